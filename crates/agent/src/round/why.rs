//! Why pages have not been reported to the worker: an answer to an operator's question.

use super::Rounds;
use crate::table;
use page::{HostVirt, PAGE_SHIFT, PageRange};
use std::time::Instant;
use wire::Why;

impl Rounds {
    /// For each of these pages why it was not reported; [`Why::Other`] where it was.
    pub fn why(&self, ranges: &[PageRange]) -> Vec<Why> {
        let worth = self.worth(Instant::now());
        let mut reasons = Vec::new();
        for range in ranges {
            let table = table::lock();
            reasons.append(&mut table.why(*range, worth));
            let broken = table.broken_pages(*range);
            drop(table);
            let first = reasons.len() - range.pages as usize;
            for page in broken.iter().flat_map(|broken| broken.start.page()..broken.end().page()) {
                let why = &mut reasons[first + (page - range.start.page()) as usize];
                if *why == Why::Other && !self.broken.is_told(HostVirt(page << PAGE_SHIFT)) {
                    *why = Why::Young;
                }
            }
        }
        reasons
    }
}
