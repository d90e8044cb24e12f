//! `mremap`: see [`agent::remap`].

use super::enter;
use agent::raw::{self, c_answer};
use agent::remap;
use std::ffi::{c_int, c_void};

/// `mremap`
///
/// # Safety
/// As the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    at: *mut c_void,
    old_length: usize,
    new_length: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    let arguments = [at as usize, old_length, new_length, flags as usize, to as usize];
    let [a, b, c, d, e] = arguments;
    // SAFETY: the caller's arguments are passed on unchanged, with the caller's promises.
    let pass = || unsafe { raw::call(libc::SYS_mremap, [a, b, c, d, e, 0]) };
    c_answer(remap::serve(arguments, |_| enter(), pass)) as *mut c_void
}
