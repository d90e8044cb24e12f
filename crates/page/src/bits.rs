//! 512 bits, one for each page of a chunk, processed by whole words; and the chunks that a range touches.
// Counts and indices are of one chunk, or checked.
#![allow(clippy::arithmetic_side_effects)]

use crate::PageRange;

/// Pages of a chunk: 512, as many as one page table maps, or one huge page has.
pub const CHUNK_PAGES: u64 = 512;
const WORDS: usize = 8;

/// The chunks that a range touches, by number, and the pages of the range in each.
pub fn chunks(range: PageRange) -> impl Iterator<Item = (u64, Bits)> {
    let (first, end) = (range.start.page(), range.start.page().saturating_add(range.pages));
    let behind = if first < end { (end - 1) / CHUNK_PAGES + 1 } else { 0 };
    (first / CHUNK_PAGES..behind).map(move |key| {
        let base = key * CHUNK_PAGES;
        let (from, to) = (first.clamp(base, base + CHUNK_PAGES), end.clamp(base, base + CHUNK_PAGES));
        (key, Bits::span(from - base, to - from))
    })
}

/// A bit for each page of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bits([u64; WORDS]);

impl Bits {
    /// `count` bits from `first` on; those beyond the chunk are left out.
    pub fn span(first: u64, count: u64) -> Self {
        let end = first.saturating_add(count).min(CHUNK_PAGES);
        let mut bits = Self::default();
        for (at, word) in bits.0.iter_mut().enumerate() {
            let base = at as u64 * 64;
            let from = first.clamp(base, base + 64) - base;
            let to = end.clamp(base, base + 64) - base;
            *word = low(to) & !low(from);
        }
        bits
    }

    fn zip(self, other: Self, f: impl Fn(u64, u64) -> u64) -> Self {
        let mut result = self;
        for (a, b) in result.0.iter_mut().zip(other.0) {
            *a = f(*a, b);
        }
        result
    }

    /// Bits that are set in both.
    pub fn and(self, other: Self) -> Self {
        self.zip(other, |a, b| a & b)
    }

    /// Bits that are set in either.
    pub fn or(self, other: Self) -> Self {
        self.zip(other, |a, b| a | b)
    }

    /// Bits that are not set in `other`.
    pub fn without(self, other: Self) -> Self {
        self.zip(other, |a, b| a & !b)
    }

    /// Whether no bit is set.
    pub fn is_empty(self) -> bool {
        self.0 == [0; WORDS]
    }

    /// Number of set bits.
    pub fn count(self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Whether the bit of this page is set.
    pub fn has(self, page: u64) -> bool {
        let word = self.0.get((page / 64) as usize).copied().unwrap_or(0);
        word >> (page % 64) & 1 == 1
    }

    /// The first set bit at or behind `from`.
    fn next_set(self, from: u64) -> Option<u64> {
        let mut at = from;
        while at < CHUNK_PAGES {
            let word = self.0.get((at / 64) as usize)? >> (at % 64);
            if word != 0 {
                return Some(at + u64::from(word.trailing_zeros()));
            }
            at = (at / 64 + 1) * 64;
        }
        None
    }

    /// The pages whose bits are set, in order.
    pub fn pages(self) -> impl Iterator<Item = u64> {
        self.runs().flat_map(|(first, count)| first..first + count)
    }

    /// The set bits of pages for which `is_so` holds.
    pub fn filter(self, is_so: impl Fn(u64) -> bool) -> Self {
        self.pages().filter(|page| is_so(*page)).fold(Self::default(), |bits, page| bits.or(Self::span(page, 1)))
    }

    /// Runs of set bits: first and count, in order.
    pub fn runs(self) -> impl Iterator<Item = (u64, u64)> {
        let clear = Self([u64::MAX; WORDS]).without(self);
        let mut at = 0;
        std::iter::from_fn(move || {
            let first = self.next_set(at)?;
            let end = clear.next_set(first).unwrap_or(CHUNK_PAGES);
            at = end;
            Some((first, end - first))
        })
    }
}

/// The lowest `n` bits of a word, all of them from 64 on.
fn low(n: u64) -> u64 {
    if n >= 64 { u64::MAX } else { (1 << n) - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn span_sets_exactly_its_pages(first in 0u64..600, count in 0u64..600) {
            let span = Bits::span(first, count);
            for page in 0..CHUNK_PAGES {
                prop_assert_eq!(span.has(page), page >= first && page < first + count);
            }
            prop_assert_eq!(span.count(), (first + count).min(512).saturating_sub(first));
        }

        #[test]
        fn runs_are_the_set_bits(words in proptest::array::uniform8(any::<u64>())) {
            let bits = Bits(words);
            let mut seen = Bits::default();
            let mut end = 0;
            for (first, count) in bits.runs() {
                prop_assert!(count > 0 && (first > end || end == 0));
                end = first + count;
                seen = seen.or(Bits::span(first, count));
            }
            prop_assert_eq!(seen, bits);
        }
    }

    #[test]
    fn range_is_cut_into_chunks() {
        let cut = |first: u64, pages| {
            let range = PageRange { start: crate::HostVirt(first << crate::PAGE_SHIFT), pages };
            chunks(range).map(|(key, bits)| (key, bits.runs().collect::<Vec<_>>())).collect::<Vec<_>>()
        };
        assert_eq!(cut(510, 515), [(0, vec![(510, 2)]), (1, vec![(0, 512)]), (2, vec![(0, 1)])]);
        assert_eq!((cut(512, 512), cut(700, 0)), (vec![(1, vec![(0, 512)])], vec![]));
    }

    #[test]
    fn a_full_chunk_is_one_run() {
        assert_eq!(Bits::span(0, 512).runs().collect::<Vec<_>>(), [(0, 512)]);
        assert_eq!(Bits::default().runs().next(), None);
    }
}
