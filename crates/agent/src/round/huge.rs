//! The huge pages of a member: looked at whole, and again after a time that doubles while they stay as they are, or the member
//! has other things to do. Which of their small pages have changed meanwhile is seen by their fingerprints.

use host::HUGE_PAGES;
use page::{Fingerprint, HostVirt, PageRange};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// When a huge page that did not change is looked at again, at first and at most.
const AGAIN: (Duration, Duration) = (Duration::from_millis(300), Duration::from_secs(64));
/// While it depends on the moment what is folded, all are looked at again after so long, or what makes it a hundredth of a
/// processor.
const LATER: (Duration, Duration) = (Duration::from_secs(4), Duration::from_micros(100 * 200));

struct HugePage {
    due: Instant,
    wait: Duration,
    /// It has come to be since the look before, and was not fingerprinted yet.
    is_new: bool,
    /// Parts of its pages' fingerprints, if there were any.
    before: Option<Box<[u16; HUGE_PAGES as usize]>>,
}

/// Those that were there at the last look.
#[derive(Default)]
pub struct HugePageList {
    known: BTreeMap<u64, HugePage>,
    /// Split since the last round, to fold some of their pages.
    lately_split: Vec<u64>,
    /// Whether it is known which there were.
    looked: bool,
}

/// What a look showed.
pub struct Look {
    /// Those whose time has come.
    pub due: Vec<PageRange>,
    /// Pages that are no longer parts of huge pages.
    pub split: u64,
}

/// What is seen of a huge page.
#[derive(Default)]
pub struct Seen {
    /// Its pages that have changed since the last time.
    pub changed: Vec<PageRange>,
    /// It has come to be since then.
    pub was_new: bool,
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
        // Of what came to be since the last look all is new; of what is there at the first look, nothing is known.
        let is_new = std::mem::replace(&mut self.looked, true);
        let mut look = Look { due: Vec::new(), split };
        let mut left = budget / HUGE_PAGES + 1;
        for page in there {
            let unknown = || HugePage { due: now, wait: AGAIN.0, is_new, before: None };
            let entry = self.known.entry(page).or_insert_with(unknown);
            if entry.due <= now && left > 0 {
                left -= 1;
                // Until it is fingerprinted, which sets it anew.
                entry.due = now + AGAIN.1;
                look.due.push(PageRange { start: HostVirt(page << page::PAGE_SHIFT), pages: HUGE_PAGES });
            }
        }
        look
    }

    /// Takes in how one looks now. Unless it `is_urgent`, it will be looked at again the later.
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
            (true, true) => (entry.wait * 2).min(AGAIN.1),
            (false, true) => AGAIN.0,
        };
        entry.due = Instant::now() + entry.wait;
        Seen { changed, was_new }
    }

    /// One has come to be whose contents are not new.
    pub fn know(&mut self, start: HostVirt) {
        let entry = HugePage { due: Instant::now() + LATER.0, wait: LATER.0, is_new: false, before: None };
        self.known.insert(start.page(), entry);
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
}
