//! When the worker is sent the member's statistics: each second while they change, and ever more rarely while they do
//! not.

use super::{STATS_EVERY, Session};
use crate::map::Counts;
use std::io;
use std::time::{Duration, Instant};
use wire::{MemberStats, ToWorker};

/// Fewest fingerprinted pages that count as a change: 64. A member at rest fingerprints a few pages again and again.
const MANY_HASHED: u64 = 64;

/// The statistics that the worker was sent last, and when it is sent the next ones.
pub struct Told {
    /// When the next report is due.
    pub due: Instant,
    wait: Duration,
    stats: MemberStats,
    unfolded: bool,
}

impl Told {
    /// The state before the first report.
    pub fn new(now: Instant) -> Self {
        Self { due: now, wait: STATS_EVERY.0, stats: MemberStats::default(), unfolded: false }
    }

    /// Makes the next report due within this time, because something has changed.
    pub fn again_within(&mut self, time: Duration) {
        self.wait = STATS_EVERY.0;
        self.due = self.due.min(Instant::now() + time);
    }

    /// Makes the next report due soon if these counts differ from those that were sent, or if everything has become
    /// private.
    pub fn notice(&mut self, counts: Counts, unfolded: bool) {
        let told = &self.stats;
        let were = (told.enrolled_pages, told.folded_pages, told.zero_pages, told.broken_pages);
        if were != (counts.enrolled, counts.folded + counts.at_home, counts.zeroed, counts.broken)
            || self.unfolded != unfolded
        {
            self.again_within(STATS_EVERY.0);
        }
        self.unfolded = unfolded;
    }

    /// Makes the next report due soon if the agent has fingerprinted many pages since the last one.
    pub fn notice_hashed(&mut self, pages: u64) {
        if self.is_news(pages) {
            self.again_within(STATS_EVERY.0);
        }
    }

    /// Whether `pages` fingerprinted pages are many more than the worker was told of.
    const fn is_news(&self, pages: u64) -> bool {
        pages.saturating_sub(self.stats.done.pages_hashed) >= MANY_HASHED
    }

    /// Records the statistics that the worker is sent now. Figures of the agent's own work do not count as a change,
    /// because they grow as long as the member lives.
    fn tell(&mut self, stats: &MemberStats, now: Instant) {
        let is_news = self.is_news(stats.done.pages_hashed);
        let before = &mut self.stats;
        before.done.pages_scanned = stats.done.pages_scanned;
        before.done.agent_cpu_us = stats.done.agent_cpu_us;
        before.agent_bytes = stats.agent_bytes;
        if !is_news {
            before.done.pages_hashed = stats.done.pages_hashed;
        }
        self.wait = if before == stats { page::doubled(Some(self.wait), STATS_EVERY) } else { STATS_EVERY.0 };
        self.due = now + self.wait;
        self.stats = stats.clone();
    }
}

impl Session {
    /// Sends these statistics to the worker.
    pub(super) fn tell(&mut self, stats: &MemberStats) -> io::Result<()> {
        self.told.tell(stats, Instant::now());
        self.link.send(&ToWorker::Stats(Box::new(stats.clone())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seconds from a report of these statistics to the next one.
    fn wait_after(told: &mut Told, stats: &MemberStats) -> u64 {
        let now = Instant::now();
        told.tell(stats, now);
        (told.due - now).as_secs()
    }

    #[test]
    fn reports_come_ever_more_rarely_until_something_changes() {
        let (mut told, mut stats) =
            (Told::new(Instant::now()), MemberStats { folded_pages: 5, ..MemberStats::default() });
        let at_rest = [(); 6].map(|()| {
            stats.done.agent_cpu_us += 1;
            stats.done.pages_scanned += 1000;
            stats.done.pages_hashed += MANY_HASHED - 1;
            wait_after(&mut told, &stats)
        });
        assert_eq!(at_rest, [1, 2, 4, 8, 10, 10]);
        stats.done.pages_hashed += MANY_HASHED;
        assert_eq!(wait_after(&mut told, &stats), 1);
        stats.detail = "another state".to_owned();
        assert_eq!(wait_after(&mut told, &stats), 1);
    }

    #[test]
    fn many_fingerprinted_pages_are_told_within_a_second() {
        let (mut told, stats) = (Told::new(Instant::now()), MemberStats::default());
        (0..6).for_each(|_| told.tell(&stats, Instant::now()));
        told.notice_hashed(MANY_HASHED - 1);
        assert!(told.due > Instant::now() + STATS_EVERY.0);
        told.notice_hashed(MANY_HASHED);
        assert!(told.due <= Instant::now() + STATS_EVERY.0);
    }

    #[test]
    fn change_of_counts_is_told_within_a_second() {
        let (mut told, stats) = (Told::new(Instant::now()), MemberStats { folded_pages: 5, ..MemberStats::default() });
        let counts = Counts { folded: 5, ..Counts::default() };
        let is_soon = |told: &Told| told.due <= Instant::now() + STATS_EVERY.0;
        for (counts, unfolded, expected) in
            [(counts, false, false), (Counts { broken: 1, ..counts }, false, true), (counts, true, true)]
        {
            (0..6).for_each(|_| told.tell(&stats, Instant::now()));
            told.unfolded = false;
            told.notice(counts, unfolded);
            assert_eq!(is_soon(&told), expected, "{counts:?}");
        }
    }
}
