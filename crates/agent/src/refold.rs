//! Folds pages again that were broken.
//!
//! A page that the member broke by writing is private, but lies in a mapping of the pool, and the kernel moves nothing out
//! of such a mapping. So it cannot be taken out of everybody's reach, as the section does; it stays where it is, and what
//! the move proves there - that nobody can be writing it - is proved in two steps here:
//!
//! ```text
//!   BROKEN, and at rest
//!      | writers are kept out: their fault sleeps (synchronous userfaultfd write-protect)
//!      v
//!   a witness is asked (`witness`): does anybody else hold the page, who might write it without a fault?
//!      |                                            \
//!      v nobody                                      v somebody, or nobody knows: let writers in --> Busy
//!   compared with the slot, in place
//!      |                     \
//!      v equal                 v different: let writers in --> Changed
//!   place the slots over it (`place`)
//!      \--> Folded. Wake who slept: they find the slot, and break it
//! ```
//!
//! Who only reads the page meanwhile reads the same bytes before and after. What is discarded meanwhile reads as zeros afterwards:
//! the kernel tells of it (`follow`).
//!
//! The table's lock is held while writers are kept out, from at most [`GROUP_PAGES`] pages in [`GROUP_PARTS`] parts at a
//! time, and a witness answers soon or not at all, so it ends by itself.

use crate::follow::Following;
use crate::maps::Kind;
use crate::place::{Placing, place};
use crate::references;
use crate::section::{RUN_PAGES, Source};
use crate::table::{Guard, Table};
use crate::witness::Witness;
use host::{Pagemap, SoftReader, map_anonymous_over, pages_equal};
use page::PageRange;
use rustix::io::Errno;
use std::time::{Duration, Instant};
use wire::prove::Proof;
use wire::{Outcome, SlotRun};

/// Pages that writers are kept out of at a time.
pub const GROUP_PAGES: u64 = RUN_PAGES;
/// And parts of memory that these pages may lie in.
const GROUP_PARTS: usize = 12;

/// Broken pages side by side that are to be folded to slots side by side.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// The pages: at most [`GROUP_PAGES`].
    pub range: PageRange,
    /// Where their contents are in the pool; `None` for zeros.
    pub source: Option<Source<'a>>,
    /// Where the outcome for the first of them belongs.
    pub at: usize,
}

/// Folds some of these parts, the first ones, and says what became of each page; gives back how many parts they were and
/// how long writers were kept out.
///
/// `table` is the table's lock, held; the caller has seen in it that all of the pages are broken ones that may be folded, and asked
/// `references` at `generation` or later.
pub fn some(
    table: &mut Guard,
    (pagemap, following, reader, witness): (&Pagemap, &Following, &mut SoftReader, &mut Witness),
    parts: &[Part<'_>],
    generation: u64,
    outcomes: &mut [Outcome],
) -> (usize, Duration) {
    let mut pages = 0;
    let fits = |part: &&Part<'_>| {
        pages += part.range.pages;
        pages <= GROUP_PAGES
    };
    let group = &parts[..parts.iter().take(GROUP_PARTS).take_while(fits).count().clamp(1, parts.len())];
    for part in group {
        outcomes[part.at..part.at + part.range.pages as usize].fill(Outcome::Busy);
        // Compared with bytes that this process has not looked at for a while: have them ready.
        let slots = part.source.and_then(|s| s.pool.slots(s.first, part.range.pages));
        let _ = slots.map(host::make_present);
    }
    if !witness.is_at_hand() {
        return (group.len(), Duration::ZERO);
    }
    // What has to be waited for later is waited for now, while nobody is kept out.
    group.iter().find_map(|part| part.source).inspect(|source| source.pool.wait_for_lock());
    following.hold().begin_section();
    let began = Instant::now();
    // Where the program looks after its faults by itself, this fails, and nothing is touched.
    let keep_out = |part: &&Part<'_>| following.until_read(|_| following.watch().protect(part.range, true)).1.is_ok();
    let kept_out: Vec<&Part<'_>> = group.iter().filter(keep_out).collect();
    let mut proofs = witness.ask(pagemap, kept_out.iter().map(|part| part.range));
    let pinned = references::generation() != generation;
    for part in &kept_out {
        let of_part = &mut outcomes[part.at..part.at + part.range.pages as usize];
        let (its_proofs, others) = proofs.split_at(of_part.len());
        proofs = others;
        judge(following, reader, part, its_proofs, of_part);
        if pinned {
            of_part.fill(Outcome::Unpinned);
        }
        replace(table, following, part.range, part.source, of_part);
    }
    following.end_section(&[]);
    for part in &kept_out {
        // What is still there; what has been replaced is not protected.
        for pooled in table.pooled_pages(part.range) {
            following.let_writers_in(pooled);
        }
        // Who slept on what has been replaced.
        let _ = following.watch().wake(part.range);
    }
    (group.len(), began.elapsed())
}

/// `Folded` stands for a page that can be replaced, for now.
fn judge(following: &Following, reader: &mut SoftReader, part: &Part<'_>, proofs: &[Proof], outcomes: &mut [Outcome]) {
    let slots = part.source.map(|s| s.pool.slots(s.first, part.range.pages));
    let Some(slots) = slots.map_or(Some(None), |slots| slots.map(Some)) else { return };
    // Held while it is read: a page that was discarded cannot be read before writers are let in again, and would be waited for
    // for ever.
    let shared = following.hold();
    for kept in shared.kept(part.range) {
        let first = (kept.start.page() - part.range.start.page()) as usize;
        // Copied, because the program may unmap it by a system call of its own. Nobody can write it.
        for n in 0..reader.read(kept) {
            if proofs[first + n] != Proof::Free {
                continue;
            }
            let wanted = slots.map_or(crate::section::zeros(), |slots| slots.start.add_pages((first + n) as u64));
            let ours = page::HostVirt(std::ptr::from_ref(reader.page(n)) as u64);
            // SAFETY: one is a copy of ours; the other is a page of the view, which reaches to the end of a file that cannot
            // shrink, or a constant.
            let equal = unsafe { pages_equal(ours, wanted) };
            outcomes[first + n] = if equal { Outcome::Folded } else { Outcome::Changed };
        }
    }
}

/// Replaces what can be.
fn replace(
    table: &mut Table,
    following: &Following,
    run: PageRange,
    source: Option<Source<'_>>,
    outcomes: &mut [Outcome],
) {
    let mut at = 0;
    while at < outcomes.len() {
        let verdict = outcomes[at];
        let pages = outcomes[at..].iter().take_while(|o| **o == verdict).count();
        let piece = PageRange { start: run.start.add_pages(at as u64), pages: pages as u64 };
        // A mapping is advised as a whole.
        let piece = PageRange { pages: table.alike(piece), ..piece };
        let pages = piece.pages as usize;
        if verdict == Outcome::Folded && map_over(table, following, piece, source, at as u32).is_err() {
            outcomes[at..at + pages].fill(Outcome::NoVma);
        }
        at += pages;
    }
}

fn map_over(
    table: &mut Table,
    following: &Following,
    piece: PageRange,
    source: Option<Source<'_>>,
    offset: u32,
) -> Result<(), Errno> {
    let slot = source.map(|source| source.first.add(offset).ok_or(Errno::INVAL)).transpose()?;
    let traits = table.traits(piece).unwrap_or_default();
    loop {
        let mapped = match (source, slot) {
            // SAFETY: every page of the piece is read-only for everybody, and holds what the slots hold. The table's lock keeps
            // other threads from mapping anything else there.
            (Some(source), Some(slot)) => unsafe {
                place(following, Placing { pool: source.pool, slot, traits, kind: Kind::Pool, staged: None }, piece)
            },
            _ if !following.may_replace_followed(piece, traits, Kind::Pool) => Err(Errno::STALE),
            // SAFETY: as above, with zeros.
            _ => unsafe { map_anonymous_over(piece) },
        };
        match mapped {
            Ok(()) => break,
            // An old kernel that is short of memory has unmapped the piece already. Its content is in the pool, so it is
            // mapped for certain, and the sooner the better.
            Err(e) if e != Errno::STALE && host::make_present(piece) == Err(Errno::NOMEM) => std::thread::yield_now(),
            Err(e) => return Err(e),
        }
    }
    match slot {
        Some(slot) => table.set_folded(SlotRun { start: piece.start, slot, pages: piece.pages as u16 }),
        None => {
            // What is refused is advice, not content.
            let _ = traits.inherited().apply(piece);
            table.set_zeroed(piece);
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "refold_tests.rs"]
mod tests;
