//! The critical section of a fold. It replaces a run of a member's pages by slots of the pool while the member uses
//! them. Pages of zeros are replaced by nothing.
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

/// The place of a run's contents in the pool.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    /// The segment.
    pub pool: &'a PoolView,
    /// The slot for the first page.
    pub first: PoolSlot,
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
    #[cfg(not(target_env = "gnu"))]
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

    /// Folds a run of at most [`RUN_PAGES`] pages and says what became of each. `source` is `None` for zeros. Returns
    /// how long pages were out of reach.
    ///
    /// `map` is the table's, whose lock is held. The caller has seen in it that the whole run is private anonymous memory
    /// that may be folded. The caller asked `references` at `generation` or later.
    pub fn fold(
        &mut self,
        map: &mut Map,
        run: PageRange,
        source: Option<Source<'_>>,
        generation: u64,
        outcomes: &mut [Outcome],
    ) -> Duration {
        debug_assert!(run.pages <= RUN_PAGES && run.pages as usize == outcomes.len());
        outcomes.fill(Outcome::Gone);
        // This process may not have looked at these bytes of the pool for a while. They are brought in before anybody
        // has to wait for them.
        let slots = source.map(|s| s.pool.slots(s.first, run.pages));
        let Some(slots) = slots.map_or(Some(None), |slots| slots.map(Some)) else { return Duration::ZERO };
        slots.iter().for_each(|slots| touch(*slots));
        if self.used + run.pages > STAGE_PAGES {
            self.clear();
        }
        // Mapping would wait for this lock: wait while nothing is out.
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
            outcomes.fill(if e == Errno::NOMEM { Outcome::NoVma } else { Outcome::Gone });
            return Duration::ZERO;
        }
        self.following.take_out_of_reach();
        let began = Instant::now();
        self.move_out(run, outcomes);
        self.judge(slots, generation, outcomes);
        self.replace(map, run, source, outcomes);
        self.end(run, source.is_none(), outcomes);
        // Only contents of folded pages are left on the stage.
        self.used += run.pages;
        began.elapsed()
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
    fn move_out(&self, run: PageRange, outcomes: &mut [Outcome]) {
        let (mut at, mut tries) = (0, 0);
        while at < run.pages {
            let from = PageRange { start: run.start.add_pages(at), pages: run.pages - at };
            // SAFETY: the run is registered, so every access to a page that is out sleeps until `end` wakes it. By
            // then, each page was mapped again or moved back. The stage is ours, and empty from `used` on.
            let moved = unsafe { self.watch().move_pages(from, self.staged(at)) };
            outcomes[at as usize..(at + moved.pages) as usize].fill(Outcome::Folded);
            at += moved.pages;
            match moved.stopped_by {
                None => return,
                // Something holds the page for the moment: a lock, a batch of the kernel's own, or an unread message.
                Some(Errno::AGAIN) if tries < TRIES => {
                    tries += 1;
                    if tries > TRIES / 2 {
                        std::thread::yield_now();
                    }
                }
                Some(e) => {
                    outcomes[at as usize] = refusal(e);
                    (at, tries) = (at + 1, 0);
                }
            }
        }
    }

    /// Compares each page that is out with its slot, or with zeros. Afterwards, `Folded` stands for equality.
    fn judge(&self, slots: Option<PageRange>, generation: u64, outcomes: &mut [Outcome]) {
        // The generation is read after the move: it then counts every file that was opened before, and through which a
        // write may have begun.
        let unpinned = openings::number() != generation;
        for (n, outcome) in outcomes.iter_mut().enumerate().filter(|(_, o)| **o == Outcome::Folded) {
            let n = n as u64;
            let wanted = slots.map_or(zeros(), |slots| slots.start.add_pages(n));
            // SAFETY: the staged page is present (it was just moved there) and ours. `wanted` is a constant, or a
            // page of the view. The view reaches to the end of a file, and the file cannot shrink.
            let equal = unsafe { pages_equal(self.staged(n), wanted) };
            if unpinned {
                *outcome = Outcome::Unpinned;
            } else if !equal {
                *outcome = Outcome::Changed;
            }
        }
    }

    /// Replaces the pages that are equal and puts back the others.
    fn replace(&self, map: &mut Map, run: PageRange, source: Option<Source<'_>>, outcomes: &mut [Outcome]) {
        let mut at = 0;
        while at < outcomes.len() {
            let (verdict, piece) = (outcomes[at], piece_from(map, run, outcomes, at));
            let pages = piece.pages as usize;
            let failed = match (verdict, source) {
                (Outcome::Folded, None) => {
                    map.set_zeroed(piece);
                    None
                }
                (Outcome::Folded, Some(source)) => self.map(map, piece, source, at as u64).err(),
                (Outcome::Changed | Outcome::Unpinned, _) => Some(verdict),
                // These pages were never moved out.
                _ => None,
            };
            if let Some(outcome) = failed {
                self.put_back(piece, at as u64, outcome == Outcome::NoVma);
                outcomes[at..at + pages].fill(outcome);
            }
            at += pages;
        }
    }

    fn map(&self, map: &mut Map, piece: PageRange, source: Source<'_>, at: u64) -> Result<(), Outcome> {
        let slot = source.first.add(at as u32).ok_or(Outcome::Gone)?;
        let traits = map.traits(piece).unwrap_or_default();
        let (kind, staged) = (Kind::Anonymous, Some(self.staged(at)));
        let placing = Placing { pool: source.pool, slot, traits, kind, staged };
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
    fn end(&self, run: PageRange, zeros: bool, outcomes: &[Outcome]) {
        let mut at = 0;
        while at < outcomes.len() {
            let replaced = outcomes[at] == Outcome::Folded && !zeros;
            let pages = outcomes[at..].iter().take_while(|o| (**o == Outcome::Folded && !zeros) == replaced).count();
            let piece = PageRange { start: run.start.add_pages(at as u64), pages: pages as u64 };
            if !replaced {
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
#[path = "section_failure_tests.rs"]
mod failure_tests;
