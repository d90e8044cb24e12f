//! The table of what was asked in: which memory may be folded, and what became of each page of it.
//!
//! ```text
//!                 ask                      set_zeroed            (whoever reads it next gets the kernel's zeros;
//!   unknown ------------> asked, private <------------> zeroed    whoever writes it makes it private again)
//!      ^   forget           |    ^
//!      |   (from anywhere)  |    | discard, set_private
//!      |        set_folded  v    |
//!      |                  mapped: a slot of the pool
//!      |                    |    |
//!      |        set_broken  v    | discard, set_private
//!      +--------------- broken: private, but inside a mapping of the pool; set_folded, set_zeroed by another way (refold)
//! ```
//!
//! Memory is known by ranges ([`extents`]), as the kernel knows mappings; pages are known one by one only where
//! something happened to them ([`chunk`]), so that a huge reservation costs nothing. Leaving `mapped` in any way puts the
//! slot on the list of released ones, which the agent's thread tells the worker.
//!
//! The program's threads change the table through the doors, the agent's thread in everything it does. One lock
//! guards it all. Whoever holds it must not touch memory that may be folded, nor take any lock of the program, nor panic.

pub mod bits;
pub mod chunk;
mod extents;
mod lookup;

#[cfg(test)]
pub use extents::READ_WRITE;
pub use extents::{Advice, Shut, Traits};
pub use lookup::everything;

use crate::lock::{self, Lock};
use crate::turnover::{ByMoment, Calm, Folds, MOMENTS, Worth, add};
use bits::{Bits, CHUNK_PAGES};
use chunk::Chunk;
use extents::{Extents, pages};
use page::{HostVirt, PAGE_SHIFT, PageRange, PoolSlot};
use std::collections::BTreeMap;
use wire::SlotRun;

static TABLE: Lock<Table> = Lock::new(Table::new());

/// The lock's holder. Signals are blocked as long.
pub type Guard = lock::Guard<'static, Table>;

/// Locks the process's table.
pub fn lock() -> Guard {
    TABLE.lock()
}

/// How many pages are what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// May be folded, now or once they are opened again.
    pub enrolled: u64,
    /// Map a slot.
    pub folded: u64,
    /// Were folded as zeros, and not seen written since.
    pub zeroed: u64,
    /// Private inside a mapping of the pool.
    pub broken: u64,
}

/// See the module's story.
#[derive(Debug)]
pub struct Table {
    extents: Extents,
    chunks: BTreeMap<u64, Box<Chunk>>,
    released: Vec<SlotRun>,
    folded: u64,
    zeroed: u64,
    broken: u64,
    generation: u64,
    /// In seconds, from any time on; 0 as long as nobody has said it, and nothing is folded for nothing then.
    now: u32,
    /// Whether it is calm, by what is known to go on (`turnover`), and since when it was calm the last time.
    is_calm: bool,
    last_calm: u32,
    /// Nothing is left alone.
    eager: bool,
    /// Whether memory may be folded that children get, too.
    follows_forks: bool,
    folds: u64,
    short_folds: u64,
    /// The same by moment, until somebody asks.
    lately: Folds,
    /// Pages that were written after they had rested, until somebody asks.
    written: u64,
    /// The chunk at which the next search for rested pages begins.
    next: u64,
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

/// The pages of chunk `key` that lie in `first..end`.
fn of_chunk(key: u64, first: u64, end: u64) -> Bits {
    let base = key * CHUNK_PAGES;
    let from = first.clamp(base, base + CHUNK_PAGES);
    let to = end.clamp(base, base + CHUNK_PAGES);
    Bits::span(from - base, to - from)
}

/// Appends a run, to the last one where the two are one.
fn push_run(runs: &mut Vec<SlotRun>, first: u64, count: u64, slot: PoolSlot) {
    let start = HostVirt(first << PAGE_SHIFT);
    if let Some(last) = runs.last_mut()
        && last.start.add_pages(last.pages.into()) == start
        && last.slot.add(last.pages.into()) == Some(slot)
        && let Some(total) = last.pages.checked_add(count as u16)
    {
        last.pages = total;
        return;
    }
    // Where not even this can be had, the pool keeps a slot too long, which is better than to abort the program.
    if runs.try_reserve(1).is_ok() {
        runs.push(SlotRun { start, slot, pages: count as u16 });
    }
}

/// Appends a range, to the last one where the two touch.
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
            is_calm: false,
            last_calm: 0,
            eager: false,
            follows_forks: false,
            folds: 0,
            short_folds: 0,
            lately: Folds::NONE,
            written: 0,
            next: 0,
        }
    }

    // --- what the program says -----------------------------------------------------------------------------------

    /// This private anonymous memory may be folded. What was known of it keeps its traits.
    pub fn ask(&mut self, range: PageRange) {
        self.ask_as(range, Traits::default());
    }

    /// As [`Table::ask`]; what is new has these traits.
    pub fn ask_as(&mut self, range: PageRange, traits: Traits) {
        let (first, end) = span(range);
        self.generation += 1;
        let traits = Traits { asked: true, ..traits };
        let mut at = first;
        // Each turn either fills the gap that begins at `at` or steps over what is known there.
        while at < end {
            let known = self.extents.within(at, end).next();
            let gap_end = known.map_or(end, |(start, ..)| start);
            self.extents.insert(at, gap_end, traits);
            at = known.map_or(end, |(_, stop, _)| stop);
        }
        self.extents.change(first, end, |known| known.asked = true);
    }

    /// This memory is not to be folded any more. Pages that map slots go on doing so.
    pub fn unask(&mut self, range: PageRange) {
        let (first, end) = span(range);
        self.generation += 1;
        self.extents.change(first, end, |known| known.asked = false);
    }

    /// This memory was unmapped, or something else was mapped in its place.
    pub fn forget(&mut self, range: PageRange) {
        let (first, end) = span(range);
        if self.extents.remove(first, end) {
            self.generation += 1;
            self.leave_pool(first, end, true);
        }
    }

    /// The contents of this memory were dropped, and where it mapped the pool it is anonymous again.
    pub fn discard(&mut self, range: PageRange) {
        let (first, end) = span(range);
        self.generation += 1;
        self.leave_pool(first, end, true);
    }

    /// This memory is not to be folded until this reason is taken back.
    pub fn shut(&mut self, range: PageRange, why: Shut) {
        let (first, end) = span(range);
        self.generation += 1;
        self.extents.change(first, end, |known| known.shut |= why as u8);
    }

    /// Takes a reason back.
    pub fn open(&mut self, range: PageRange, why: Shut) {
        let (first, end) = span(range);
        self.generation += 1;
        self.extents.change(first, end, |known| known.shut &= !(why as u8));
    }

    /// This memory's protection was changed to these `PROT_` bits.
    pub fn protect(&mut self, range: PageRange, access: u8) {
        let (first, end) = span(range);
        self.generation += 1;
        self.extents.change(first, end, |known| known.access = access);
    }

    /// Changes what is remembered of the advice given for this memory.
    pub fn advise(&mut self, range: PageRange, change: impl Fn(&mut Advice)) {
        let (first, end) = span(range);
        self.generation += 1;
        self.extents.change(first, end, |known| change(&mut known.advice));
    }

    /// This memory was moved: what was known of `from` now holds of the range of that size at `to`, and what was known
    /// of that range no longer.
    pub fn relocate(&mut self, from: PageRange, to: HostVirt) {
        let (first, end) = span(from);
        let moved: Vec<_> = self.extents.within(first, end).collect();
        let runs = self.slot_runs(from);
        let broken = self.broken_pages(from);
        let zeroed = self.zeroed_pages(from);
        let pending = self.pending_pages(from);
        let (folds, lately) = (self.folds, self.lately);
        self.forget(PageRange { start: to, pages: from.pages });
        // The slots go along: they are not released.
        self.drop_slots(first, end);
        self.forget(from);
        let there = |page: u64| to.page() + (page - first);
        let at = |range: PageRange| PageRange { start: HostVirt(there(range.start.page()) << PAGE_SHIFT), ..range };
        for (start, stop, traits) in moved {
            self.extents.insert(there(start), there(stop), traits);
        }
        for run in runs {
            self.set_folded(SlotRun { start: HostVirt(there(run.start.page()) << PAGE_SHIFT), ..run });
        }
        broken.into_iter().for_each(|range| self.set_broken(at(range)));
        zeroed.into_iter().for_each(|range| self.set_zeroed(at(range)));
        pending.into_iter().for_each(|range| self.set_pending(at(range)));
        // Only their places are new.
        (self.folds, self.lately) = (folds, lately);
    }

    // --- what the agent's thread did -----------------------------------------------------------------------------

    /// It is this second now, counted from any time on, beginning with 1, and calm or not.
    pub fn set_time(&mut self, now: u32, calm: Option<Calm>) {
        (self.now, self.is_calm) = (now, calm.is_some_and(|calm| calm.goes_on));
        if let Some(calm) = calm {
            self.last_calm = now.saturating_sub(calm.seconds);
        }
    }

    /// Whether forked children are followed: else, only what they do not get may be folded.
    pub const fn follow_forks(&mut self, follow: bool) {
        self.follows_forks = follow;
    }

    /// Has nothing be left alone from now on.
    pub const fn be_eager(&mut self) {
        self.eager = true;
    }

    /// Pages that were written after they had rested, since this was asked last, as far as that was seen: in the looks that were
    /// taken in, and of folded ones.
    pub const fn take_written(&mut self) -> u64 {
        std::mem::replace(&mut self.written, 0)
    }

    /// Pages that were folded since this was asked last, and those that are known since then to have been folded for nothing.
    pub const fn take_folds(&mut self) -> Folds {
        std::mem::replace(&mut self.lately, Folds::NONE)
    }

    /// Pages that were ever folded, and those of them that were written so soon that it was for nothing.
    pub const fn folds(&self) -> (u64, u64) {
        (self.folds, self.short_folds)
    }

    /// These pages map these slots now.
    pub fn set_folded(&mut self, run: SlotRun) {
        let range = PageRange { start: run.start, pages: run.pages.into() };
        let (first, end) = span(range);
        self.leave_pool(first, end, true);
        let (now, mut made) = ((self.now, self.is_calm), self.lately.made);
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
    }

    /// These pages were zeros, and are not there any more.
    pub fn set_zeroed(&mut self, range: PageRange) {
        let (first, end) = span(range);
        self.leave_pool(first, end, true);
        let (now, mut made) = ((self.now, self.is_calm), self.lately.made);
        self.each_known(first, end, |key, chunk| {
            add(&mut made, chunk.folded_at(of_chunk(key, first, end), now));
            chunk.zeroed = chunk.zeroed.or(of_chunk(key, first, end));
        });
        self.lately.made = made;
        self.zeroed += range.pages;
        self.folds += range.pages;
    }

    /// Copy-on-write made these pages private; they stay in a mapping of the pool. Their slots are released.
    pub fn set_broken(&mut self, range: PageRange) {
        let (first, end) = span(range);
        let (now, last_calm, mut short, mut written) = (self.now, self.last_calm, [0; MOMENTS], 0);
        self.each_known(first, end, |key, chunk| {
            let pages = chunk.mapped.and(of_chunk(key, first, end));
            add(&mut short, chunk.ended(pages, now));
            written += chunk.written_at(pages, (now, last_calm));
        });
        self.were_short(short);
        self.written += written;
        self.leave_pool(first, end, true);
        self.each_known(first, end, |key, chunk| chunk.broken = chunk.broken.or(of_chunk(key, first, end)));
        self.broken += range.pages;
    }

    /// These pages are private anonymous memory again, with their contents. Their slots are released.
    pub fn set_private(&mut self, range: PageRange) {
        let (first, end) = span(range);
        self.leave_pool(first, end, false);
    }

    /// These pages were written.
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
        self.were_short(short);
    }

    /// These pages, which nobody watches, were written, as a look at their contents has shown.
    pub fn seen_written(&mut self, range: PageRange) {
        let (first, end) = span(range);
        let (at, mut written) = ((self.now, self.last_calm), 0);
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

    /// Whether nothing was seen written for so many seconds anywhere near this range.
    pub fn is_at_rest(&self, range: PageRange, seconds: u32) -> bool {
        let (first, end) = span(range);
        self.chunks.range(keys(first, end)).all(|(_, chunk)| chunk.is_at_rest(self.now, seconds))
    }

    /// Takes in a look at all enrolled memory, of which `written` was written since the last: what is written is pending
    /// from now on, and what was pending but is not written has rested and is given back, in order of address from where
    /// the last search ended. At most `budget` pages, rounded up to whole chunks; more stays pending, and so does what is of
    /// not worth folding.
    /// What is only `new` to the looks, and not known to have been written, is pending too and does not count as changed.
    pub fn rest(&mut self, (written, new): (&[PageRange], &[PageRange]), budget: u64, worth: Worth) -> Vec<PageRange> {
        for (range, is_new) in written.iter().map(|range| (range, false)).chain(new.iter().map(|range| (range, true))) {
            let (first, end) = span(*range);
            let known: Vec<_> = self.extents.within(first, end).filter(|(.., traits)| traits.asked).collect();
            for (start, stop, _) in known {
                self.set_pending(pages(start, stop));
                let (at, mut written) = ((self.now, self.last_calm), 0);
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

    /// Takes up to `most` runs from the list of slots that are mapped no longer.
    pub fn take_released(&mut self, most: usize) -> Vec<SlotRun> {
        let behind = self.released.len().saturating_sub(most);
        self.released.split_off(behind)
    }

    /// The list of slots that are mapped no longer.
    pub fn released(&self) -> &[SlotRun] {
        &self.released
    }

    /// Nobody is to be told of these slots any more.
    pub fn drop_released(&mut self, of: impl Fn(PoolSlot) -> bool) {
        self.released.retain(|run| !of(run.slot));
    }

    // --- within --------------------------------------------------------------------------------------------------

    fn were_short(&mut self, folds: ByMoment) {
        self.short_folds += folds.iter().sum::<u64>();
        add(&mut self.lately.short, folds);
    }

    /// Ends what was known of the pages of `first..end`, whose slots are released. Whether they are pending stays
    /// known unless `all` is to be forgotten.
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

    /// Calls `f` for every chunk of `first..end`, making those that are not there.
    fn each_known(&mut self, first: u64, end: u64, mut f: impl FnMut(u64, &mut Chunk)) {
        if first < end {
            for key in keys(first, end) {
                f(key, self.chunks.entry(key).or_insert_with(Chunk::new));
            }
        }
    }
}

/// The pages of a chunk that may be folded as far as their ranges go.
fn open_pages(extents: &Extents, key: u64, follows_forks: bool) -> Bits {
    let (first, end) = (key * CHUNK_PAGES, (key + 1) * CHUNK_PAGES);
    let open = extents.within(first, end).filter(|(.., traits)| traits.open(follows_forks));
    open.fold(Bits::default(), |bits, (start, stop, _)| bits.or(Bits::span(start - first, stop - start)))
}

#[cfg(test)]
mod tests;
