//! Starts the agent's own threads. Their stacks lie in the agent's arena, so nothing of them lies where pages may be
//! folded. They block all signals, so no signal handler of the program runs on them.

use crate::{arena, world};
use rustix::io::Errno;
use std::ffi::{CStr, c_int, c_void};

/// Stack of the agent's thread, in bytes: messages of 64 KiB are decoded on the heap.
pub const STACK_BYTES: usize = 512 << 10;
/// Stack of a thread that only reads the kernel's messages, in bytes.
pub const SMALL_STACK_BYTES: usize = 128 << 10;

type Body = Box<dyn FnOnce() + Send>;

/// Starts a detached thread. A panic in it ends the process.
///
/// # Errors
/// Memory is short, or the process has as many threads as it may.
pub fn thread(name: &'static CStr, stack_bytes: usize, body: impl FnOnce() + Send + 'static) -> Result<(), Errno> {
    let stack = arena::map(stack_bytes).ok_or(Errno::NOMEM)?;
    let everything_blocked = Signals::block_all();
    let named: Body = Box::new(move || {
        // SAFETY: the name is a string of at most 16 bytes with its end, and this system call names the calling thread.
        unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
        world::join();
        body();
    });
    let argument = Box::into_raw(Box::new(named));
    // SAFETY: an all-zero attribute object is storage for `pthread_attr_init`, which makes it one.
    let mut attributes: libc::pthread_attr_t = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to storage for one attribute object, exclusively borrowed.
    unsafe { libc::pthread_attr_init(&raw mut attributes) };
    let bottom = stack.start.0 as usize as *mut c_void;
    // SAFETY: the stack is mapped, has that size, and belongs to this thread alone; it is never unmapped.
    unsafe { libc::pthread_attr_setstack(&raw mut attributes, bottom, stack_bytes) };
    // SAFETY: the attributes are initialised; nobody joins the thread.
    unsafe { libc::pthread_attr_setdetachstate(&raw mut attributes, libc::PTHREAD_CREATE_DETACHED) };
    // SAFETY: all bits zero are storage for a thread's handle, a number or a pointer.
    let mut thread: libc::pthread_t = unsafe { std::mem::zeroed() };
    // SAFETY: `main` is a thread's function. Its argument is a box that was given away, for this thread alone.
    let failed: c_int = unsafe { libc::pthread_create(&raw mut thread, &raw const attributes, main, argument.cast()) };
    drop(everything_blocked);
    if failed != 0 {
        // SAFETY: no thread was started, so the box belongs to this function again.
        drop(unsafe { Box::from_raw(argument) });
        return Err(Errno::from_raw_os_error(failed));
    }
    Ok(())
}

extern "C" fn main(argument: *mut c_void) -> *mut c_void {
    // SAFETY: `thread` gave the box away for this function alone.
    let body = unsafe { Box::from_raw(argument.cast::<Body>()) };
    body();
    std::ptr::null_mut()
}

/// Signals of the calling thread, blocked until dropped.
struct Signals(libc::sigset_t);

impl Signals {
    fn block_all() -> Self {
        // SAFETY: an all-zero set is storage for `sigfillset`, which fills it.
        let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: points to a set, exclusively borrowed.
        unsafe { libc::sigfillset(&raw mut all) };
        let mut before = all;
        // SAFETY: both point to sets that outlive the call.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
        Self(before)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: points to the set that was in force before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut()) };
    }
}
