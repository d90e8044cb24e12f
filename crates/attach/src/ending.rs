//! Threads of ours in a process, that end because what was begun there has failed.
//!
//! ```text
//!   at the end of a call of ours, or somewhere else: asked to stop
//!      |  a call that it begins becomes none
//!      v
//!   munmap of what was mapped for it, if anything was --> exit
//! ```
//!
//! A frozen process does neither until it is thawed: somebody has to look until then.

use crate::remote;
use act::{Registers, Resume, Stop, Tracee};
use rustix::io::Errno;
use rustix::process::Pid;

/// See the module.
#[derive(Debug)]
pub struct Ending {
    tracee: Tracee,
    /// Where it makes system calls. `None`: right before the place at which it stops first, as it has just been made there.
    instruction: Option<u64>,
    /// Memory that it is to unmap: address and bytes.
    unmap: Option<[u64; 2]>,
    unmaps: bool,
}

impl Ending {
    /// A thread that makes calls of ours, and nothing else.
    pub fn new(tracee: Tracee, instruction: Option<u64>, unmap: Option<[u64; 2]>) -> Self {
        let mut ending = Self { tracee, instruction, unmap, unmaps: false };
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
            if !self.unmaps {
                self.tracee.set_registers(&Registers { orig_rax: u64::MAX, ..now })?;
            }
            return self.tracee.resume(Resume::ToSystemCall, 0);
        }
        if stop == Stop::SystemCall {
            self.note(&now);
        } else if self.unmaps {
            return self.tracee.resume(Resume::ToSystemCall, 0);
        }
        let call = match self.unmap.filter(|_| !self.unmaps) {
            Some([start, bytes]) => (libc::SYS_munmap, [start, bytes, 0, 0, 0, 0]),
            None => (libc::SYS_exit, [0; 6]),
        };
        self.unmaps = call.0 == libc::SYS_munmap;
        let instruction = *self.instruction.get_or_insert(now.rip - remote::SYSCALL.len() as u64);
        self.tracee.set_registers(&remote::prepared(now, instruction, call.0, call.1))?;
        self.tracee.resume(if self.unmaps { Resume::ToSystemCall } else { Resume::Freely }, 0)
    }

    /// Takes in what a call has done that nobody waited for.
    fn note(&mut self, now: &Registers) {
        match now.orig_rax.cast_signed() {
            libc::SYS_munmap => self.unmap = None,
            // The first of its mappings is the one to which no address is given.
            libc::SYS_mmap if now.rdi == 0 && !(-4095..0).contains(&now.rax.cast_signed()) => {
                self.unmap = Some([now.rax, now.rsi]);
            }
            _ => {}
        }
    }
}
