//! `_exit`: before the process ends, children that were forked a moment ago are handed to the keeper
//! ([`agent::follow`]).

use super::is_member;
use agent::{follow, raw};
use std::ffi::c_int;

/// `_exit`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _exit(status: c_int) -> ! {
    if is_member() {
        follow::wait_for_keeper();
    }
    loop {
        // SAFETY: ends the process.
        unsafe { raw::call(libc::SYS_exit_group, [status as usize, 0, 0, 0, 0, 0]) };
    }
}

/// `_Exit`: the same.
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Exit(status: c_int) -> ! {
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { _exit(status) }
}
