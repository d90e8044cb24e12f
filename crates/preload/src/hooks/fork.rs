//! `fork`: a child that may live long enough gets an agent of its own ([`crate::child`]).
//!
//! The C library's own `fork` makes the child. It also runs handlers and takes malloc's locks, so that the child may
//! allocate, which it must to start a thread. If the program has another malloc, this may not take its locks at a fork.
//! So children of such a program stay inert.

use super::is_member;
use crate::child;
use agent::{forks, raw};
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

type Fork = unsafe extern "C" fn() -> c_int;

/// The C library's function, and whether a thread may be started in its children.
#[derive(Clone, Copy)]
struct Found {
    fork: Option<Fork>,
    may_allocate: bool,
}

static FOUND: OnceLock<Found> = OnceLock::new();

/// Looks up the C library's function. The constructor calls this first: later, nothing may wait for the loader.
pub fn find() {
    found();
}

fn found() -> Found {
    *FOUND.get_or_init(|| {
        // SAFETY: looks a name up in the libraries that are loaded after this one.
        let fork = unsafe { libc::dlsym(libc::RTLD_NEXT, c"fork".as_ptr()) };
        // SAFETY: looks a name up in all libraries, as the program's calls do.
        let malloc = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"malloc".as_ptr()) };
        // SAFETY: asks for a library that is loaded, and does not load it.
        let library = unsafe { libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        // SAFETY: looks a name up in a loaded library.
        let libcs = |library: *mut c_void| unsafe { libc::dlsym(library, c"malloc".as_ptr()) };
        let may_allocate = !library.is_null() && !malloc.is_null() && libcs(library) == malloc;
        // SAFETY: this is the type of the C library's function of that name.
        let fork = (!fork.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Fork>(fork) });
        Found { fork, may_allocate }
    })
}

/// `fork`
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fork() -> c_int {
    let Found { fork, may_allocate } = found();
    let Some(fork) = fork else {
        return raw::c_answer(super::refuse(libc::ENOSYS)) as c_int;
    };
    if is_member() {
        forks::wait();
    }
    let known = (may_allocate && is_member()).then(child::prepare).flatten();
    // SAFETY: the caller's promises.
    let child = unsafe { fork() };
    let Some(known) = known else { return child };
    if child == 0 {
        let signals = raw::set_signal_mask(u64::MAX);
        // SAFETY: this is the thread that forked, right after the fork, with all signals blocked.
        unsafe { child::begin(known) };
        raw::set_signal_mask(signals);
    } else {
        child::forked(known);
    }
    child
}
