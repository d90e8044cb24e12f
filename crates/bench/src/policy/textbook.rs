//! The textbook rule, ski rental: a page is folded when it has rested for a while. That while doubles for its block with
//! a short-lived fold, and halves with one that has lived.

use super::replay::{LIFE_SECONDS, Rule};
use page::Bits;
use std::collections::BTreeMap;

/// The numbers of the rule.
#[derive(Clone, Copy, Debug)]
pub struct Rental {
    /// Rest after which a page is folded of whose block nothing is known, in seconds.
    pub first_seconds: u32,
    /// Least and most of that rest, in seconds.
    pub bounds_seconds: [u32; 2],
    /// Length of a block, in pages.
    pub block_pages: u64,
}

/// The numbers that it begins with.
pub const RENTAL: Rental = Rental { first_seconds: 4, bounds_seconds: [2, 1024], block_pages: 16 };

/// A block of pages that have one while.
#[derive(Clone, Copy, Debug)]
struct Block {
    /// Seconds of rest after which a page is folded.
    rest: u32,
    /// Second until which the while does not double again. All pages of a block that are written together are one event.
    doubled_until: u32,
    /// Second until which the while does not halve again.
    halved_until: u32,
}

/// Seconds at which the pages of a chunk were written and folded; 0 for never.
#[derive(Clone, Debug, Default)]
struct Seconds {
    written: BTreeMap<u64, u32>,
    folded: BTreeMap<u64, u32>,
}

/// The textbook rule.
#[derive(Debug)]
pub struct Textbook {
    params: &'static Rental,
    second: u32,
    chunks: BTreeMap<u64, Seconds>,
    blocks: BTreeMap<(u64, u64), Block>,
}

impl Textbook {
    /// Nothing was folded so far.
    pub const fn new(params: &'static Rental) -> Self {
        Self { params, second: 0, chunks: BTreeMap::new(), blocks: BTreeMap::new() }
    }

    fn block(&mut self, key: u64, page: u64) -> &mut Block {
        let new = Block { rest: self.params.first_seconds, doubled_until: 0, halved_until: 0 };
        self.blocks.entry((key, page / self.params.block_pages)).or_insert(new)
    }
}

impl Rule for Textbook {
    fn begin(&mut self, second: u32) {
        self.second = second;
    }

    fn written(&mut self, key: u64, written: Bits, folded: Bits) {
        let (now, [least, most]) = (self.second, self.params.bounds_seconds);
        for page in folded.pages() {
            let chunk = self.chunks.entry(key).or_default();
            let since = chunk.folded.remove(&page).unwrap_or(now);
            let block = self.block(key, page);
            if now - since >= LIFE_SECONDS {
                if now >= block.halved_until {
                    (block.rest, block.halved_until) = ((block.rest / 2).max(least), now + 1);
                }
            } else if now >= block.doubled_until {
                (block.rest, block.doubled_until) = ((block.rest * 2).min(most), now + 1);
            }
        }
        let chunk = self.chunks.entry(key).or_default();
        chunk.written.extend(written.pages().map(|page| (page, now)));
    }

    fn admit(&mut self, key: u64, rested: Bits) -> Bits {
        let chunk = self.chunks.entry(key).or_default();
        let blocks = &self.blocks;
        rested.filter(|page| {
            let written = chunk.written.get(&page).copied().unwrap_or(0);
            let block = blocks.get(&(key, page / self.params.block_pages));
            self.second - written >= block.map_or(self.params.first_seconds, |block| block.rest)
        })
    }

    fn folded(&mut self, key: u64, pages: Bits) {
        let chunk = self.chunks.entry(key).or_default();
        chunk.folded.extend(pages.pages().map(|page| (page, self.second)));
    }

    fn end(&mut self, _: u64) {}
}
