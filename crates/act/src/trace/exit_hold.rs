//! A second process, which holds a thread of this process at its end. A thread that is killed stops once more
//! (`PTRACE_EVENT_EXIT`), before the kernel detaches it from the threads that it traces.
//!
//! ```text
//!   this thread                       the process beside it
//!      | fork ------------------------->  traces this thread
//!      | steers threads of a program      waits
//!      | killed: stops (PTRACE_EVENT_EXIT) --> looks after these threads: they stand still
//!      | <------ goes on ---------------      each of them will stop again, before it runs code of the program's
//!      | lets its threads go, and ends        gives them back what is theirs
//! ```
//!
//! If the second process is killed, this one goes on alone. That a thread killed by `SIGKILL` stops in this way was
//! seen on Linux 6.18.

use super::{ask, last_error};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use rustix::thread::gettid;
use std::ffi::c_int;
use std::io::{self, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The second process. Dropping this ends it.
#[derive(Debug)]
pub struct ExitHold(Pid);

impl ExitHold {
    /// Forks the second process, for the calling thread. When this thread is about to end, `inherit` is called in the
    /// second process.
    ///
    /// # Errors
    /// No process can be made, or this thread is traced already.
    pub fn start(inherit: impl FnOnce(Dying)) -> io::Result<Self> {
        let (mut ready, tell) = io::pipe()?;
        let thread = gettid();
        // A host may let only ancestors trace a process (Yama). The call fails on hosts without Yama, where it is not
        // needed.
        let may_trace = |whom: usize| {
            // SAFETY: takes numbers, and changes who may trace this process.
            unsafe { libc::prctl(libc::PR_SET_PTRACER, whom) };
        };
        may_trace(usize::MAX);
        // SAFETY: the child has a copy of this thread alone, which holds no lock: it ends by `_exit`.
        let child = match unsafe { libc::fork() } {
            0 => {
                drop(ready);
                let _ = catch_unwind(AssertUnwindSafe(|| hold(thread, tell).map(inherit)));
                // SAFETY: ends this process.
                unsafe { libc::_exit(0) }
            }
            child => Pid::from_raw(child).filter(|_| child > 0),
        };
        let failed = io::Error::last_os_error();
        drop(tell);
        let this = Self(child.ok_or(failed)?);
        let is_ready = ready.read_exact(&mut [0]);
        may_trace(0);
        is_ready.map(|()| this).map_err(|_| io::Error::other("this process is traced itself"))
    }
}

impl Drop for ExitHold {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
        let _ = waitpid(Some(self.0), WaitOptions::empty());
    }
}

/// A thread that is held at its end. It ends when this is dropped.
#[derive(Debug)]
pub struct Dying {
    thread: Pid,
}

impl Dying {
    /// Id of the thread, which `/proc` shows as the tracer of all threads that it traces.
    pub const fn thread(&self) -> Pid {
        self.thread
    }
}

impl Drop for Dying {
    fn drop(&mut self) {
        // SAFETY: takes no memory of this process.
        let _ = unsafe { ask(libc::PTRACE_DETACH, self.thread, 0, 0) };
    }
}

/// Traces a thread until it is about to end (`PTRACE_EVENT_EXIT`). `None`: the thread is gone, or cannot be traced.
fn hold(thread: Pid, tell: io::PipeWriter) -> Option<Dying> {
    // SAFETY: takes no memory of this process.
    unsafe { ask(libc::PTRACE_SEIZE, thread, 0, libc::PTRACE_O_TRACEEXIT as usize) }.ok()?;
    { tell }.write_all(&[0]).ok()?;
    loop {
        let mut status: c_int = 0;
        let number = thread.as_raw_nonzero().get();
        // SAFETY: `status` is exclusively borrowed for the call.
        if unsafe { libc::waitpid(number, &raw mut status, libc::__WALL) } < 0 && last_error() != Errno::INTR {
            return None;
        }
        let (how, signal) = match (libc::WIFSTOPPED(status), status >> 16, libc::WSTOPSIG(status)) {
            (false, ..) => return None,
            (true, libc::PTRACE_EVENT_EXIT, _) => return Some(Dying { thread }),
            (true, libc::PTRACE_EVENT_STOP, libc::SIGTRAP) => (libc::PTRACE_CONT, 0),
            (true, libc::PTRACE_EVENT_STOP, _) => (libc::PTRACE_LISTEN, 0),
            (true, _, signal) => (libc::PTRACE_CONT, signal),
        };
        // SAFETY: takes no memory of this process.
        let _ = unsafe { ask(how, thread, 0, signal as usize) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::getpid;

    fn end(code: i32) -> ! {
        // SAFETY: ends this process.
        unsafe { libc::_exit(code) }
    }

    /// A tracer ends as it wants to, by a signal, and not at all.
    #[test]
    fn thread_that_ends_is_held_before() {
        for how in ["killed", "exits", "goes on"] {
            let (mut told, tell) = io::pipe().unwrap();
            // SAFETY: the child makes a process beside it and ends, and takes no lock of this test's.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let own = getpid();
                let held = ExitHold::start(|dying| {
                    let state =
                        host::ProcessStat::read(own.as_raw_nonzero().get().cast_unsigned()).map(|stat| stat.state);
                    let is_held = state.is_ok_and(|state| state == b't') && dying.thread() == own;
                    { tell }.write_all(&[u8::from(is_held)]).unwrap();
                });
                let held = held.unwrap_or_else(|_| end(9));
                match how {
                    "killed" => kill_process(own, Signal::KILL).unwrap(),
                    "exits" => end(7),
                    _ => drop(held),
                }
                end(3);
            }
            drop(tell);
            let mut said = Vec::new();
            told.read_to_end(&mut said).unwrap();
            let (_, status) = waitpid(Pid::from_raw(child), WaitOptions::empty()).unwrap().unwrap();
            let found = (status.terminating_signal(), status.exit_status());
            let expected = match how {
                "killed" => (vec![1], (Some(libc::SIGKILL), None)),
                "exits" => (vec![1], (None, Some(7))),
                _ => (vec![], (None, Some(3))),
            };
            assert_eq!((said, found), expected, "{how}");
        }
    }
}
