//! The table of enrolled memory: which memory may be folded, and what became of each page of it.
//!
//! ```text
//!                 ask                      set_zeroed            (a thread that reads it next gets the kernel's zeros;
//!   unknown ------------> asked, private <------------> zeroed    a thread that writes it makes it private again)
//!      ^   forget           |    ^
//!      |   (from anywhere)  |    | discard, set_private
//!      |        set_folded  v    |
//!      |                  mapped: a slot of the pool
//!      |                    |    |
//!      |        set_broken  v    | discard, set_private
//!      +--------------- broken: private inside a mapping of the pool; set_folded, set_zeroed by another way (refold)
//! ```
//!
//! The table knows memory by ranges ([`extents`]), as the kernel knows mappings. It knows pages one by one only where
//! something happened to them ([`chunk`]), so a huge reservation costs nothing. A page that leaves `mapped` in any way
//! puts its slot on the list of released slots, which the agent's thread reports to the worker.
//!
//! The program's threads change the table through the hooks, and the agent's thread changes it in everything that it
//! does. One lock guards all of it. Its holder must not touch memory that may be folded, take a lock of the program's,
//! or panic.

pub mod bits;
pub mod chunk;
mod extents;
mod homes;
mod lookup;

pub use extents::{Advice, Home, READ_WRITE, Shut, Traits};
pub use lookup::everything;

use crate::follow;
use crate::lock::{self, Lock};
use crate::turnover::{ByMoment, Folds, MOMENTS, QuietInterval, Worth, add};
use bits::{Bits, CHUNK_PAGES};
use chunk::Chunk;
use extents::{Extents, pages};
use page::{HostVirt, PAGE_SHIFT, PageRange, PoolSlot};
use std::collections::BTreeMap;
use wire::SlotRun;

static TABLE: Lock<Table> = Lock::new(Table::new());

/// Access to the table, with its lock held and all signals blocked.
pub type Guard = lock::Guard<'static, Table>;

/// Locks the process's table.
pub fn lock() -> Guard {
    TABLE.lock()
}

/// As [`lock`], for a thread of the program's. Each time that it has waited for `wait`, it asks `give_up`; if true, it
/// returns without the lock.
#[cfg(target_env = "gnu")]
pub fn lock_unless(wait: std::time::Duration, give_up: impl Fn() -> bool) -> Option<Guard> {
    TABLE.lock_unless(wait, give_up)
}

/// Gives a forked child a table of its own, which knows these ranges and nothing about their pages.
///
/// # Safety
/// The calling thread is the only one, and does not hold the lock.
pub unsafe fn begin_anew(known: &[(PageRange, Traits)]) {
    // SAFETY: by the caller.
    unsafe { TABLE.begin_anew(Table::new()) };
    let mut table = lock();
    for (range, traits) in known.iter().filter(|(_, traits)| traits.home.is_none()) {
        let (first, end) = span(*range);
        table.extents.insert(first, end, *traits);
    }
}

/// Numbers of pages, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pages that may be folded, at once or when the reason against it is taken back. Those that are only reserved are
    /// left out.
    pub enrolled: u64,
    /// Pages that map a slot, but for those at home.
    pub folded: u64,
    /// Pages that were born folded and show their homes, or empty slots.
    pub at_home: u64,
    /// Pages that were folded as zeros, and were not seen written since.
    pub zeroed: u64,
    /// Private pages inside mappings of the pool.
    pub broken: u64,
}

/// The table of enrolled memory of this process.
#[derive(Debug)]
pub struct Table {
    extents: Extents,
    chunks: BTreeMap<u64, Box<Chunk>>,
    released: Vec<SlotRun>,
    folded: u64,
    zeroed: u64,
    broken: u64,
    generation: u64,
    /// Seconds since an arbitrary moment; 0 until [`Table::set_time`] is called. At 0, no fold counts as short-lived.
    now: u32,
    /// Whether there is a quiet interval that is expected to go on (`turnover`).
    is_quiet: bool,
    /// Second at which the last quiet interval began.
    last_quiet: u32,
    /// Whether no page is ever left alone.
    eager: bool,
    /// Whether children are followed, so that memory which they inherit may be folded, too.
    follows_forks: bool,
    /// Pages that were ever folded, and the short-lived folds among them.
    folds: u64,
    short_folds: u64,
    /// Folds and short-lived folds by moment, since the last call of [`Table::take_folds`].
    lately: Folds,
    /// Pages that were written after they had rested, since the last call of [`Table::take_written`].
    written: u64,
    /// The chunk at which the next search for rested pages begins.
    next: u64,
    /// Private mappings of files that the program has enrolled, of which it is not known yet whether they map a
    /// template.
    of_files: Vec<(PageRange, Traits)>,
}

/// The numbers of the first page of `range` and of the one behind its last.
const fn span(range: PageRange) -> (u64, u64) {
    let first = range.start.page();
    (first, first.saturating_add(range.pages))
}

/// The keys of the chunks that `first..end` touches; only for `first < end`.
const fn keys(first: u64, end: u64) -> std::ops::RangeInclusive<u64> {
    first / CHUNK_PAGES..=(end - 1) / CHUNK_PAGES
}

/// As [`keys`], for any `first` and `end`.
const fn keys_or_none(first: u64, end: u64) -> std::ops::Range<u64> {
    if first < end { first / CHUNK_PAGES..(end - 1) / CHUNK_PAGES + 1 } else { 0..0 }
}

/// The pages of chunk `key` that lie in `first..end`.
fn of_chunk(key: u64, first: u64, end: u64) -> Bits {
    let base = key * CHUNK_PAGES;
    let from = first.clamp(base, base + CHUNK_PAGES);
    let to = end.clamp(base, base + CHUNK_PAGES);
    Bits::span(from - base, to - from)
}

/// Adds a run to the last one if it continues that. Says whether it does.
fn joins_last(runs: &mut [SlotRun], run: SlotRun) -> bool {
    let Some(last) = runs.last_mut() else { return false };
    let goes_on =
        last.start.add_pages(last.pages.into()) == run.start && last.slot.add(last.pages.into()) == Some(run.slot);
    let total = last.pages.checked_add(run.pages).filter(|_| goes_on);
    last.pages = total.unwrap_or(last.pages);
    total.is_some()
}

/// Appends a run, and joins it to the last one if it continues that.
fn push_run(runs: &mut Vec<SlotRun>, first: u64, count: u64, slot: PoolSlot) {
    let run = SlotRun { start: HostVirt(first << PAGE_SHIFT), slot, pages: count as u16 };
    // If there is no memory for this note, the pool keeps a slot too long, which is better than to abort the program.
    if !joins_last(runs, run) && runs.try_reserve(1).is_ok() {
        runs.push(run);
    }
}

/// Appends a range, and joins it to the last one if the two touch.
fn push_range(ranges: &mut Vec<PageRange>, first: u64, count: u64) {
    if let Some(last) = ranges.last_mut()
        && last.end().page() == first
    {
        last.pages += count;
    } else {
        ranges.push(pages(first, first + count));
    }
}

impl Table {
    const fn new() -> Self {
        Self {
            extents: Extents::new(),
            chunks: BTreeMap::new(),
            released: Vec::new(),
            folded: 0,
            zeroed: 0,
            broken: 0,
            generation: 0,
            now: 0,
            is_quiet: false,
            last_quiet: 0,
            eager: false,
            follows_forks: false,
            folds: 0,
            short_folds: 0,
            lately: Folds::NONE,
            written: 0,
            next: 0,
            of_files: Vec::new(),
        }
    }

    // --- changes that the program makes ------------------------------------------------------------------------------

    /// Enrols private anonymous memory. Ranges that are known already keep their traits.
    pub fn ask(&mut self, range: PageRange) {
        self.ask_as(range, Traits::default());
    }

    /// Notes that the program does something to known memory, and wakes an agent that rests.
    fn note_change(&mut self) {
        self.generation += 1;
        follow::wake_resting();
    }

    /// As [`Table::ask`]; new ranges get these traits.
    pub fn ask_as(&mut self, range: PageRange, traits: Traits) {
        let (first, end) = span(range);
        self.note_change();
        let traits = Traits { asked: true, ..traits };
        let mut at = first;
        // Each turn either fills the gap that begins at `at` or steps over the range that is known there.
        while at < end {
            let known = self.extents.within(at, end).next();
            let gap_end = known.map_or(end, |(start, ..)| start);
            self.extents.insert(at, gap_end, traits);
            at = known.map_or(end, |(_, stop, _)| stop);
        }
        // Memory with homes that was excluded cannot be enrolled again: the worker counts its pages as away from home.
        self.extents.change(first, end, |known| known.asked |= known.home.is_none());
    }

    /// Enrols memory with these traits, in place of those that it had.
    #[cfg(not(target_env = "gnu"))]
    pub fn ask_anew(&mut self, range: PageRange, traits: Traits) {
        let (first, end) = span(range);
        let traits = Traits { asked: true, ..traits };
        if self.traits(range) != Some(traits) {
            self.note_change();
            self.extents.insert(first, end, traits);
        }
    }

    /// Excludes memory from folding for good. Pages that map slots go on doing so.
    pub fn unask(&mut self, range: PageRange) {
        let (first, end) = span(range);
        self.note_change();
        self.leave_homes(first, end);
        self.extents.change(first, end, |known| known.asked = false);
    }

    /// Notes that this memory was unmapped, or that something else was mapped in its place.
    pub fn forget(&mut self, range: PageRange) {
        let (first, end) = span(range);
        self.of_files.retain(|(known, _)| known.end() <= range.start || range.end() <= known.start);
        self.leave_homes(first, end);
        if self.extents.remove(first, end) {
            self.note_change();
            self.leave_pool(first, end, true);
            self.chunks.range_mut(keys_or_none(first, end)).for_each(|(&key, chunk)| {
                let gone = of_chunk(key, first, end);
                chunk.change_at_home(|at_home| at_home.placed = at_home.placed.without(gone));
            });
        }
    }

    /// Notes that the contents of this memory were dropped, and that it is anonymous again where it mapped the pool. Folds
    /// of the last minute were short-lived, as if the pages had been written.
    pub fn discard(&mut self, range: PageRange) {
        let (first, end) = span(range);
        self.note_change();
        if first < end {
            let (now, mut short) = (self.now, [0; MOMENTS]);
            for (&key, chunk) in self.chunks.range_mut(keys(first, end)) {
                let mapped = chunk.mapped.and(of_chunk(key, first, end));
                if !mapped.is_empty() {
                    add(&mut short, chunk.ended(mapped, now));
                }
            }
            self.count_short_lived(short);
        }
        self.leave_pool(first, end, true);
    }

    /// Excludes memory from folding until this reason is taken back.
    pub fn shut(&mut self, range: PageRange, why: Shut) {
        let (first, end) = span(range);
        self.note_change();
        self.extents.change(first, end, |known| known.shut |= why as u8);
    }

    /// Takes a reason back.
    pub fn open(&mut self, range: PageRange, why: Shut) {
        let (first, end) = span(range);
        self.note_change();
        self.extents.change(first, end, |known| known.shut &= !(why as u8));
    }

    /// Notes that the protection of this memory was changed to these `PROT_` bits.
    pub fn protect(&mut self, range: PageRange, access: u8) {
        let (first, end) = span(range);
        self.note_change();
        self.extents.change(first, end, |known| known.access = access);
    }

    /// Changes the advice that is remembered for this memory.
    pub fn advise(&mut self, range: PageRange, change: impl Fn(&mut Advice)) {
        let (first, end) = span(range);
        self.note_change();
        self.extents.change(first, end, |known| change(&mut known.advice));
    }

    /// Notes that memory was moved. Everything known of `from` then holds of the range of that size at `to`. Everything
    /// known of that range is forgotten.
    pub fn relocate(&mut self, from: PageRange, to: HostVirt) {
        let (first, end) = span(from);
        let moved: Vec<_> = self.extents.within(first, end).collect();
        let runs = self.slot_runs(from);
        let broken = self.broken_pages(from);
        let zeroed = self.zeroed_pages(from);
        let pending = self.pending_pages(from);
        let placed = self.placed_pages(from);
        let (folds, lately) = (self.folds, self.lately);
        self.forget(PageRange { start: to, pages: from.pages });
        // The slots move along, so they are not released.
        self.drop_slots(first, end);
        self.forget(from);
        let there = |page: u64| to.page() + (page - first);
        let at = |range: PageRange| PageRange { start: HostVirt(there(range.start.page()) << PAGE_SHIFT), ..range };
        for (start, stop, traits) in moved {
            // The worker knows homes by their addresses.
            let home = traits.home.map(|home| home.moved(start, there(start)));
            self.extents.insert(
                there(start),
                there(stop),
                Traits { home, asked: traits.asked && home.is_none(), ..traits },
            );
        }
        for run in runs {
            self.set_folded(SlotRun { start: HostVirt(there(run.start.page()) << PAGE_SHIFT), ..run });
        }
        broken.into_iter().for_each(|range| self.set_broken(at(range)));
        zeroed.into_iter().for_each(|range| self.set_zeroed(at(range)));
        pending.into_iter().for_each(|range| self.set_pending(at(range)));
        placed.into_iter().for_each(|range| self.set_placed(at(range), true));
        // The folds are no new ones; only their places are.
        (self.folds, self.lately) = (folds, lately);
    }

    // --- changes that the agent's thread makes -----------------------------------------------------------------------

    /// Sets the time, in seconds from an arbitrary moment on, beginning with 1; and the quiet interval, `None` in a
    /// burst.
    pub fn set_time(&mut self, now: u32, quiet: Option<QuietInterval>) {
        (self.now, self.is_quiet) = (now, quiet.is_some_and(|quiet| quiet.goes_on));
        if let Some(quiet) = quiet {
            self.last_quiet = now.saturating_sub(quiet.seconds);
        }
    }

    /// Sets whether forked children are followed. If they are not, only memory that they do not inherit may be folded.
    pub const fn follow_forks(&mut self, follow: bool) {
        self.follows_forks = follow;
    }

    /// Whether forked children are followed.
    pub const fn follows_forks(&self) -> bool {
        self.follows_forks
    }

    /// Makes the table leave no page alone from here on.
    pub const fn be_eager(&mut self) {
        self.eager = true;
    }

    /// Pages that were written after they had rested, since the last call. The table knows of writes from the scans
    /// that it takes in ([`Table::rest`]), and of those to folded pages.
    pub const fn take_written(&mut self) -> u64 {
        std::mem::replace(&mut self.written, 0)
    }

    /// Pages that were folded since the last call, and folds that have turned out to be short-lived since then.
    pub const fn take_folds(&mut self) -> Folds {
        std::mem::replace(&mut self.lately, Folds::NONE)
    }

    /// Pages that were ever folded, and the short-lived folds among them.
    pub const fn folds(&self) -> (u64, u64) {
        (self.folds, self.short_folds)
    }

    /// Notes that these pages map these slots.
    pub fn set_folded(&mut self, run: SlotRun) {
        let range = PageRange { start: run.start, pages: run.pages.into() };
        let (first, end) = span(range);
        self.leave_pool(first, end, true);
        let (now, mut made) = ((self.now, self.is_quiet), self.lately.made);
        self.each_known(first, end, |key, chunk| {
            add(&mut made, chunk.folded_at(of_chunk(key, first, end), now));
            let base = key * CHUNK_PAGES;
            for (page, count) in of_chunk(key, first, end).runs() {
                let slot = run.slot.bits().wrapping_add((base + page - first) as u32);
                chunk.map(page, count, PoolSlot::from_bits(slot));
            }
        });
        self.lately.made = made;
        self.folded += range.pages;
        self.folds += range.pages;
        if self.traits(range).is_some_and(|traits| traits.home.is_some()) {
            self.set_placed(range, true);
        }
    }

    /// Notes that these pages held zeros, and were dropped.
    pub fn set_zeroed(&mut self, range: PageRange) {
        let (first, end) = span(range);
        self.leave_pool(first, end, true);
        let (now, mut made) = ((self.now, self.is_quiet), self.lately.made);
        self.each_known(first, end, |key, chunk| {
            add(&mut made, chunk.folded_at(of_chunk(key, first, end), now));
            chunk.zeroed = chunk.zeroed.or(of_chunk(key, first, end));
        });
        self.lately.made = made;
        self.zeroed += range.pages;
        self.folds += range.pages;
    }

    /// Notes that copy-on-write made these pages private; they stay in a mapping of the pool. Their slots are released.
    pub fn set_broken(&mut self, range: PageRange) {
        let (first, end) = span(range);
        let (now, last_quiet, mut short, mut written) = (self.now, self.last_quiet, [0; MOMENTS], 0);
        let at_home = self.at_home(range);
        self.each_known(first, end, |key, chunk| {
            let here = of_chunk(key, first, end);
            let left = at_home.iter().map(|range| of_chunk(key, range.start.page(), range.end().page()));
            let pages = chunk.mapped.and(here).or(left.fold(Bits::default(), Bits::or));
            add(&mut short, chunk.ended(pages, now));
            written += chunk.written_at(pages, (now, last_quiet));
        });
        self.count_short_lived(short);
        self.written += written;
        self.leave_pool(first, end, true);
        self.each_known(first, end, |key, chunk| chunk.broken = chunk.broken.or(of_chunk(key, first, end)));
        self.broken += range.pages;
    }

    /// Notes that these pages map slots of a pool that nobody serves any more. They count as broken, though nobody wrote them.
    pub fn set_orphaned(&mut self, range: PageRange) {
        let (first, end) = span(range);
        self.drop_slots(first, end);
        self.each_known(first, end, |key, chunk| chunk.broken = chunk.broken.or(of_chunk(key, first, end)));
        self.broken += range.pages;
    }

    /// Notes that these pages are private anonymous memory again, with their contents. Their slots are released.
    pub fn set_private(&mut self, range: PageRange) {
        let (first, end) = span(range);
        self.leave_pool(first, end, false);
    }

    /// Notes that these pages were written.
    pub fn set_pending(&mut self, range: PageRange) {
        let (first, end) = span(range);
        let (now, mut zeroed, mut short) = (self.now, 0, [0; MOMENTS]);
        self.each_known(first, end, |key, chunk| {
            let pages = of_chunk(key, first, end);
            chunk.pending = chunk.pending.or(pages);
            let ended = chunk.zeroed.and(pages);
            if !ended.is_empty() {
                zeroed += ended.count();
                add(&mut short, chunk.ended(ended, now));
                chunk.zeroed = chunk.zeroed.without(pages);
            }
        });
        self.zeroed -= zeroed;
        self.count_short_lived(short);
    }

    /// Notes that these pages, whose writes the kernel does not note, were written: their contents have changed.
    pub fn seen_written(&mut self, range: PageRange) {
        let (first, end) = span(range);
        let (at, mut written) = ((self.now, self.last_quiet), 0);
        self.each_known(first, end, |key, chunk| written += chunk.written_at(of_chunk(key, first, end), at));
        self.written += written;
    }

    /// The pages of a range that are worth folding.
    pub fn worth_folding(&self, range: PageRange, worth: Worth) -> Vec<PageRange> {
        let (first, end) = span(range);
        let mut found = Vec::new();
        let unknown = Chunk::new();
        for key in keys(first, end) {
            let (pages, base) = (of_chunk(key, first, end), key * CHUNK_PAGES);
            let chunk = self.chunks.get(&key).unwrap_or(&unknown);
            let pages = if self.eager { pages } else { chunk.without_left_alone(pages, self.now) };
            let pages = chunk.worth_folding(pages, self.now, (base, worth));
            pages.runs().for_each(|(page, count)| push_range(&mut found, base + page, count));
        }
        found
    }

    /// Whether no write was seen for this many seconds in any chunk that the range touches.
    pub fn is_at_rest(&self, range: PageRange, seconds: u32) -> bool {
        let (first, end) = span(range);
        self.chunks.range(keys(first, end)).all(|(_, chunk)| chunk.is_at_rest(self.now, seconds))
    }

    /// Records a scan of all enrolled memory. Returns pages that have rested, in order of address from where the last
    /// search ended.
    ///
    /// - Pages in `written` were written since the last scan. They are pending from here on.
    /// - Pages that were pending and were not written have rested, and are pending no longer.
    /// - Pages that are only `new` to the scans are pending, too, but do not count as written.
    ///
    /// At most `budget` pages are returned, rounded up to whole chunks. Further pages stay pending, and so do pages
    /// that are not worth folding.
    pub fn rest(&mut self, (written, new): (&[PageRange], &[PageRange]), budget: u64, worth: Worth) -> Vec<PageRange> {
        for (range, is_new) in written.iter().map(|range| (range, false)).chain(new.iter().map(|range| (range, true))) {
            let (first, end) = span(*range);
            let known: Vec<_> = self.extents.within(first, end).filter(|(.., traits)| traits.asked).collect();
            for (start, stop, _) in known {
                self.set_pending(pages(start, stop));
                let (at, mut written) = ((self.now, self.last_quiet), 0);
                self.each_known(start, stop, |key, chunk| {
                    let pages = of_chunk(key, start, stop);
                    chunk.fresh = chunk.fresh.or(pages);
                    if !is_new {
                        written += chunk.written_at(pages, at);
                    }
                });
                self.written += written;
            }
        }
        let mut rested = Vec::new();
        let mut left = budget;
        let from = self.next;
        let Self { extents, chunks, next, now, eager, follows_forks, .. } = self;
        let (before, behind): (Vec<_>, Vec<_>) = chunks.iter_mut().partition(|(key, _)| **key < from);
        for (&key, chunk) in behind.into_iter().chain(before) {
            let mut old = chunk.pending.without(chunk.fresh);
            chunk.fresh = Bits::default();
            if !*eager {
                old = chunk.without_left_alone(old, *now);
            }
            old = chunk.worth_folding(old, *now, (key * CHUNK_PAGES, worth));
            if old.is_empty() || left == 0 {
                continue;
            }
            let take = old.and(open_pages(extents, key, *follows_forks)).without(chunk.pooled());
            chunk.pending = chunk.pending.without(take);
            take.runs().for_each(|(page, count)| push_range(&mut rested, key * CHUNK_PAGES + page, count));
            left = left.saturating_sub(take.count());
            *next = key + 1;
        }
        let now = self.now;
        self.chunks.retain(|_, chunk| !chunk.is_empty(now));
        rested
    }

    /// Takes up to `most` runs from the list of released slots.
    pub fn take_released(&mut self, most: usize) -> Vec<SlotRun> {
        let behind = self.released.len().saturating_sub(most);
        self.released.split_off(behind)
    }

    /// The list of released slots: slots that were mapped and are not any more.
    pub fn released(&self) -> &[SlotRun] {
        &self.released
    }

    /// Removes slots of this kind from the list of released slots: nobody is to be told of them.
    pub fn drop_released(&mut self, of: impl Fn(PoolSlot) -> bool) {
        self.released.retain(|run| !of(run.slot));
    }

    // --- helpers -----------------------------------------------------------------------------------------------------

    fn count_short_lived(&mut self, folds: ByMoment) {
        self.short_folds += folds.iter().sum::<u64>();
        add(&mut self.lately.short, folds);
    }

    /// Forgets that the pages of `first..end` were folded, zeroed or broken, and releases their slots. Which of them
    /// are pending is forgotten only with `all`.
    fn leave_pool(&mut self, first: u64, end: u64, all: bool) {
        if first >= end {
            return;
        }
        let Self { chunks, released, .. } = self;
        let (mut folded, mut zeroed, mut broken) = (0, 0, 0);
        for (&key, chunk) in chunks.range_mut(keys(first, end)) {
            let pages = of_chunk(key, first, end);
            for (page, count, slot) in chunk.slot_runs(pages) {
                push_run(released, key * CHUNK_PAGES + page, count, slot);
                folded += count;
            }
            zeroed += chunk.zeroed.and(pages).count();
            broken += chunk.broken.and(pages).count();
            chunk.mapped = chunk.mapped.without(pages);
            chunk.zeroed = chunk.zeroed.without(pages);
            chunk.broken = chunk.broken.without(pages);
            if all {
                chunk.pending = chunk.pending.without(pages);
                chunk.fresh = chunk.fresh.without(pages);
            }
        }
        self.folded -= folded;
        self.zeroed -= zeroed;
        self.broken -= broken;
    }

    /// Forgets which slots `first..end` maps, without releasing them.
    fn drop_slots(&mut self, first: u64, end: u64) {
        if first >= end {
            return;
        }
        for (&key, chunk) in self.chunks.range_mut(keys(first, end)) {
            let pages = of_chunk(key, first, end);
            self.folded -= chunk.mapped.and(pages).count();
            chunk.mapped = chunk.mapped.without(pages);
        }
    }

    /// Calls `f` for every chunk of `first..end`, and makes chunks that are missing.
    fn each_known(&mut self, first: u64, end: u64, mut f: impl FnMut(u64, &mut Chunk)) {
        if first < end {
            for key in keys(first, end) {
                f(key, self.chunks.entry(key).or_insert_with(Chunk::new));
            }
        }
    }
}

/// The pages of a chunk that may be folded, as far as the traits of their ranges tell.
fn open_pages(extents: &Extents, key: u64, follows_forks: bool) -> Bits {
    let (first, end) = (key * CHUNK_PAGES, (key + 1) * CHUNK_PAGES);
    let open = extents.within(first, end).filter(|(.., traits)| traits.open(follows_forks));
    open.fold(Bits::default(), |bits, (start, stop, _)| bits.or(Bits::span(start - first, stop - start)))
}

#[cfg(test)]
mod tests;
