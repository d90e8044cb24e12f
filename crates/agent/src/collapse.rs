//! Collapses pieces of memory in which folding is no longer of use. A piece of 2 MiB becomes one mapping again, and one
//! huge page if the program wants huge pages.
//!
//! Folding cuts memory into mappings and splits huge pages. Broken pages stay in mappings of the pool's file, in which
//! the kernel makes no huge pages. A piece is collapsed if next to nothing of it is folded any more, or if it is being
//! unfolded:
//!
//! ```text
//!   map memory of our own with the same traits, all of it present: as a huge page, if one can be had
//!   make every page of the piece the member's own, as a write does
//!      | keep writers out of the whole piece: their fault sleeps (synchronous userfaultfd write-protect)
//!      v look at the page table: is every page there, its own, and protected?
//!   ask a witness (`witness`): does anybody else hold a page and could write it without a fault?
//!      |                                      \
//!      v no, for all of them                   v yes, or it does not know: let writers in, try again later
//!   copy the piece; move our mapping over it, atomically
//!      \--> private. Wake who slept: they find the copy
//! ```
//!
//! A thread that reads meanwhile reads the same bytes before and after. Writers wait for the copy of two megabytes,
//! which takes some hundred microseconds. So a piece is collapsed only when it was not written for a while.

use crate::follow::Following;
use crate::maps::Kind;
use crate::references;
use crate::round::{scan, spans};
use crate::table::{self, Guard, Traits};
use crate::witness::Witness;
use act::{HUGE_PAGES, MemberMemory, Userfault, Watch, make_private, move_mapping_over};
use host::{Pagemap, PagemapEntry};
use page::{HostVirt, PAGE_SHIFT, PageRange, PageSet};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use wire::prove::Proof;

/// Shortest time between two searches for pieces, and the share of a processor's time that searches may take: 30 s,
/// 1/1000.
const LOOK_EVERY: (Duration, u32) = (Duration::from_secs(30), 1000);
/// Share of a processor's time that collapsing pieces may take: 1/20.
const SHARE: u32 = 20;
/// Shortest and longest time before a piece that could not be collapsed is tried again: 1 min, 1 h.
const AGAIN: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3600));

/// The pieces that are to be collapsed, and when.
pub struct Collapse {
    /// Pieces that the last search has found, in reverse order.
    places: Vec<PageRange>,
    look_due: Instant,
    next: Instant,
    /// Pieces that could not be collapsed: the time before which they are not tried again, and the length of that wait.
    failed: BTreeMap<HostVirt, (Instant, Duration)>,
}

impl Collapse {
    /// The state before the first search.
    pub fn new(now: Instant) -> Self {
        Self { places: Vec::new(), look_due: now + LOOK_EVERY.0, next: now, failed: BTreeMap::new() }
    }

    /// Makes the next search due at once.
    pub const fn hurry(&mut self, now: Instant) {
        self.look_due = now;
    }

    /// The next piece in which at most `most` pages are not small private pages of the member, and its traits; `None`
    /// if there is none, or it is not time for one.
    ///
    /// # Errors
    /// The kernel refused to look.
    pub fn next(&mut self, pagemap: &Pagemap, most: u64, now: Instant) -> host::Result<Option<(PageRange, Traits)>> {
        if now >= self.look_due {
            self.look(pagemap, most, now)?;
            self.look_due = now + LOOK_EVERY.0.max(now.elapsed() * LOOK_EVERY.1);
        }
        if now < self.next {
            return Ok(None);
        }
        while let Some(place) = self.places.pop() {
            let traits = table::lock().open_traits(place);
            if let Some(traits) = traits {
                return Ok(Some((place, traits)));
            }
        }
        Ok(None)
    }

    /// The time until the next search or piece is due.
    pub fn due_in(&self, now: Instant) -> Duration {
        let due = if self.places.is_empty() { self.look_due } else { self.next };
        due.saturating_duration_since(now)
    }

    fn look(&mut self, pagemap: &Pagemap, most: u64, now: Instant) -> host::Result<()> {
        self.failed.retain(|_, (until, wait)| now < *until + *wait);
        let mut counts = BTreeMap::<u64, u64>::new();
        for range in scan(pagemap, &spans(), Pagemap::small_private_ranges)? {
            let (mut at, end) = (range.start.page(), range.end().page());
            while at < end {
                let next = (at / HUGE_PAGES + 1) * HUGE_PAGES;
                *counts.entry(at / HUGE_PAGES).or_default() += next.min(end) - at;
                at = next;
            }
        }
        let whole = |(number, pages): (u64, u64)| {
            let start = HostVirt((number * HUGE_PAGES) << PAGE_SHIFT);
            (pages + most >= HUGE_PAGES).then_some(PageRange { start, pages: HUGE_PAGES })
        };
        let waits = |place: &PageRange| self.failed.get(&place.start).is_some_and(|(until, _)| now < *until);
        self.places = counts.into_iter().filter_map(whole).filter(|place| !waits(place)).collect();
        self.places.reverse();
        Ok(())
    }

    /// Records whether a piece was collapsed, and how long the attempt took.
    pub fn done(&mut self, place: PageRange, is_collapsed: bool, took: Duration) {
        let now = Instant::now();
        self.next = now + took * SHARE;
        if is_collapsed {
            self.failed.remove(&place.start);
        } else {
            let wait = page::doubled(self.failed.get(&place.start).map(|(_, wait)| *wait), AGAIN);
            self.failed.insert(place.start, (now + wait, wait));
        }
    }
}

/// Collapses a piece whose pages are all private to the member: moves `copy` over it, which is as long. Returns whether
/// that was done.
///
/// `table` is the table's lock, held. The caller has seen in it that all of the piece may be folded, has made a survey
/// (`references`) at `generation` or later, and has called a witness for the piece.
///
/// # Errors
/// Memory or mappings are short, or the program has registered the piece with its own userfaultfd.
pub fn collapse_piece(
    table: &mut Guard,
    (pagemap, notes, following, witness): (&Pagemap, Option<&Userfault>, &Following, &mut Witness),
    (piece, traits): (PageRange, Traits),
    copy: MemberMemory,
    generation: u64,
) -> Result<bool, Errno> {
    let pooled = table.pooled_pages(piece);
    let private = gaps_of(piece, &pooled);
    for part in &private {
        if let Some(notes) = notes {
            // A mapping is registered with one userfaultfd at most. If the program has registered its own, this call
            // fails, and the program's stays. Writes that are not noted from here on do no harm: pages are always
            // compared before they are folded.
            notes.register(*part, Watch::Writes)?;
            let _ = notes.unregister(*part);
        }
        following.watch().register(*part, Watch::Writes)?;
    }
    following.hold().begin_section();
    let (held, kept_out) = following.until_read(|_| following.watch().protect(piece, true));
    drop(held);
    let result = kept_out.map(|()| {
        let is_free = is_all_its_own(pagemap, piece)
            && witness.ask(pagemap, std::iter::once(piece)).iter().all(|proof| *proof == Proof::Free)
            && references::generation() == generation;
        is_free && replace(following, copy, piece, traits).is_ok()
    });
    following.end_section(&private);
    if result == Ok(true) {
        table.set_private(piece);
    } else {
        pooled.iter().for_each(|part| following.let_writers_in(*part));
        // Lifts the write protection, and wakes the threads that sleep because of it.
        private.iter().map(|part| following.watch().unregister(*part)).for_each(|_| ());
    }
    // Wakes threads that sleep on a page of a piece that was replaced.
    let _ = following.watch().wake(piece);
    result
}

/// The parts of a piece that are not among these parts of it, in order.
fn gaps_of(piece: PageRange, parts: &[PageRange]) -> Vec<PageRange> {
    let mut known = PageSet::new();
    parts.iter().for_each(|part| known.insert(*part));
    known.missing(piece)
}

/// Gives the member a private copy of every page of a piece, as writes would.
///
/// # Errors
/// Memory is short.
pub fn make_own(table: &mut Guard, piece: PageRange) -> Result<(), Errno> {
    make_private(piece)?;
    for run in table.slot_runs(piece) {
        table.set_broken(PageRange { start: run.start, pages: run.pages.into() });
    }
    for zeroed in table.zeroed_pages(piece) {
        table.set_pending(zeroed);
    }
    Ok(())
}

/// Whether every page is present, private, and write-protected. An absent page could be written without a fault that
/// makes the writer sleep.
fn is_all_its_own(pagemap: &Pagemap, piece: PageRange) -> bool {
    let mut entries: Vec<PagemapEntry> = Vec::with_capacity(piece.pages as usize);
    let is_own = |entry: &PagemapEntry| entry.write_protected() && !entry.file_or_shared();
    pagemap.read(piece.start, piece.pages, &mut entries).is_ok()
        && entries.len() as u64 == piece.pages
        && entries.iter().all(is_own)
}

fn replace(following: &Following, copy: MemberMemory, piece: PageRange, traits: Traits) -> Result<(), Errno> {
    act::give_to_children(copy.range(), true)?;
    traits.inherited().apply(copy.range())?;
    // While this lock is held, no thread goes on to discard: later discards apply to the mapping that replaces the
    // piece. A page that was discarded before could not be read until writers are let in again.
    let held = following.hold();
    if held.kept(piece) != [piece] {
        return Err(Errno::BUSY);
    }
    if copy.fill_as_far_as_there(piece.start) != piece.pages {
        return Err(Errno::FAULT);
    }
    if !following.may_replace(piece, traits, Kind::Either) {
        return Err(Errno::STALE);
    }
    // SAFETY: writers were kept out of every page of the piece before anything was copied. The witness and
    // `references` have said that nobody holds a page who could write it otherwise. Nothing of the piece was
    // discarded since, and our mapping holds the same bytes.
    unsafe { move_mapping_over(copy.range(), piece.start) }?;
    drop(held);
    copy.forget();
    Ok(())
}

#[cfg(test)]
#[path = "collapse_tests.rs"]
mod tests;
