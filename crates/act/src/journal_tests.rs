//! Logs of userfaultfds that have no messages, and of discards by this process.

use super::*;
use crate::userfault::{Purpose, Watch};
use page::pages_to_bytes;
use rustix::mm::{Advice, madvise, mmap_anonymous};

const ABOUT: About = About { socket: None, layout: (0, 0), is_born: false };

fn open() -> Option<Userfault> {
    Userfault::open(Purpose::Follow).inspect_err(|e| eprintln!("skipped: no userfaultfd here: {e}")).ok()
}

fn page(n: u64) -> PageRange {
    PageRange { start: HostVirt((16 + n) << PAGE_SHIFT), pages: 1 }
}

fn set(pages: impl Iterator<Item = u64>) -> PageSet {
    let mut set = PageSet::new();
    pages.for_each(|n| set.insert(page(n)));
    set
}

#[test]
fn long_log_is_a_partial_one_until_it_is_emptied() {
    let Some(watch) = open() else { return };
    let journal = Journal::new().unwrap();
    let half = RECORDS as u64 / 2;
    let mut entry = journal.enter(&watch, ABOUT, &set((0..half).map(|n| 2 * n)), &PageSet::new()).unwrap();
    let found = journal.found();
    assert_eq!((found[0].log.len() as u64, found[0].is_partial), (half, false));
    entry.logged.insert(page(2 * half));
    entry.write_anew();
    assert!(journal.found()[0].is_partial);
    entry.clear();
    let found = journal.found();
    assert_eq!((found[0].log.len(), found[0].is_partial), (0, false));
    drop(entry);
    assert!(journal.is_empty());
}

#[test]
fn discard_is_in_the_journal_as_soon_as_the_discarding_thread_goes_on() {
    let Some(watch) = open() else { return };
    let journal = Journal::new().unwrap();
    let mut entry = journal.enter(&watch, ABOUT, &PageSet::new(), &PageSet::new()).unwrap();
    let bytes = pages_to_bytes(4) as usize;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let memory = unsafe { mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) }.unwrap();
    let range = PageRange { start: HostVirt(memory as u64), pages: 4 };
    watch.register(range, Watch::Writes).unwrap();
    let at = range.start.0;
    // SAFETY: the memory is this test's, and holds nothing.
    let discarding =
        std::thread::spawn(move || unsafe { madvise(at as *mut _, bytes, Advice::LinuxDontNeed) }.unwrap());
    while entry.next_message(&watch).unwrap().is_none() {
        std::thread::yield_now();
    }
    discarding.join().unwrap();
    assert_eq!(journal.found()[0].log, [Logged::Discard(range)]);
}
