//! A set of pages, kept as ranges.

use crate::{HostVirt, PAGE_SHIFT, PageRange};
use std::collections::BTreeMap;

/// Ranges of pages by page number: from the first page of each to the page behind its last. No two ranges touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageSet(BTreeMap<u64, u64>);

impl PageSet {
    /// A set without pages.
    pub const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Whether it has no pages.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds pages.
    pub fn insert(&mut self, range: PageRange) {
        let (mut first, mut end) = span(range);
        if first >= end {
            return;
        }
        // Ranges that overlap or touch the new one are merged with it.
        while let Some((&start, &stop)) = self.0.range(..=end).next_back().filter(|(_, stop)| **stop >= first) {
            self.0.remove(&start);
            (first, end) = (first.min(start), end.max(stop));
        }
        self.0.insert(first, end);
    }

    /// Removes pages.
    pub fn remove(&mut self, range: PageRange) {
        let (first, end) = span(range);
        if first >= end {
            return;
        }
        while let Some((&start, &stop)) = self.0.range(..end).next_back().filter(|(_, stop)| **stop > first) {
            self.0.remove(&start);
            if start < first {
                self.0.insert(start, first);
            }
            if stop > end {
                self.0.insert(end, stop);
            }
        }
    }

    /// Whether a page is in the set.
    pub fn contains(&self, page: HostVirt) -> bool {
        self.0.range(..=page.page()).next_back().is_some_and(|(_, end)| *end > page.page())
    }

    /// The pages of a range that are in the set, in order.
    pub fn within(&self, range: PageRange) -> Vec<PageRange> {
        let (first, end) = span(range);
        let before = self.0.range(..first).next_back();
        let all = before.into_iter().chain(self.0.range(first..end.max(first)));
        let clipped = all.map(|(&start, &stop)| pages(start.max(first), stop.min(end)));
        clipped.filter(|range| range.pages > 0).collect()
    }

    /// The pages of a range that are not in the set, in order.
    pub fn missing(&self, range: PageRange) -> Vec<PageRange> {
        let (mut at, end) = span(range);
        let mut found = Vec::new();
        for known in self.within(range) {
            found.push(pages(at, known.start.page()));
            at = known.end().page();
        }
        found.push(pages(at, end));
        found.retain(|range| range.pages > 0);
        found
    }

    /// All pages of the set, in order.
    pub fn ranges(&self) -> impl Iterator<Item = PageRange> {
        self.0.iter().map(|(&first, &end)| pages(first, end))
    }
}

const fn span(range: PageRange) -> (u64, u64) {
    (range.start.page(), range.start.page().saturating_add(range.pages))
}

const fn pages(first: u64, end: u64) -> PageRange {
    PageRange { start: HostVirt(first << PAGE_SHIFT), pages: end.saturating_sub(first) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Compares random operations on some pages with the same operations on a set of single pages.
    #[test]
    fn ranges_agree_with_single_pages() {
        let mut number = 1_u64;
        let mut below = |n: u64| {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (number >> 33) % n
        };
        let (mut set, mut single) = (PageSet::new(), BTreeSet::new());
        for _ in 0..10_000 {
            let (first, count) = (below(11), below(5));
            let range = pages(first, first + count);
            if below(2) == 0 {
                set.insert(range);
                single.extend(first..first + count);
            } else {
                set.remove(range);
                single.retain(|page| !(first..first + count).contains(page));
            }
            let listed: Vec<u64> = set.ranges().flat_map(|r| r.start.page()..r.end().page()).collect();
            assert_eq!(listed, single.iter().copied().collect::<Vec<_>>());
            let joined = set.ranges().zip(set.ranges().skip(1)).all(|(one, next)| one.end() < next.start);
            assert!(joined, "two ranges touch: {set:?}");
            assert_eq!(set.contains(range.start), single.contains(&first));
            let (inside, outside) = (set.within(range), set.missing(range));
            let count_of = |ranges: &[PageRange]| ranges.iter().map(|range| range.pages).sum::<u64>();
            assert_eq!(count_of(&inside), (first..first + count).filter(|page| single.contains(page)).count() as u64);
            assert_eq!(count_of(&inside) + count_of(&outside), count);
            assert_eq!(set.is_empty(), single.is_empty());
        }
    }
}
