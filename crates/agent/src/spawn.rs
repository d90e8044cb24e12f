//! Starts the agent's own threads. Their stacks lie in the agent's arena, so nothing of them lies where pages may be
//! folded. They block all signals, so no signal handler of the program runs on them.

use crate::{arena, raw, world};
use rustix::io::Errno;
use rustix::thread::gettid;
use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

/// Stack of the agent's thread, in bytes: messages of 64 KiB are decoded on the heap.
pub const STACK_BYTES: usize = 512 << 10;
/// Stack of a thread that only reads the kernel's messages, in bytes.
pub const SMALL_STACK_BYTES: usize = 128 << 10;

type Body = Box<dyn FnOnce() + Send>;

/// The last threads that were started. An element is [`STARTING`] at first, then the thread's number, then that number
/// negated once the thread has ended its work; 0 in unused elements.
static LAST: [AtomicI32; 8] = [const { AtomicI32::new(0) }; 8];
/// Number of threads that were started.
static STARTED: AtomicUsize = AtomicUsize::new(0);
const STARTING: i32 = i32::MAX;

/// A set of threads, as bits for the elements of [`LAST`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Slots(u8);

impl Slots {
    /// Adds the threads of `others`.
    pub const fn add(&mut self, others: Self) {
        self.0 |= others.0;
    }

    /// Whether the set is empty.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether all of these threads have ended: the kernel knows none of them any more.
    pub fn are_gone(self) -> bool {
        let mut ended = LAST.iter().enumerate().filter(|(n, _)| self.0 & 1 << n != 0);
        ended.all(|(_, slot)| {
            let thread = slot.load(Ordering::SeqCst).unsigned_abs() as usize;
            // SAFETY: signal 0 is none.
            let answer = unsafe { raw::call(libc::SYS_tgkill, [std::process::id() as usize, thread, 0, 0, 0, 0]) };
            thread == 0 || raw::error(answer) == Some(libc::ESRCH)
        })
    }
}

/// The threads that have not ended their work.
pub fn running() -> Slots {
    let runs = |slot: &AtomicI32| slot.load(Ordering::SeqCst) > 0;
    Slots(LAST.iter().enumerate().filter(|(_, slot)| runs(slot)).fold(0, |all, (n, _)| all | 1 << n))
}

/// Forgets the parent's threads. For a forked child, before it starts any.
pub fn begin_anew() {
    LAST.iter().for_each(|slot| slot.store(0, Ordering::SeqCst));
}

/// Starts a detached thread. A panic in it ends the process.
///
/// # Errors
/// Memory is short, or the process has as many threads as it may.
pub fn thread(name: &'static CStr, stack_bytes: usize, body: impl FnOnce() + Send + 'static) -> Result<(), Errno> {
    let stack = arena::map(stack_bytes).ok_or(Errno::NOMEM)?;
    let everything_blocked = Signals::block_all();
    let slot = &LAST[STARTED.fetch_add(1, Ordering::Relaxed) % LAST.len()];
    slot.store(STARTING, Ordering::SeqCst);
    let named: Body = Box::new(move || {
        let number = gettid().as_raw_nonzero().get();
        slot.store(number, Ordering::SeqCst);
        // SAFETY: the name is a string of at most 16 bytes with its end, and this system call names the calling thread.
        unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
        world::join();
        body();
        slot.store(-number, Ordering::SeqCst);
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
        slot.store(0, Ordering::SeqCst);
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

/// The calling thread's signal mask; all signals are blocked until this is dropped.
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
