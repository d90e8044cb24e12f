//! A fork probe: a forked copy of this process that does nothing. It shows which pages a device may write without the
//! processor noticing.
//!
//! `fork` shares every private page between parent and child until one of them writes it, except for pages that are
//! pinned for DMA. Of a pinned page the child gets a copy at once, because the device's writes must go to the
//! parent's page. So for a private page of the parent, as long as the fork probe lives:
//!
//! ```text
//!                        fork
//!   not pinned --------------------> mapped twice: not exclusive
//!                                       | written, or pinned to be written: the kernel gives the parent a copy first
//!                                       v
//!   pinned ------------------------> mapped once: exclusive
//! ```
//!
//! A page that is not exclusive was therefore not pinned at the fork, and neither written nor pinned for writing since.
//! The kernel checks no more before `UFFDIO_MOVE` takes a page out: a plain reference without a pin goes unnoticed in
//! both cases.
//!
//! The fork probe maps the memory that the process gives to its children. It runs no code of the program and holds no
//! lock. It ends with the thread that made it, at the latest after [`LONGEST_SECONDS`].

use rustix::io::Errno;
use rustix::process::Pid;

/// Longest life of a fork probe, in seconds: the agent uses one for at most half of that. Once the fork probe has
/// ended, pages that were shared with it are exclusive again and count as written.
const LONGEST_SECONDS: i64 = 10;

/// A running fork probe, which ends when this is dropped. See the module.
#[derive(Debug)]
pub struct ForkProbe(Pid);

impl ForkProbe {
    /// Forks a probe. The program does not learn of the probe's end, neither by a signal nor by `wait` for any child.
    ///
    /// # Errors
    /// The number of processes has reached its limit, or memory is short.
    pub fn cast() -> Result<Self, Errno> {
        let parent = std::process::id();
        // SAFETY: the child is a copy of this thread alone, on a copy of its stack. It makes a few system calls that
        // touch no memory, and sleeps until it is killed. No other code runs in it, so it does not matter which locks
        // other threads held at the fork.
        match unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) } {
            0 => stay(parent),
            pid => Pid::from_raw(pid as i32).filter(|_| pid > 0).map(Self).ok_or_else(last_error),
        }
    }
}

impl Drop for ForkProbe {
    fn drop(&mut self) {
        let pid = self.0.as_raw_nonzero().get();
        // SAFETY: the process is our child, so its pid is not used again before it is waited for. Only a program that
        // waits for children it does not know (`__WALL`) could have waited for it before. The pid would then be
        // another process's only if the kernel had gone through all pids since.
        unsafe { libc::kill(pid, libc::SIGKILL) };
        loop {
            // SAFETY: no memory is passed.
            let waited = unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::__WALL) };
            if waited >= 0 || last_error() != Errno::INTR {
                return;
            }
        }
    }
}

/// The fork probe's life: it sleeps until it is killed, or for [`LONGEST_SECONDS`].
fn stay(parent: u32) -> ! {
    // SAFETY: the call takes numbers only. The kernel sends the signal when the thread that forked us ends.
    unsafe { libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
    // SAFETY: the call takes nothing.
    if unsafe { libc::syscall(libc::SYS_getppid) } == i64::from(parent) {
        // If the thread that forked this process ended before the call above, and its process lives on, no signal
        // comes. So the sleep is bounded.
        let time = libc::timespec { tv_sec: LONGEST_SECONDS, tv_nsec: 0 };
        // SAFETY: `time` is on our copy of the stack. The call writes nothing, as no remaining time is asked for. No
        // signal handler runs, because signals are blocked here as they are in the agent's thread.
        unsafe { libc::syscall(libc::SYS_nanosleep, &raw const time, 0) };
    }
    loop {
        // SAFETY: the call ends this process, in which no other code runs.
        unsafe { libc::syscall(libc::SYS_exit_group, 0) };
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fork_probe_lives_until_dropped() {
        let _turn = crate::turn_to_fork();
        let fork_probe = ForkProbe::cast().unwrap();
        let process = format!("/proc/{}/status", fork_probe.0.as_raw_nonzero());
        assert!(std::path::Path::new(&process).exists());
        drop(fork_probe);
        assert!(!std::path::Path::new(&process).exists());
    }

    #[test]
    fn fork_probe_ends_with_thread_that_made_it() {
        let _turn = crate::turn_to_fork();
        let fork_probe =
            std::thread::spawn(|| std::mem::ManuallyDrop::new(ForkProbe::cast().unwrap()).0).join().unwrap();
        // A zombie: the process has ended, and its parent has not waited for it.
        let state = || std::fs::read_to_string(format!("/proc/{}/stat", fork_probe.as_raw_nonzero())).unwrap();
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !state().contains(") Z ") {
            assert!(std::time::Instant::now() < end, "{}", state());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        drop(ForkProbe(fork_probe));
    }
}
