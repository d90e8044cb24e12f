//! Giving way to the program's own userfaultfd (postcopy migration, snapshots): a mapping can be registered with one
//! only, and the program's goes first.
//!
//! The program's thread that is about to register asks here. It has to take ours off the range at once, but does not have
//! our userfaultfds among its files; so it gets them from the agent's thread for the moment.

use crate::section::Section;
use crate::table;
use host::{Userfault, Watch};
use page::{PageRange, PageSet};
use rustix::process::Pid;
use rustix::thread::gettid;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

static THREAD: AtomicI32 = AtomicI32::new(0);
static NOTES: AtomicI32 = AtomicI32::new(-1);
static WATCH: AtomicI32 = AtomicI32::new(-1);

/// Whether ours was taken off memory that maps the pool, and has not been put back on all of it.
static IS_OFF: AtomicBool = AtomicBool::new(false);

/// From now on, what this section uses has to give way. For the thread that has it open.
pub fn publish(section: &Section) {
    NOTES.store(section.notes().map_or(-1, Userfault::number), Ordering::Relaxed);
    WATCH.store(section.following().watch().number(), Ordering::Relaxed);
    THREAD.store(gettid().as_raw_nonzero().get(), Ordering::Release);
    crate::doors::set_yield(unregister);
}

/// Takes our userfaultfds off a range. Called by a thread of the program.
fn unregister(range: PageRange) {
    // Held, so that no section is under way, and none puts them back.
    let table = table::lock();
    let mut pooled = PageSet::new();
    table.pooled_pages(range).into_iter().for_each(|range| pooled.insert(range));
    let Some(thread) = Pid::from_raw(THREAD.load(Ordering::Acquire)) else { return };
    let take_off = |number: &AtomicI32, parts: Vec<PageRange>| {
        if let Ok(ours) = Userfault::of_thread(thread, number.load(Ordering::Relaxed)) {
            // If it fails, so will the program's own registration, and the program is told that.
            parts.into_iter().map(|part| ours.unregister(part)).for_each(|_| ());
        }
    };
    take_off(&NOTES, pooled.missing(range));
    IS_OFF.store(true, Ordering::Relaxed);
    take_off(&WATCH, pooled.within(range));
}

/// Puts ours back on memory that maps the pool, as far as the program's own is gone. For the agent's thread.
pub fn take_back(section: &Section) {
    if !IS_OFF.swap(false, Ordering::Relaxed) {
        return;
    }
    let table = table::lock();
    for pooled in table.pooled_pages(table::everything()) {
        for (part, traits) in table.known(pooled) {
            let is_yielded = traits.is_yielded();
            if is_yielded || section.following().watch().register(part, Watch::AbsentAndWrites).is_err() {
                IS_OFF.store(true, Ordering::Relaxed);
            }
        }
    }
}
