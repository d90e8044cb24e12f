//! Gives back what folding took, where it is of no use any more: two megabytes are made one mapping again, and a huge page
//! where the program wants those.
//!
//! Folding cuts memory into mappings and splits huge pages, and pages that were broken stay in mappings of the pool's file,
//! where the kernel makes no huge page of them. Where next to nothing is folded any more, or nothing is to be:
//!
//! ```text
//!   a mapping of our own, as the program's was, all of it present: as a huge page, if one can be had
//!   what is not the member's own becomes so, as if it had been written
//!      | writers are kept out of all of it: their fault sleeps (synchronous userfaultfd write-protect)
//!      v look at the page table: is every page there, its own, and protected?
//!   a witness is asked (`witness`): does anybody else hold a page, who might write it without a fault?
//!      |                                      \
//!      v nobody, of none                       v somebody, or nobody knows: let writers in, try again later
//!   copy all of it; move our mapping over it, atomically
//!      \--> private. Wake who slept: they find the copy
//! ```
//!
//! Who reads meanwhile reads the same bytes before and after. Writers wait for the copy of two megabytes, which takes some
//! hundred microseconds; so only what was not written for a while is made whole.

use crate::follow::Following;
use crate::maps::Kind;
use crate::references;
use crate::table::{self, Guard, Traits};
use crate::witness::Witness;
use host::{HUGE_PAGES, MemberMemory, Pagemap, PagemapEntry, Userfault, Watch, make_private, move_mapping_over};
use page::{HostVirt, PAGE_SHIFT, PageRange, PageSet};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use wire::prove::Proof;

/// How often places are looked for, at most; and what that may take of a processor.
const LOOK_EVERY: (Duration, u32) = (Duration::from_secs(30), 1000);
/// What making pieces whole may take of a processor.
const SHARE: u32 = 20;
/// A place that could not be made whole is tried again after so long at first, and at most.
const AGAIN: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3600));

/// Where pieces are to be made whole, and when.
pub struct Regain {
    places: Vec<PageRange>,
    look_due: Instant,
    next: Instant,
    /// Not to be tried before, and how long was waited for that.
    failed: BTreeMap<HostVirt, (Instant, Duration)>,
}

impl Regain {
    /// Nothing is known yet.
    pub fn new(now: Instant) -> Self {
        Self { places: Vec::new(), look_due: now + LOOK_EVERY.0, next: now, failed: BTreeMap::new() }
    }

    /// Has the next look come at once.
    pub const fn hurry(&mut self, now: Instant) {
        self.look_due = now;
    }

    /// The next piece, in which all but `most` pages are small ones of the member's own, and what is known of it.
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

    /// When to go on.
    pub fn due_in(&self, now: Instant) -> Duration {
        let due = if self.places.is_empty() { self.look_due } else { self.next };
        due.saturating_duration_since(now)
    }

    fn look(&mut self, pagemap: &Pagemap, most: u64, now: Instant) -> host::Result<()> {
        self.failed.retain(|_, (until, wait)| now < *until + *wait);
        let mut counts = BTreeMap::<u64, u64>::new();
        for span in crate::round::spans() {
            for range in pagemap.small_private_ranges(span.start, span.end())? {
                let (mut at, end) = (range.start.page(), range.end().page());
                while at < end {
                    let next = (at / HUGE_PAGES + 1) * HUGE_PAGES;
                    *counts.entry(at / HUGE_PAGES).or_default() += next.min(end) - at;
                    at = next;
                }
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

    /// What came of a piece, and how long it took.
    pub fn done(&mut self, place: PageRange, is_whole: bool, took: Duration) {
        let now = Instant::now();
        self.next = now + took * SHARE;
        if is_whole {
            self.failed.remove(&place.start);
        } else {
            let wait = self.failed.get(&place.start).map_or(AGAIN.0, |(_, wait)| (*wait * 2).min(AGAIN.1));
            self.failed.insert(place.start, (now + wait, wait));
        }
    }
}

/// Makes a piece whole that is all the member's own: moves `copy` over it, which is as long. Says whether it is whole now.
///
/// `table` is the table's lock, held; the caller has seen in it that all of the piece may be folded, has asked `references` at
/// `generation` or later, and called a witness for the piece.
///
/// # Errors
/// Memory or mappings are short, or the program looks after faults by itself.
pub fn make_whole(
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
            // No mapping has two userfaultfds. If it has the program's own, this fails, and that one stays. What is written
            // unnoticed from here on is compared before it is folded, as always.
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
        // Lifts the protection, and wakes who slept on it.
        private.iter().map(|part| following.watch().unregister(*part)).for_each(|_| ());
    }
    // Who slept on what has been replaced.
    let _ = following.watch().wake(piece);
    result
}

/// What of a piece is not among these parts of it, in order.
fn gaps_of(piece: PageRange, parts: &[PageRange]) -> Vec<PageRange> {
    let mut known = PageSet::new();
    parts.iter().for_each(|part| known.insert(*part));
    known.missing(piece)
}

/// Makes all of a piece the member's own, as if it had been written.
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

/// Whether every page is there, private, and protected: one that is absent could be written without a fault that sleeps.
fn is_all_its_own(pagemap: &Pagemap, piece: PageRange) -> bool {
    let mut entries: Vec<PagemapEntry> = Vec::with_capacity(piece.pages as usize);
    let is_own = |entry: &PagemapEntry| entry.write_protected() && !entry.file_or_shared();
    pagemap.read(piece.start, piece.pages, &mut entries).is_ok()
        && entries.len() as u64 == piece.pages
        && entries.iter().all(is_own)
}

fn replace(following: &Following, copy: MemberMemory, piece: PageRange, traits: Traits) -> Result<(), Errno> {
    host::give_to_children(copy.range(), true)?;
    traits.inherited().apply(copy.range())?;
    // Held, so that who discards from here on does so in what has taken its place; and a page that was discarded could not be
    // read before writers are let in again.
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
    // SAFETY: writers were kept out of every page of the piece before anything was copied, nobody held one who could write it
    // otherwise, nothing of it was discarded since, and our mapping holds the same bytes.
    unsafe { move_mapping_over(copy.range(), piece.start) }?;
    drop(held);
    copy.forget();
    Ok(())
}

#[cfg(test)]
#[path = "regain_tests.rs"]
mod tests;
