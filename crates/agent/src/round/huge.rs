//! The huge pages of a member: looked at whole, and again after a time that doubles while they stay as they are.

use crate::turnover::LIFE;
use page::{Fingerprint, HostVirt, PageRange};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A huge page.
pub const HUGE_PAGES: u64 = 512;
/// How many pages of a huge page that has changed are thought to have: nobody counts them.
const CHANGE: u64 = 32;
/// When a huge page that did not change is looked at again, at first and at most.
const AGAIN: (Duration, Duration) = (Duration::from_millis(300), Duration::from_secs(64));

#[derive(Clone, Copy)]
struct HugePage {
    due: Instant,
    wait: Duration,
    fingerprint: u64,
}

/// Those that were there at the last look.
#[derive(Default)]
pub struct HugePageList {
    known: BTreeMap<u64, HugePage>,
    /// Split since the last round, to fold some of their pages.
    lately_split: Vec<u64>,
    /// Whether it is known which there were.
    looked: bool,
    /// Pages of them that changed since the last look, about.
    changed: u64,
}

/// What a look showed.
pub struct Look {
    /// Those whose time has come.
    pub due: Vec<PageRange>,
    /// Pages that changed since the last one, about.
    pub changed: u64,
    /// Pages that are no longer parts of huge pages.
    pub split: u64,
}

impl HugePageList {
    /// Takes in which there are, as ranges in order; at most about `budget` pages are due.
    pub fn look(&mut self, ranges: &[PageRange], budget: u64, now: Instant) -> Look {
        let whole = |range: &PageRange| {
            let (first, end) = (range.start.page().next_multiple_of(HUGE_PAGES), range.end().page());
            (first..).step_by(HUGE_PAGES as usize).take_while(move |page| page + HUGE_PAGES <= end)
        };
        let there: Vec<u64> = ranges.iter().flat_map(whole).collect();
        let before = self.known.len();
        self.known.retain(|page, _| there.binary_search(page).is_ok());
        let split = (before - self.known.len()) as u64 * HUGE_PAGES;
        // Memory that came to be since the last look has changed; at the first look, nothing is known of what changes.
        let looked = std::mem::replace(&mut self.looked, true);
        let new = if looked { (there.len() - self.known.len()) as u64 * HUGE_PAGES } else { 0 };
        let mut look = Look { due: Vec::new(), changed: new + std::mem::take(&mut self.changed), split };
        let mut left = budget / HUGE_PAGES + 1;
        for page in there {
            let entry = self.known.entry(page).or_insert(HugePage { due: now, wait: AGAIN.0, fingerprint: 0 });
            if entry.due <= now && left > 0 {
                left -= 1;
                // Until it is fingerprinted, which sets it anew.
                entry.due = now + AGAIN.1;
                look.due.push(PageRange { start: HostVirt(page << page::PAGE_SHIFT), pages: HUGE_PAGES });
            }
        }
        look
    }

    /// Says whether one has rested: at once, or where much changes for long.
    pub fn has_rested(&mut self, start: HostVirt, fingerprints: &[Fingerprint], is_busy: bool) -> bool {
        let all = fingerprints.iter().fold(0, |all: u64, f| all.rotate_left(1) ^ f.0);
        let Some(entry) = self.known.get_mut(&start.page()) else { return !is_busy };
        entry.wait = if entry.fingerprint == all { (entry.wait * 2).min(AGAIN.1) } else { AGAIN.0 };
        let stayed = entry.fingerprint == all && entry.wait >= LIFE;
        if entry.fingerprint != 0 && entry.fingerprint != all {
            self.changed += CHANGE;
        }
        if is_busy {
            entry.wait = entry.wait.max(LIFE);
        }
        entry.due = Instant::now() + entry.wait;
        entry.fingerprint = all;
        stayed || !is_busy
    }

    /// Where the huge page begins that a page is part of, as far as was seen; it is to be split now.
    pub fn split(&mut self, page: HostVirt) -> Option<HostVirt> {
        let first = page.page() / HUGE_PAGES * HUGE_PAGES;
        self.known.remove(&first)?;
        self.lately_split.push(first);
        Some(HostVirt(first << page::PAGE_SHIFT))
    }

    /// Where those were that were split since this was last asked, in order.
    pub fn take_split(&mut self) -> Vec<PageRange> {
        let mut split = std::mem::take(&mut self.lately_split);
        split.sort_unstable();
        let range = |page| PageRange { start: HostVirt(page << page::PAGE_SHIFT), pages: HUGE_PAGES };
        split.into_iter().map(range).collect()
    }

    /// All are to be looked at as new ones.
    pub fn forget(&mut self) {
        self.known.clear();
        self.looked = false;
    }

    /// Memory that this takes, about.
    pub fn bytes(&self) -> usize {
        self.known.len() * 48
    }
}
