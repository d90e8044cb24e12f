//! The map of enrolled memory: which memory may be folded, and what is known for certain of each of its pages. Folding
//! rests on these facts. Guesses are kept elsewhere: this module uses no policy and no history of pages, and wakes no
//! thread ([`crate::table`]).
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
//! The map knows memory by ranges ([`extents`]), as the kernel knows mappings. It knows pages one by one only where
//! something happened to them ([`chunk`]), so a huge reservation costs nothing. A page that leaves `mapped` in any way
//! puts its slot on the list of released slots, which the agent's thread reports to the worker.

mod chunk;
mod extents;
mod homes;
mod lookup;

pub use extents::{Advice, Home, READ_WRITE, Shut, Traits};
pub use lookup::everything;

use chunk::{Chunk, Fact};
use extents::{Extents, pages};
use page::{Bits, CHUNK_PAGES, HostVirt, PAGE_SHIFT, PageRange, PoolSlot, chunks};
use std::collections::BTreeMap;
use wire::SlotRun;

/// Bytes that the notes of one chunk take, without homes.
#[cfg(test)]
pub const CHUNK_BYTES: usize = size_of::<Chunk>();

/// Numbers of pages, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pages that may be folded, now or once the reason against it is gone. Memory without any access rights
    /// (`PROT_NONE`) is left out.
    pub enrolled: u64,
    /// Pages that map a slot, without those that show their homes.
    pub folded: u64,
    /// Pages that show their homes ([`crate::home`]), also if these are empty.
    pub at_home: u64,
    /// Pages that were folded as zeros, and were not seen written since.
    pub zeroed: u64,
    /// Private pages inside mappings of the pool.
    pub broken: u64,
}

/// The map of enrolled memory of this process.
#[derive(Debug)]
pub struct Map {
    extents: Extents,
    chunks: BTreeMap<u64, Box<Chunk>>,
    released: Vec<SlotRun>,
    folded: u64,
    zeroed: u64,
    broken: u64,
    generation: u64,
    /// Whether forked children are followed. If they are, memory that they inherit may be folded, too.
    follows_forks: bool,
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

/// Adds a run to the last one, if it continues the last one. Returns whether it does.
fn joins_last(runs: &mut [SlotRun], run: SlotRun) -> bool {
    let Some(last) = runs.last_mut() else { return false };
    let goes_on =
        last.start.add_pages(last.pages.into()) == run.start && last.slot.add(last.pages.into()) == Some(run.slot);
    let total = last.pages.checked_add(run.pages).filter(|_| goes_on);
    last.pages = total.unwrap_or(last.pages);
    total.is_some()
}

/// Appends a run, or joins it to the last one if it continues the last one.
fn push_run(runs: &mut Vec<SlotRun>, first: u64, count: u64, slot: PoolSlot) {
    let run = SlotRun { start: HostVirt(first << PAGE_SHIFT), slot, pages: count as u16 };
    // If there is no memory for this note, the worker keeps a slot longer than needed, which is better than to abort
    // the program.
    if !joins_last(runs, run) && runs.try_reserve(1).is_ok() {
        runs.push(run);
    }
}

/// Appends a range, or joins it to the last one if the two touch.
fn push_range(ranges: &mut Vec<PageRange>, first: u64, count: u64) {
    if let Some(last) = ranges.last_mut()
        && last.end().page() == first
    {
        last.pages += count;
    } else {
        ranges.push(pages(first, first + count));
    }
}

impl Map {
    /// A map in which nothing is enrolled.
    pub const fn new() -> Self {
        Self {
            extents: Extents::new(),
            chunks: BTreeMap::new(),
            released: Vec::new(),
            folded: 0,
            zeroed: 0,
            broken: 0,
            generation: 0,
            follows_forks: false,
            next: 0,
            of_files: Vec::new(),
        }
    }

    // --- changes that the program makes ------------------------------------------------------------------------------

    /// Enrols private anonymous memory. Ranges that are known already keep their traits.
    pub fn ask(&mut self, range: PageRange) {
        self.ask_as(range, Traits::default());
    }

    /// Notes ranges with these traits, in place of all that is known of them.
    pub fn know(&mut self, range: PageRange, traits: Traits) {
        let (first, end) = span(range);
        self.extents.insert(first, end, traits);
    }

    /// Notes that the program has changed something about memory that the map knows.
    const fn note_change(&mut self) {
        self.generation += 1;
    }

    /// As [`Map::ask`]; new ranges get these traits.
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
        // Memory with homes that was excluded from folding cannot be enrolled again: the worker no longer counts its
        // pages as showing their homes.
        self.extents.change(first, end, |known| known.asked |= known.home.is_none());
    }

    /// Enrols memory with these traits, in place of its former ones.
    pub fn ask_anew(&mut self, range: PageRange, traits: Traits) {
        let (first, end) = span(range);
        let traits = Traits { asked: true, ..traits };
        if self.traits(range) != Some(traits) {
            self.note_change();
            self.extents.insert(first, end, traits);
        }
    }

    /// Excludes memory from folding for good. Pages that map slots still map them.
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

    /// Notes that the program has discarded this memory, and that it is anonymous memory again where it lay in a
    /// mapping of the pool. `ended` is called with each chunk's pages that mapped slots.
    pub fn discard(&mut self, range: PageRange, mut ended: impl FnMut(u64, Bits)) {
        let (first, end) = span(range);
        self.note_change();
        for (&key, chunk) in self.chunks.range(keys_or_none(first, end)) {
            let mapped = chunk.mapped().and(of_chunk(key, first, end));
            if !mapped.is_empty() {
                ended(key, mapped);
            }
        }
        self.leave_pool(first, end, true);
    }

    /// Excludes memory from folding for this reason, until the reason is taken back ([`Map::open`]).
    pub fn shut(&mut self, range: PageRange, why: Shut) {
        let (first, end) = span(range);
        self.note_change();
        self.extents.change(first, end, |known| known.shut |= why as u8);
    }

    /// Takes back a reason for which memory was excluded from folding ([`Map::shut`]).
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

    /// Changes the advice that is noted for this memory.
    pub fn advise(&mut self, range: PageRange, change: impl Fn(&mut Advice)) {
        let (first, end) = span(range);
        self.note_change();
        self.extents.change(first, end, |known| change(&mut known.advice));
    }

    /// Notes that memory was moved from `from` to `to`. What is known of `from` then holds for its new place; what was
    /// known of that place is forgotten.
    pub fn relocate(&mut self, from: PageRange, to: HostVirt) {
        let (first, end) = span(from);
        let moved: Vec<_> = self.extents.within(first, end).collect();
        let runs = self.slot_runs(from);
        let broken = self.broken_pages(from);
        let zeroed = self.zeroed_pages(from);
        let pending = self.pending_pages(from);
        let placed = self.placed_pages(from);
        self.forget(PageRange { start: to, pages: from.pages });
        // The slots move along, so they are not released.
        self.drop_slots(first, end);
        self.forget(from);
        let there = |page: u64| to.page() + (page - first);
        let at = |range: PageRange| PageRange { start: HostVirt(there(range.start.page()) << PAGE_SHIFT), ..range };
        for (start, stop, traits) in moved {
            // The worker knows homes by the addresses of pages, so memory with homes that was moved is enrolled no
            // longer.
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
        broken.into_iter().for_each(|range| self.set_broken(at(range), |_, _| ()));
        zeroed.into_iter().for_each(|range| self.set_zeroed(at(range)));
        pending.into_iter().for_each(|range| self.set_pending(at(range), |_, _| ()));
        placed.into_iter().for_each(|range| self.set_placed(at(range), true));
    }

    // --- changes that the agent's thread makes -----------------------------------------------------------------------

    /// Sets whether forked children are followed. If they are not, only memory that they do not inherit may be folded.
    pub const fn follow_forks(&mut self, follow: bool) {
        self.follows_forks = follow;
    }

    /// Whether forked children are followed.
    pub const fn follows_forks(&self) -> bool {
        self.follows_forks
    }

    /// Notes that these pages map these slots.
    pub fn set_folded(&mut self, run: SlotRun) {
        let range = PageRange { start: run.start, pages: run.pages.into() };
        let (first, end) = span(range);
        self.leave_pool(first, end, true);
        self.each_known(first, end, |key, chunk| {
            let base = key * CHUNK_PAGES;
            for (page, count) in of_chunk(key, first, end).runs() {
                let slot = run.slot.bits().wrapping_add((base + page - first) as u32);
                chunk.set(Bits::span(page, count), Fact::Mapped(PoolSlot::from_bits(slot)));
            }
        });
        self.folded += range.pages;
        if self.traits(range).is_some_and(|traits| traits.home.is_some()) {
            self.set_placed(range, true);
        }
    }

    /// Notes that these pages held zeros, and were dropped.
    pub fn set_zeroed(&mut self, range: PageRange) {
        let (first, end) = span(range);
        self.leave_pool(first, end, true);
        self.each_known(first, end, |key, chunk| chunk.set(of_chunk(key, first, end), Fact::Zeroed));
        self.zeroed += range.pages;
    }

    /// Notes that a write has made these pages private (copy-on-write). They still lie in a mapping of the pool. Their
    /// slots are released. `ended` is called with each chunk's pages that were folded or showed their homes until now.
    pub fn set_broken(&mut self, range: PageRange, mut ended: impl FnMut(u64, Bits)) {
        let (first, end) = span(range);
        let at_home = self.at_home(range);
        for (key, here) in chunks(range) {
            let left = at_home.iter().map(|range| of_chunk(key, range.start.page(), range.end().page()));
            let mapped = self.chunks.get(&key).map_or(Bits::default(), |chunk| chunk.mapped().and(here));
            ended(key, mapped.or(left.fold(Bits::default(), Bits::or)));
        }
        self.leave_pool(first, end, true);
        self.each_known(first, end, |key, chunk| chunk.set(of_chunk(key, first, end), Fact::Broken));
        self.broken += range.pages;
    }

    /// Notes that these pages map slots of a pool without a worker. They count as broken, though nobody wrote them.
    pub fn set_orphaned(&mut self, range: PageRange) {
        let (first, end) = span(range);
        self.drop_slots(first, end);
        self.each_known(first, end, |key, chunk| chunk.set(of_chunk(key, first, end), Fact::Broken));
        self.broken += range.pages;
    }

    /// Notes that these pages are private anonymous memory again, with their contents. Their slots are released.
    pub fn set_private(&mut self, range: PageRange) {
        let (first, end) = span(range);
        self.leave_pool(first, end, false);
    }

    /// Notes that these pages were written (pending). `ended` is called with each chunk's pages that were folded as
    /// zeros.
    pub fn set_pending(&mut self, range: PageRange, mut ended: impl FnMut(u64, Bits)) {
        let (first, end) = span(range);
        let mut zeroed = 0;
        self.each_known(first, end, |key, chunk| {
            let pages = of_chunk(key, first, end);
            chunk.pending = chunk.pending.or(pages);
            let were_zeroed = chunk.zeroed().and(pages);
            if !were_zeroed.is_empty() {
                zeroed += were_zeroed.count();
                ended(key, were_zeroed);
                chunk.set(were_zeroed, Fact::Private);
            }
        });
        self.zeroed -= zeroed;
    }

    /// As [`Map::set_pending`], for pages that a scan has found written, or that it has scanned for the first time.
    /// They do not count as rested in the next call of [`Map::take_rested`]. Returns the enrolled parts of the range.
    pub fn scanned(&mut self, range: PageRange, mut ended: impl FnMut(u64, Bits)) -> Vec<PageRange> {
        let (first, end) = span(range);
        let asked = self.extents.within(first, end).filter(|(.., traits)| traits.asked);
        let asked: Vec<_> = asked.map(|(first, end, _)| pages(first, end)).collect();
        for part in &asked {
            self.set_pending(*part, &mut ended);
            let (first, end) = span(*part);
            self.each_known(first, end, |key, chunk| chunk.fresh = chunk.fresh.or(of_chunk(key, first, end)));
        }
        asked
    }

    /// Ends a scan. Returns pages that have rested, in order of address from where the last search ended: pages that
    /// were pending before this scan, were not found written by it, and are admitted by `admit`.
    ///
    /// At most `budget` pages are returned, rounded up to whole chunks. Further pages stay pending, and so do pages
    /// that are not admitted.
    pub fn take_rested(&mut self, budget: u64, admit: impl Fn(u64, Bits) -> Bits) -> Vec<PageRange> {
        let (mut rested, mut left, from) = (Vec::new(), budget, self.next);
        let Self { extents, chunks, next, follows_forks, .. } = self;
        let (before, behind): (Vec<_>, Vec<_>) = chunks.iter_mut().partition(|(key, _)| **key < from);
        for (&key, chunk) in behind.into_iter().chain(before) {
            let old = chunk.pending.without(std::mem::take(&mut chunk.fresh));
            if old.is_empty() || left == 0 {
                continue;
            }
            let old = admit(key, old);
            if old.is_empty() {
                continue;
            }
            let take = old.and(open_pages(extents, key, *follows_forks)).without(chunk.pooled());
            chunk.pending = chunk.pending.without(take);
            take.runs().for_each(|(page, count)| push_range(&mut rested, key * CHUNK_PAGES + page, count));
            left = left.saturating_sub(take.count());
            *next = key + 1;
        }
        self.chunks.retain(|_, chunk| !chunk.is_empty());
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

    /// Removes slots for which `of` holds from the list of released slots: the worker is not told of them.
    pub fn drop_released(&mut self, of: impl Fn(PoolSlot) -> bool) {
        self.released.retain(|run| !of(run.slot));
    }

    // --- helpers -----------------------------------------------------------------------------------------------------

    /// Forgets that the pages of `first..end` were folded, zeroed or broken, and releases their slots. With `all`, also
    /// forgets which of them are pending.
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
            zeroed += chunk.zeroed().and(pages).count();
            broken += chunk.broken().and(pages).count();
            chunk.set(pages, Fact::Private);
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
            let mapped = chunk.mapped().and(pages);
            self.folded -= mapped.count();
            chunk.set(mapped, Fact::Private);
        }
    }

    /// Calls `f` for every chunk that `first..end` touches. Chunks that do not exist are made.
    fn each_known(&mut self, first: u64, end: u64, mut f: impl FnMut(u64, &mut Chunk)) {
        if first < end {
            for key in keys(first, end) {
                f(key, self.chunks.entry(key).or_insert_with(Chunk::new));
            }
        }
    }
}

/// The pages of a chunk that may be folded, as far as the traits of memory tell.
fn open_pages(extents: &Extents, key: u64, follows_forks: bool) -> Bits {
    let (first, end) = (key * CHUNK_PAGES, (key + 1) * CHUNK_PAGES);
    let open = extents.within(first, end).filter(|(.., traits)| traits.open(follows_forks));
    open.fold(Bits::default(), |bits, (start, stop, _)| bits.or(Bits::span(start - first, stop - start)))
}

#[cfg(test)]
mod tests;
