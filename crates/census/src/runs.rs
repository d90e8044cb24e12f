//! Runs: stretches of neighbouring pages of one guest that match neighbouring pages of another.
//!
//! Each page that another guest holds too gets a partner: the first such page in the order of the scan. Neighbours
//! that have neighbouring partners form a run. A run matters to a merger, because it can be mapped as a whole.
//!
//! Memory is fixed. In a census of more than [`MOST_POSITIONS`] positions, only evenly spaced stretches are looked at,
//! the same ones whatever the bound of the index. A run is cut where a stretch ends.

use crate::{Entry, RunLengths};
use page::GuestIndex;

/// Most positions for which a partner is kept. In a larger census, only every nth stretch is looked at.
const MOST_POSITIONS: u32 = 1 << 20;
/// Number of neighbouring positions that are looked at or left out together.
const STRETCH_POSITIONS: u32 = 1 << 12;
/// Mark of a position without a page.
const NO_PAGE: u32 = u32::MAX;
/// Mark of a position whose page matches no page of another guest.
const NO_PARTNER: u32 = u32::MAX - 1;

/// The partner of every position looked at.
#[derive(Debug)]
pub struct Partners {
    every_nth_stretch: u32,
    partner: Vec<u32>,
}

impl Partners {
    /// Without partners yet, for a scan of `positions` positions.
    pub fn new(positions: u32) -> Self {
        let every_nth_stretch = positions.div_ceil(MOST_POSITIONS).max(1);
        let stretches = positions.div_ceil(STRETCH_POSITIONS).div_ceil(every_nth_stretch);
        Self { every_nth_stretch, partner: vec![NO_PAGE; (stretches * STRETCH_POSITIONS) as usize] }
    }

    fn slot(&self, position: u32) -> Option<usize> {
        let (stretch, offset) = (position / STRETCH_POSITIONS, position % STRETCH_POSITIONS);
        let looked_at = stretch.is_multiple_of(self.every_nth_stretch);
        looked_at.then(|| (stretch / self.every_nth_stretch * STRETCH_POSITIONS + offset) as usize)
    }

    /// Gives each page of one content its partner. Frames that another process maps too are shared already, and get
    /// none.
    pub fn class(&mut self, class: &[Entry]) {
        let candidates = || class.iter().filter(|e| e.owner() != GuestIndex::HOST && !e.mapped_elsewhere());
        let Some(first) = candidates().min_by_key(|e| e.position()) else { return };
        let others = candidates().filter(|e| e.owner() != first.owner());
        let second = others.map(|e| e.position()).min().unwrap_or(NO_PARTNER);
        for entry in candidates() {
            let partner = if entry.owner() == first.owner() { second } else { first.position() };
            if let Some(slot) = self.slot(entry.position()) {
                self.partner[slot] = partner;
            }
        }
    }

    /// Joins the pairs of neighbours into runs.
    pub fn finish(&self) -> RunLengths {
        let mut runs: Vec<u64> = Vec::new();
        for stretch in self.partner.chunks(STRETCH_POSITIONS as usize) {
            let matched = |p: u32| p < NO_PARTNER;
            let continues = |a: &u32, b: &u32| matched(*a) && matched(*b) && *b == *a + 1;
            runs.extend(stretch.chunk_by(continues).filter(|run| matched(run[0])).map(|run| run.len() as u64));
        }
        runs.sort_unstable();
        let matched_pages: u64 = runs.iter().sum();
        let long: u64 = runs.iter().filter(|&&n| n >= 8).sum();
        let mut runs_by_log2_length = vec![0; runs.last().map_or(0, |n| n.ilog2() as usize + 1)];
        let mut pages_by_log2_length = runs_by_log2_length.clone();
        for length in &runs {
            runs_by_log2_length[length.ilog2() as usize] += 1;
            pages_by_log2_length[length.ilog2() as usize] += length;
        }
        let share = |part: u64, of: u64| if of == 0 { 0.0 } else { part as f64 / of as f64 };
        RunLengths {
            one_stretch_in: self.every_nth_stretch,
            pages_looked_at: self.partner.iter().filter(|&&p| p != NO_PAGE).count() as u64,
            matched_pages,
            runs: runs.len() as u64,
            mean: share(matched_pages, runs.len() as u64),
            median: runs.get(runs.len() / 2).copied().unwrap_or(0),
            share_in_runs_of_8: share(long, matched_pages),
            runs_by_log2_length,
            pages_by_log2_length,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_goes_on_while_neighbours_match_neighbours() {
        // Guest 0 holds contents 1..=10 at 0..10; guest 1 holds 3,4,5 at 100.., then 9 at 103, then 50.
        let mut partners = Partners::new(200);
        for content in 1..=10 {
            let mut class = vec![Entry::sample(0, content - 1, u64::from(content))];
            match content {
                3..=5 => class.push(Entry::sample(1, 97 + content, u64::from(content))),
                9 => class.push(Entry::sample(1, 103, 9)),
                _ => {}
            }
            partners.class(&class);
        }
        partners.class(&[Entry::sample(1, 104, 50), Entry::sample(1, 105, 50)]);
        let found = partners.finish();
        assert_eq!((found.pages_looked_at, found.matched_pages), (16, 8));
        assert_eq!((found.runs, found.median, found.mean), (4, 3, 2.0));
        assert_eq!(found.runs_by_log2_length, [2, 2]);
        assert_eq!(found.pages_by_log2_length, [2, 6]);
    }

    #[test]
    fn a_large_census_is_sampled_in_fixed_memory() {
        let partners = Partners::new(u32::MAX);
        assert!(partners.partner.len() <= (MOST_POSITIONS + STRETCH_POSITIONS) as usize);
        assert_eq!(partners.finish().one_stretch_in, partners.every_nth_stretch);
        assert!(partners.every_nth_stretch > 4000);
        assert_eq!(partners.slot(0), Some(0));
        assert_eq!(partners.slot(STRETCH_POSITIONS), None);
        let last = (u32::MAX / STRETCH_POSITIONS / partners.every_nth_stretch) * partners.every_nth_stretch;
        assert!(partners.slot(last * STRETCH_POSITIONS).unwrap() < partners.partner.len());
    }
}
