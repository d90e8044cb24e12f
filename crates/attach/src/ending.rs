//! Ends threads that this program has made in another process, because attaching has failed.
//!
//! ```text
//!   at the end of a call of ours, or somewhere else: asked to stop
//!      |  a call that it begins is cancelled
//!      v
//!   makes its last calls, such as munmap of what was mapped for it --> exit
//! ```
//!
//! In a frozen process, the thread does none of this until the process is thawed. Until then, this program has to look
//! at it again and again.

use crate::remote;
use crate::rescue::Ours;
use act::trace::{Registers, Resume, Stop, Tracee};
use rustix::io::Errno;
use rustix::process::Pid;

/// A system call: its number and its arguments.
pub type Order = (i64, [u64; 6]);

/// The call that unmaps memory.
pub const fn unmapping(start: u64, bytes: u64) -> Order {
    (libc::SYS_munmap, [start, bytes, 0, 0, 0, 0])
}

/// A thread that this program has made in another process. It makes its last calls and then ends.
#[derive(Debug)]
pub struct Ending {
    tracee: Tracee,
    /// Address of the `syscall` instruction by which the thread makes calls. `None`: the instruction right before the
    /// place at which the thread stops first, because the thread has just made a call there.
    instruction: Option<u64>,
    /// Calls that the thread is to make before it ends, in reverse order.
    orders: Vec<Order>,
    is_making: bool,
    ours: Option<Ours>,
}

impl Ending {
    /// Begins to end a thread that runs no code of the program. The thread makes the calls in `orders` before it ends.
    pub fn new(tracee: Tracee, instruction: Option<u64>, mut orders: Vec<Order>, ours: Option<Ours>) -> Self {
        orders.reverse();
        let mut ending = Self { tracee, instruction, orders, is_making: false, ours };
        ending.tell_orders();
        // Mostly, the thread is stopped at the end of a call.
        if ending.act(Stop::SystemCall).is_err() {
            let _ = ending.tracee.interrupt();
        }
        ending
    }

    /// The thread.
    pub const fn thread(&self) -> Pid {
        self.tracee.thread()
    }

    /// Acts on the thread's stops. Returns whether the thread was told to end, or has ended.
    pub fn tend(&mut self) -> bool {
        loop {
            match self.tracee.look() {
                Ok(None) => return false,
                Ok(Some(Stop::Ended)) | Err(_) => return true,
                Ok(Some(stop)) => {
                    if self.act(stop) != Ok(()) {
                        return true;
                    }
                }
            }
        }
    }

    fn act(&mut self, stop: Stop) -> Result<(), Errno> {
        let now = self.tracee.registers()?;
        if stop == Stop::SystemCall && self.tracee.begins_call() {
            if !self.is_making {
                self.tracee.set_registers(&Registers { orig_rax: u64::MAX, ..now })?;
            }
            return self.tracee.resume(Resume::ToSystemCall, 0);
        }
        if stop == Stop::SystemCall {
            self.note(&now);
        } else if self.is_making {
            return self.tracee.resume(Resume::ToSystemCall, 0);
        }
        self.is_making = !self.orders.is_empty();
        let (number, arguments) = self.orders.last().copied().unwrap_or((libc::SYS_exit, [0; 6]));
        let instruction = *self.instruction.get_or_insert(now.rip - remote::SYSCALL.len() as u64);
        self.tracee.set_registers(&remote::prepared(now, instruction, number, arguments))?;
        self.tracee.resume(if self.is_making { Resume::ToSystemCall } else { Resume::Freely }, 0)
    }

    /// Records the effect of a call that has ended. A call of `orders` is done. Memory that an `mmap` has mapped is to
    /// be unmapped.
    fn note(&mut self, now: &Registers) {
        let (number, before) = (now.orig_rax.cast_signed(), self.orders.len());
        let is_order = |(ordered, arguments): &Order| number == *ordered && now.rdi == arguments[0];
        if self.orders.last().is_some_and(is_order) {
            self.orders.pop();
        }
        // The first `mmap` of a thread of ours has no address given. It is noted once: a second `munmap` of that range
        // could unmap memory of the program.
        let mapped = unmapping(now.rax, now.rsi);
        let is_mapped = number == libc::SYS_mmap && now.rdi == 0 && !(-4095..0).contains(&now.rax.cast_signed());
        if is_mapped && !self.orders.contains(&mapped) {
            self.orders.push(mapped);
        }
        if self.orders.len() != before {
            self.tell_orders();
        }
    }

    /// Notes which calls are left ([`Ours`]). If this process is killed, the second process takes this thread over, and
    /// has it make them.
    fn tell_orders(&self) {
        // If the note fails, and this process is killed, a call may be made twice.
        let orders = || self.orders.iter().rev().copied().collect::<Vec<_>>();
        let _ = self.ours.as_ref().map(|ours| ours.is_to_make(&orders()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use act::trace::{REGISTERS, registers_of};

    /// A thread whose tracer was killed behind the call that had mapped memory, with the way back noted, unmapped that
    /// twice. In between, the program may have mapped memory there.
    #[test]
    fn memory_is_unmapped_once() {
        let tracee = Tracee::of_clone(rustix::process::getpid());
        let mut ending = Ending { tracee, instruction: Some(0), orders: Vec::new(), is_making: false, ours: None };
        let (start, bytes) = (0x7000_0000_0000, 1 << 20);
        let after = |number: i64, rdi: u64, rax: u64| {
            let orig_rax = number.cast_unsigned();
            Registers { orig_rax, rdi, rsi: bytes, rax, ..registers_of([0; REGISTERS]) }
        };
        let mapped = after(libc::SYS_mmap, 0, start);
        for _ in 0..2 {
            ending.note(&mapped);
            assert_eq!(ending.orders, [unmapping(start, bytes)]);
        }
        ending.note(&after(libc::SYS_munmap, start, 0));
        assert_eq!(ending.orders, []);
        // Other mappings are parts of that.
        ending.note(&after(libc::SYS_mmap, start, start));
        ending.note(&after(libc::SYS_mmap, 0, (-libc::ENOMEM) as u64));
        assert_eq!(ending.orders, []);
    }
}
