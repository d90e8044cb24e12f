//! The huge pages of a member. A huge page is looked at as a whole: the fingerprints of its small pages show which of
//! them have changed. It is looked at again after a time that doubles while it stays as it is. While not all resting
//! pages are worth folding, that time is fixed, and longer than the shortest.
//!
//! In a burst, hardly a page is worth folding. So huge pages of which nothing is known are left for that time, too. When a
//! quiet interval begins, those that were left, or were looked at in the burst, are due at once. An interval that is
//! expected to end soon is none here.

use act::HUGE_PAGES;
use page::{Fingerprint, HostVirt, PageRange};
use policy::Worth;
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
    /// Whether it was last looked at, or left, in a burst.
    in_burst: bool,
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
    /// When a look at those of a burst was last brought forward.
    hurried: Option<Instant>,
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

    /// Makes those huge pages due that were looked at, or left, in a burst. This happens no more often than looks come by
    /// themselves in a burst, so it at most doubles their number.
    fn hurry(&mut self, now: Instant) {
        if self.hurried.is_some_and(|then| now.saturating_duration_since(then) < self.later()) {
            return;
        }
        for entry in self.known.values_mut().filter(|entry| entry.in_burst) {
            entry.due = entry.due.min(now);
            self.hurried = Some(now);
        }
    }

    /// The time after which huge pages are looked at again while not all resting pages are worth folding.
    fn later(&self) -> Duration {
        LATER.0.max(LATER.1 * u32::try_from(self.known.len()).unwrap_or(u32::MAX))
    }

    /// Replaces the list by these huge pages, given as ordered ranges. Returns those that are due: as many as hold
    /// `budget` small pages, the last one as a whole.
    pub fn look(&mut self, ranges: &[PageRange], budget: u64, in_burst: bool, now: Instant) -> Look {
        if !in_burst {
            self.hurry(now);
        }
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
        let first_due = if in_burst && !is_new { now + self.later() } else { now };
        let mut left = budget.div_ceil(HUGE_PAGES);
        for page in there {
            let unknown = || HugePage { due: first_due, wait: AGAIN.0, is_new, in_burst, before: None };
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

    /// Records the fingerprints of a huge page. Unless all pages that rest are of `worth`, the next look at it comes later.
    pub fn seen(&mut self, start: HostVirt, fingerprints: &[Fingerprint], worth: Worth) -> Seen {
        let later = self.later();
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
        entry.in_burst = matches!(worth, Worth::Ages(..));
        entry.wait = match (changed.is_empty(), worth == Worth::All) {
            (_, false) => later,
            (true, true) => page::doubled(Some(entry.wait), AGAIN),
            (false, true) => AGAIN.0,
        };
        entry.due = Instant::now() + entry.wait;
        Seen { changed, was_new }
    }

    /// Records a new huge page whose contents are not new.
    pub fn know(&mut self, start: HostVirt) {
        let due = Instant::now() + LATER.0;
        let entry = HugePage { due, wait: LATER.0, is_new: false, in_burst: false, before: None };
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

    /// Makes all due.
    #[cfg(test)]
    pub fn make_due(&mut self, now: Instant) {
        self.known.values_mut().for_each(|entry| entry.due = now);
    }

    /// Forgets all, so that the next look is as the first one.
    pub fn forget(&mut self) {
        self.known.clear();
        self.looked = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use policy::TODAY;

    /// Looks so many seconds after `begin`, and returns the number of huge pages that are due. Their next look is planned by the
    /// clock, as if all happened at `begin`.
    fn look(list: &mut HugePageList, begin: Instant, seconds: u64, worth: Worth) -> usize {
        let there = PageRange { start: HostVirt(0), pages: 2 * HUGE_PAGES };
        let (now, in_burst) = (begin + Duration::from_secs(seconds), matches!(worth, Worth::Ages(..)));
        let due = list.look(&[there], u64::MAX, in_burst, now).due;
        due.iter().for_each(|huge| drop(list.seen(huge.start, &[Fingerprint(1); HUGE_PAGES as usize], worth)));
        due.len()
    }

    #[test]
    fn huge_pages_of_burst_are_due_once_quiet_interval_begins_and_not_over_and_over() {
        let (mut list, begin, later) = (HugePageList::default(), Instant::now(), LATER.0.as_secs());
        let (burst, quiet) = (Worth::Ages(0, TODAY.judged.probes), Worth::Rested(4));
        let mut at = |seconds, worth| look(&mut list, begin, seconds, worth);
        assert_eq!([at(0, burst), at(0, quiet), at(0, quiet)], [0, 2, 0]);
        // Another burst, and a gap in it.
        assert_eq!([at(100 * later, burst), at(later - 1, quiet)], [2, 0]);
        assert_eq!([at(later, quiet), at(later, quiet)], [2, 0]);
        // Those that were looked at in the quiet interval are not hurried.
        list.hurried = None;
        assert_eq!(look(&mut list, begin, later - 1, quiet), 0);
    }
}
