//! Queries of the map.

use super::{Counts, Map, Traits, chunk::Chunk};
use super::{keys, of_chunk, open_pages, push_range, push_run, span};
use page::{Bits, CHUNK_PAGES, PageRange, chunks};
use wire::{SlotRun, Why};

impl Map {
    /// Numbers of pages, by state.
    pub fn counts(&self) -> Counts {
        let asked = self.extents.all().filter(|(.., traits)| traits.asked && !traits.is_only_reserved());
        let enrolled = asked.map(|(first, end, _)| end - first).sum();
        Counts {
            enrolled,
            folded: self.folded,
            at_home: self.at_home_pages(),
            zeroed: self.zeroed,
            broken: self.broken,
        }
    }

    /// A number that changes whenever the program changes something about memory that the map knows.
    pub const fn generation(&self) -> u64 {
        self.generation
    }

    /// Replaces the content of `ranges` by all pages that may be folded and do not lie in mappings of the pool, in
    /// order. Pages that were folded as zeros are among them.
    pub fn foldable(&self, ranges: &mut Vec<PageRange>) {
        ranges.clear();
        for (first, end, _) in self.extents.all().filter(|(.., traits)| traits.open(self.follows_forks)) {
            let mut at = first;
            // Only pages in mappings of the pool interrupt a range.
            for (&key, chunk) in self.chunks.range(keys(first, end)) {
                for (page, count) in chunk.pooled().and(of_chunk(key, first, end)).runs() {
                    let page = key * CHUNK_PAGES + page;
                    if page > at {
                        push_range(ranges, at, page - at);
                    }
                    at = page + count;
                }
            }
            if end > at {
                push_range(ranges, at, end - at);
            }
        }
    }

    /// Whether every page of the range may be folded, and none lies in a mapping of the pool.
    pub fn is_foldable(&self, range: PageRange) -> bool {
        let (first, end) = span(range);
        if first >= end {
            return false;
        }
        let open: u64 =
            self.extents.within(first, end).filter(|(.., t)| t.open(self.follows_forks)).map(|(a, b, _)| b - a).sum();
        let pooled = |key: u64, chunk: &Chunk| !chunk.pooled().and(of_chunk(key, first, end)).is_empty();
        open == range.pages && !self.chunks.range(keys(first, end)).any(|(key, chunk)| pooled(*key, chunk))
    }

    /// All broken pages that may be folded again in place (`refold`), in order. `admit` picks among those of each
    /// chunk.
    pub fn refoldable(&self, admit: impl Fn(u64, Bits) -> Bits) -> Vec<PageRange> {
        let open = self.extents.all().filter(|(.., traits)| traits.open_again(self.follows_forks));
        open.flat_map(|(first, end, _)| self.select(super::pages(first, end), |key, chunk| admit(key, chunk.broken())))
            .collect()
    }

    /// Whether every page of the range is broken, and may be folded again in place.
    pub fn is_refoldable(&self, range: PageRange) -> bool {
        let (first, end) = span(range);
        let open: u64 = self
            .extents
            .within(first, end)
            .filter(|(.., t)| t.open_again(self.follows_forks))
            .map(|(a, b, _)| b - a)
            .sum();
        let broken: u64 = self.broken_pages(range).iter().map(|range| range.pages).sum();
        open == range.pages && broken == range.pages
    }

    /// For each page of the range, why it is not folded; [`Why::Other`] if the reason is none that the map knows.
    /// `admit` returns, for pages of a chunk, which of them are not left alone after short-lived folds, and which are
    /// worth folding.
    pub fn why(&self, range: PageRange, admit: impl Fn(u64, Bits) -> (Bits, Bits)) -> Vec<Why> {
        let (mut reasons, unknown) = (Vec::new(), Chunk::new());
        for (key, pages) in chunks(range) {
            let chunk = self.chunks.get(&key).unwrap_or(&unknown);
            let open = open_pages(&self.extents, key, self.follows_forks);
            let folded = chunk.mapped().or(chunk.zeroed());
            let (not_alone, worth) = admit(key, pages);
            let rested = worth.without(chunk.pending);
            reasons.extend(pages.pages().map(|page| match () {
                () if !open.has(page) => Why::NotEnrolled,
                () if folded.has(page) => Why::Other,
                () if !not_alone.has(page) => Why::BackedOff,
                () if !rested.has(page) => Why::Young,
                () => Why::Other,
            }));
        }
        reasons
    }

    /// Whether there are notes about single pages of this chunk.
    pub fn knows_chunk(&self, key: u64) -> bool {
        self.chunks.contains_key(&key)
    }

    /// Whether at least a part of the range lies in mappings of the pool, and no page of it is folded any more.
    pub fn is_only_broken(&self, range: PageRange) -> bool {
        self.slot_runs(range).is_empty() && self.zeroed_pages(range).is_empty() && !self.broken_pages(range).is_empty()
    }

    /// The traits of a range; `None` if they are not the same for all of it.
    pub fn traits(&self, range: PageRange) -> Option<Traits> {
        let (first, end) = span(range);
        let mut parts = self.extents.within(first, end);
        let (start, stop, traits) = parts.next()?;
        // Neighbouring ranges with equal traits are joined, so one range has to cover it.
        (start == first && stop == end).then_some(traits)
    }

    /// Known ranges within the range, and their traits, in order.
    pub fn known(&self, range: PageRange) -> Vec<(PageRange, Traits)> {
        let (first, end) = span(range);
        self.extents.within(first, end).map(|(a, b, traits)| (super::pages(a, b), traits)).collect()
    }

    /// Number of pages, from the first of a range on, that have the same traits.
    pub fn alike(&self, range: PageRange) -> u64 {
        self.known(range).first().map_or(range.pages, |(part, _)| part.end().page() - range.start.page())
    }

    /// The traits of a range, if they are the same for all of it and allow folding; `None` otherwise.
    pub fn open_traits(&self, range: PageRange) -> Option<Traits> {
        self.traits(range).filter(|traits| traits.open(self.follows_forks))
    }

    /// Two numbers of pages: those that may be folded as far as their traits tell, and those that could be if forked
    /// children were followed.
    pub fn open_and_unfollowed(&self) -> (u64, u64) {
        let pages = |(first, end, _): (u64, u64, Traits)| end - first;
        let all: u64 = self.extents.all().filter(|(.., traits)| traits.open_again(true)).map(pages).sum();
        let open: u64 =
            self.extents.all().filter(|(.., traits)| traits.open_again(self.follows_forks)).map(pages).sum();
        (open, all - open)
    }

    /// Whether anything is known within the range.
    pub fn touches(&self, range: PageRange) -> bool {
        let (first, end) = span(range);
        self.extents.touches(first, end)
    }

    /// Runs of pages of the range that map consecutive slots, in order.
    pub fn slot_runs(&self, range: PageRange) -> Vec<SlotRun> {
        let mut runs = Vec::new();
        self.each(range, |key, chunk, pages| {
            for (page, count, slot) in chunk.slot_runs(pages) {
                push_run(&mut runs, key * CHUNK_PAGES + page, count, slot);
            }
        });
        runs
    }

    /// All pages that map slots, in order.
    pub fn all_slot_runs(&self) -> Vec<SlotRun> {
        self.slot_runs(everything())
    }

    /// Pages of the range that lie in mappings of the pool, broken ones too.
    pub fn pooled_pages(&self, range: PageRange) -> Vec<PageRange> {
        self.select(range, |_, chunk| chunk.pooled())
    }

    /// Pages of the range that map slots, or were folded as zeros.
    pub fn folded_pages(&self, range: PageRange) -> Vec<PageRange> {
        self.select(range, |_, chunk| chunk.mapped().or(chunk.zeroed()))
    }

    /// Pages of the range that are private inside mappings of the pool.
    pub fn broken_pages(&self, range: PageRange) -> Vec<PageRange> {
        self.select(range, |_, chunk| chunk.broken())
    }

    /// Pages of the range that were folded as zeros.
    pub fn zeroed_pages(&self, range: PageRange) -> Vec<PageRange> {
        self.select(range, |_, chunk| chunk.zeroed())
    }

    /// Pages of the range that are pending: they were found written, or new, when they were last scanned.
    pub fn pending_pages(&self, range: PageRange) -> Vec<PageRange> {
        self.select(range, |_, chunk| chunk.pending)
    }

    /// Estimates how many mappings (VMAs) folding has made of the range: the mappings of the pool, and the parts of
    /// memory between them.
    pub fn mappings(&self, range: PageRange) -> u64 {
        (self.pooled_pages(range).len() + self.slot_runs(range).len()) as u64
    }

    /// All memory with mappings of the pool that may be folded, in pieces with uniform traits, each with its number of
    /// [mappings](Self::mappings), in order. No piece extends beyond a chunk.
    pub fn pieces_in_pool(&self) -> Vec<(PageRange, u64)> {
        let in_pool = self.chunks.iter().filter(|(_, chunk)| !chunk.pooled().is_empty());
        let parts = in_pool.flat_map(|(key, _)| self.extents.within(key * CHUNK_PAGES, (key + 1) * CHUNK_PAGES));
        let open = parts.filter(|(.., traits)| traits.open(self.follows_forks));
        let pieces = open.map(|(first, end, _)| super::pages(first, end)).map(|piece| (piece, self.mappings(piece)));
        pieces.filter(|(_, mappings)| *mappings > 0).collect()
    }

    pub(super) fn select(&self, range: PageRange, pick: impl Fn(u64, &Chunk) -> Bits) -> Vec<PageRange> {
        let mut ranges = Vec::new();
        self.each(range, |key, chunk, pages| {
            for (page, count) in pick(key, chunk).and(pages).runs() {
                push_range(&mut ranges, key * CHUNK_PAGES + page, count);
            }
        });
        ranges
    }

    fn each(&self, range: PageRange, mut f: impl FnMut(u64, &Chunk, Bits)) {
        let (first, end) = span(range);
        if first < end {
            for (&key, chunk) in self.chunks.range(keys(first, end)) {
                f(key, chunk, of_chunk(key, first, end));
            }
        }
    }
}

/// All addresses.
pub const fn everything() -> PageRange {
    super::pages(0, 1 << 45)
}
