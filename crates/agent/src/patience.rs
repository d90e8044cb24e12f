//! Pages that were to be folded and were not are left alone for a while, longer each time: a page that is pinned, or
//! written just when it is looked at, is so again the next moment.

use page::{HostVirt, PageRange};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// No more pages are remembered.
const MOST: usize = 1 << 14;
/// The first time.
const SHORTEST: Duration = Duration::from_secs(1);
/// And at most.
const LONGEST: Duration = Duration::from_secs(64);

#[derive(Clone, Copy)]
struct Wait {
    until: Instant,
    time: Duration,
}

/// See the module's story.
#[derive(Default)]
pub struct Patience(BTreeMap<u64, Wait>);

impl Patience {
    /// A page was not folded.
    pub fn failed(&mut self, page: HostVirt, now: Instant) {
        if self.0.len() >= MOST {
            self.0.retain(|_, wait| wait.until > now);
        }
        let time = self.0.get(&page.page()).map_or(SHORTEST, |wait| (wait.time * 2).min(LONGEST));
        if self.0.len() < MOST || self.0.contains_key(&page.page()) {
            self.0.insert(page.page(), Wait { until: now + time, time });
        }
    }

    /// Those of the range that are to be left alone.
    pub fn waiting(&self, range: PageRange, now: Instant) -> impl Iterator<Item = PageRange> {
        let pages = self.0.range(range.start.page()..range.end().page());
        pages
            .filter(move |(_, wait)| wait.until > now)
            .map(|(&page, _)| PageRange { start: HostVirt(page << page::PAGE_SHIFT), pages: 1 })
    }

    /// Forgets pages whose time was over long ago.
    pub fn forget_old(&mut self, now: Instant) {
        self.0.retain(|_, wait| now < wait.until + wait.time * 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failure_waits_longer_and_time_heals() {
        let (mut patience, now) = (Patience::default(), Instant::now());
        let page = HostVirt(0x5000);
        let range = PageRange { start: HostVirt(0x4000), pages: 4 };
        let waits = |patience: &Patience, after| patience.waiting(range, now + after).count() == 1;
        patience.failed(page, now);
        assert!(waits(&patience, SHORTEST / 2) && !waits(&patience, SHORTEST));
        patience.failed(page, now);
        assert!(waits(&patience, SHORTEST) && !waits(&patience, SHORTEST * 2));
        (0..20).for_each(|_| patience.failed(page, now));
        assert!(waits(&patience, LONGEST - SHORTEST) && !waits(&patience, LONGEST));
        patience.forget_old(now + LONGEST * 4);
        assert!(patience.0.is_empty());
    }

    #[test]
    fn it_does_not_remember_without_bound() {
        let (mut patience, now) = (Patience::default(), Instant::now());
        (0..2 * MOST as u64).for_each(|n| patience.failed(HostVirt(n << 12), now));
        assert_eq!(patience.0.len(), MOST);
    }
}
