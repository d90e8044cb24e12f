//! Whether a huge page is worth splitting.
//!
//! A huge page makes a program faster (fewer TLB misses), and folding any of its small pages splits it. So it is split
//! only if enough of its 512 pages would fold. One of the 512 pages counts if it has the same content as
//!
//! - the page of zeros, where zeros are folded,
//! - a slot,
//! - another page of the same huge page,
//! - a small page seen elsewhere, or
//! - a page of another huge page that has enough contents in common with this one to be worth splitting itself.
//!
//! Without the last condition, two huge pages could be split for a few pages.

use crate::index::Entry;
use crate::plan::Planner;
use crate::table::{CHUNK_PAGES, Mark, MemberId, PageRef};
use page::{Fingerprint, HostVirt};
use std::collections::HashMap;

/// Chunks of 64 pages in a huge page.
const CHUNKS: u64 = 512 / CHUNK_PAGES;

impl Planner {
    /// Whether enough pages of a huge page would fold that it is to be split. If so, other huge pages that have enough
    /// contents in common with it lose the mark that keeps them whole.
    pub(crate) fn is_worth_splitting(
        &mut self,
        member: MemberId,
        start: HostVirt,
        fingerprints: &[Fingerprint],
    ) -> bool {
        let Some(least) = self.policy.split_huge_at.filter(|_| self.policy.folds) else { return false };
        let own = (member, start.page() / CHUNK_PAGES / CHUNKS);
        let mut fold = 0;
        let mut duplicates: HashMap<(MemberId, u64), Vec<PageRef>> = HashMap::new();
        let mut sorted: Vec<u64> = fingerprints.iter().map(|f| f.0).collect();
        sorted.sort_unstable();
        for (at, fingerprint) in sorted.iter().enumerate() {
            let among_them = at > 0 && sorted[at - 1] == *fingerprint;
            // The agent sends 0 for a page that is not to be folded.
            if *fingerprint == 0 {
                continue;
            }
            match self.index.find(self.key(*fingerprint, member), &self.keys()) {
                _ if *fingerprint == Fingerprint::ZERO_PAGE.0 => fold += u32::from(self.policy.zeros),
                Some(Entry::Slot(_)) => fold += 1,
                _ if among_them => fold += 1,
                Some(Entry::Page(page)) if self.is_shareable(page) => fold += 1,
                Some(Entry::Page(page)) if self.table.is(page, Mark::Huge) => {
                    let place = (self.table.member(page), self.table.chunk_number(page) / CHUNKS);
                    if place != own {
                        duplicates.entry(place).or_default().push(page);
                    }
                }
                _ => {}
            }
        }
        duplicates.retain(|_, pages| pages.len() as u32 >= least);
        fold += duplicates.values().map(|pages| pages.len() as u32).sum::<u32>();
        if fold < least {
            return false;
        }
        for page in duplicates.into_values().flatten() {
            self.table.clear(page, Mark::Huge);
        }
        true
    }
}
