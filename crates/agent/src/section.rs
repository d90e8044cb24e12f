//! The critical section of a fold. It replaces a run of a member's pages by slots of the pool while the member uses
//! them. Pages of zeros are replaced by nothing. A run has parts whose slots do not follow each other. They are taken
//! out of reach together, because each registration costs as much as some pages.
//!
//! The bytes of a page alone decide, and they are compared while nobody can write the page:
//!
//! ```text
//!             register: from here on, a thread that touches an absent page of the run sleeps
//!   ON GUARD -----------------------------------------------------------------> refused: Gone
//!      | move the pages out, to a stage of our own. The kernel refuses pages that are pinned for DMA or shared
//!      v with a child. Every access to a page that is out sleeps: of a thread, of KVM, of a system call
//!     OUT ----- a page was refused --> Busy; the pages before and behind it go on
//!      | ask `references` again: was anything opened meanwhile that writes without pinning? --> back, Unpinned
//!      | compare each page with its slot
//!      |                      \
//!      v equal                 v different
//!   place the slots over    move back --> Changed
//!   the hole (`place`)
//!      |   \ no mapping to be had: move back --> NoVma
//!      v
//!   Folded; wake everybody; note writes again where pages went back
//! ```
//!
//! Meanwhile the program may discard memory, fork or move mappings, by any system call. The kernel tells the follower
//! (`follow`). A page that was discarded does not go back. A child that was forked while pages were out is given copies
//! of them.
//!
//! To map slots, the agent's thread takes the lock of the pool's file. The kernel also holds that lock while it looks
//! up the mappings of one of the pool's pages, and may lose its processor meanwhile. The thread waits for that before
//! any page is out.
//!
//! From OUT on:
//!
//! - Every path ends with each page mapped or moved back, and everybody woken.
//! - No path needs the worker, an allocation, or a lock of the host program.
//! - The table's lock is held all the time, so that no hook changes mappings under us.
//! - A run has at most [`RUN_PAGES`] pages, which bounds the time.
//!
//! Once the slots are mapped, the kernel breaks them by itself when the member writes, and nothing of ours is in the
//! member's way. The page that was moved out is dropped. Nobody can have a reference through which it would still be
//! written, because the kernel moves only pages that nobody has pinned. Members that use anything which writes without
//! pinning are not folded (`references`).

use crate::follow::Following;
use crate::map::Map;
use crate::maps::Kind;
use crate::openings;
use crate::place::{Placing, place};
use act::{MemberMemory, PoolView, Userfault, Watch, map_anonymous_where_free, pages_equal};
use page::{HostVirt, PAGE_BYTES, PageRange, PoolSlot, pages_to_bytes};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::{Duration, Instant};
use wire::{Outcome, SlotRun, Target};

/// Most pages of a run: those that are out of reach at the same time.
pub const RUN_PAGES: u64 = 64;
/// Most parts of a run. Each takes a mapping, and some microseconds in which pages are out of reach.
pub const RUN_PARTS: usize = 8;
/// Pages of the stage. Its contents are dropped when it is full, not after each run.
const STAGE_PAGES: u64 = 8 * RUN_PAGES;
/// Shortest time between two waits for the lock of the pool's file: 100 us.
const LOCK_KEEPS: Duration = Duration::from_micros(100);
/// Number of repeated attempts at a move that finds something locked for the moment.
const TRIES: u32 = 8;

/// A page of zeros to compare with.
static ZEROS: Zeros = Zeros([0; PAGE_BYTES]);

#[repr(align(4096))]
struct Zeros([u8; PAGE_BYTES]);

/// The address of a page of zeros.
pub fn zeros() -> HostVirt {
    HostVirt(&raw const ZEROS.0 as u64)
}

/// The means of a section, made once.
pub struct Section {
    following: Arc<Following>,
    /// Notes writes to private memory, where the kernel can.
    notes: Option<Userfault>,
    stage: MemberMemory,
    /// Pages of the stage that are in use; the run's begin behind them.
    used: u64,
    /// Whether the kernel refuses to let a range go by a userfaultfd that does not look after it (from Linux 6.17 on).
    tells_owners_apart: bool,
    /// The last time that the lock of the pool's file was found free.
    lock_was_free: Option<Instant>,
    /// Whether pages can be moved to the stage. It is closed while nothing is folded: a thread that populates all of
    /// the program's memory (`mlockall`) would wait for pages there.
    is_open: bool,
}

/// The place of a part's contents in the pool.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    /// The segment.
    pub pool: &'a PoolView,
    /// The slot for the first page.
    pub first: PoolSlot,
}

/// A part of a run.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// Its pages, which follow those of the part before it.
    pub pages: u64,
    /// The place of its contents; `None` for zeros.
    pub source: Option<Source<'a>>,
}

impl Section {
    /// `notes` is a userfaultfd that notes writes (`UFFD_FEATURE_WP_ASYNC`), if the kernel offers one.
    ///
    /// # Errors
    /// Memory is short.
    pub fn new(following: Arc<Following>, notes: Option<Userfault>) -> Result<Self, Errno> {
        let stage = MemberMemory::stage(STAGE_PAGES)?;
        let tells_owners_apart =
            notes.as_ref().is_some_and(|notes| tells_owners_apart(notes, following.watch(), &stage));
        Ok(Self { following, notes, stage, used: 0, tells_owners_apart, lock_was_free: None, is_open: false })
    }

    /// The stage, which is memory of the agent's own.
    pub const fn stage(&self) -> PageRange {
        self.stage.range()
    }

    /// The follower of the memory that is folded.
    pub const fn following(&self) -> &Arc<Following> {
        &self.following
    }

    /// From here on, memory is followed by another follower. Nothing may be registered with the one before.
    pub fn follow_by(&mut self, following: Arc<Following>) {
        self.clear();
        std::mem::replace(&mut self.following, following).retire();
    }

    /// The userfaultfd that notes writes.
    pub const fn notes(&self) -> Option<&Userfault> {
        self.notes.as_ref()
    }

    /// Whether nobody else looks after the faults of a private range. The program may, with a userfaultfd of its own.
    pub fn may_touch(&self, range: PageRange) -> bool {
        self.notes().is_none_or(|notes| notes.register(range, Watch::Writes).is_ok())
    }

    /// Notes writes again in memory that has been made private.
    pub fn watch_again(&self, ranges: &[PageRange]) {
        for (range, notes) in ranges.iter().filter_map(|range| Some((range, self.notes()?))) {
            // If it cannot be watched, the next round finds it unwatched and tries again.
            let _ = notes.register(*range, Watch::Writes);
        }
    }

    /// Folds a run of at most [`RUN_PAGES`] pages and says what became of each. Returns how long pages were out of reach.
    ///
    /// `map` is the table's, whose lock is held. The caller has seen in it that the whole run is private anonymous memory
    /// that may be folded. The caller asked `references` at `generation` or later.
    pub fn fold(
        &mut self,
        map: &mut Map,
        run: PageRange,
        parts: &[Part<'_>],
        generation: u64,
        outcomes: &mut [Outcome],
    ) -> Duration {
        debug_assert!(run.pages <= RUN_PAGES && run.pages as usize == outcomes.len());
        debug_assert_eq!(run.pages, parts.iter().map(|part| part.pages).sum::<u64>());
        outcomes.fill(Outcome::Gone);
        let Some(contents) = contents(parts) else { return Duration::ZERO };
        if self.used + run.pages > STAGE_PAGES {
            self.clear();
        }
        // Mapping would wait for this lock: wait while nothing is out.
        let source = parts.iter().find_map(|part| part.source);
        if let Some(source) = source.filter(|_| self.lock_was_free.is_none_or(|then| then.elapsed() > LOCK_KEEPS)) {
            source.pool.wait_for_lock();
            self.lock_was_free = Some(Instant::now());
        }
        // A child that was forked when slots lay here copies the records of that time when the message of the fork is
        // read.
        let mut shared = self.following.hold_caught_up();
        shared.forget(run);
        shared.begin_section();
        drop(shared);
        if let Err(e) = self.open().and_then(|()| self.guard(run)) {
            self.following.end_section(&[run]);
            if parts.len() > 1 {
                return self.fold_by_parts(map, run, parts, generation, outcomes);
            }
            outcomes.fill(if e == Errno::NOMEM { Outcome::NoVma } else { Outcome::Gone });
            return Duration::ZERO;
        }
        self.following.take_out_of_reach();
        let began = Instant::now();
        self.move_out(run, parts, outcomes);
        self.judge(&contents, generation, outcomes);
        for (at, part) in places(parts) {
            let range = PageRange { start: run.start.add_pages(at), pages: part.pages };
            self.replace(map, (range, at), part.source, &mut outcomes[at as usize..][..part.pages as usize]);
        }
        self.end(run, parts, outcomes);
        // Only contents of folded pages are left on the stage.
        self.used += run.pages;
        began.elapsed()
    }

    /// Folds a run of which a part cannot be registered: each part by itself.
    fn fold_by_parts(
        &mut self,
        map: &mut Map,
        run: PageRange,
        parts: &[Part<'_>],
        generation: u64,
        outcomes: &mut [Outcome],
    ) -> Duration {
        let mut longest = Duration::ZERO;
        for (at, part) in places(parts) {
            let range = PageRange { start: run.start.add_pages(at), pages: part.pages };
            let outcomes = &mut outcomes[at as usize..][..part.pages as usize];
            longest = longest.max(self.fold(map, range, &[part], generation, outcomes));
        }
        longest
    }

    /// Closes the stage, then drops the contents of folded pages from it. In the other order, the follower would be
    /// told of the discard.
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.is_open) {
            let _ = self.watch().unregister(self.stage.range());
        }
        self.stage.drop_pages(self.used);
        self.used = 0;
    }

    fn watch(&self) -> &Userfault {
        self.following.watch()
    }

    fn open(&mut self) -> Result<(), Errno> {
        if !self.is_open {
            self.stage.unlock();
            self.watch().register(self.stage.range(), Watch::Missing)?;
            self.is_open = true;
        }
        Ok(())
    }

    /// Makes every access to an absent page of the run sleep.
    fn guard(&self, run: PageRange) -> Result<(), Errno> {
        if let Some(notes) = self.notes() {
            // A mapping is registered with one userfaultfd at most. If the program has registered its own, this call
            // fails, and the program's stays.
            if !self.tells_owners_apart {
                notes.register(run, Watch::Writes)?;
            }
            notes.unregister(run)?;
        }
        self.watch().register(run, Watch::MissingAndWrites).inspect_err(|e| {
            // The kernel has looked through the whole run by then, and may have registered some of its mappings.
            if *e == Errno::NOMEM {
                let _ = self.watch().unregister(run);
            }
            self.watch_again(&[run]);
        })
    }

    /// Moves out the pages that can be moved. Afterwards, the outcome `Folded` stands for a page that is out.
    ///
    /// The kernel moves no range that lies in more than one mapping. A refused run is moved by its parts.
    fn move_out(&self, run: PageRange, parts: &[Part<'_>], outcomes: &mut [Outcome]) {
        let (mut at, mut tries, mut by_parts) = (0, 0, false);
        while at < run.pages {
            let end = if by_parts { end_of_part(parts, at) } else { run.pages };
            let from = PageRange { start: run.start.add_pages(at), pages: end - at };
            // SAFETY: the run is registered, so every access to a page that is out sleeps until `end` wakes it. By
            // then, each page was mapped again or moved back. The stage is ours, and empty from `used` on.
            let moved = unsafe { self.watch().move_pages(from, self.staged(at)) };
            outcomes[at as usize..(at + moved.pages) as usize].fill(Outcome::Folded);
            at += moved.pages;
            match moved.stopped_by {
                None => {}
                // Something holds the page for the moment: a lock, a batch of the kernel's own, or an unread message.
                Some(Errno::AGAIN) if tries < TRIES => {
                    tries += 1;
                    if tries > TRIES / 2 {
                        std::thread::yield_now();
                    }
                }
                Some(_) if end_of_part(parts, at) < end => (by_parts, tries) = (true, 0),
                Some(e) => {
                    outcomes[at as usize] = refusal(e);
                    (at, tries) = (at + 1, 0);
                }
            }
        }
    }

    /// Compares each page that is out with the bytes at the address that `contents` has for it. Afterwards, `Folded` stands for
    /// equality.
    fn judge(&self, contents: &Contents, generation: u64, outcomes: &mut [Outcome]) {
        // The generation is read after the move: it then counts every file that was opened before, and through which a
        // write may have begun.
        let unpinned = openings::number() != generation;
        for (n, outcome) in outcomes.iter_mut().enumerate().filter(|(_, o)| **o == Outcome::Folded) {
            // SAFETY: the staged page is present (it was just moved there) and ours. The other one is a constant, or a
            // page of the view. The view reaches to the end of a file, and the file cannot shrink.
            let equal = unsafe { pages_equal(self.staged(n as u64), contents[n]) };
            if unpinned {
                *outcome = Outcome::Unpinned;
            } else if !equal {
                *outcome = Outcome::Changed;
            }
        }
    }

    /// Replaces the pages of a part that are equal and puts back the others. `first` is the number of the part's first page in
    /// the run.
    fn replace(
        &self,
        map: &mut Map,
        (part, first): (PageRange, u64),
        source: Option<Source<'_>>,
        outcomes: &mut [Outcome],
    ) {
        let mut at = 0;
        while at < outcomes.len() {
            let (verdict, piece) = (outcomes[at], piece_from(map, part, outcomes, at));
            let pages = piece.pages as usize;
            let failed = match (verdict, source) {
                (Outcome::Folded, None) => {
                    map.set_zeroed(piece);
                    None
                }
                (Outcome::Folded, Some(Source { pool, first: slot })) => {
                    let source = slot.add(at as u32).map(|first| Source { pool, first });
                    self.map(map, piece, source, first + at as u64).err()
                }
                (Outcome::Changed | Outcome::Unpinned, _) => Some(verdict),
                // These pages were never moved out.
                _ => None,
            };
            if let Some(outcome) = failed {
                self.put_back(piece, first + at as u64, outcome == Outcome::NoVma);
                outcomes[at..at + pages].fill(outcome);
            }
            at += pages;
        }
    }

    fn map(&self, map: &mut Map, piece: PageRange, source: Option<Source<'_>>, at: u64) -> Result<(), Outcome> {
        let Source { pool, first: slot } = source.ok_or(Outcome::Gone)?;
        let traits = map.traits(piece).unwrap_or_default();
        let (kind, staged) = (Kind::Anonymous, Some(self.staged(at)));
        let placing = Placing { pool, slot, traits, kind, staged };
        // SAFETY: every page of the piece is out of reach, and its content was found equal to these slots' since
        // then. The table's lock keeps other threads from mapping anything else there.
        unsafe { place(&self.following, placing, piece) }.map_err(|_| Outcome::NoVma)?;
        map.set_folded(SlotRun { start: piece.start, slot, pages: piece.pages as u16 });
        Ok(())
    }

    /// Puts pages back where they were. This cannot be given up: the member's data is on the stage. `tried` says
    /// whether slots were to be placed there.
    fn put_back(&self, piece: PageRange, staged: u64, tried: bool) {
        let (mut done, mut place) = (0, piece.start);
        while done < piece.pages {
            let rest = PageRange { start: place.add_pages(done), pages: piece.pages - done };
            // While this lock is held, nobody discards or forks between the look at discarded pages and the move.
            let mut shared = self.following.hold();
            shared.give_to_born(rest, self.staged(staged + done));
            let Some(kept) = shared.kept(rest).first().copied() else { return };
            let skipped = kept.start.page() - rest.start.page();
            let from = PageRange { start: self.staged(staged + done + skipped), ..kept };
            // SAFETY: the stage is ours, and nobody else knows of it. The place is empty and out of reach.
            let moved = unsafe { self.watch().move_pages(from, kept.start) };
            let copied = match moved.stopped_by {
                // The program has changed its protection meanwhile, or locked it, by a system call of its own.
                Some(Errno::INVAL) => self.watch().copy_pages(from.start, kept).unwrap_or(0),
                Some(Errno::FAULT) if moved.pages == 0 => self.put_back_failed(from.start, kept.start),
                _ => 0,
            };
            drop(shared);
            done += skipped + moved.pages + copied;
            match moved.stopped_by {
                None => {}
                Some(_) if copied > 0 => {}
                // Placing slots failed half way, as it does on old kernels when memory is short: the mapping itself is
                // gone. Nobody could use the place since, because the table's lock keeps others from mapping there.
                Some(Errno::NOENT | Errno::INVAL) => {
                    let rest = PageRange { start: place.add_pages(done), pages: piece.pages - done };
                    let moved = self.following.hold().moved_to(rest);
                    match moved {
                        // The program has moved it by a system call of its own.
                        Some(there) => place = HostVirt(there.start.0 - pages_to_bytes(done)),
                        None if tried && self.map_again(rest) => {}
                        // The program has unmapped it: nobody misses the rest.
                        None => return,
                    }
                }
                // Memory for a page table is short, something is locked for the moment, or a message is unread.
                Some(_) => std::thread::yield_now(),
            }
        }
    }

    /// Puts a page back that cannot be moved because its frame has failed (`memory_failure`). A thread that touches the
    /// page is told so, as if it had never been moved. Returns the number of pages put back.
    fn put_back_failed(&self, staged: HostVirt, place: HostVirt) -> u64 {
        let page = PageRange { start: place, pages: 1 };
        match self.watch().copy_pages(staged, page) {
            Err(Errno::FAULT) => self.watch().poison(page).unwrap_or(0),
            result => result.unwrap_or(0),
        }
    }

    /// Maps memory where nothing is mapped, so that pages can be moved there. False if something lies there.
    fn map_again(&self, range: PageRange) -> bool {
        match map_anonymous_where_free(range) {
            Ok(()) => drop(self.watch().register(range, Watch::MissingAndWrites)),
            Err(Errno::EXIST) => return false,
            Err(_) => {}
        }
        std::thread::yield_now();
        true
    }

    /// Wakes everybody, and leaves the anonymous rest of the run as it was registered before.
    fn end(&self, run: PageRange, parts: &[Part<'_>], outcomes: &[Outcome]) {
        let mut replaced = [false; RUN_PAGES as usize];
        for (at, part) in places(parts).filter(|(_, part)| part.source.is_some()) {
            (at..at + part.pages).for_each(|page| replaced[page as usize] = outcomes[page as usize] == Outcome::Folded);
        }
        let mut at = 0;
        for alike in replaced[..outcomes.len()].chunk_by(|one, next| one == next) {
            let pages = alike.len();
            let piece = PageRange { start: run.start.add_pages(at as u64), pages: pages as u64 };
            if !alike[0] {
                // Also wakes threads that sleep on zeros. The notes of writes are lost, so these pages count as
                // written.
                let _ = self.watch().unregister(piece);
                self.watch_again(&[piece]);
            }
            at += pages;
        }
        let _ = self.watch().wake(run);
        self.following.end_section(&[run]);
    }

    fn staged(&self, n: u64) -> HostVirt {
        self.stage.range().start.add_pages(self.used + n)
    }
}

/// The outcome for a page that the kernel does not move. The page is left where it is and counted, by any error.
const fn refusal(error: Errno) -> Outcome {
    match error {
        Errno::BUSY | Errno::AGAIN => Outcome::Busy,
        Errno::NOMEM => Outcome::NoMemory,
        _ => Outcome::Gone,
    }
}

/// The longest piece of a run that begins with page `at`, and whose pages have one outcome and one set of traits: advice
/// applies to a mapping as a whole.
pub fn piece_from(map: &Map, run: PageRange, outcomes: &[Outcome], at: usize) -> PageRange {
    let pages = outcomes[at..].iter().take_while(|outcome| **outcome == outcomes[at]).count() as u64;
    let piece = PageRange { start: run.start.add_pages(at as u64), pages };
    PageRange { pages: map.alike(piece), ..piece }
}

/// Whether the kernel refuses to let a range go by a userfaultfd that does not look after it.
fn tells_owners_apart(one: &Userfault, other: &Userfault, memory: &MemberMemory) -> bool {
    let page = PageRange { pages: 1, ..memory.range() };
    one.register(page, Watch::Writes).is_ok() && {
        let tells = other.unregister(page) == Err(Errno::INVAL);
        let _ = one.unregister(page);
        tells
    }
}

/// The addresses of the bytes that the pages of a run are compared with.
type Contents = [HostVirt; RUN_PAGES as usize];

/// The contents of a run's pages; `None` if slots are not in the pool. This process may not have looked at these bytes for a while.
/// They are brought in before anybody has to wait for them.
fn contents(parts: &[Part<'_>]) -> Option<Contents> {
    let mut contents = [zeros(); RUN_PAGES as usize];
    for (at, part) in places(parts) {
        if let Some(source) = part.source {
            let slots = source.pool.slots(source.first, part.pages)?;
            (0..part.pages).for_each(|n| contents[(at + n) as usize] = slots.start.add_pages(n));
            touch(slots);
        }
    }
    Some(contents)
}

/// The parts of a run, each with the number of its first page in the run.
fn places<'a>(parts: &[Part<'a>]) -> impl Iterator<Item = (u64, Part<'a>)> {
    parts.iter().scan(0, |end, part| {
        *end += part.pages;
        Some((*end - part.pages, *part))
    })
}

/// The end of the part that has this page of a run.
fn end_of_part(parts: &[Part<'_>], page: u64) -> u64 {
    places(parts).map(|(at, part)| at + part.pages).find(|end| page < *end).unwrap_or(page)
}

/// Reads a byte of every page, so that all are present when they are compared.
fn touch(slots: PageRange) {
    for n in 0..slots.pages {
        let at = slots.start.add_pages(n).0 as usize as *const u8;
        // SAFETY: the slots lie in the view, which is readable. Nothing depends on the bytes.
        unsafe { at.read_volatile() };
    }
}

/// Cuts a range that is to be folded into runs that one section can do.
pub fn pieces(start: HostVirt, pages: u64, target: Target) -> impl Iterator<Item = (PageRange, Target)> {
    cut(PageRange { start, pages }, RUN_PAGES).filter_map(move |range| match target {
        Target::Zero => Some((range, target)),
        Target::Slot(slot) => {
            slot.add((range.start.page() - start.page()) as u32).map(|slot| (range, Target::Slot(slot)))
        }
    })
}

/// Cuts a range into pieces of at most `most` pages.
pub fn cut(range: PageRange, most: u64) -> impl Iterator<Item = PageRange> {
    (0..range.pages.div_ceil(most)).map(move |n| {
        let done = n * most;
        PageRange { start: range.start.add_pages(done), pages: (range.pages - done).min(most) }
    })
}

#[cfg(test)]
#[path = "section_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "section_part_tests.rs"]
mod part_tests;

#[cfg(test)]
#[path = "section_failure_tests.rs"]
mod failure_tests;
