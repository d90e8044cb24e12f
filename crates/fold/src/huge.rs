//! Whether a huge page is worth splitting.
//!
//! A huge page is fast, and folding any page of it ends that. So its 512 pages are weighed: those that hold zeros, that
//! a slot holds, that some page seen elsewhere holds, or that hold the same as another one among them, would fold. A
//! page seen in another huge page counts only if that one would be worth splitting for what it has in common with
//! this one: otherwise the two would be split for nothing.

use crate::index::Entry;
use crate::plan::Planner;
use crate::table::{CHUNK_PAGES, Mark, MemberId, PageRef};
use page::{Fingerprint, HostVirt};
use std::collections::HashMap;

/// Chunks of 64 pages in a huge page.
const CHUNKS: u64 = 512 / CHUNK_PAGES;

impl Planner {
    /// Whether so many of a huge page's pages would fold that it is to be split; its twins are, too.
    pub(crate) fn is_worth_splitting(
        &mut self,
        member: MemberId,
        start: HostVirt,
        fingerprints: &[Fingerprint],
    ) -> bool {
        let Some(least) = self.policy.split_huge_at.filter(|_| self.policy.folds) else { return false };
        let own = (member, start.page() / CHUNK_PAGES / CHUNKS);
        let mut fold = 0;
        let mut twins: HashMap<(MemberId, u64), Vec<PageRef>> = HashMap::new();
        let mut sorted: Vec<u64> = fingerprints.iter().map(|f| f.0).collect();
        sorted.sort_unstable();
        for (at, fingerprint) in sorted.iter().enumerate() {
            let among_them = at > 0 && sorted[at - 1] == *fingerprint;
            // What its agent keeps to itself.
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
                        twins.entry(place).or_default().push(page);
                    }
                }
                _ => {}
            }
        }
        twins.retain(|_, pages| pages.len() as u32 >= least);
        fold += twins.values().map(|pages| pages.len() as u32).sum::<u32>();
        if fold < least {
            return false;
        }
        for page in twins.into_values().flatten() {
            self.table.clear(page, Mark::Huge);
        }
        true
    }
}
