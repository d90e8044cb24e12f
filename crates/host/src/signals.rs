//! Signals read from a descriptor, for a process that waits for other descriptors too.

use rustix::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::io;

/// A signal that was caught.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caught {
    /// This process is asked to end (`SIGTERM`, `SIGINT`).
    End,
    /// A child has ended (`SIGCHLD`).
    Child,
    /// The terminal has closed, or this process is asked to read its configuration again (`SIGHUP`).
    Hangup,
}

/// A descriptor from which the caught signals of this process are read.
#[derive(Debug)]
pub struct Signals(OwnedFd);

const CAUGHT: [libc::c_int; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGCHLD, libc::SIGHUP];

impl Signals {
    /// Begins to catch `SIGTERM`, `SIGINT`, `SIGCHLD` and `SIGHUP`. Must be called before the process has other
    /// threads. Children inherit the mask that blocks these signals: see [`let_signals_through`].
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn catch() -> io::Result<Self> {
        let set = change_mask(libc::SIG_BLOCK, &CAUGHT)?;
        // SAFETY: `set` is a signal set that was filled above; the call reads it and returns a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just given us this descriptor, and nobody else knows of it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The next caught signal, if there is one.
    pub fn next(&self) -> Option<Caught> {
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        let got = rustix::io::read(&self.0, &mut info).ok()?;
        // The number of the signal is the first field.
        let number = info.first_chunk::<4>().filter(|_| got == info.len()).map(|n| u32::from_ne_bytes(*n))?;
        Some(match number.cast_signed() {
            libc::SIGCHLD => Caught::Child,
            libc::SIGHUP => Caught::Hangup,
            _ => Caught::End,
        })
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Unblocks the signals that [`Signals::catch`] blocked in a parent of this process.
///
/// # Errors
/// The kernel refused.
pub fn let_signals_through() -> io::Result<()> {
    change_mask(libc::SIG_UNBLOCK, &CAUGHT).map(drop)
}

fn change_mask(how: libc::c_int, signals: &[libc::c_int]) -> io::Result<libc::sigset_t> {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the call fills the set, to which nothing else refers.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: it was filled by the call above.
    let mut set = unsafe { set.assume_init() };
    for signal in signals {
        // SAFETY: the set is initialized and exclusively borrowed; `signal` is the number of a signal.
        unsafe { libc::sigaddset(&raw mut set, *signal) };
    }
    // SAFETY: the call reads the set and changes only this thread's signal mask.
    let answer = unsafe { libc::pthread_sigmask(how, &raw const set, std::ptr::null_mut()) };
    if answer == 0 { Ok(set) } else { Err(io::Error::from_raw_os_error(answer)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caught_signals_are_read_and_do_not_end_process() {
        // In a thread of its own: a mask belongs to one thread and ends with it.
        let caught = std::thread::spawn(|| {
            let signals = Signals::catch().unwrap();
            assert_eq!(signals.next(), None);
            // SAFETY: the call only returns the calling thread's number.
            let here = unsafe { libc::pthread_self() };
            // SAFETY: the call sends a signal to this very thread, which blocks it.
            unsafe { libc::pthread_kill(here, libc::SIGTERM) };
            let first = signals.next();
            // SAFETY: as above.
            unsafe { libc::pthread_kill(here, libc::SIGCHLD) };
            let second = signals.next();
            // SAFETY: as above.
            unsafe { libc::pthread_kill(here, libc::SIGHUP) };
            [first, second, signals.next(), signals.next()]
        });
        assert_eq!(caught.join().unwrap(), [Some(Caught::End), Some(Caught::Child), Some(Caught::Hangup), None]);
    }
}
