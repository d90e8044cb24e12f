//! Why pages have not been reported to the worker: asked by an operator, or by a process that parks a guest and waits
//! until it is folded.

use super::{Kind, Rounds};
use crate::table;
use host::Pagemap;
use page::{HostVirt, PAGE_SHIFT, PageRange};
use std::time::Instant;
use wire::Why;

impl Rounds {
    /// For each of these pages, why it was not reported; [`Why::Other`] if it was. The next round comes sooner, because
    /// the asker may wait for what it finds.
    pub fn why(&mut self, pagemap: &Pagemap, ranges: &[PageRange]) -> Vec<Why> {
        self.clock.next = self.clock.next.min(self.clock.last + self.soon());
        let worth = self.policy.admit(Instant::now());
        let mut reasons = Vec::new();
        for range in ranges {
            let table = table::lock();
            let mut of_range = table.why(*range, worth);
            let broken = table.broken_pages(*range);
            drop(table);
            let (is_broken, is_unseen) = (marks(*range, &broken), marks(*range, &self.unseen(pagemap, *range)));
            for (n, why) in of_range.iter_mut().enumerate().filter(|(_, why)| **why == Why::Other) {
                let at = HostVirt((range.start.page() + n as u64) << PAGE_SHIFT);
                let is_young = if is_broken[n] { !self.broken.is_told(at) } else { is_unseen[n] };
                if is_young {
                    *why = Why::Young;
                }
            }
            reasons.append(&mut of_range);
        }
        reasons
    }

    /// Pages of a range that no round has seen as they are now: they were written since the last one, are not watched,
    /// or wait to be fingerprinted.
    fn unseen(&self, pagemap: &Pagemap, range: PageRange) -> Vec<PageRange> {
        let waits = self.rested.iter().filter(|rested| rested.kind == Kind::Small).map(|rested| rested.range);
        let mut unseen: Vec<PageRange> =
            waits.filter(|part| part.start < range.end() && range.start < part.end()).collect();
        if self.notes_writes {
            for look in [Pagemap::written_ranges, Pagemap::unwatched_ranges] {
                // If the kernel does not tell, there is only what the table knows.
                unseen.append(&mut look(pagemap, range.start, range.end()).unwrap_or_default());
            }
        }
        unseen
    }
}

/// For each page of a range, whether it is in one of these parts.
fn marks(range: PageRange, parts: &[PageRange]) -> Vec<bool> {
    let mut marks = vec![false; range.pages as usize];
    for part in parts {
        for page in part.start.max(range.start).page()..part.end().min(range.end()).page() {
            marks[(page - range.start.page()) as usize] = true;
        }
    }
    marks
}
