//! The main heap, which grows and shrinks by `brk` and not through any hook. Nobody else maps memory there, so the
//! agent looks at it once a round.

use super::{ALL, State, ask, state};
use crate::raw;
use crate::table::{self, Table, Traits};
use page::{HostVirt, PAGE_BYTES, PageRange};
use std::sync::atomic::{AtomicU64, Ordering};

/// Beginning of the heap when the agent last looked.
static KNOWN_START: AtomicU64 = AtomicU64::new(u64::MAX);
/// End of the heap when the agent last looked.
static KNOWN_END: AtomicU64 = AtomicU64::new(0);

/// Brings the table up to date with the heap, if all anonymous memory is enrolled.
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
    // The heap has given this memory back. If it has grown again meanwhile, the memory there is new.
    table.forget(pages(end, known));
    // Memory that is known already keeps its traits.
    ask(table, pages(start, end), Traits::default());
}

/// The part of a range that was heap when the agent last looked and is not any more. If a fold had moved pages of it
/// out meanwhile, they were put back at addresses where nothing should be mapped.
pub fn lost_heap(range: PageRange) -> Option<PageRange> {
    let (start, end) = (KNOWN_START.load(Ordering::Relaxed), KNOWN_END.load(Ordering::Relaxed));
    if range.start.0 < start || range.start.0 >= end {
        return None;
    }
    let lost = HostVirt(heap_end().max(range.start.0));
    (lost < range.end()).then(|| PageRange { start: lost, pages: range.end().page() - lost.page() })
}

/// Whether any of a range was heap when the agent last looked: it may have been given back, and have come again since.
pub fn is_heap(range: PageRange) -> bool {
    let (start, end) = (KNOWN_START.load(Ordering::Relaxed), KNOWN_END.load(Ordering::Relaxed));
    range.start.0 < end && start < range.end().0
}

/// The end of the heap, rounded up to whole pages.
fn heap_end() -> u64 {
    // SAFETY: the call asks for an impossible end, which changes nothing. The kernel answers with the heap's end.
    let end = unsafe { raw::call(libc::SYS_brk, [0; 6]) };
    (end as u64).next_multiple_of(PAGE_BYTES as u64)
}

/// The beginning of the heap: the 47th field of the process's `stat`.
fn heap_start() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").ok()?;
    let fields = stat.rsplit_once(')')?.1;
    let start: u64 = fields.split_ascii_whitespace().nth(44)?.parse().ok()?;
    (start != 0).then(|| start.next_multiple_of(PAGE_BYTES as u64))
}
