//! Backoff for pages that could not be folded: the agent leaves such a page alone for a while, twice as long after each
//! failure. A page that is pinned, or written just when it is being folded, is likely to be so again the next moment.

use page::{HostVirt, PageRange};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Most pages for which a failure is remembered.
const MAX_PAGES: usize = 1 << 14;
/// Wait after the first failure, and longest wait: 1 s, 64 s.
const WAIT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(64));

#[derive(Clone, Copy)]
struct Wait {
    until: Instant,
    time: Duration,
}

/// When each page that could not be folded may be tried again, by page number.
#[derive(Default)]
pub struct Patience(BTreeMap<u64, Wait>);

impl Patience {
    /// Notes that a page could not be folded.
    pub fn failed(&mut self, page: HostVirt, now: Instant) {
        if self.0.len() >= MAX_PAGES {
            self.0.retain(|_, wait| wait.until > now);
        }
        let time = page::doubled(self.0.get(&page.page()).map(|wait| wait.time), WAIT);
        if self.0.len() < MAX_PAGES || self.0.contains_key(&page.page()) {
            self.0.insert(page.page(), Wait { until: now + time, time });
        }
    }

    /// The pages of the range that must not be tried yet.
    pub fn waiting(&self, range: PageRange, now: Instant) -> impl Iterator<Item = PageRange> {
        let pages = self.0.range(range.start.page()..range.end().page());
        pages
            .filter(move |(_, wait)| wait.until > now)
            .map(|(&page, _)| PageRange { start: HostVirt(page << page::PAGE_SHIFT), pages: 1 })
    }

    /// Forgets pages whose wait has been over for twice its length.
    pub fn forget_old(&mut self, now: Instant) {
        self.0.retain(|_, wait| now < wait.until + wait.time * 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_doubles_with_each_failure_and_is_capped() {
        let (mut patience, now) = (Patience::default(), Instant::now());
        let page = HostVirt(0x5000);
        let range = PageRange { start: HostVirt(0x4000), pages: 4 };
        let waits = |patience: &Patience, after| patience.waiting(range, now + after).count() == 1;
        patience.failed(page, now);
        assert!(waits(&patience, WAIT.0 / 2) && !waits(&patience, WAIT.0));
        patience.failed(page, now);
        assert!(waits(&patience, WAIT.0) && !waits(&patience, WAIT.0 * 2));
        (0..20).for_each(|_| patience.failed(page, now));
        assert!(waits(&patience, WAIT.1 - WAIT.0) && !waits(&patience, WAIT.1));
        patience.forget_old(now + WAIT.1 * 4);
        assert!(patience.0.is_empty());
    }

    #[test]
    fn remembered_pages_are_capped() {
        let (mut patience, now) = (Patience::default(), Instant::now());
        (0..2 * MAX_PAGES as u64).for_each(|n| patience.failed(HostVirt(n << 12), now));
        assert_eq!(patience.0.len(), MAX_PAGES);
    }
}
