//! Change over time: the fate of every page since the previous round. A page is compared by its fingerprint at the
//! same address of the same process (after Kloster et al., 2006, who compared snapshots).

use crate::{Change, Entry};
use page::GuestIndex;

/// Neighbouring pages of one process that are neighbours in the order of the scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stretch {
    /// Process that the pages belong to.
    pub pid: u32,
    /// Number of the first page in its address space.
    pub page: u64,
    /// Number of pages.
    pub pages: u32,
    /// Position of the first page.
    pub position: u32,
}

/// State of one page in a round. Twelve bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C, packed(4))]
struct Seen {
    fingerprint: u64,
    /// Second of the watch since which the page has been a duplicate with this content, or one of the two marks below.
    since: u32,
}

/// Mark in [`Seen::since`]: no page sampled at this position.
const ABSENT: u32 = u32::MAX;
/// Mark in [`Seen::since`]: a page whose content nobody else holds.
const UNIQUE: u32 = u32::MAX - 1;

/// One round of a watch.
#[derive(Debug, Default)]
pub struct Round {
    number: u32,
    /// Seconds from the begin of the watch to this round.
    second: u32,
    stretches: Vec<Stretch>,
    seen: Vec<Seen>,
}

impl Round {
    /// Begins a round, `second` seconds after the watch began. `stretches` are sorted, and take up positions below
    /// `end`.
    pub fn begin(number: u32, second: u32, stretches: Vec<Stretch>, end: u32) -> Self {
        debug_assert!(stretches.is_sorted());
        Self { number, second, stretches, seen: vec![Seen { fingerprint: 0, since: ABSENT }; end as usize] }
    }

    /// Records the pages of one content. `duplicate` tells whether the content is held more than once.
    pub fn class(&mut self, class: &[Entry], duplicate: bool) {
        for entry in class.iter().filter(|e| e.owner() != GuestIndex::HOST) {
            let since = if duplicate { self.second } else { UNIQUE };
            self.seen[entry.position() as usize] = Seen { fingerprint: entry.fingerprint().0, since };
        }
    }

    /// Compares this round with the round before. A page that is still a duplicate keeps the second since which it has
    /// been one.
    pub fn compare(&mut self, before: &Self) -> Change {
        let mut change =
            Change { round: self.number, seconds: f64::from(self.second - before.second), ..Change::default() };
        let seen_before = before.seen.iter().filter(|s| s.since != ABSENT).count() as u64;
        for (now, then) in overlaps(&self.stretches, &before.stretches) {
            change.compare(&mut self.seen[now as usize], before.seen[then as usize]);
        }
        let mut total_seconds = 0;
        for seen in self.seen.iter().filter(|s| s.since != ABSENT) {
            change.new_pages += 1;
            if seen.since != UNIQUE {
                change.duplicate_pages += 1;
                total_seconds += u64::from(self.second - seen.since);
            }
        }
        change.new_pages -= change.unchanged_pages + change.changed_pages;
        change.gone_pages = seen_before - change.unchanged_pages - change.changed_pages;
        change.mean_duplicate_seconds = total_seconds as f64 / change.duplicate_pages.max(1) as f64;
        change
    }
}

impl Change {
    fn compare(&mut self, now: &mut Seen, then: Seen) {
        match (now.since, then.since) {
            (ABSENT, _) | (_, ABSENT) => {}
            _ if now.fingerprint != then.fingerprint => self.changed_pages += 1,
            (UNIQUE, _) | (_, UNIQUE) => self.unchanged_pages += 1,
            _ => {
                self.unchanged_pages += 1;
                self.still_duplicate_pages += 1;
                now.since = then.since;
            }
        }
    }
}

/// The positions in both rounds of every page that occurs in both.
fn overlaps<'a>(now: &'a [Stretch], then: &'a [Stretch]) -> impl Iterator<Item = (u32, u32)> + 'a {
    let mut rest = then;
    now.iter().flat_map(move |n| {
        let ends_before = |t: &Stretch| (t.pid, t.page + u64::from(t.pages)) <= (n.pid, n.page);
        rest = &rest[rest.partition_point(ends_before)..];
        let touching = rest.iter().take_while(|t| (t.pid, t.page) < (n.pid, n.page + u64::from(n.pages)));
        touching.flat_map(|t| {
            let first = n.page.max(t.page);
            let last = (n.page + u64::from(n.pages)).min(t.page + u64::from(t.pages));
            (first..last).map(|p| (n.position + (p - n.page) as u32, t.position + (p - t.page) as u32))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stretch(pid: u32, page: u64, pages: u32, position: u32) -> Stretch {
        Stretch { pid, page, pages, position }
    }

    #[test]
    fn each_page_is_unchanged_changed_gone_or_new() {
        // Pages 10..16 of process 1, then a hole opens at 12 and 16..18 appear; 13 is rewritten.
        let mut before = Round::begin(1, 0, vec![stretch(1, 10, 6, 0)], 6);
        before.class(&[Entry::sample(0, 0, 7), Entry::sample(0, 1, 7)], true);
        for p in 2..6 {
            before.class(&[Entry::sample(0, p, 100 + u64::from(p))], false);
        }
        let mut now = Round::begin(2, 30, vec![stretch(1, 10, 2, 0), stretch(1, 13, 5, 3)], 8);
        now.class(&[Entry::sample(0, 0, 7), Entry::sample(0, 1, 7), Entry::sample(0, 7, 7)], true);
        now.class(&[Entry::sample(0, 3, 999)], false);
        now.class(&[Entry::sample(0, 4, 104)], false);
        now.class(&[Entry::sample(0, 5, 105)], false);
        let change = now.compare(&before);
        assert_eq!((change.unchanged_pages, change.changed_pages), (4, 1));
        assert_eq!((change.gone_pages, change.new_pages), (1, 1));
        assert_eq!((change.duplicate_pages, change.still_duplicate_pages), (3, 2));
        assert_eq!(change.mean_duplicate_seconds, 20.0);
    }

    #[test]
    fn the_same_address_of_another_process_is_another_page() {
        let now = [stretch(1, 0, 10, 0), stretch(2, 5, 10, 10)];
        let then = [stretch(1, 5, 20, 0), stretch(2, 0, 6, 20)];
        let pairs: Vec<_> = overlaps(&now, &then).collect();
        assert_eq!(pairs, [(5, 0), (6, 1), (7, 2), (8, 3), (9, 4), (10, 25)]);
    }
}
