//! The critical section of a fold. It replaces a run of a member's pages by slots of the pool while the member uses
//! them; pages of zeros are replaced by nothing. A run consists of parts, each of which goes to consecutive slots. All
//! parts are moved out together, because registering a range costs as much time as moving some pages.
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
//! up the mappings of one of the pool's pages, and may be preempted meanwhile. So the thread waits until the lock is
//! free before it moves any page out.
//!
//! From OUT on:
//!
//! - Every path ends with each page mapped or moved back, and everybody woken.
//! - No path needs the worker, an allocation, or a lock of the host program.
//! - The table's lock is held all the time, so that no hook changes mappings under us.
//! - A run has at most [`RUN_PAGES`] pages, which bounds the time.
//!
//! Once the slots are mapped, the kernel copies a page when the member writes it, and the agent has no part in that.
//! The page that was moved out is dropped. Nobody can have a reference through which it would still be written, because
//! the kernel moves only pages that are not pinned. Members with open files that may be written to memory without
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

/// Most pages of a run, all of which are moved out at the same time.
pub const RUN_PAGES: u64 = 64;
/// Most parts of a run. Each part takes a mapping, and some microseconds during which the pages are out.
pub const RUN_PARTS: usize = 8;
/// Pages of the stage, to which pages are moved out. Contents of folded pages are dropped when it is full, not after
/// each run.
const STAGE_PAGES: u64 = 8 * RUN_PAGES;
/// Shortest time between two waits for the lock of the pool's file: 100 us.
const LOCK_KEEPS: Duration = Duration::from_micros(100);
/// Most repeated attempts to move a page that is locked for the moment.
const TRIES: u32 = 8;

/// A page of zeros to compare with.
static ZEROS: Zeros = Zeros([0; PAGE_BYTES]);

#[repr(align(4096))]
struct Zeros([u8; PAGE_BYTES]);

/// The address of a page of zeros.
pub fn zeros() -> HostVirt {
    HostVirt(&raw const ZEROS.0 as u64)
}

/// What is needed to fold runs; made once for a process.
pub struct Section {
    following: Arc<Following>,
    /// The userfaultfd that notes writes to private memory, if the kernel supports that.
    notes: Option<Userfault>,
    stage: MemberMemory,
    /// Pages of the stage that hold contents of folded pages. The next run's pages go behind them.
    used: u64,
    /// Whether the kernel refuses to unregister a range through a userfaultfd with which it is not registered (from
    /// Linux 6.17 on).
    tells_owners_apart: bool,
    /// The last time that the lock of the pool's file was found free.
    lock_was_free: Option<Instant>,
    /// Whether pages can be moved to the stage: it is registered with the follower's userfaultfd. While nothing is
    /// folded it is not, because a thread that populates all of the program's memory (`mlockall`) would wait for pages
    /// there.
    is_open: bool,
}

/// Where the contents of a part's pages are in the pool.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    /// The segment.
    pub pool: &'a PoolView,
    /// The slot for the first page.
    pub first: PoolSlot,
}

/// Consecutive pages of a run that are to be folded to consecutive slots, or to zeros.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    /// Number of pages. They follow those of the part before it.
    pub pages: u64,
    /// Where their contents are in the pool; `None` for zeros.
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

    /// From here on, another follower follows the memory. Nothing may be registered with the one before.
    pub fn follow_by(&mut self, following: Arc<Following>) {
        self.clear();
        std::mem::replace(&mut self.following, following).retire();
    }

    /// The userfaultfd that notes writes.
    pub const fn notes(&self) -> Option<&Userfault> {
        self.notes.as_ref()
    }

    /// Whether a private range is not registered with a userfaultfd of the program's.
    pub fn may_touch(&self, range: PageRange) -> bool {
        self.notes().is_none_or(|notes| notes.register(range, Watch::Writes).is_ok())
    }

    /// Has the kernel note writes again in memory that has been made private.
    pub fn watch_again(&self, ranges: &[PageRange]) {
        for (range, notes) in ranges.iter().filter_map(|range| Some((range, self.notes()?))) {
            // If it cannot be watched, the next round finds it unwatched and tries again.
            let _ = notes.register(*range, Watch::Writes);
        }
    }

    /// Folds a run of at most [`RUN_PAGES`] pages, and sets the outcome of each page. Returns how long pages were out.
    ///
    /// `map` is the table's map; the table's lock is held. The caller has seen in it that the whole run is private
    /// anonymous memory that may be folded, and has made a survey (`references`) at `generation` or later.
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
        // Mapping slots waits for this lock, so it is waited for while no page is out.
        let source = parts.iter().find_map(|part| part.source);
        if let Some(source) = source.filter(|_| self.lock_was_free.is_none_or(|then| then.elapsed() > LOCK_KEEPS)) {
            source.pool.wait_for_lock();
            self.lock_was_free = Some(Instant::now());
        }
        // A child gets a copy of the discards that are recorded when the message of its fork is read. So all such
        // messages are read before the records of slots that lay here earlier are dropped.
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

    /// Folds each part by itself, after the run as a whole could not be registered.
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

    /// Closes the stage, then drops the contents of folded pages from it. In the other order, the follower would get a
    /// message of the discard.
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

    /// From here on, every thread that accesses an absent page of the run sleeps.
    fn guard(&self, run: PageRange) -> Result<(), Errno> {
        if let Some(notes) = self.notes() {
            // A mapping is registered with one userfaultfd at most. If the program has registered its own, this call
            // fails, and the program's registration stays.
            if !self.tells_owners_apart {
                notes.register(run, Watch::Writes)?;
            }
            notes.unregister(run)?;
        }
        self.watch().register(run, Watch::MissingAndWrites).inspect_err(|e| {
            // The kernel may have registered some of the run's mappings before memory was short.
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
                // Something holds the page for the moment: a lock, a batch of the kernel's own (`lru_add`), or an
                // unread message.
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

    /// Compares each page that is out with the bytes that `contents` has for it. Afterwards, the outcome `Folded`
    /// stands for a page whose bytes are equal.
    fn judge(&self, contents: &Contents, generation: u64, outcomes: &mut [Outcome]) {
        // The generation is read after the pages were moved out. So it counts every file that was opened before, and
        // through which a write to them may have begun.
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

    /// Replaces the pages of a part that are equal, and moves the others back. `first` is the index of the part's first
    /// page in the run.
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

    /// Moves pages back where they were. This is repeated until it succeeds: the stage has the only copy of the
    /// member's data. `tried` says whether slots were to be mapped there, which may have unmapped the place.
    fn put_back(&self, piece: PageRange, staged: u64, tried: bool) {
        let (mut done, mut place) = (0, piece.start);
        while done < piece.pages {
            let rest = PageRange { start: place.add_pages(done), pages: piece.pages - done };
            // While this lock is held, nobody discards or forks between the look-up of discarded pages and the move.
            let mut shared = self.following.hold();
            shared.give_to_born(rest, self.staged(staged + done));
            let Some(kept) = shared.kept(rest).first().copied() else { return };
            let skipped = kept.start.page() - rest.start.page();
            let from = PageRange { start: self.staged(staged + done + skipped), ..kept };
            // SAFETY: the stage is ours, and nobody else knows of it. The place is empty and out of reach.
            let moved = unsafe { self.watch().move_pages(from, kept.start) };
            let copied = match moved.stopped_by {
                // The program has changed the protection of the place meanwhile, or locked it, by a system call that
                // bypasses the hooks.
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
                        // The program has moved the mapping by a system call that bypasses the hooks.
                        Some(there) => place = HostVirt(there.start.0 - pages_to_bytes(done)),
                        None if tried && self.map_again(rest) => {}
                        // The program has unmapped the place: nobody misses the remaining pages.
                        None => return,
                    }
                }
                // The kernel has no memory for a page table, something is locked for the moment, or a message is
                // unread.
                Some(_) => std::thread::yield_now(),
            }
        }
    }

    /// Puts a page back that cannot be moved because its memory has failed (`memory_failure`). A thread that touches
    /// the page gets `SIGBUS`, as if the page had never been moved. Returns the number of pages put back.
    fn put_back_failed(&self, staged: HostVirt, place: HostVirt) -> u64 {
        let page = PageRange { start: place, pages: 1 };
        match self.watch().copy_pages(staged, page) {
            Err(Errno::FAULT) => self.watch().poison(page).unwrap_or(0),
            result => result.unwrap_or(0),
        }
    }

    /// Maps memory at a place where nothing is mapped, so that pages can be moved there. `false` if something is mapped
    /// there.
    fn map_again(&self, range: PageRange) -> bool {
        match map_anonymous_where_free(range) {
            Ok(()) => drop(self.watch().register(range, Watch::MissingAndWrites)),
            Err(Errno::EXIST) => return false,
            Err(_) => {}
        }
        std::thread::yield_now();
        true
    }

    /// Wakes all threads that wait for pages of the run, and registers the parts that were not replaced by slots as
    /// they were before.
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
                // This also wakes threads that sleep on pages folded as zeros. The kernel's notes of writes are lost,
                // so these pages count as written.
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

/// The outcome for a page that the kernel does not move, for any error. The page stays where it is.
const fn refusal(error: Errno) -> Outcome {
    match error {
        Errno::BUSY | Errno::AGAIN => Outcome::Busy,
        Errno::NOMEM => Outcome::NoMemory,
        _ => Outcome::Gone,
    }
}

/// The longest piece of a run that begins with page `at`, and whose pages have one outcome and one set of traits:
/// advice applies to a mapping as a whole.
pub fn piece_from(map: &Map, run: PageRange, outcomes: &[Outcome], at: usize) -> PageRange {
    let pages = outcomes[at..].iter().take_while(|outcome| **outcome == outcomes[at]).count() as u64;
    let piece = PageRange { start: run.start.add_pages(at as u64), pages };
    PageRange { pages: map.alike(piece), ..piece }
}

/// Whether the kernel refuses to unregister a range through a userfaultfd with which it is not registered.
fn tells_owners_apart(one: &Userfault, other: &Userfault, memory: &MemberMemory) -> bool {
    let page = PageRange { pages: 1, ..memory.range() };
    one.register(page, Watch::Writes).is_ok() && {
        let tells = other.unregister(page) == Err(Errno::INVAL);
        let _ = one.unregister(page);
        tells
    }
}

/// The addresses of the bytes with which the pages of a run are compared.
type Contents = [HostVirt; RUN_PAGES as usize];

/// The contents of a run's pages; `None` if slots are not in the pool. The pages of the slots are mapped by reading
/// them, so that no thread has to wait for that later, while pages are out.
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

/// The end of the part that contains this page of a run.
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

/// Cuts a range that is to be folded into runs that one section can fold.
pub fn pieces(start: HostVirt, pages: u64, target: Target) -> impl Iterator<Item = (PageRange, Target)> {
    cut(PageRange { start, pages }, RUN_PAGES).filter_map(move |range| match target {
        Target::Zero => Some((range, target)),
        Target::Slot(slot) => {
            slot.add((range.start.page() - start.page()) as u32).map(|slot| (range, Target::Slot(slot)))
        }
    })
}

/// Cuts a range into pieces of at most `most` pages each.
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
