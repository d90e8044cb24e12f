//! The broken pages of a member. They are fingerprinted now and then: each after a time that doubles. While much
//! changes, the policy bounds this time to a few seconds.

use page::{CHUNK_PAGES, Fingerprint, HostVirt, PAGE_SHIFT, PageRange};
use policy::{Cadence, TODAY, Worth};
use std::collections::BTreeMap;

/// Longest time after which a broken page is fingerprinted again, in seconds.
const LONGEST: u32 = TODAY.seldom.broken_longest;
const _: () = assert!(LONGEST <= u8::MAX as u32, "as it is kept for each page");
/// Delay, in seconds, from which on all overdue pages count as equally late.
const LATEST: usize = 255;

/// A broken page, as it was when last fingerprinted.
#[derive(Clone, Copy)]
struct BrokenPage {
    fingerprint: u64,
    /// Since when its fingerprint has not changed, in seconds since the first round.
    since: u32,
    /// When it is fingerprinted next, in seconds since the first round.
    due: u32,
    /// Its index in its chunk.
    at: u16,
    /// Time from its last fingerprint to the next one, in seconds.
    wait: u8,
    /// Whether the worker was told that the page rests.
    told: bool,
}

/// The broken pages at the last look, in order, by chunk. Their number may vary much. A single list would be built anew
/// at each look while the former one still exists, in memory that never shrinks.
#[derive(Default)]
pub struct BrokenPageList(BTreeMap<u64, Box<[BrokenPage]>>);

impl BrokenPageList {
    /// Replaces the list by these broken pages, given as ordered ranges. Returns at most `budget` of the pages that are
    /// due, the most overdue first. A new page is due at once.
    pub fn look(&mut self, ranges: &[PageRange], now: u32, budget: u64, cadence: Cadence) -> Vec<PageRange> {
        let Cadence { broken_first: wait, broken_longest: longest, .. } = cadence;
        let mut before = std::mem::take(&mut self.0);
        let mut pages = ranges.iter().flat_map(|range| range.start.page()..range.end().page()).peekable();
        while let Some(key) = pages.peek().map(|page| page / CHUNK_PAGES) {
            let mut known = before.remove(&key).unwrap_or_default().into_iter().peekable();
            let mut broken = Vec::new();
            while let Some(page) = pages.next_if(|page| page / CHUNK_PAGES == key) {
                let at = (page % CHUNK_PAGES) as u16;
                while known.next_if(|known| known.at < at).is_some() {}
                let new = BrokenPage { fingerprint: 0, since: now, due: now, at, wait: wait as u8, told: false };
                let mut entry = known.next_if(|known| known.at == at).unwrap_or(new);
                entry.due = entry.due.min(now + longest);
                broken.push(entry);
            }
            self.0.insert(key, broken.into_boxed_slice());
        }
        self.take_due(now, budget)
    }

    /// At most `budget` of the pages that are due: the most overdue ones.
    fn take_due(&mut self, now: u32, budget: u64) -> Vec<PageRange> {
        let late = |entry: &BrokenPage| Some((now.checked_sub(entry.due)? as usize).min(LATEST));
        let mut number = [0_u64; LATEST + 1];
        let all = self.0.values().flat_map(|broken| broken.iter());
        all.filter_map(late).for_each(|seconds| number[seconds] += 1);
        // All pages that are overdue by more than `least` seconds are taken, and `left` of those that are overdue by
        // `least` seconds.
        let (mut least, mut left) = (LATEST, budget);
        while least > 0 && number[least] <= left {
            left -= number[least];
            least -= 1;
        }
        let mut due: Vec<PageRange> = Vec::new();
        for (key, broken) in &mut self.0 {
            for entry in broken.iter_mut() {
                let Some(seconds) = late(entry).filter(|seconds| *seconds >= least) else { continue };
                if seconds == least {
                    let Some(fewer) = left.checked_sub(1) else { continue };
                    left = fewer;
                }
                // Fingerprinting sets this anew.
                entry.due = now + LONGEST;
                let start = HostVirt((key * CHUNK_PAGES + u64::from(entry.at)) << PAGE_SHIFT);
                match due.last_mut() {
                    Some(last) if last.end() == start => last.pages += 1,
                    _ => due.push(PageRange { start, pages: 1 }),
                }
            }
        }
        due
    }

    /// Records the fingerprints of pages. Returns, for each page, whether it has rested, is worth folding and was not
    /// reported before; and the pages that were written. Each page is due again after a time that begins at `wait`
    /// seconds and doubles.
    pub fn have_rested(
        &mut self,
        start: HostVirt,
        fingerprints: &[Fingerprint],
        now: u32,
        (wait, worth): (u32, Worth),
    ) -> (Vec<bool>, Vec<PageRange>) {
        let (mut tell, mut written) = (Vec::with_capacity(fingerprints.len()), Vec::new());
        for (page, fingerprint) in (start.page()..).zip(fingerprints) {
            let Some(entry) = self.entry(page) else {
                tell.push(false);
                continue;
            };
            let (is_new, is_same) = (entry.fingerprint == 0, entry.fingerprint == fingerprint.0);
            if !is_same {
                (entry.since, entry.fingerprint) = (now, fingerprint.0);
            }
            let rested = is_same && worth.allows(page, now - entry.since);
            tell.push(rested && !entry.told);
            entry.told = rested;
            if !is_new && !is_same {
                written.push(PageRange { start: HostVirt(page << PAGE_SHIFT), pages: 1 });
            }
            if !is_new {
                // The time doubles in either case: a page that has changed is likely to change again, and one that has
                // not is known.
                entry.wait = (u32::from(entry.wait) * 2).clamp(wait, if wait == 0 { 0 } else { LONGEST }) as u8;
            }
            entry.due = now + u32::from(entry.wait);
        }
        (tell, written)
    }

    /// Has pages of the range that rest reported again.
    pub fn tell_again(&mut self, range: PageRange) {
        self.within(range, |known| known.told = false);
    }

    /// Forgets what is known of pages that the worker has handled: they were folded, or had changed. Such a page may be
    /// broken again before the next look, with the same content. It counts as a new broken page then.
    pub fn forget(&mut self, range: PageRange) {
        self.within(range, |known| {
            (known.fingerprint, known.due, known.wait, known.told) = (0, 0, 0, false);
        });
    }

    fn within(&mut self, range: PageRange, mut change: impl FnMut(&mut BrokenPage)) {
        let (first, end) = (range.start.page(), range.end().page());
        for (key, broken) in self.0.range_mut(first / CHUNK_PAGES..end.div_ceil(CHUNK_PAGES)) {
            let is_within = |known: &&mut BrokenPage| (first..end).contains(&(key * CHUNK_PAGES + u64::from(known.at)));
            broken.iter_mut().filter(is_within).for_each(&mut change);
        }
    }

    fn entry(&mut self, page: u64) -> Option<&mut BrokenPage> {
        let broken = self.0.get_mut(&(page / CHUNK_PAGES))?;
        let found = find(broken, page)?;
        broken.get_mut(found)
    }

    /// Whether the worker was told that a page rests, and the page has not changed since.
    pub fn is_told(&self, at: HostVirt) -> bool {
        let broken = self.0.get(&(at.page() / CHUNK_PAGES));
        broken.is_some_and(|broken| find(broken, at.page()).is_some_and(|found| broken[found].told))
    }
}

/// The index of a page among the broken pages of its chunk.
fn find(broken: &[BrokenPage], page: u64) -> Option<usize> {
    broken.binary_search_by_key(&((page % CHUNK_PAGES) as u16), |known| known.at).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cadence of a member that is folded as fast as can be.
    const EAGER: Cadence = Cadence { broken_first: 0, ..TODAY.busy };

    #[test]
    fn resting_page_is_told_once_and_again_on_demand() {
        let mut list = BrokenPageList::default();
        let pages = |first: u64, pages| PageRange { start: HostVirt(first << PAGE_SHIFT), pages };
        let (mut now, first) = (0, 2 * CHUNK_PAGES - 1);
        let mut tell = |list: &mut BrokenPageList, contents: [u64; 3]| {
            now += 4;
            assert_eq!(list.look(&[pages(first, 3)], now, u64::MAX, EAGER), [pages(first, 3)]);
            list.have_rested(pages(first, 1).start, &contents.map(Fingerprint), now, (0, Worth::All)).0
        };
        assert_eq!(tell(&mut list, [1, 2, 3]), [false; 3]);
        assert_eq!(tell(&mut list, [1, 2, 30]), [true, true, false]);
        assert_eq!(tell(&mut list, [1, 2, 30]), [false, false, true]);
        list.tell_again(pages(first + 1, 5));
        assert_eq!(tell(&mut list, [1, 2, 30]), [false, true, true]);
        // A page that is no longer broken is forgotten: beside one that still is, and with its whole chunk.
        list.look(&[pages(first + 2, 1)], 17, u64::MAX, EAGER);
        list.have_rested(pages(first + 2, 1).start, &[Fingerprint(30)], 17, (0, Worth::All));
        assert_eq!((list.0.len(), list.entry(first).is_none(), list.entry(first + 2).is_some()), (1, true, true));
        assert_eq!(tell(&mut list, [1, 2, 30]), [false; 3]);
        list.tell_again(pages(0, u64::MAX >> PAGE_SHIFT));
        assert_eq!(tell(&mut list, [1, 2, 30]), [true; 3]);
    }

    /// Such a page was never told again, and stayed private until its content changed.
    #[test]
    fn page_that_is_broken_again_between_two_looks_is_told_again() {
        let (mut list, page) = (BrokenPageList::default(), PageRange { start: HostVirt(0), pages: 1 });
        let told = |list: &mut BrokenPageList, now| {
            assert_eq!(list.look(&[page], now, u64::MAX, TODAY.seldom), [page]);
            list.have_rested(page.start, &[Fingerprint(1)], now, (2, Worth::All)).0 == [true]
        };
        assert_eq!([0, 2, 6].map(|now| told(&mut list, now)), [false, true, false]);
        list.forget(page);
        assert_eq!([7, 9].map(|now| told(&mut list, now)), [false, true]);
    }

    #[test]
    fn pages_beyond_the_budget_come_next() {
        let (mut list, all) = (BrokenPageList::default(), PageRange { start: HostVirt(0), pages: 2 * CHUNK_PAGES });
        let (mut seen, mut now) = (vec![0; all.pages as usize], 0);
        for _ in 0..6 {
            now += 1;
            let due = list.look(&[all], now, CHUNK_PAGES / 3 + 1, TODAY.seldom);
            assert!(due.iter().map(|range| range.pages).sum::<u64>() <= CHUNK_PAGES / 3 + 1);
            due.iter()
                .flat_map(|range| range.start.page()..range.end().page())
                .for_each(|page| seen[page as usize] += 1);
        }
        assert!(seen.iter().all(|times| *times == 1), "{seen:?}");
        assert!(list.look(&[all], now, 0, TODAY.seldom).is_empty());
    }

    #[test]
    fn broken_pages_are_due_sooner_the_more_changes() {
        let page = [PageRange { start: HostVirt(0), pages: 1 }];
        for (cadence, after) in [(TODAY.busiest, 2), (TODAY.busy, 4), (TODAY.seldom, 128)] {
            let (mut list, mut now) = (BrokenPageList::default(), 0);
            assert_eq!(list.look(&page, now, u64::MAX, cadence), page);
            // The page has stayed the same for long.
            for _ in 0..8 {
                now += 128;
                assert_eq!(list.look(&page, now, u64::MAX, cadence), page);
                list.have_rested(page[0].start, &[Fingerprint(1)], now, (2, Worth::All));
            }
            list.look(&page, now, u64::MAX, cadence);
            assert_eq!(
                (1..200).find(|second| !list.look(&page, now + second, u64::MAX, cadence).is_empty()),
                Some(after)
            );
        }
    }
}
