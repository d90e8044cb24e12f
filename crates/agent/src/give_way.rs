//! Giving way to the program's own userfaultfd (postcopy migration, snapshots): a mapping can be registered with one
//! only, and the program's goes first.
//!
//! The program's thread that is about to register asks here. It has to take ours off the range at once, but does not have
//! our userfaultfd among its files; so it gets it from the agent's thread for the moment.

use crate::table;
use host::Userfault;
use page::PageRange;
use rustix::process::Pid;
use rustix::thread::gettid;
use std::sync::atomic::{AtomicI32, Ordering};

static THREAD: AtomicI32 = AtomicI32::new(0);
static NUMBER: AtomicI32 = AtomicI32::new(-1);

/// From now on, `guard` is what has to give way. For the thread that has it open.
pub fn publish(guard: &Userfault) {
    NUMBER.store(guard.number(), Ordering::Relaxed);
    THREAD.store(gettid().as_raw_nonzero().get(), Ordering::Release);
    crate::doors::set_yield(unregister);
}

/// Takes our userfaultfd off a range. Called by a thread of the program.
fn unregister(range: PageRange) {
    // Held, so that no section is under way, and none puts it back.
    let _table = table::lock();
    let Some(thread) = Pid::from_raw(THREAD.load(Ordering::Acquire)) else { return };
    if let Ok(guard) = Userfault::of_thread(thread, NUMBER.load(Ordering::Relaxed)) {
        // If it fails, so will the program's own registration, and the program is told that.
        let _ = guard.unregister(range);
    }
}
