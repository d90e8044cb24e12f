//! Signals to end (`SIGINT`, `SIGTERM`, `SIGHUP`) that are noted, so that work in progress can be undone first.

use std::io;
use std::sync::atomic::{AtomicI32, Ordering};

/// The first signal that was noted; 0 for none.
static NOTED: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: libc::c_int) {
    NOTED.store(signal, Ordering::SeqCst);
}

/// From here on, the first signal to end (`SIGINT`, `SIGTERM`, `SIGHUP`) is noted and does not end this process. A
/// second signal of the same kind does. Signals that are ignored, as under `nohup`, stay ignored. Programs that this
/// process executes are not affected.
///
/// # Errors
/// The kernel refused.
pub fn note_interrupts() -> io::Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: an all-zero action is one with the default handler and an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        let mut before = action;
        // SAFETY: only reads the present action into `before`, which is exclusively borrowed.
        if unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut before) } != 0 {
            return Err(io::Error::last_os_error());
        }
        if before.sa_sigaction == libc::SIG_IGN {
            continue;
        }
        action.sa_sigaction = note as *const () as usize;
        action.sa_flags = libc::SA_RESETHAND;
        // SAFETY: the handler only stores a number in an atomic, which is allowed at any moment.
        if unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// The first signal to end that has come since [`note_interrupts`]; `None` if none has.
pub fn interrupted() -> Option<i32> {
    Some(NOTED.load(Ordering::SeqCst)).filter(|signal| *signal != 0)
}
