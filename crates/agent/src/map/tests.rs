//! The map against a model that knows each page by itself.

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Queries for tests.
impl Map {
    /// The slot that a page maps.
    pub fn slot(&self, page: HostVirt) -> Option<PoolSlot> {
        match self.chunks.get(&(page.page() / CHUNK_PAGES))?.fact(page.page() % CHUNK_PAGES) {
            Fact::Mapped(slot) => Some(slot),
            _ => None,
        }
    }

    /// Number of chunks with notes of single pages.
    pub fn known_chunks(&self) -> usize {
        self.chunks.len()
    }

    /// Number of pages that are pending and could rest.
    pub fn backlog(&self) -> u64 {
        let waiting = |key: u64, chunk: &Chunk| {
            chunk.pending.without(chunk.pooled()).and(open_pages(&self.extents, key, self.follows_forks)).count()
        };
        self.chunks.iter().map(|(key, chunk)| waiting(*key, chunk)).sum()
    }
}

/// The empty map of a member whose children are followed.
fn map() -> Map {
    Map { follows_forks: true, ..Map::new() }
}

/// Pages of the model.
const PAGES: u64 = 1600;
/// Number of the page that is the model's page 0: within a chunk, not at its beginning.
const BASE: u64 = 0x7f00_0000_0000 / 4096 + 300;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Page {
    traits: Option<Traits>,
    pending: bool,
    zeroed: bool,
    broken: bool,
    slot: Option<u32>,
}

impl Page {
    fn pooled(self) -> bool {
        self.broken || self.slot.is_some()
    }

    fn foldable(self) -> bool {
        self.traits.is_some_and(|traits| traits.open(true)) && !self.pooled()
    }
}

struct Model {
    pages: Vec<Page>,
    released: BTreeMap<(u64, u32), usize>,
}

#[derive(Clone, Debug)]
enum Step {
    Ask(u64, u64),
    Unask(u64, u64),
    Forget(u64, u64),
    Discard(u64, u64),
    Shut(u64, u64, Shut),
    Open(u64, u64, Shut),
    DontFork(u64, u64, bool),
    Protect(u64, u64, u8),
    Relocate(u64, u64, u64),
    Folded(u64, u64, u32),
    Zeroed(u64, u64),
    Broken(u64, u64),
    Private(u64, u64),
    Pending(u64, u64),
    Rest(Vec<(u64, u64)>),
}

fn range_strategy() -> impl Strategy<Value = (u64, u64)> {
    (0..PAGES, 1_u64..700).prop_map(|(first, count)| (first, count.min(PAGES - first)))
}

fn shut_strategy() -> impl Strategy<Value = Shut> {
    prop_oneof![Just(Shut::Locked), Just(Shut::Yielded), Just(Shut::Special)]
}

fn step() -> impl Strategy<Value = Step> {
    let range = range_strategy;
    prop_oneof![
        3 => range().prop_map(|(a, n)| Step::Ask(a, n)),
        1 => range().prop_map(|(a, n)| Step::Unask(a, n)),
        1 => range().prop_map(|(a, n)| Step::Forget(a, n)),
        1 => range().prop_map(|(a, n)| Step::Discard(a, n)),
        1 => (range(), shut_strategy()).prop_map(|((a, n), why)| Step::Shut(a, n, why)),
        1 => (range(), shut_strategy()).prop_map(|((a, n), why)| Step::Open(a, n, why)),
        1 => (range(), any::<bool>()).prop_map(|((a, n), on)| Step::DontFork(a, n, on)),
        1 => (range(), prop_oneof![Just(0), Just(1), Just(READ_WRITE)])
            .prop_map(|((a, n), access)| Step::Protect(a, n, access)),
        1 => (0..PAGES / 2, 1..PAGES / 2, 0..PAGES / 2).prop_map(|(from, n, to)| {
            // A move never overlaps itself.
            let n = n.min(PAGES / 2 - from).min(PAGES / 2 - to);
            Step::Relocate(from, n, to + PAGES / 2)
        }),
        3 => (range(), 0_u32..5000).prop_map(|((a, n), slot)| Step::Folded(a, n, slot)),
        1 => range().prop_map(|(a, n)| Step::Zeroed(a, n)),
        2 => range().prop_map(|(a, n)| Step::Broken(a, n)),
        1 => range().prop_map(|(a, n)| Step::Private(a, n)),
        2 => range().prop_map(|(a, n)| Step::Pending(a, n)),
        2 => proptest::collection::vec(range(), 0..4).prop_map(Step::Rest),
    ]
}

fn real(first: u64, count: u64) -> PageRange {
    pages(BASE + first, BASE + first + count)
}

/// Records a scan, and returns what has rested.
fn rest(map: &mut Map, written: &[PageRange], budget: u64) -> Vec<PageRange> {
    written.iter().for_each(|range| drop(map.scanned(*range, |_, _| ())));
    map.take_rested(budget, |_, pages| pages)
}

/// The model's pages of ranges of the map.
fn listed(ranges: &[PageRange]) -> BTreeSet<u64> {
    let pages = |range: &PageRange| {
        let first = range.start.page() - BASE;
        first..first + range.pages
    };
    ranges.iter().flat_map(pages).collect()
}

impl Model {
    fn each(&mut self, first: u64, count: u64, f: impl Fn(&mut Page)) {
        for at in first..first + count {
            let page = &mut self.pages[at as usize];
            let before = page.slot;
            f(page);
            if let Some(slot) = before.filter(|slot| page.slot != Some(*slot)) {
                *self.released.entry((at, slot)).or_default() += 1;
            }
        }
    }

    fn apply(&mut self, step: &Step) {
        let gone = |page: &mut Page| *page = Page { traits: page.traits, ..Page::default() };
        match *step {
            Step::Ask(a, n) => {
                self.each(a, n, |p| p.traits = Some(Traits { asked: true, ..p.traits.unwrap_or_default() }))
            }
            Step::Unask(a, n) => self.each(a, n, |p| p.traits = p.traits.map(|t| Traits { asked: false, ..t })),
            Step::Forget(a, n) => self.each(a, n, |p| *p = Page::default()),
            Step::Discard(a, n) => self.each(a, n, gone),
            Step::Shut(a, n, why) => {
                self.each(a, n, |p| p.traits = p.traits.map(|t| Traits { shut: t.shut | why as u8, ..t }))
            }
            Step::Open(a, n, why) => {
                self.each(a, n, |p| p.traits = p.traits.map(|t| Traits { shut: t.shut & !(why as u8), ..t }))
            }
            Step::DontFork(a, n, on) => self.each(a, n, |p| {
                p.traits = p.traits.map(|t| Traits { advice: Advice { dont_fork: on, ..t.advice }, ..t });
            }),
            Step::Protect(a, n, access) => {
                self.each(a, n, |p| p.traits = p.traits.map(|t| Traits { access, ..t }));
            }
            Step::Relocate(from, n, to) => {
                let moved: Vec<Page> = self.pages[from as usize..(from + n) as usize].to_vec();
                for (at, page) in moved.into_iter().enumerate() {
                    self.each(to + at as u64, 1, |p| *p = page);
                    self.pages[from as usize + at] = Page::default();
                }
            }
            Step::Folded(a, n, slot) => {
                for at in a..a + n {
                    // A slot that is replaced by itself is released and taken anew.
                    self.each(at, 1, gone);
                    self.pages[at as usize].slot = Some(slot + (at - a) as u32);
                }
            }
            Step::Zeroed(a, n) => self.each(a, n, |p| *p = Page { traits: p.traits, zeroed: true, ..Page::default() }),
            Step::Broken(a, n) => self.each(a, n, |p| *p = Page { traits: p.traits, broken: true, ..Page::default() }),
            Step::Private(a, n) => {
                self.each(a, n, |p| *p = Page { traits: p.traits, pending: p.pending, ..Page::default() })
            }
            Step::Pending(a, n) => self.each(a, n, |p| (p.pending, p.zeroed) = (true, false)),
            Step::Rest(_) => {}
        }
    }

    fn rest(&mut self, written: &[(u64, u64)]) -> BTreeSet<u64> {
        let is_written = |at: u64| written.iter().any(|(a, n)| at >= *a && at < a + n);
        let mut rested = BTreeSet::new();
        for (at, page) in self.pages.iter_mut().enumerate() {
            if is_written(at as u64) {
                if page.traits.is_some_and(|t| t.asked) {
                    (page.pending, page.zeroed) = (true, false);
                }
            } else if page.pending && page.foldable() {
                page.pending = false;
                rested.insert(at as u64);
            }
        }
        rested
    }
}

/// Whether the step may happen: the agent does its part only to memory that the map knows.
fn may_apply(model: &Model, step: &Step) -> bool {
    let known = |a: u64, n: u64| model.pages[a as usize..(a + n) as usize].iter().all(|page| page.traits.is_some());
    match *step {
        Step::Folded(a, n, _) | Step::Zeroed(a, n) | Step::Broken(a, n) | Step::Pending(a, n) => known(a, n),
        Step::Relocate(from, n, _) => n > 0 && known(from, n),
        _ => true,
    }
}

fn run_step(map: &mut Map, step: &Step) {
    match *step {
        Step::Ask(a, n) => map.ask(real(a, n)),
        Step::Unask(a, n) => map.unask(real(a, n)),
        Step::Forget(a, n) => map.forget(real(a, n)),
        Step::Discard(a, n) => map.discard(real(a, n), |_, _| ()),
        Step::Shut(a, n, why) => map.shut(real(a, n), why),
        Step::Open(a, n, why) => map.open(real(a, n), why),
        Step::DontFork(a, n, on) => map.advise(real(a, n), |advice| advice.dont_fork = on),
        Step::Protect(a, n, access) => map.protect(real(a, n), access),
        Step::Relocate(from, n, to) => map.relocate(real(from, n), real(to, 1).start),
        Step::Folded(a, n, slot) => {
            map.set_folded(SlotRun { start: real(a, n).start, slot: PoolSlot::from_bits(slot), pages: n as u16 })
        }
        Step::Zeroed(a, n) => map.set_zeroed(real(a, n)),
        Step::Broken(a, n) => map.set_broken(real(a, n), |_, _| ()),
        Step::Private(a, n) => map.set_private(real(a, n)),
        Step::Pending(a, n) => map.set_pending(real(a, n), |_, _| ()),
        Step::Rest(_) => {}
    }
}

fn compare(map: &Map, model: &Model) -> Result<(), TestCaseError> {
    let all = real(0, PAGES);
    let which = |pick: fn(&Page) -> bool| -> BTreeSet<u64> {
        (0..PAGES).filter(|at| pick(&model.pages[*at as usize])).collect()
    };
    let mut foldable = Vec::new();
    map.foldable(&mut foldable);
    prop_assert!(foldable.windows(2).all(|pair| pair[0].end().0 < pair[1].start.0), "{:?}", foldable);
    prop_assert_eq!(listed(&foldable), which(|page| page.foldable()));
    prop_assert_eq!(listed(&map.pending_pages(all)), which(|page| page.pending));
    prop_assert_eq!(listed(&map.zeroed_pages(all)), which(|page| page.zeroed));
    prop_assert_eq!(listed(&map.broken_pages(all)), which(|page| page.broken));
    prop_assert_eq!(listed(&map.pooled_pages(all)), which(|page| page.pooled()));
    let number = |pick: fn(&Page) -> bool| model.pages.iter().filter(|page| pick(page)).count() as u64;
    let counts = Counts {
        enrolled: number(|page| page.traits.is_some_and(|traits| traits.asked && traits.access != 0)),
        folded: number(|page| page.slot.is_some()),
        at_home: 0,
        zeroed: number(|page| page.zeroed),
        broken: number(|page| page.broken),
    };
    prop_assert_eq!(map.counts(), counts);
    prop_assert_eq!(map.backlog(), number(|page| page.pending && page.foldable()));
    let known = map.known(all);
    for pair in known.windows(2) {
        prop_assert!(pair[0].0.end().0 < pair[1].0.start.0 || pair[0].1 != pair[1].1, "not joined: {:?}", pair);
    }
    let mut traits = vec![None; PAGES as usize];
    for (range, known) in known {
        let first = (range.start.page() - BASE) as usize;
        traits[first..first + range.pages as usize].fill(Some(known));
    }
    for (at, page) in model.pages.iter().enumerate() {
        prop_assert_eq!(map.slot(real(at as u64, 1).start).map(PoolSlot::bits), page.slot);
        prop_assert_eq!(traits[at], page.traits);
    }
    compare_runs(map, model)
}

fn compare_runs(map: &Map, model: &Model) -> Result<(), TestCaseError> {
    let mut seen = BTreeMap::new();
    for run in map.all_slot_runs() {
        for at in 0..u64::from(run.pages) {
            seen.insert(run.start.page() + at - BASE, run.slot.bits() + at as u32);
        }
    }
    let slots = model.pages.iter().enumerate().filter_map(|(at, page)| Some((at as u64, page.slot?)));
    prop_assert_eq!(seen, slots.collect::<BTreeMap<_, _>>());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn map_agrees_with_model_of_single_pages(steps in proptest::collection::vec(step(), 1..40)) {
        let mut map = map();
        let mut model = Model { pages: vec![Page::default(); PAGES as usize], released: BTreeMap::new() };
        map.ask(real(100, 1300));
        model.apply(&Step::Ask(100, 1300));
        for step in steps {
            if !may_apply(&model, &step) {
                continue;
            }
            if let Step::Rest(written) = &step {
                let ranges: Vec<_> = written.iter().map(|(a, n)| real(*a, *n)).collect();
                prop_assert_eq!(listed(&rest(&mut map, &ranges, u64::MAX)), model.rest(written));
            } else {
                model.apply(&step);
                run_step(&mut map, &step);
            }
            compare(&map, &model)?;
        }
        let mut released: BTreeMap<(u64, u32), usize> = BTreeMap::new();
        loop {
            let runs = map.take_released(3);
            if runs.is_empty() {
                break;
            }
            for run in runs {
                for at in 0..u64::from(run.pages) {
                    *released.entry((run.start.page() + at - BASE, run.slot.bits() + at as u32)).or_default() += 1;
                }
            }
        }
        prop_assert_eq!(released, model.released);
    }

    #[test]
    fn pending_pages_rest_once_and_within_budget(
        budget in 1_u64..2000,
        pending in proptest::collection::vec(range_strategy(), 1..5),
    ) {
        let mut map = map();
        map.ask(real(0, PAGES));
        for (first, count) in &pending {
            map.set_pending(real(*first, *count), |_, _| ());
        }
        let expected: BTreeSet<u64> = pending.iter().flat_map(|(a, n)| *a..a + n).collect();
        let mut seen = BTreeSet::new();
        for _ in 0..PAGES {
            let rested = rest(&mut map, &[], budget);
            let number: u64 = rested.iter().map(|range| range.pages).sum();
            prop_assert!(number < budget + CHUNK_PAGES);
            for page in listed(&rested) {
                prop_assert!(seen.insert(page), "page {} rested twice", page);
            }
            if seen.len() == expected.len() {
                break;
            }
        }
        prop_assert_eq!(seen, expected);
        prop_assert!(map.chunks.is_empty());
    }
}

#[test]
fn a_foldable_range_is_foldable_throughout() {
    let mut map = map();
    map.ask(real(0, 600));
    assert!(map.is_foldable(real(0, 600)));
    assert!(!map.is_foldable(real(0, 601)));
    assert!(!map.is_foldable(real(0, 0)));
    map.set_broken(real(550, 1), |_, _| ());
    assert!(map.is_foldable(real(0, 550)));
    assert!(!map.is_foldable(real(0, 551)));
    map.shut(real(10, 1), Shut::Locked);
    assert!(!map.is_foldable(real(0, 550)));
    assert!(map.is_foldable(real(11, 539)));
}

#[test]
fn dropping_released_slots_leaves_those_of_other_segments() {
    let mut map = map();
    map.ask(real(0, 20));
    for (page, segment) in [(0, 1), (10, 2)] {
        map.set_folded(SlotRun { start: real(page, 5).start, slot: PoolSlot::new(segment, 7).unwrap(), pages: 5 });
        map.set_broken(real(page, 5), |_, _| ());
    }
    map.drop_released(|slot| slot.segment() == 1);
    let left = map.take_released(usize::MAX);
    assert_eq!(
        left.iter().map(|run| (run.start, run.slot.segment(), run.pages)).collect::<Vec<_>>(),
        [(real(10, 5).start, 2, 5)]
    );
}

#[test]
fn traits_of_a_range_are_those_of_all_its_pages() {
    let mut map = map();
    map.ask(real(0, 100));
    map.advise(real(50, 50), |advice| advice.dont_dump = true);
    assert_eq!(map.traits(real(40, 20)), None);
    assert_eq!(map.traits(real(50, 10)).map(|traits| traits.advice.dont_dump), Some(true));
    assert_eq!(map.traits(real(90, 20)), None, "a part is unknown");
}

#[test]
fn a_reservation_costs_nothing_until_it_is_written() {
    let mut map = map();
    // 16 TiB, as some run-time systems reserve.
    map.ask(real(0, 1 << 32));
    assert!(map.chunks.is_empty());
    assert_eq!(map.counts().enrolled, 1 << 32);
    map.set_pending(real(5 << 30, 1), |_, _| ());
    map.set_pending(real(1 << 30, 1), |_, _| ());
    assert_eq!(rest(&mut map, &[], u64::MAX), [real(1 << 30, 1)]);
}
