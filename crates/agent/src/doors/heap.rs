//! The main heap, which grows and shrinks by `brk` and not through any door. Nobody else maps there, so it is enough
//! to look at it once a round.

use super::{ALL, State, ask, state};
use crate::raw;
use crate::table::{self, Table, Traits};
use page::{HostVirt, PAGE_BYTES, PageRange};
use std::sync::atomic::{AtomicU64, Ordering};

/// Where the heap began and ended when it was last looked at.
static KNOWN_START: AtomicU64 = AtomicU64::new(u64::MAX);
static KNOWN_END: AtomicU64 = AtomicU64::new(0);

/// Brings the table up to date with the heap, where all anonymous memory is asked in.
pub fn ask_heap() {
    if ALL.load(Ordering::Relaxed) && state() == State::Member {
        let start = heap_start();
        let mut table = table::lock();
        if let Some(start) = start {
            follow(&mut table, start);
        }
    }
}

fn follow(table: &mut Table, start: u64) {
    let end = heap_end();
    let known = KNOWN_END.swap(end, Ordering::Relaxed);
    KNOWN_START.store(start, Ordering::Relaxed);
    let pages =
        |from: u64, to: u64| PageRange { start: HostVirt(from), pages: to.saturating_sub(from) / PAGE_BYTES as u64 };
    // What was given back; what has come again since is new.
    table.forget(pages(end, known));
    // The part that is known keeps what the program said of it.
    ask(table, pages(start, end), Traits::default());
}

/// The part of a range that was heap when it was last looked at and is not any more. If pages of it were out meanwhile,
/// they have been mapped where nothing is to be.
pub fn lost_heap(range: PageRange) -> Option<PageRange> {
    let (start, end) = (KNOWN_START.load(Ordering::Relaxed), KNOWN_END.load(Ordering::Relaxed));
    if range.start.0 < start || range.start.0 >= end {
        return None;
    }
    let lost = HostVirt(heap_end().max(range.start.0));
    (lost < range.end()).then(|| PageRange { start: lost, pages: range.end().page() - lost.page() })
}

/// Whether any of a range is or was heap when it was last looked at: it may have gone and come again since.
pub fn is_heap(range: PageRange) -> bool {
    let (start, end) = (KNOWN_START.load(Ordering::Relaxed), KNOWN_END.load(Ordering::Relaxed));
    range.start.0 < end && start < range.end().0
}

/// The end of the heap's last whole page.
fn heap_end() -> u64 {
    // SAFETY: an impossible end changes nothing, and the kernel says where the heap ends.
    let end = unsafe { raw::call(libc::SYS_brk, [0; 6]) };
    (end as u64).next_multiple_of(PAGE_BYTES as u64)
}

/// Where the heap begins: the 47th field of the process's `stat`.
fn heap_start() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").ok()?;
    let fields = stat.rsplit_once(')')?.1;
    let start: u64 = fields.split_ascii_whitespace().nth(44)?.parse().ok()?;
    (start != 0).then(|| start.next_multiple_of(PAGE_BYTES as u64))
}
