//! A shadow: a forked copy of this process that does nothing, made to find out which pages may be written behind the
//! processor's back.
//!
//! `fork` shares every private page between parent and child, until one of them writes it - but for pages that are pinned
//! for DMA. Of those the child gets a copy at once, because what a device writes must stay the parent's. So for a private page
//! of the parent, as long as the shadow lives:
//!
//! ```text
//!                        fork
//!   not pinned --------------------> mapped twice: not exclusive
//!                                       | written, or pinned to be written: the kernel gives the parent a copy first
//!                                       v
//!   pinned ------------------------> mapped once: exclusive
//! ```
//!
//! A page that is not exclusive was therefore neither pinned then nor written or pinned for writing since. That is as
//! much as the kernel promises of pages that it lets `UFFDIO_MOVE` take out: those that are held without being pinned are
//! not told apart.
//!
//! The shadow maps what the process gives to its children. It runs no code of the program, holds no lock, and ends with the
//! thread that cast it, or after some seconds, whatever becomes of that.

use rustix::io::Errno;
use rustix::process::Pid;

/// It ends by itself after so long: nobody uses one for more than half of that. What was shared with it counts as written then.
const LONGEST_SECONDS: i64 = 10;

/// See the module.
#[derive(Debug)]
pub struct Shadow(Pid);

impl Shadow {
    /// Forks. Nobody is told when the shadow ends: neither by a signal nor by `wait` for any child.
    ///
    /// # Errors
    /// There are as many processes as there may be, or memory is short.
    pub fn cast() -> Result<Self, Errno> {
        let parent = std::process::id();
        // SAFETY: the child is a copy of this thread alone, on a copy of its stack. It makes a few system calls that touch no
        // memory, and sleeps until it is killed: no code of anybody else runs in it, so it does not matter which locks were held.
        match unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) } {
            0 => stay(parent),
            pid => Pid::from_raw(pid as i32).filter(|_| pid > 0).map(Self).ok_or_else(last_error),
        }
    }
}

impl Drop for Shadow {
    fn drop(&mut self) {
        let pid = self.0.as_raw_nonzero().get();
        // SAFETY: the process is our child. If somebody else has waited for it, its number may be another's by now; but that takes
        // a program that waits for children it does not know (`__WALL`), and the thread group's ids to have gone round in between.
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

/// What the shadow does.
fn stay(parent: u32) -> ! {
    // SAFETY: takes numbers only. The signal is sent when the thread that cast us ends.
    unsafe { libc::syscall(libc::SYS_prctl, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
    // SAFETY: takes nothing.
    if unsafe { libc::syscall(libc::SYS_getppid) } == i64::from(parent) {
        // Should that thread have ended before we could ask to end with it, we end soon.
        let time = libc::timespec { tv_sec: LONGEST_SECONDS, tv_nsec: 0 };
        // SAFETY: `time` is on our copy of the stack. Nothing is returned, and signals are blocked.
        unsafe { libc::syscall(libc::SYS_nanosleep, &raw const time, 0) };
    }
    loop {
        // SAFETY: ends this process, which runs nobody's code.
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
    fn it_lives_as_long_as_it_is_held() {
        let shadow = Shadow::cast().unwrap();
        let process = format!("/proc/{}/status", shadow.0.as_raw_nonzero());
        assert!(std::path::Path::new(&process).exists());
        drop(shadow);
        assert!(!std::path::Path::new(&process).exists());
    }

    #[test]
    fn it_ends_with_its_thread() {
        let shadow = std::thread::spawn(|| std::mem::ManuallyDrop::new(Shadow::cast().unwrap()).0).join().unwrap();
        // Ended, and nobody has waited for it yet.
        let state = || std::fs::read_to_string(format!("/proc/{}/stat", shadow.as_raw_nonzero())).unwrap();
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !state().contains(") Z ") {
            assert!(std::time::Instant::now() < end, "{}", state());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        drop(Shadow(shadow));
    }
}
