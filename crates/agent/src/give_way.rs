//! Yielding to the program's own userfaultfd (postcopy migration, snapshots): a mapping can be registered with one
//! userfaultfd only, and the program's takes precedence.
//!
//! A thread of the program that is about to register memory calls this module through a hook (`hooks/userfault.rs`). It
//! has to unregister the memory from the agent's userfaultfds at once, but these are not in its table of file
//! descriptors. So it duplicates them from the agent's thread for a moment.
//!
//! **Anonymous memory.** In a mapping of the pool, the kernel reports no missing pages to the program's userfaultfd,
//! and moves no pages from or to it (`UFFDIO_MOVE`). So a thread of the program that needs anonymous memory asks the
//! agent's thread for it, and waits.

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

/// Shortest and longest time between two checks of the agent's thread, while it sleeps for long, whether the program's
/// threads have changed or want anything: 1 s, 5 s.
pub const CHANGES_EVERY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));
/// Longest time that a thread waits for the agent to make memory anonymous, counted from the last page that became so:
/// 2 s.
const WAIT_LONGEST: Duration = Duration::from_secs(2);
/// Time after which a thread that waits for anonymous memory checks again: 200 us.
const LOOK_EVERY: Duration = Duration::from_micros(200);

/// Number of the agent's thread that has the files below open; 0 before [`publish`].
static THREAD: AtomicI32 = AtomicI32::new(0);
/// Descriptor of the userfaultfd that notes writes, -1 for none.
static NOTES: AtomicI32 = AtomicI32::new(-1);
/// Descriptor of the userfaultfd that follows memory which maps the pool, -1 for none.
static WATCH: AtomicI32 = AtomicI32::new(-1);
/// Descriptor of the file that wakes the agent's thread, -1 for none.
static ALARM: AtomicI32 = AtomicI32::new(-1);
/// Memory that threads of the program wait for to become anonymous.
static WANTED: Lock<Vec<PageRange>> = Lock::new(Vec::new());

/// Whether the agent's userfaultfd was taken off memory in mappings of the pool, and is not yet back on all of it.
static IS_OFF: AtomicBool = AtomicBool::new(false);

/// Makes this section's userfaultfds the ones that [`unregister`] takes off memory. For the thread that has them open.
pub fn publish(section: &Section) {
    NOTES.store(section.notes().map_or(-1, Userfault::number), Ordering::Relaxed);
    WATCH.store(section.following().watch().number(), Ordering::Relaxed);
    ALARM.store(section.following().alarm().as_raw_fd(), Ordering::Relaxed);
    THREAD.store(gettid().as_raw_nonzero().get(), Ordering::Release);
}

/// Forgets the parent's userfaultfds. For a forked child, before it has threads.
pub(crate) fn begin_anew() {
    THREAD.store(0, Ordering::Release);
    [&NOTES, &WATCH, &ALARM].into_iter().for_each(|number| number.store(-1, Ordering::Relaxed));
    IS_OFF.store(false, Ordering::Relaxed);
    // SAFETY: the child has this thread only, and it forked outside of this module.
    unsafe { WANTED.begin_anew(Vec::new()) };
}

/// Forgets the userfaultfds, which are about to be closed. For the agent's thread, at its end.
pub fn withdraw() {
    THREAD.store(0, Ordering::Release);
}

/// Unregisters a range from the agent's userfaultfds. A thread of the program calls it.
pub fn unregister(range: PageRange) {
    // While the table's lock is held, no section is under way that would register the range again.
    let _table = table::lock();
    let Some(thread) = Pid::from_raw(THREAD.load(Ordering::Acquire)) else { return };
    let of_number = |number: &AtomicI32| Userfault::of_thread(thread, number.load(Ordering::Relaxed)).ok();
    let ours = [of_number(&NOTES), of_number(&WATCH)];
    IS_OFF.store(true, Ordering::Relaxed);
    // This is done for each mapping, because a part of the range may be registered with the program's userfaultfd
    // already. From Linux 6.17 on, the kernel would then unregister nothing of the range. Older kernels would take that
    // part from the program. So the kernel is asked first whose the mapping is: a mapping that is registered with one
    // userfaultfd cannot be registered with another.
    for mapping in maps::mappings(range, false).unwrap_or_default() {
        for ours in ours.iter().flatten().filter(|ours| ours.register(mapping.range, Watch::Writes).is_ok()) {
            // If a mapping stays registered with the agent's userfaultfd, the program's own registration fails with an
            // error.
            let _ = ours.unregister(mapping.range);
        }
    }
}

/// Waits until no page of a range lies in a mapping of the pool. Returns whether that was reached. A thread of the
/// program calls it. The range may be folded again afterwards, unless the table keeps it shut.
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

/// Notes that a thread waits for this range to become anonymous, or (`begins` is false) that it waits no longer.
pub fn want(range: PageRange, begins: bool) {
    let mut wanted = WANTED.lock();
    if begins {
        wanted.push(range);
    } else {
        wanted.retain(|wanted| *wanted != range);
    }
}

/// Wakes the agent's thread. `false` if that failed: the agent then checks within [`CHANGES_EVERY`].
pub fn wake_agent() -> bool {
    let Some(thread) = Pid::from_raw(THREAD.load(Ordering::Acquire)) else { return false };
    let alarm = act::file_of_thread(thread, ALARM.load(Ordering::Relaxed));
    alarm.is_ok_and(|alarm| rustix::io::write(alarm, &1_u64.to_ne_bytes()).is_ok())
}

/// The memory that threads of the program wait for to become anonymous. For the agent's thread.
pub fn wanted() -> Vec<PageRange> {
    WANTED.lock().clone()
}

/// Whether a thread still waits for this range. For the agent's thread.
pub fn is_wanted(range: PageRange) -> bool {
    WANTED.lock().contains(&range)
}

/// Registers memory in mappings of the pool with the agent's userfaultfd again, except where the program's userfaultfd
/// is still registered. For the agent's thread.
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

    /// The kernel refuses to unregister a whole range if any part of it is registered with another userfaultfd. Once,
    /// the program's registration of more memory than it had before failed because of that.
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
