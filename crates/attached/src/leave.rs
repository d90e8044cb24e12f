//! Leaves a process as it was before the agent came: mappings of the pool are replaced by anonymous memory, in mappings
//! that join their neighbours.
//!
//! ```text
//!   stop the program's threads (`channel`)
//!   make every page of some pieces the program's own, as a write does; keep writers out
//!      |  ask a witness: does anybody else hold a page, and could write it?  --> yes: that piece later
//!      v no
//!   piece by piece: copy the pages; map fresh memory without pages over the piece (a thread that touches it sleeps);
//!      |  move the copies there
//!      v
//!   wake who slept; let the threads go on
//! ```
//!
//! Not only the program's threads may use the memory meanwhile, but also the kernel's threads (vhost, `io_uring`), and
//! devices. Kernel threads sleep when they touch a page that is not there, and the witness finds the references that
//! the others hold.

use act::{HUGE_PAGES, MemberMemory, Watch, make_private, move_mapping_over};
use agent::fold::Folder;
use agent::follow::Following;
use agent::maps::{self, Kind, Mapping};
use agent::section::cut;
use agent::table::{self, Advice, READ_WRITE, Traits};
use agent::{raw, references, world};
use host::{Pagemap, PagemapEntry};
use page::{HostVirt, PAGE_BYTES, PageRange, pages_to_bytes};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::{Duration, Instant};
use wire::prove::{PROVE_PAGES, PROVE_RANGES, Proof};

/// Most pages of a piece.
const PIECE_PAGES: u64 = HUGE_PAGES / 8;
/// Most pieces of a group, and most pages in all of them. The witness is asked once for each group, and answers when it
/// gets a processor.
const GROUP: (usize, u64) = (PROVE_RANGES, PROVE_PAGES as u64);
/// Longest wait for the witness's answer: 50 ms. Only the program's threads are held up by it, and they are stopped in
/// any case.
const ANSWER_TIME: Duration = Duration::from_millis(50);
/// Pause before pieces that could not be made anonymous are tried again: 20 ms.
const AGAIN: Duration = Duration::from_millis(20);

/// How memory came to lie in a mapping of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// This agent has folded the memory.
    Folded,
    /// The memory was folded in a member, which then forked this process. The table does not know it.
    Inherited,
}

/// Makes all memory anonymous that lies in mappings of the pool and is registered with the userfaultfd of the section's
/// follower. Returns `false` if some of it is left after `patience` without progress.
pub fn restore(folder: &mut Folder, pagemap: &Pagemap, patience: Duration, origin: Origin) -> bool {
    let mut until = Instant::now() + patience;
    forget_writes(folder);
    loop {
        // Discarded pages are replaced by zeros first.
        let following = Arc::clone(folder.section().following());
        match origin {
            Origin::Folded => drop(folder.settle_discards(pagemap)),
            Origin::Inherited => following.hold().settle(),
        }
        let Some(left) = pooled(&following) else { return false };
        if left.is_empty() {
            return true;
        }
        let mut pieces: Vec<(PageRange, &Mapping)> = left
            .iter()
            .flat_map(|mapping| cut(mapping.range, PIECE_PAGES).map(move |piece| (piece, mapping)))
            .collect();
        let all = pieces.len();
        let (is_any_late, is_held) = join(folder, pagemap, &mut pieces);
        if !is_held {
            // Nothing was tried, because the program's threads did not stop in time. That does not count against
            // `patience`.
            until = Instant::now() + patience;
        }
        let is_over = Instant::now() > until;
        // A piece that becomes anonymous beside no anonymous neighbour is a mapping of its own. So this is done only
        // while no other piece can join a neighbour, and for one piece at a time: others then join it.
        let mut done = all - pieces.len();
        if is_over || !is_any_late {
            for piece in &pieces {
                if !folder.hold() {
                    break;
                }
                if restore_group(folder, pagemap, &[*piece], Side::None) == [Restored::Yes] {
                    done += 1;
                    break;
                }
            }
        }
        folder.parts().2.rest();
        if done > 0 {
            until = Instant::now() + patience;
        } else if is_over {
            return pooled(&following).is_some_and(|left| left.is_empty());
        } else {
            std::thread::sleep(AGAIN);
        }
    }
}

/// Makes those pieces anonymous that have an anonymous neighbour to join: first in one direction, then in the other.
/// Leaves the other pieces in `pieces`. Returns whether some of these must be tried later, and whether the program's
/// threads could be stopped each time.
fn join(folder: &mut Folder, pagemap: &Pagemap, pieces: &mut Vec<(PageRange, &Mapping)>) -> (bool, bool) {
    let (mut is_any_late, mut is_held) = (false, true);
    for side in [Side::Before, Side::Behind] {
        let mut left = Vec::new();
        let mut rest = pieces.as_slice();
        while !rest.is_empty() {
            let (group, others) = rest.split_at(first_group(rest));
            rest = others;
            // Pieces behind one that was not tried could be mistaken for pieces without neighbours.
            is_held &= folder.hold();
            let restored =
                if is_held { restore_group(folder, pagemap, group, side) } else { vec![Restored::Later; group.len()] };
            is_any_late |= restored.contains(&Restored::Later);
            left.extend(
                group.iter().zip(restored).filter(|(_, restored)| *restored != Restored::Yes).map(|(piece, _)| *piece),
            );
        }
        left.reverse();
        *pieces = left;
    }
    (is_any_late, is_held)
}

/// Number of pieces, from the first on, that make a group.
fn first_group(pieces: &[(PageRange, &Mapping)]) -> usize {
    let mut pages = 0;
    let fits = |(piece, _): &&(PageRange, &Mapping)| {
        pages += piece.pages;
        pages <= GROUP.1
    };
    pieces.iter().take(GROUP.0).take_while(fits).count().max(1).min(pieces.len())
}

/// The outcome of making a piece anonymous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Restored {
    /// The piece is anonymous.
    Yes,
    /// The piece has no anonymous neighbour to join.
    Alone,
    /// A page of the piece has a reference besides its mapping (I/O may write to it), so making the piece anonymous is
    /// tried again later.
    Later,
}

/// Unregisters memory from the userfaultfd that notes writes: a registered mapping joins no other one.
fn forget_writes(folder: &mut Folder) {
    let Some(notes) = folder.parts().0.notes() else { return };
    let table = table::lock();
    for part in maps::mappings(table::everything(), false).unwrap_or_default().iter().filter(|part| part.anonymous) {
        if !table.known(part.range).is_empty() {
            let _ = notes.unregister(part.range);
        }
    }
}

/// The neighbour that a piece is to join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Before,
    Behind,
    None,
}

impl Side {
    /// Whether a piece touches `last` on this side.
    fn joins(self, piece: PageRange, last: Option<PageRange>) -> bool {
        last.is_some_and(|last| match self {
            Self::Before => last.end() == piece.start,
            Self::Behind => piece.end() == last.start,
            Self::None => false,
        })
    }

    /// The page next to a piece on this side, if it is anonymous memory with these traits, so that the kernel can join
    /// both into one mapping; the outer `None` otherwise. A thread's stack, for example, has other advice.
    /// [`Side::None`] asks for no neighbour: the answer is `Some(None)`.
    fn neighbour(
        self,
        (following, table): (&Following, &table::Guard),
        piece: PageRange,
        traits: Traits,
    ) -> Option<Option<PageRange>> {
        let start = match self {
            Self::Before => HostVirt(piece.start.0.checked_sub(PAGE_BYTES as u64)?),
            Self::Behind => piece.end(),
            Self::None => return Some(None),
        };
        let (page, found) = (PageRange { start, pages: 1 }, following.mapping_of(start)?);
        let joins = found.private && found.file.1 == 0 && found.access == traits.access;
        let is_alike = table.traits(page).is_some_and(|known| known.advice == traits.advice);
        (joins && is_alike).then_some(Some(page))
    }
}

/// All private mappings of the pool that are registered with this follower's userfaultfd; `None` if the list of
/// mappings cannot be read.
fn pooled(following: &Following) -> Option<Vec<Mapping>> {
    let all = maps::mappings(table::everything(), true)?;
    Some(all.into_iter().filter(|mapping| is_pooled(mapping) && following.follows(mapping.range.start)).collect())
}

fn is_pooled(mapping: &Mapping) -> bool {
    mapping.private && maps::is_pool_file(mapping.file)
}

/// A page in a mapping of the pool that this process has inherited at its fork, and that is registered with another
/// userfaultfd; `Ok(None)` if there is none. `Err`: the list of mappings cannot be read.
pub fn inherited(following: &Following) -> Result<Option<HostVirt>, ()> {
    let all = maps::mappings(table::everything(), false).ok_or(())?;
    let mut others = all.iter().filter(|mapping| is_pooled(mapping) && !following.follows(mapping.range.start));
    Ok(others.next().map(|mapping| mapping.range.start))
}

/// A piece of a group that is to be made anonymous.
struct Piece {
    /// Index of the piece in the group.
    at: usize,
    range: PageRange,
    traits: Traits,
    was_locked: bool,
    /// Whether the piece still maps the pool, so that it may be replaced.
    may: bool,
}

impl Piece {
    /// Unlocks a piece and makes it writable, if it has a neighbour to join on this side, or will have one once `last`
    /// is anonymous.
    fn begin(
        (following, table): (&Following, &table::Guard),
        (at, (range, mapping)): (usize, &(PageRange, &Mapping)),
        side: Side,
        last: Option<PageRange>,
    ) -> Option<Self> {
        let range = *range;
        // For enrolled memory, the table's record is used: a mapping of the pool does not show advice on huge pages,
        // for example.
        let advice = table.traits(range).map_or(mapping.advice, |traits| Advice {
            dont_fork: mapping.advice.dont_fork,
            dont_dump: mapping.advice.dont_dump,
            ..traits.advice
        });
        let traits = Traits { asked: true, access: mapping.access, shut: 0, advice, home: None };
        if !side.joins(range, last) {
            side.neighbour((following, table), range, traits)?;
        }
        // Locked memory is not replaced, so it is unlocked for a moment. The program's threads are stopped, and cannot
        // notice.
        let was_locked = world::is_held() && maps::is_locked(range);
        if was_locked {
            unlock(range);
        }
        let may = following.may_replace(range, traits, Kind::Pool);
        if may {
            protect(range, READ_WRITE);
        }
        Some(Self { at, range, traits, was_locked, may })
    }

    /// Gives the piece back to the program: as anonymous memory, or in the pool as before.
    fn end(&self, following: &Following, table: &mut table::Guard, is_done: bool) {
        let Self { range, traits, .. } = *self;
        // If the program's threads have been let go meanwhile, another mapping may lie there.
        let written = Traits { access: READ_WRITE, ..traits };
        if is_done || self.may && following.may_replace(range, written, Kind::Pool) {
            protect(range, traits.access);
        }
        if is_done {
            table.set_private(range);
            following.hold().forget(range);
        } else if self.may {
            following.let_writers_in(range);
        }
    }
}

/// Makes those pieces of a group anonymous that have a neighbour on this side, and of which nobody else holds a page.
/// The program's threads are stopped. Returns the outcome for each piece.
fn restore_group(folder: &mut Folder, pagemap: &Pagemap, group: &[(PageRange, &Mapping)], side: Side) -> Vec<Restored> {
    let mut restored = vec![Restored::Alone; group.len()];
    let following = Arc::clone(folder.parts().0.following());
    let mut table = table::lock();
    let mut pieces: Vec<Piece> = Vec::new();
    for piece in group.iter().enumerate() {
        let last = pieces.last().map(|last| last.range);
        pieces.extend(Piece::begin((&following, &table), piece, side, last));
    }
    let ranges: Vec<PageRange> = pieces.iter().filter(|piece| piece.may).map(|piece| piece.range).collect();
    let mut free = are_free(folder, &table, pagemap, &ranges).into_iter();
    for piece in &pieces {
        let is_free = piece.may && free.next().unwrap_or(false);
        // The neighbour is looked up again: only now it is known whether the piece before has become anonymous.
        let neighbour = side.neighbour((&following, &table), piece.range, piece.traits);
        let is_done = is_free
            && neighbour.is_some_and(|neighbour| replace(&following, (piece.range, neighbour), piece.traits).is_ok());
        piece.end(&following, &mut table, is_done);
        restored[piece.at] = match neighbour {
            _ if is_done => Restored::Yes,
            None => Restored::Alone,
            Some(_) => Restored::Later,
        };
    }
    following.end_section(&[]);
    for piece in pieces.iter().filter(|piece| piece.may) {
        let _ = following.watch().wake(piece.range);
    }
    drop(table);
    // Locking touches the pages, as a write does, and would wait for ever while writers are kept out.
    pieces.iter().filter(|piece| piece.was_locked).for_each(|piece| lock(piece.range));
    restored
}

/// Gives the program a private copy of every page of these pieces, and keeps writers out. Returns for each piece
/// whether nobody else holds a page of it.
fn are_free(folder: &mut Folder, table: &table::Guard, pagemap: &Pagemap, pieces: &[PageRange]) -> Vec<bool> {
    let generation = references::generation();
    let is_sound = folder.unpinned().is_none();
    let (section, witness, _) = folder.parts();
    let following = Arc::clone(section.following());
    following.hold().begin_section();
    let is_there = witness.call_for(table, pieces) == Ok(true);
    let keep_out = |piece: &PageRange| {
        let made = make_private(*piece).is_ok();
        let (held, kept_out) = following.until_read(|_| following.watch().protect(*piece, true));
        drop(held);
        made && kept_out.is_ok() && is_all_its_own(pagemap, *piece)
    };
    let ours: Vec<bool> = pieces.iter().map(keep_out).collect();
    let mut proofs = witness.ask_within(pagemap, pieces.iter().copied(), ANSWER_TIME);
    let may = is_sound && is_there && references::generation() == generation;
    let is_free = |(piece, is_ours): (&PageRange, bool)| {
        let (its, others) = proofs.split_at(piece.pages as usize);
        proofs = others;
        is_ours && may && its.iter().all(|proof| *proof == Proof::Free)
    };
    pieces.iter().zip(ours).map(is_free).collect()
}

/// Whether every page is present, private, and write-protected.
fn is_all_its_own(pagemap: &Pagemap, piece: PageRange) -> bool {
    let mut entries: Vec<PagemapEntry> = Vec::with_capacity(piece.pages as usize);
    let is_own = |entry: &PagemapEntry| entry.present() && entry.write_protected() && !entry.file_or_shared();
    pagemap.read(piece.start, piece.pages, &mut entries).is_ok()
        && entries.len() as u64 == piece.pages
        && entries.iter().all(is_own)
}

/// Maps fresh memory over a piece, and moves copies of the piece's pages into it.
fn replace(
    following: &Following,
    (piece, neighbour): (PageRange, Option<PageRange>),
    traits: Traits,
) -> Result<(), Errno> {
    let advice = traits.advice;
    let watch = following.watch();
    let copy = MemberMemory::new(piece.pages)?;
    // After `mlockall(MCL_FUTURE)` the copy is locked, and the kernel moves no page out of locked memory.
    copy.unlock();
    if following.hold().kept(piece) != [piece] || copy.fill_as_far_as_there(piece.start) != piece.pages {
        return Err(Errno::BUSY);
    }
    // A mapping without pages takes on the addresses of its new place when it is moved, and so can join its neighbours
    // there.
    let (fresh, _guards) = MemberMemory::apart(piece.pages, !advice.no_reserve)?;
    // After `mlockall(MCL_FUTURE)` the fresh mapping is locked and full of zeros already.
    fresh.unlock();
    fresh.drop_pages(piece.pages);
    Traits { advice, ..Traits::default() }.inherited().apply(fresh.range())?;
    if advice.mergeable {
        advise(fresh.range(), libc::MADV_MERGEABLE);
    }
    watch.register(fresh.range(), Watch::Missing)?;
    // The fresh mapping joins its neighbour only if both are registered with the userfaultfd in the same way.
    neighbour.into_iter().for_each(|neighbour| _ = watch.register(neighbour, Watch::Missing));
    // Making pages private, and asking the witness, may have taken so long that the threads were let go.
    if !following.may_replace(piece, Traits { access: READ_WRITE, ..traits }, Kind::Pool) {
        return Err(Errno::BUSY);
    }
    following.hold().expect_placing(fresh.range().start, piece);
    // SAFETY: writers were kept out of the piece before it was copied, and the program's threads are stopped. A thread
    // that touches the fresh memory sleeps until the copies are there. The witness and `references` have said that
    // nobody holds a page who could write it otherwise.
    let moved = unsafe { move_mapping_over(fresh.range(), piece.start) };
    if moved.is_ok() {
        fresh.forget();
        fill(following, piece, copy.range());
        let _ = watch.unregister(piece);
    } else {
        following.hold().expect_no_placing();
    }
    neighbour.into_iter().for_each(|neighbour| _ = watch.unregister(neighbour));
    moved
}

/// Moves copies of pages to a place without pages, but for pages that were discarded.
fn fill(following: &Following, piece: PageRange, copies: PageRange) {
    let (mut at, end) = (piece.start, piece.end());
    while at < end {
        // While this lock is held, no discard is acknowledged between the look-up of discarded pages and the move.
        let shared = following.hold();
        let rest = PageRange { start: at, pages: end.page() - at.page() };
        let Some(kept) = shared.kept(rest).first().copied() else { return };
        let from = copies.start.add_pages(kept.start.page() - piece.start.page());
        // SAFETY: the copies are ours. The place is empty, and a thread that touches it sleeps.
        let moved = unsafe { following.watch().move_pages(PageRange { start: from, ..kept }, kept.start) };
        at = kept.start.add_pages(moved.pages);
        drop(shared);
        if moved.stopped_by.is_some() {
            // The kernel has no memory for a page table, something is locked for the moment, or a message is unread.
            std::thread::yield_now();
        }
    }
}

fn unlock(piece: PageRange) {
    // SAFETY: unlocking changes no content.
    unsafe { raw::call(libc::SYS_munlock, [piece.start.0 as usize, pages_to_bytes(piece.pages) as usize, 0, 0, 0, 0]) };
}

/// Locks memory again that was unlocked before. All of its pages are present.
fn lock(piece: PageRange) {
    // SAFETY: locking changes no content.
    unsafe { raw::call(libc::SYS_mlock, [piece.start.0 as usize, pages_to_bytes(piece.pages) as usize, 0, 0, 0, 0]) };
}

fn protect(piece: PageRange, access: u8) {
    let arguments = [piece.start.0 as usize, pages_to_bytes(piece.pages) as usize, access.into(), 0, 0, 0];
    // SAFETY: the program's threads are stopped, and find the protection that they left.
    unsafe { raw::call(libc::SYS_mprotect, arguments) };
}

fn advise(range: PageRange, advice: i32) {
    let arguments = [range.start.0 as usize, pages_to_bytes(range.pages) as usize, advice as usize, 0, 0, 0];
    // SAFETY: the advice changes no content.
    unsafe { raw::call(libc::SYS_madvise, arguments) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scarce::with_short_memory;
    use crate::testing::{Member, alone, fold, pool, section, traits};
    use std::sync::atomic::Ordering;
    use wire::Outcome;

    /// Once, copies were lost when the move had failed after the kernel had unmapped the destination.
    #[test]
    fn memory_that_is_short_while_pages_are_left_loses_none() {
        if !alone("leave::tests::memory_that_is_short_while_pages_are_left_loses_none") {
            return;
        }
        let Some(mut section) = section() else { return };
        let (pool, member) = (pool(), Member::new(8));
        let piece = member.run(0, 8);
        assert_eq!(fold(&mut section, piece, Some((&pool, 0))), [Outcome::Folded; 8]);
        let following = Arc::clone(section.following());
        following.hold().begin_section();
        make_private(piece).unwrap();
        let replaced = with_short_memory(0b11, || replace(&following, (piece, None), traits()));
        following.end_section(&[]);
        assert_eq!(act::make_present(piece), Ok(()), "the program's memory is unmapped");
        assert_eq!((replaced, member.in_pool()), (Ok(()), 0));
        (0..8).for_each(|page| assert_eq!(member.word(page, 0).load(Ordering::Relaxed), page + 1));
    }
}
