//! `fork`: the child gets a table that is in order, and no agent.
//!
//! The locks are held while the kernel copies, so that no fold is under way and the child's copies are whole. The child
//! enrols nothing. If it got mappings of the pool, its doors keep contents right; if not, they only pass on.

use super::{State, set_state};
use crate::{arena, table};
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Lets the C library call us around every `fork`.
pub fn register() {
    // SAFETY: three functions that live as long as the process: the library is preloaded and never unloaded.
    unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
}

unsafe extern "C" fn prepare() {
    table::lock_for_fork();
    arena::lock_for_fork();
}

unsafe extern "C" fn parent() {
    arena::unlock_after_fork();
    table::unlock_after_fork();
}

unsafe extern "C" fn child() {
    arena::unlock_after_fork();
    become_child();
    table::unlock_after_fork();
}

fn become_child() {
    // The forking thread holds the lock already, and may enter.
    let mut table = table::lock();
    if super::state() == State::Inert {
        return;
    }
    table.unask_all();
    let counts = table.counts();
    let holds_pool = counts.folded + counts.broken > 0;
    set_state(if holds_pool { State::Child } else { State::Inert });
}

/// The C library's own `_Fork`, which calls no handlers.
static REAL_FORK: AtomicUsize = AtomicUsize::new(0);

/// `_Fork`: what is done around `fork` is right around it too.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Fork() -> c_int {
    let Some(real) = real_fork() else {
        // A C library without it cannot have been linked against; say what a kernel without would.
        return crate::raw::c_answer(super::refuse(libc::ENOSYS)) as c_int;
    };
    // SAFETY: these are the handlers, called as the C library would call them.
    unsafe { prepare() };
    // SAFETY: passed on as it came.
    let process = unsafe { real() };
    if process == 0 {
        // SAFETY: as above.
        unsafe { child() };
    } else {
        // SAFETY: as above.
        unsafe { parent() };
    }
    process
}

fn real_fork() -> Option<unsafe extern "C" fn() -> c_int> {
    let mut address = REAL_FORK.load(Ordering::Relaxed);
    if address == 0 {
        let name: *const c_char = c"_Fork".as_ptr();
        // SAFETY: looks a name up among the libraries behind this one.
        let found: *mut c_void = unsafe { libc::dlsym(libc::RTLD_NEXT, name) };
        address = found as usize;
        REAL_FORK.store(address, Ordering::Relaxed);
    }
    // SAFETY: null is `None`; anything else is the function of that name, whose type is documented.
    unsafe { std::mem::transmute::<usize, Option<unsafe extern "C" fn() -> c_int>>(address) }
}
