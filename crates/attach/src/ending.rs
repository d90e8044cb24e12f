//! Threads of ours in a process, that end because what was begun there has failed.
//!
//! ```text
//!   at the end of a call of ours, or somewhere else: asked to stop
//!      |  a call that it begins becomes none
//!      v
//!   what it is to do before, such as munmap of what was mapped for it --> exit
//! ```
//!
//! A frozen process does neither until it is thawed: somebody has to look until then.

use crate::remote;
use crate::rescue::Ours;
use act::{Registers, Resume, Stop, Tracee};
use rustix::io::Errno;
use rustix::process::Pid;

/// A system call: its number and its arguments.
pub type Order = (i64, [u64; 6]);

/// The call that unmaps memory.
pub const fn unmapping(start: u64, bytes: u64) -> Order {
    (libc::SYS_munmap, [start, bytes, 0, 0, 0, 0])
}

/// See the module.
#[derive(Debug)]
pub struct Ending {
    tracee: Tracee,
    /// Where it makes system calls. `None`: right before the place at which it stops first, where it has just made one.
    instruction: Option<u64>,
    /// Calls that it is to make, the first one last.
    orders: Vec<Order>,
    is_making: bool,
    _ours: Option<Ours>,
}

impl Ending {
    /// A thread that makes calls of ours, and nothing else. It makes these before it ends.
    pub fn new(tracee: Tracee, instruction: Option<u64>, mut orders: Vec<Order>, ours: Option<Ours>) -> Self {
        orders.reverse();
        let mut ending = Self { tracee, instruction, orders, is_making: false, _ours: ours };
        // It is stopped at the end of a call, mostly.
        if ending.act(Stop::SystemCall).is_err() {
            let _ = ending.tracee.interrupt();
        }
        ending
    }

    /// The thread.
    pub const fn thread(&self) -> Pid {
        self.tracee.thread()
    }

    /// Looks after it. Says whether it has been told to end, or has ended.
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

    /// Takes in what a call has done that nobody waited for, or that is done.
    fn note(&mut self, now: &Registers) {
        let number = now.orig_rax.cast_signed();
        let is_order = |(ordered, arguments): &Order| number == *ordered && now.rdi == arguments[0];
        if self.orders.last().is_some_and(is_order) {
            self.orders.pop();
        }
        // The first of its mappings is the one to which no address is given.
        if number == libc::SYS_mmap && now.rdi == 0 && !(-4095..0).contains(&now.rax.cast_signed()) {
            self.orders.push(unmapping(now.rax, now.rsi));
        }
    }
}
