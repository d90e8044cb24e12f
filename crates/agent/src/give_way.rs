//! Yielding to the program's own userfaultfd (postcopy migration, snapshots): a mapping can be registered with one
//! userfaultfd only, and the program's takes precedence.
//!
//! The program's thread that is about to register calls this module through a hook (`hooks/userfault.rs`). It has to
//! take the agent's userfaultfds off the range at once, but does not have them in its table of file descriptors. So it
//! borrows them from the agent's thread for a moment.
//!
//! **Anonymous memory.** The kernel tells nobody of pages that are missing in a mapping of the pool, and moves none from
//! or to one (`UFFDIO_MOVE`). So a program's thread that needs anonymous memory asks the agent's thread for it, and waits.

use crate::lock::Lock;
use crate::maps;
use crate::section::Section;
use crate::table;
use act::{Userfault, Watch};
use page::PageRange;
use rustix::fd::AsRawFd;
use rustix::process::Pid;
use rustix::thread::gettid;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// Shortest and longest time between two looks, while the agent's thread rests, at what the program's threads have changed:
/// 1 s, 5 s.
pub const CHANGES_EVERY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));
/// Longest time that a thread waits for the agent to make memory anonymous, since the last page of it that was: 2 s.
const WAIT_LONGEST: Duration = Duration::from_secs(2);
/// Pause of a thread that waits for that, between two looks: 200 us.
const LOOK_EVERY: Duration = Duration::from_micros(200);

/// Agent's thread that has the files below open; 0 before [`publish`].
static THREAD: AtomicI32 = AtomicI32::new(0);
/// Descriptor of the userfaultfd that notes writes, -1 for none.
static NOTES: AtomicI32 = AtomicI32::new(-1);
/// Descriptor of the userfaultfd that follows memory which maps the pool, -1 for none.
static WATCH: AtomicI32 = AtomicI32::new(-1);
/// Descriptor of the file that wakes the agent's thread, -1 for none.
static ALARM: AtomicI32 = AtomicI32::new(-1);
/// Memory that threads of the program wait for.
static WANTED: Lock<Vec<PageRange>> = Lock::new(Vec::new());

/// Whether the agent's userfaultfd was taken off memory that maps the pool, and is not back on all of it.
static IS_OFF: AtomicBool = AtomicBool::new(false);

/// Makes the userfaultfds of this section the ones that yield. For the thread that has them open.
pub fn publish(section: &Section) {
    NOTES.store(section.notes().map_or(-1, Userfault::number), Ordering::Relaxed);
    WATCH.store(section.following().watch().number(), Ordering::Relaxed);
    ALARM.store(section.following().alarm().as_raw_fd(), Ordering::Relaxed);
    THREAD.store(gettid().as_raw_nonzero().get(), Ordering::Release);
}

/// Leaves the parent's userfaultfds behind. For a forked child, before it has threads.
pub(crate) fn begin_anew() {
    THREAD.store(0, Ordering::Release);
    [&NOTES, &WATCH, &ALARM].into_iter().for_each(|number| number.store(-1, Ordering::Relaxed));
    IS_OFF.store(false, Ordering::Relaxed);
    // SAFETY: the child has this thread only, and it forked outside of this module.
    unsafe { WANTED.begin_anew(Vec::new()) };
}

/// Has no userfaultfd yield any more: there is none. For the agent's thread, at its end.
pub fn withdraw() {
    THREAD.store(0, Ordering::Release);
}

/// Takes the agent's userfaultfds off a range. A thread of the program calls it.
pub fn unregister(range: PageRange) {
    // While the table's lock is held, no section is under way, and none puts the userfaultfds back.
    let _table = table::lock();
    let Some(thread) = Pid::from_raw(THREAD.load(Ordering::Acquire)) else { return };
    let of_number = |number: &AtomicI32| Userfault::of_thread(thread, number.load(Ordering::Relaxed)).ok();
    let ours = [of_number(&NOTES), of_number(&WATCH)];
    IS_OFF.store(true, Ordering::Relaxed);
    // Mapping by mapping, because a part of the range may be the program's already. From Linux 6.17 on, the kernel then
    // lets nothing of the range go. Older ones would take the part from the program. So the kernel is asked first whose
    // the mapping is: nobody can register a mapping of another's.
    for mapping in maps::mappings(range, false).unwrap_or_default() {
        for ours in ours.iter().flatten().filter(|ours| ours.register(mapping.range, Watch::Writes).is_ok()) {
            // If a mapping stays registered with the agent's userfaultfd, the program's own registration fails with an
            // error.
            let _ = ours.unregister(mapping.range);
        }
    }
}

/// Waits until nothing of a range lies in mappings of the pool. Says whether that was reached. A thread of the program calls
/// it. The range may be folded again afterwards, unless it was shut.
pub fn make_anonymous(range: PageRange) -> bool {
    let left = || table::lock().mapped_by_us(range).iter().map(|part| part.pages).sum::<u64>();
    let mut before = left();
    let mut until = Instant::now() + WAIT_LONGEST;
    if before > 0 {
        want(range, true);
        if !wake_agent() {
            until += CHANGES_EVERY.1;
        }
    }
    while before > 0 && Instant::now() < until {
        wake_agent();
        std::thread::sleep(LOOK_EVERY);
        let now = left();
        if now < before {
            until = Instant::now() + WAIT_LONGEST;
        }
        before = now;
    }
    want(range, false);
    before == 0
}

/// Notes that a range is to be anonymous, or that nobody waits for it any more.
pub fn want(range: PageRange, begins: bool) {
    let mut wanted = WANTED.lock();
    if begins {
        wanted.push(range);
    } else {
        wanted.retain(|wanted| *wanted != range);
    }
}

/// Wakes the agent's thread, or returns `false`: then it looks within [`CHANGES_EVERY`].
pub fn wake_agent() -> bool {
    let Some(thread) = Pid::from_raw(THREAD.load(Ordering::Acquire)) else { return false };
    let alarm = act::file_of_thread(thread, ALARM.load(Ordering::Relaxed));
    alarm.is_ok_and(|alarm| rustix::io::write(alarm, &1_u64.to_ne_bytes()).is_ok())
}

/// The memory that threads of the program wait for. For the agent's thread.
pub fn wanted() -> Vec<PageRange> {
    WANTED.lock().clone()
}

/// Whether a thread still waits for this range. For the agent's thread.
pub fn is_wanted(range: PageRange) -> bool {
    WANTED.lock().contains(&range)
}

/// Puts the agent's userfaultfd back on memory that maps the pool, except where the program's own is still there. For
/// the agent's thread.
pub fn take_back(section: &Section) {
    if !IS_OFF.swap(false, Ordering::Relaxed) {
        return;
    }
    let table = table::lock();
    for pooled in table.mapped_by_us(table::everything()) {
        for (part, traits) in table.known(pooled) {
            let is_yielded = traits.is_yielded();
            if is_yielded || section.following().watch().register(part, Watch::AbsentAndWrites).is_err() {
                IS_OFF.store(true, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Member, fold, pool, section};
    use act::Purpose;
    use wire::Outcome;

    /// The kernel refuses a whole range where any part of it belongs to somebody else. The program's registration of more
    /// than it had before once failed for that.
    #[test]
    fn program_registers_more_than_it_has_registered_before() {
        let Some(mut section) = section() else { return };
        let (pool, member) = (pool(), Member::new(12));
        let programs = Userfault::open(Purpose::Note).unwrap();
        assert_eq!(fold(&mut section, member.run(4, 4), Some((&pool, 4))), [Outcome::Folded; 4]);
        section.watch_again(&[member.run(0, 4), member.run(8, 4)]);
        publish(&section);
        let register = |first, pages| {
            unregister(member.run(first, pages));
            programs.register(member.run(first, pages), Watch::Writes)
        };
        assert_eq!(register(1, 1), Ok(()));
        assert_eq!(register(5, 1), Ok(()));
        programs.protect(member.run(1, 1), true).unwrap();
        assert_eq!(register(0, 12), Ok(()));
        let mut entries = Vec::new();
        let pagemap = host::Pagemap::open(std::process::id()).unwrap();
        pagemap.read(member.run(0, 12).start, 12, &mut entries).unwrap();
        assert!(entries[1].write_protected(), "what the program had registered stays as it was");
        // Where the table does not know that memory is folded, and the agent looks after it, too.
        programs.unregister(member.run(0, 12)).unwrap();
        section.following().watch().register(member.run(2, 1), Watch::Writes).unwrap();
        assert_eq!(register(0, 12), Ok(()));
    }
}
