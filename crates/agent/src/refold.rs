//! Folds pages again that were folded and then written (broken).
//!
//! A broken page is private, but lies in a mapping of the pool. The kernel moves no page out of such a mapping, so the
//! page cannot be moved out as in the section. It stays where it is. Moving a page proves that nobody can be writing
//! it; here, this is proved in two steps:
//!
//! ```text
//!   BROKEN, and at rest
//!      | keep writers out: their fault sleeps (synchronous userfaultfd write-protect)
//!      v
//!   ask a witness (`witness`): does anybody else hold the page and could write it without a fault?
//!      |                                            \
//!      v no                                          v yes, or it does not know: let writers in --> Busy
//!   compared with the slot, in place
//!      |                     \
//!      v equal                 v different: let writers in --> Changed
//!   place the slots over it (`place`)
//!      \--> Folded. Wake who slept: they find the slot, and break it
//! ```
//!
//! Pages that map a pool without a worker are handled the same way. Such a page belongs to a file that nobody can
//! write, so no witness is needed ([`crate::witness`]).
//!
//! A thread that only reads the page meanwhile reads the same bytes before and after. A page that is discarded
//! meanwhile reads as zeros afterwards: the kernel tells the follower of it (`follow`).
//!
//! The table's lock is held while writers are kept out. This time is bounded: at most [`GROUP_PAGES`] pages in
//! [`GROUP_PARTS`] parts are handled at a time, and a witness that does not answer soon is not waited for.

use crate::follow::Following;
use crate::home;
use crate::maps::Kind;
use crate::place::{Placing, place};
use crate::references;
use crate::section::{RUN_PAGES, Source, piece_from};
use crate::table::{Guard, Table, Traits};
use crate::witness::Witness;
use act::{MemberMemory, SoftReader, move_mapping_over, pages_equal};
use host::Pagemap;
use page::PageRange;
use rustix::io::Errno;
use std::time::{Duration, Instant};
use wire::prove::Proof;
use wire::{Outcome, SlotRun};

/// Most pages from which writers are kept out at the same time.
pub const GROUP_PAGES: u64 = RUN_PAGES;
/// Most parts in which these pages may lie.
const GROUP_PARTS: usize = 12;

/// Consecutive broken pages that are to be folded to consecutive slots.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// The pages: at most [`GROUP_PAGES`].
    pub range: PageRange,
    /// Where their contents are in the pool; `None` for zeros.
    pub source: Option<Source<'a>>,
    /// Index of the outcome for the first page.
    pub at: usize,
}

/// Folds the first of these parts, and sets the outcome of each of their pages. Returns the number of parts, and how
/// long writers were kept out.
///
/// `table` is the table's lock, held. The caller has seen in it that all of the pages are broken and may be folded, and
/// has made a survey (`references`) at `generation` or later.
pub fn fold_group(
    table: &mut Guard,
    (pagemap, following, reader, witness): (&Pagemap, &Following, &mut SoftReader, &mut Witness),
    parts: &[Part<'_>],
    generation: u64,
    outcomes: &mut [Outcome],
) -> (usize, Duration) {
    let group = first_group(parts);
    prepare(group, outcomes);
    if !witness.is_at_hand() && !group.iter().any(|part| shows_file(pagemap, part.range)) {
        return (group.len(), Duration::ZERO);
    }
    // Mapping slots takes the lock of the pool's file, so that lock is waited for before writers are kept out.
    group.iter().find_map(|part| part.source).inspect(|source| source.pool.wait_for_lock());
    following.hold().begin_section();
    let began = Instant::now();
    let at_home: Vec<PageRange> =
        group.iter().filter(|part| is_in_own_mapping(table, part)).map(|part| part.range).collect();
    // If the program has registered the memory with its own userfaultfd, this fails, and the part stays as it is.
    let keep_out = |part: &&Part<'_>| {
        let is_watched = !at_home.contains(&part.range)
            || table.traits(part.range).is_some_and(|traits| home::watch(following, part.range, traits));
        is_watched && following.until_read(|_| following.watch().protect(part.range, true)).1.is_ok()
    };
    let kept_out: Vec<&Part<'_>> = group.iter().filter(keep_out).collect();
    let proofs = witness.ask(pagemap, kept_out.iter().map(|part| part.range));
    replace_proved(table, (following, reader), &kept_out, (proofs, generation), outcomes);
    following.end_section(&[]);
    let_writers_in(table, following, &kept_out);
    at_home.into_iter().for_each(|range| home::leave(table, following, range));
    (group.len(), began.elapsed())
}

/// Whether no page of a range is private to the member: all of them map a pool without a worker.
pub fn shows_file(pagemap: &Pagemap, range: PageRange) -> bool {
    pagemap.private_ranges(range.start, range.end()).is_ok_and(|own| own.is_empty())
}

/// Whether a part lies in a mapping of the program's own: its pages have homes, and no slots were placed over them.
fn is_in_own_mapping(table: &Table, part: &Part<'_>) -> bool {
    table.home(part.range.start.page()).is_some() && table.placement(part.range) == Some(false)
}

/// The first of these parts: as many as are handled at a time, and one at least.
fn first_group<'a, 'b>(parts: &'b [Part<'a>]) -> &'b [Part<'a>] {
    let mut pages = 0;
    let fits = |part: &&Part<'_>| {
        pages += part.range.pages;
        pages <= GROUP_PAGES
    };
    &parts[..parts.iter().take(GROUP_PARTS).take_while(fits).count().clamp(1, parts.len())]
}

/// Sets the outcome of all pages to `Busy`, and makes their slots present in the view. Otherwise writers would have to
/// wait for page faults in the view.
fn prepare(group: &[Part<'_>], outcomes: &mut [Outcome]) {
    for part in group {
        outcomes[part.at..part.at + part.range.pages as usize].fill(Outcome::Busy);
        let slots = part.source.and_then(|s| s.pool.slots(s.first, part.range.pages));
        let _ = slots.map(act::make_present);
    }
}

/// Compares and replaces parts from which writers are kept out. `proofs` has an answer of the witness for each of their
/// pages, in order.
fn replace_proved(
    table: &mut Table,
    (following, reader): (&Following, &mut SoftReader),
    kept_out: &[&Part<'_>],
    (mut proofs, generation): (&[Proof], u64),
    outcomes: &mut [Outcome],
) {
    // The generation is read after writers were kept out, as the section reads it after the move.
    let pinned = references::generation() != generation;
    for part in kept_out {
        let of_part = &mut outcomes[part.at..part.at + part.range.pages as usize];
        let (its_proofs, others) = proofs.split_at(of_part.len());
        proofs = others;
        judge(following, reader, part, its_proofs, of_part);
        if pinned {
            of_part.fill(Outcome::Unpinned);
        }
        replace(table, following, part.range, part.source, of_part);
    }
}

/// Lets writers in again, and wakes all threads that sleep on these parts.
fn let_writers_in(table: &Table, following: &Following, kept_out: &[&Part<'_>]) {
    for part in kept_out {
        // Pages that were replaced are not protected; those that were not still are.
        for pooled in table.pooled_pages(part.range) {
            following.let_writers_in(pooled);
        }
        // Wakes threads that sleep on pages that were replaced.
        let _ = following.watch().wake(part.range);
    }
}

/// Compares each page that the witness found free with its slot. Afterwards, the outcome `Folded` stands for a page
/// that can be replaced.
fn judge(following: &Following, reader: &mut SoftReader, part: &Part<'_>, proofs: &[Proof], outcomes: &mut [Outcome]) {
    let slots = part.source.map(|s| s.pool.slots(s.first, part.range.pages));
    let Some(slots) = slots.map_or(Some(None), |slots| slots.map(Some)) else { return };
    // This lock is held while the pages are read. A page that was discarded must not be read before writers are let in
    // again: the read would never end.
    let shared = following.hold();
    for kept in shared.kept(part.range) {
        let first = (kept.start.page() - part.range.start.page()) as usize;
        // The reader copies the pages, because the program may unmap them by a system call that bypasses the hooks.
        // Nobody can write them.
        for n in 0..reader.read(kept) {
            if proofs[first + n] != Proof::Free {
                continue;
            }
            let wanted = slots.map_or(crate::section::zeros(), |slots| slots.start.add_pages((first + n) as u64));
            let ours = page::HostVirt(std::ptr::from_ref(reader.page(n)) as u64);
            // SAFETY: one is a copy of ours. The other is a constant, or a page of the view. The view reaches to the
            // end of a file, and the file cannot shrink.
            let equal = unsafe { pages_equal(ours, wanted) };
            outcomes[first + n] = if equal { Outcome::Folded } else { Outcome::Changed };
        }
    }
}

/// Replaces the pages whose outcome is `Folded`.
fn replace(
    table: &mut Table,
    following: &Following,
    run: PageRange,
    source: Option<Source<'_>>,
    outcomes: &mut [Outcome],
) {
    let mut at = 0;
    while at < outcomes.len() {
        let (verdict, piece) = (outcomes[at], piece_from(table, run, outcomes, at));
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
    if let Some(home) = traits.home.map(|home| home.of(piece.start.page()))
        && slot.is_none_or(|slot| slot == home)
    {
        // SAFETY: every page of the piece is read-only for everybody, and holds the bytes of its slot, which is its
        // home, or zeros. The table's lock keeps other threads from mapping anything else there.
        return unsafe { home::come_home(table, following, (piece, traits), slot.is_none()) };
    }
    match (source, slot) {
        // SAFETY: every page of the piece is read-only for everybody, and holds the bytes of its slot. The
        // table's lock keeps other threads from mapping anything else there.
        (Some(source), Some(slot)) => unsafe {
            place(following, Placing { pool: source.pool, slot, traits, kind: Kind::Pool, staged: None }, piece)
        },
        _ => place_zeros(following, piece, traits),
    }?;
    match slot {
        Some(slot) => table.set_folded(SlotRun { start: piece.start, slot, pages: piece.pages as u16 }),
        None => table.set_zeroed(piece),
    }
    Ok(())
}

/// Replaces pages of zeros by fresh memory with the same advice. The caller has seen that they are read-only for
/// everybody.
fn place_zeros(following: &Following, piece: PageRange, traits: Traits) -> Result<(), Errno> {
    let zeros = MemberMemory::new(piece.pages)?;
    traits.inherited().apply(zeros.range())?;
    if !following.may_replace_followed(piece, traits, Kind::Pool) {
        return Err(Errno::STALE);
    }
    // SAFETY: every page of the piece is read-only for everybody, and holds zeros, as our mapping does. The table's
    // lock keeps other threads from mapping anything else there.
    unsafe { move_mapping_over(zeros.range(), piece.start) }?;
    zeros.forget();
    Ok(())
}

#[cfg(test)]
#[path = "refold_tests.rs"]
mod tests;
