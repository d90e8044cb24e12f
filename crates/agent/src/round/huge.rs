//! The huge pages of a member. A huge page is examined as a whole: the fingerprints of its small pages show which of
//! them have changed. It is examined again after a time that doubles while none changes. While not all resting pages
//! are worth folding, that time is fixed ([`LATER`]).
//!
//! In a burst, hardly any page is worth folding. So huge pages that were never examined are left for that time, too.
//! When a quiet interval begins, huge pages that were left, or were examined in the burst, are due at once. A quiet
//! interval that is expected to end soon does not count as one here.

use act::HUGE_PAGES;
use page::{Fingerprint, HostVirt, PageRange};
use policy::Worth;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Shortest and longest time after which a huge page that did not change is examined again: 300 ms, 64 s.
const AGAIN: (Duration, Duration) = (Duration::from_millis(300), Duration::from_secs(64));
/// Time after which huge pages are examined again while not all resting pages are worth folding: 4 s, but at least 20
/// ms for each huge page, so that it takes 1/100 of a processor's time.
const LATER: (Duration, Duration) = (Duration::from_secs(4), Duration::from_micros(100 * 200));

struct HugePage {
    due: Instant,
    wait: Duration,
    /// Whether the huge page appeared after the last look, and was not fingerprinted yet.
    is_new: bool,
    /// Whether it was last examined, or left, in a burst.
    in_burst: bool,
    /// The low 16 bits of its pages' fingerprints; `None` if it was never fingerprinted.
    before: Option<Box<[u16; HUGE_PAGES as usize]>>,
}

/// The huge pages that the member had at the last look.
#[derive(Default)]
pub struct HugePageList {
    known: BTreeMap<u64, HugePage>,
    /// Huge pages that were split since the last round, to fold some of their pages.
    lately_split: Vec<u64>,
    /// Whether there was a look since the list was made or [forgotten](HugePageList::forget).
    looked: bool,
    /// When huge pages of a burst were last made due ([`HugePageList::hurry`]).
    hurried: Option<Instant>,
}

/// The result of [`HugePageList::look`].
pub struct Look {
    /// Huge pages that are to be fingerprinted now.
    pub due: Vec<PageRange>,
    /// Pages that are no longer parts of huge pages.
    pub split: u64,
}

/// The result of [`HugePageList::seen`].
#[derive(Default)]
pub struct Seen {
    /// Pages of the huge page that have changed since it was last fingerprinted.
    pub changed: Vec<PageRange>,
    /// Whether the huge page has appeared since then.
    pub was_new: bool,
}

impl HugePageList {
    /// Whether the member had no huge pages at the last look.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Makes the huge pages due that were examined, or left, in a burst. This happens no more often than they become
    /// due by themselves in a burst, so it at most doubles the number of examinations.
    fn hurry(&mut self, now: Instant) {
        if self.hurried.is_some_and(|then| now.saturating_duration_since(then) < self.later()) {
            return;
        }
        for entry in self.known.values_mut().filter(|entry| entry.in_burst) {
            entry.due = entry.due.min(now);
            self.hurried = Some(now);
        }
    }

    /// The time after which huge pages are examined again while not all resting pages are worth folding.
    fn later(&self) -> Duration {
        LATER.0.max(LATER.1 * u32::try_from(self.known.len()).unwrap_or(u32::MAX))
    }

    /// Replaces the list by these huge pages, given as ordered ranges. Returns those that are due, until they have at
    /// least `budget` small pages in all.
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
        // Huge pages that have appeared since the last look are new. Of those that the first look finds, this is not
        // known.
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

    /// Records the fingerprints of a huge page. Unless `worth` allows all pages that rest, the next examination comes
    /// later.
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

    /// Adds a huge page that a collapse has made, whose contents are not new.
    pub fn know(&mut self, start: HostVirt) {
        let due = Instant::now() + LATER.0;
        let entry = HugePage { due, wait: LATER.0, is_new: false, in_burst: false, before: None };
        self.known.insert(start.page(), entry);
    }

    /// The start of the huge page that this page is part of, if the list has it; it is removed from the list. The
    /// caller splits it.
    pub fn split(&mut self, page: HostVirt) -> Option<HostVirt> {
        let first = page.page() / HUGE_PAGES * HUGE_PAGES;
        self.known.remove(&first)?;
        self.lately_split.push(first);
        Some(HostVirt(first << page::PAGE_SHIFT))
    }

    /// The ranges of huge pages that were split since the last call, in order.
    pub fn take_split(&mut self) -> Vec<PageRange> {
        let mut split = std::mem::take(&mut self.lately_split);
        split.sort_unstable();
        let range = |page| PageRange { start: HostVirt(page << page::PAGE_SHIFT), pages: HUGE_PAGES };
        split.into_iter().map(range).collect()
    }

    /// Makes all huge pages due.
    #[cfg(test)]
    pub fn make_due(&mut self, now: Instant) {
        self.known.values_mut().for_each(|entry| entry.due = now);
    }

    /// Forgets all huge pages, so that the next look is like the first one.
    pub fn forget(&mut self) {
        self.known.clear();
        self.looked = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use policy::TODAY;

    /// Looks so many seconds after `begin`, and returns the number of huge pages that are due. Their next look is
    /// planned by the clock, as if all happened at `begin`.
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
        // Huge pages that were examined in the quiet interval are not hurried.
        list.hurried = None;
        assert_eq!(look(&mut list, begin, later - 1, quiet), 0);
    }
}
