//! Signals as something to read, in a process that waits for other things too.

use rustix::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::io;

/// A signal that was caught.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caught {
    /// Somebody wants this process to end (`SIGTERM`, `SIGINT`).
    End,
    /// A child has ended (`SIGCHLD`).
    Child,
}

/// Catches signals from now on, for this process.
#[derive(Debug)]
pub struct Signals(OwnedFd);

const CAUGHT: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGCHLD];

impl Signals {
    /// Begins to catch `SIGTERM`, `SIGINT` and `SIGCHLD`. To be called before the process has other threads. Children
    /// inherit that these signals are held back: see [`let_signals_through`].
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn catch() -> io::Result<Self> {
        let set = change_mask(libc::SIG_BLOCK, &CAUGHT)?;
        // SAFETY: `set` is a signal set that was filled above; the call reads it and gives back a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just given us this descriptor, and nobody else knows of it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The next signal that was caught, if there is one.
    pub fn next(&self) -> Option<Caught> {
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        let got = rustix::io::read(&self.0, &mut info).ok()?;
        // The number of the signal is the first field.
        let number = info.first_chunk::<4>().filter(|_| got == info.len()).map(|n| u32::from_ne_bytes(*n))?;
        Some(if number == libc::SIGCHLD.cast_unsigned() { Caught::Child } else { Caught::End })
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Lets signals through again that a parent of this process held back.
///
/// # Errors
/// The kernel refused.
pub fn let_signals_through() -> io::Result<()> {
    change_mask(libc::SIG_UNBLOCK, &CAUGHT).map(drop)
}

fn change_mask(how: libc::c_int, signals: &[libc::c_int]) -> io::Result<libc::sigset_t> {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: fills the set, to which nothing else refers.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: it was filled by the call above.
    let mut set = unsafe { set.assume_init() };
    for signal in signals {
        // SAFETY: a set that was filled, exclusively borrowed, and the number of a signal.
        unsafe { libc::sigaddset(&raw mut set, *signal) };
    }
    // SAFETY: reads the set and changes nothing but which signals this thread receives.
    let answer = unsafe { libc::pthread_sigmask(how, &raw const set, std::ptr::null_mut()) };
    if answer == 0 { Ok(set) } else { Err(io::Error::from_raw_os_error(answer)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_read_in_place_of_ending_the_process() {
        // In a thread of its own, whose mask is its own and goes with it.
        let caught = std::thread::spawn(|| {
            let signals = Signals::catch().unwrap();
            assert_eq!(signals.next(), None);
            // SAFETY: names the calling thread.
            let here = unsafe { libc::pthread_self() };
            // SAFETY: sends a signal to this very thread, which holds it back.
            unsafe { libc::pthread_kill(here, libc::SIGTERM) };
            let first = signals.next();
            // SAFETY: as above.
            unsafe { libc::pthread_kill(here, libc::SIGCHLD) };
            (first, signals.next(), signals.next())
        });
        assert_eq!(caught.join().unwrap(), (Some(Caught::End), Some(Caught::Child), None));
    }
}
