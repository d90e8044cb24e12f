//! The huge pages of a member. A huge page is looked at as a whole: the fingerprints of its small pages show which of
//! them have changed. It is looked at again after a time that doubles while it stays as it is. While not all resting
//! pages are worth folding, that time is fixed, and longer than the shortest.

use act::HUGE_PAGES;
use page::{Fingerprint, HostVirt, PageRange};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Shortest and longest time after which a huge page that did not change is looked at again: 300 ms, 64 s.
const AGAIN: (Duration, Duration) = (Duration::from_millis(300), Duration::from_secs(64));
/// Shortest time after which huge pages are looked at again while not all resting pages are worth folding. It is 4 s,
/// or 20 ms for each huge page, which takes 1/100 of a processor.
const LATER: (Duration, Duration) = (Duration::from_secs(4), Duration::from_micros(100 * 200));

struct HugePage {
    due: Instant,
    wait: Duration,
    /// Whether the huge page appeared after the last look, and was not fingerprinted yet.
    is_new: bool,
    /// Parts of its pages' fingerprints, if it was fingerprinted.
    before: Option<Box<[u16; HUGE_PAGES as usize]>>,
}

/// The huge pages at the last look.
#[derive(Default)]
pub struct HugePageList {
    known: BTreeMap<u64, HugePage>,
    /// Huge pages that were split since the last round, to fold some of their pages.
    lately_split: Vec<u64>,
    /// Whether there was a look.
    looked: bool,
}

/// The result of a look.
pub struct Look {
    /// Huge pages whose next look is due.
    pub due: Vec<PageRange>,
    /// Pages that are no longer parts of huge pages.
    pub split: u64,
}

/// The result of fingerprinting a huge page.
#[derive(Default)]
pub struct Seen {
    /// Those of its pages that have changed since the last time.
    pub changed: Vec<PageRange>,
    /// Whether it has come to be since then.
    pub was_new: bool,
}

impl HugePageList {
    /// Whether there was none at the last look.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Replaces the list by these huge pages, given as ordered ranges. Returns those that are due: as many as hold
    /// `budget` small pages, the last one as a whole.
    pub fn look(&mut self, ranges: &[PageRange], budget: u64, now: Instant) -> Look {
        let whole = |range: &PageRange| {
            let (first, end) = (range.start.page().next_multiple_of(HUGE_PAGES), range.end().page());
            (first..).step_by(HUGE_PAGES as usize).take_while(move |page| page + HUGE_PAGES <= end)
        };
        let there: Vec<u64> = ranges.iter().flat_map(whole).collect();
        let before = self.known.len();
        self.known.retain(|page, _| there.binary_search(page).is_ok());
        let split = (before - self.known.len()) as u64 * HUGE_PAGES;
        // Huge pages that came to be since the last look are new. Of those that the first look finds, nothing is known.
        let is_new = std::mem::replace(&mut self.looked, true);
        let mut look = Look { due: Vec::new(), split };
        let mut left = budget.div_ceil(HUGE_PAGES);
        for page in there {
            let unknown = || HugePage { due: now, wait: AGAIN.0, is_new, before: None };
            let entry = self.known.entry(page).or_insert_with(unknown);
            if entry.due <= now && left > 0 {
                left -= 1;
                // Fingerprinting sets this anew.
                entry.due = now + AGAIN.1;
                look.due.push(PageRange { start: HostVirt(page << page::PAGE_SHIFT), pages: HUGE_PAGES });
            }
        }
        look
    }

    /// Records the fingerprints of a huge page. Unless this `is_urgent`, the next look at it comes later.
    pub fn seen(&mut self, start: HostVirt, fingerprints: &[Fingerprint], is_urgent: bool) -> Seen {
        let later = LATER.1 * u32::try_from(self.known.len()).unwrap_or(u32::MAX);
        let Some(entry) = self.known.get_mut(&start.page()) else { return Seen::default() };
        let was_new = std::mem::take(&mut entry.is_new);
        let is_first = entry.before.is_none();
        let before = entry.before.get_or_insert_with(|| Box::new([0; HUGE_PAGES as usize]));
        let mut changed = Vec::new();
        for (at, (before, now)) in before.iter_mut().zip(fingerprints).enumerate() {
            let is_other = std::mem::replace(before, now.0 as u16) != now.0 as u16;
            if was_new || is_other && !is_first {
                changed.push(PageRange { start: start.add_pages(at as u64), pages: 1 });
            }
        }
        entry.wait = match (changed.is_empty(), is_urgent) {
            (_, false) => LATER.0.max(later),
            (true, true) => page::doubled(Some(entry.wait), AGAIN),
            (false, true) => AGAIN.0,
        };
        entry.due = Instant::now() + entry.wait;
        Seen { changed, was_new }
    }

    /// Records a new huge page whose contents are not new.
    pub fn know(&mut self, start: HostVirt) {
        let entry = HugePage { due: Instant::now() + LATER.0, wait: LATER.0, is_new: false, before: None };
        self.known.insert(start.page(), entry);
    }

    /// The start of the huge page that a page is part of, if such a huge page is known. The caller splits it.
    pub fn split(&mut self, page: HostVirt) -> Option<HostVirt> {
        let first = page.page() / HUGE_PAGES * HUGE_PAGES;
        self.known.remove(&first)?;
        self.lately_split.push(first);
        Some(HostVirt(first << page::PAGE_SHIFT))
    }

    /// The places of huge pages that were split since the last call, in order.
    pub fn take_split(&mut self) -> Vec<PageRange> {
        let mut split = std::mem::take(&mut self.lately_split);
        split.sort_unstable();
        let range = |page| PageRange { start: HostVirt(page << page::PAGE_SHIFT), pages: HUGE_PAGES };
        split.into_iter().map(range).collect()
    }

    /// Forgets all, so that the next look is as the first one.
    pub fn forget(&mut self) {
        self.known.clear();
        self.looked = false;
    }
}
