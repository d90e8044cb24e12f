//! The map's part for memory with homes ([`crate::home`]). A page that is neither mapped nor broken nor placed shows
//! its home: nothing is noted for it.

use super::{Bits, CHUNK_PAGES, Chunk, Home, Map, Traits, keys_or_none, of_chunk, push_range, span};
use page::{HostVirt, PAGE_SHIFT, PageRange, PoolSlot};
use std::collections::BTreeMap;
use wire::SlotRun;

/// Most mappings of files that are remembered until it is known whether they map a template.
const MOST_FILES: usize = 64;

/// The pages of a range, without those that `but` picks in each chunk.
fn pages_without(
    chunks: &BTreeMap<u64, Box<Chunk>>,
    (first, end): (u64, u64),
    but: impl Fn(&Chunk) -> Bits,
) -> Vec<PageRange> {
    let (mut found, mut at) = (Vec::new(), first);
    for (&key, chunk) in chunks.range(keys_or_none(first, end)) {
        for (page, count) in but(chunk).and(of_chunk(key, first, end)).runs() {
            let page = key * CHUNK_PAGES + page;
            if page > at {
                push_range(&mut found, at, page - at);
            }
            at = page + count;
        }
    }
    if end > at {
        push_range(&mut found, at, end - at);
    }
    found
}

/// The pages of a chunk that do not show their homes, provided that they have homes.
fn is_elsewhere(chunk: &Chunk) -> Bits {
    chunk.pooled().or(chunk.placed())
}

impl Map {
    /// Notes a private mapping of a file that the program has enrolled.
    pub fn ask_file(&mut self, range: PageRange, traits: Traits) {
        let is_known = self.of_files.iter().any(|(known, _)| *known == range) || self.touches(range);
        if self.of_files.len() < MOST_FILES && !is_known {
            self.note_change();
            self.of_files.push((range, traits));
        }
    }

    /// The private mappings of files that were enrolled, and are not known to map a template.
    pub fn of_files(&self) -> &[(PageRange, Traits)] {
        &self.of_files
    }

    /// Notes memory of which every page shows its home. Returns the homes.
    pub fn enter_home(&mut self, range: PageRange, traits: Traits) -> Vec<SlotRun> {
        let (first, end) = span(range);
        self.forget(range);
        self.extents.insert(first, end, Traits { asked: true, ..traits });
        self.note_change();
        let mut runs = Vec::new();
        traits.home.into_iter().for_each(|home| cut_runs(&mut runs, first, end, home));
        runs
    }

    /// Notes that the program has discarded its private copies of these pages, so that they show their homes again.
    pub fn come_back(&mut self, range: PageRange) {
        let (first, end) = span(range);
        self.leave_pool(first, end, true);
        self.set_placed(range, false);
    }

    /// As [`Map::come_back`], for those of these pages that lie in the program's own mapping. For a hook, after the
    /// kernel has discarded them.
    pub fn come_back_unplaced(&mut self, range: PageRange) {
        for part in self.broken_pages(range) {
            let mut placed = page::PageSet::new();
            self.placed_pages(part).into_iter().for_each(|range| placed.insert(range));
            placed.missing(part).into_iter().for_each(|range| self.come_back(range));
        }
    }

    /// Whether all pages of a range were placed (`true`), or none was (`false`); `None` if some were.
    pub fn placement(&self, range: PageRange) -> Option<bool> {
        match self.placed_pages(range).iter().map(|part| part.pages).sum::<u64>() {
            0 => Some(false),
            pages => (pages == range.pages).then_some(true),
        }
    }

    /// Memory with homes that the worker knows of, in order.
    fn homes(&self) -> impl Iterator<Item = (u64, u64, Home)> {
        let asked = self.extents.all().filter(|(.., traits)| traits.asked);
        asked.filter_map(|(first, end, traits)| Some((first, end, traits.home?)))
    }

    /// The homes of all memory with homes that is enrolled, as runs of slots. They are for a new worker, which counts
    /// all these pages as showing their homes until it is told otherwise.
    pub fn home_runs(&mut self) -> Vec<SlotRun> {
        let mut runs = Vec::new();
        self.homes().for_each(|(first, end, home)| cut_runs(&mut runs, first, end, home));
        self.chunks.values_mut().for_each(|chunk| chunk.change_at_home(|at_home| at_home.told_away = Bits::default()));
        runs
    }

    /// Pages that have ceased to show their homes, and pages that show them again, since the worker was last told.
    pub fn take_moves(&mut self) -> [Vec<SlotRun>; 2] {
        let mut moves = [Vec::new(), Vec::new()];
        let Self { extents, chunks, .. } = self;
        for (first, end, traits) in extents.all().filter(|(.., traits)| traits.asked) {
            let Some(home) = traits.home else { continue };
            for (&key, chunk) in chunks.range_mut(keys_or_none(first, end)) {
                let here = of_chunk(key, first, end);
                let (away, told) = (is_elsewhere(chunk).and(here), chunk.told_away().and(here));
                for (runs, pages) in moves.iter_mut().zip([away.without(told), told.without(away)]) {
                    for (page, count) in pages.runs() {
                        cut_runs(runs, key * CHUNK_PAGES + page, key * CHUNK_PAGES + page + count, home);
                    }
                }
                chunk.change_at_home(|at_home| at_home.told_away = at_home.told_away.without(here).or(away));
            }
        }
        moves
    }

    /// Pages of a range that show their homes, in memory of which the worker knows.
    pub fn at_home(&self, range: PageRange) -> Vec<PageRange> {
        let (first, end) = span(range);
        let known = self.extents.within(first, end).filter(|(.., traits)| traits.asked && traits.home.is_some());
        known.flat_map(|(first, end, _)| pages_without(&self.chunks, (first, end), is_elsewhere)).collect()
    }

    /// Number of pages that show their homes.
    pub(super) fn at_home_pages(&self) -> u64 {
        let of_range = |(first, end, _): (u64, u64, Home)| {
            let chunks = self.chunks.range(keys_or_none(first, end));
            let elsewhere = chunks.map(|(&key, chunk)| is_elsewhere(chunk).and(of_chunk(key, first, end)).count());
            end - first - elsewhere.sum::<u64>()
        };
        self.homes().map(of_range).sum()
    }

    /// The home of a page; `None` if it has none.
    pub fn home(&self, page: u64) -> Option<PoolSlot> {
        let (.., traits) = self.extents.within(page, page + 1).next()?;
        traits.home.map(|home| home.of(page))
    }

    /// Releases the homes of the pages of `first..end` that the worker counts as showing them.
    pub(super) fn leave_homes(&mut self, first: u64, end: u64) {
        let Self { extents, chunks, released, .. } = self;
        for (start, stop, traits) in extents.within(first, end).filter(|(.., traits)| traits.asked) {
            let Some(home) = traits.home else { continue };
            for range in pages_without(chunks, (start, stop), Chunk::told_away) {
                cut_runs(released, range.start.page(), range.end().page(), home);
            }
            for (&key, chunk) in chunks.range_mut(keys_or_none(start, stop)) {
                let gone = of_chunk(key, start, stop);
                chunk.change_at_home(|at_home| at_home.told_away = at_home.told_away.without(gone));
            }
        }
    }

    /// Notes that these pages show their homes again because they were folded to them. Slots that they mapped are
    /// released.
    pub fn set_home(&mut self, range: PageRange) {
        let (first, end) = span(range);
        self.leave_pool(first, end, true);
        self.set_placed(range, false);
        self.each_known(first, end, |key, chunk| {
            // The worker learns this from the outcome of the fold.
            let back = of_chunk(key, first, end);
            chunk.change_at_home(|at_home| at_home.told_away = at_home.told_away.without(back));
        });
    }

    /// Notes whether slots other than their homes were placed over these pages with homes.
    pub(super) fn set_placed(&mut self, range: PageRange, is_placed: bool) {
        let (first, end) = span(range);
        self.each_known(first, end, |key, chunk| {
            let pages = of_chunk(key, first, end);
            chunk.change_at_home(|at_home| {
                at_home.placed = if is_placed { at_home.placed.or(pages) } else { at_home.placed.without(pages) };
            });
        });
    }

    /// Pages of the range with homes, over which other slots were placed.
    pub fn placed_pages(&self, range: PageRange) -> Vec<PageRange> {
        self.select(range, |_, chunk| chunk.placed())
    }

    /// Pages of the range that lie in mappings of the pool which the agent has made.
    pub fn mapped_by_us(&self, range: PageRange) -> Vec<PageRange> {
        let (first, end) = span(range);
        let mut found = Vec::new();
        for (start, stop, traits) in self.extents.within(first, end) {
            let part = super::pages(start, stop);
            let pages = match traits.home {
                Some(_) => self.placed_pages(part),
                None => self.pooled_pages(part),
            };
            found.extend(pages);
        }
        found
    }

    /// Stops using homes in segments for which `of` holds: these segments are not the present worker's.
    pub fn lose_homes(&mut self, of: impl Fn(u8) -> bool) {
        let lost: Vec<_> = self.homes().filter(|(first, _, home)| of(home.of(*first).segment())).collect();
        for (first, end, _) in lost {
            self.extents.change(first, end, |known| known.asked = false);
        }
    }
}

/// Appends the homes of `first..end`, cut into runs of at most 65,535 pages.
fn cut_runs(runs: &mut Vec<SlotRun>, first: u64, end: u64, home: Home) {
    let mut at = first;
    while at < end {
        let count = (end - at).min(u64::from(u16::MAX));
        let run = SlotRun { start: HostVirt(at << PAGE_SHIFT), slot: home.of(at), pages: count as u16 };
        if !super::joins_last(runs, run) && runs.try_reserve(1).is_ok() {
            runs.push(run);
        }
        at += count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: u64 = 0x7000_0000;
    /// Number of pages: more than one run may have, and not a whole number of chunks.
    const PAGES: u64 = 70_000;

    fn at(first: u64, count: u64) -> PageRange {
        PageRange { start: HostVirt((FIRST + first) << PAGE_SHIFT), pages: count }
    }

    fn slot(page: u64) -> PoolSlot {
        PoolSlot::new(PoolSlot::FIRST_TEMPLATE, page as u32).unwrap()
    }

    /// The map of a member with homes of which the worker knows.
    fn born() -> Map {
        let mut map = Map::new();
        let traits = Traits { home: Some(Home::new(FIRST, slot(0))), ..Traits::default() };
        let runs = map.enter_home(at(0, PAGES), traits);
        assert_eq!(runs.iter().map(|run| u64::from(run.pages)).sum::<u64>(), PAGES);
        map
    }

    fn told(runs: &[SlotRun]) -> Vec<(u64, u64)> {
        let run = |run: &SlotRun| {
            let first = run.start.page() - FIRST;
            assert_eq!(run.slot, slot(first));
            (first, run.pages.into())
        };
        runs.iter().map(run).collect()
    }

    fn moves(map: &mut Map) -> [Vec<(u64, u64)>; 2] {
        map.take_moves().map(|runs| told(&runs))
    }

    #[test]
    fn memory_that_is_whole_takes_no_notes_however_large_it_is() {
        let mut map = born();
        assert_eq!((map.chunks.len(), map.counts().at_home), (0, PAGES));
        map.set_broken(at(600, 3), |_, _| ());
        assert_eq!((map.chunks.len(), map.counts().at_home, map.counts().broken), (1, PAGES - 3, 3));
        assert_eq!(moves(&mut map), [vec![(600, 3)], vec![]]);
        map.set_home(at(600, 3));
        assert_eq!((moves(&mut map), map.counts().at_home), ([vec![], vec![]], PAGES));
    }

    #[test]
    fn worker_is_told_once_of_each_page_that_leaves_or_comes_back() {
        let mut map = born();
        map.set_broken(at(10, 4), |_, _| ());
        assert_eq!(moves(&mut map), [vec![(10, 4)], vec![]]);
        map.come_back(at(12, 1));
        map.set_broken(at(20, 1), |_, _| ());
        map.come_back(at(20, 1));
        assert_eq!(moves(&mut map), [vec![], vec![(12, 1)]]);
        map.set_folded(SlotRun { start: at(11, 1).start, slot: PoolSlot::new(3, 9).unwrap(), pages: 1 });
        assert_eq!((moves(&mut map), map.placement(at(11, 1))), ([vec![], vec![]], Some(true)));
        assert_eq!((map.placement(at(10, 1)), map.placement(at(10, 2))), (Some(false), None));
        // The worker of a new connection is told of all homes.
        assert_eq!(map.home_runs().iter().map(|run| u64::from(run.pages)).sum::<u64>(), PAGES);
        assert_eq!(moves(&mut map), [vec![(10, 2), (13, 1)], vec![]]);
        map.come_back(at(11, 1));
        assert_eq!(told(&map.released()[..0]), []);
        assert_eq!(
            map.take_released(9),
            [SlotRun { start: at(11, 1).start, slot: PoolSlot::new(3, 9).unwrap(), pages: 1 }]
        );
    }

    #[test]
    fn unmapped_memory_releases_homes_that_the_worker_counts() {
        let mut map = born();
        map.set_broken(at(30, 2), |_, _| ());
        assert_eq!(moves(&mut map), [vec![(30, 2)], vec![]]);
        map.set_broken(at(33, 1), |_, _| ());
        map.forget(at(28, 8));
        assert_eq!(told(&map.take_released(9)), [(28, 2), (32, 4)]);
        assert_eq!((moves(&mut map), map.counts().at_home), ([vec![], vec![]], PAGES - 8));
        // Memory with homes that was excluded from folding cannot be enrolled again.
        map.unask(at(0, 20));
        assert_eq!(told(&map.take_released(9)), [(0, 20)]);
        map.ask(at(0, 20));
        assert_eq!(map.counts().at_home, PAGES - 28);
        let there = HostVirt(0x6000_0000 << PAGE_SHIFT);
        map.relocate(at(40, 4), there);
        assert_eq!((told(&map.take_released(9)), map.home(0x6000_0001)), (vec![(40, 4)], Some(slot(41))));
    }
}
