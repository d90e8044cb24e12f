//! The textbook rule for a cost that is paid once against one that goes on (ski rental). A page is folded when it was
//! not written for some time. That time is kept for each block of pages: it doubles with a short-lived fold, and halves
//! with one that has lasted.

use super::replay::{LIFE_SECONDS, Rule};
use page::Bits;
use std::collections::BTreeMap;

/// Parameters of the rule.
#[derive(Clone, Copy, Debug)]
pub struct Rental {
    /// Seconds without a write after which a page is folded, in a block without folds so far.
    pub first_seconds: u32,
    /// Least and most of these seconds.
    pub bounds_seconds: [u32; 2],
    /// Length of a block, in pages.
    pub block_pages: u64,
}

/// The parameters that are compared with the agent's policy.
pub const RENTAL: Rental = Rental { first_seconds: 4, bounds_seconds: [2, 1024], block_pages: 16 };

/// A block of pages with the same waiting time.
#[derive(Clone, Copy, Debug)]
struct Block {
    /// Seconds without a write after which a page of the block is folded.
    rest: u32,
    /// Second before which the waiting time does not double again: pages of a block that are written together count as
    /// one event.
    doubled_until: u32,
    /// Second before which the waiting time does not halve again.
    halved_until: u32,
}

/// For each page of a chunk, the seconds at which it was written last and folded; 0 for never.
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
    /// The rule before anything was folded.
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
