//! How many pages a member may fingerprint, by its share of the group's scan rate.

use act::HUGE_PAGES;
use std::time::{Duration, Instant};

/// Longest time for which an unused rate is saved up: 10 s, the longest time between two rounds.
const KEPT: Duration = super::FURTHEST;

/// Number of pages that may be fingerprinted. A huge page is read as a whole, which may make the number negative.
pub struct Allowance {
    at: Instant,
    pages: f64,
}

impl Allowance {
    /// No page may be fingerprinted yet.
    pub const fn new(now: Instant) -> Self {
        Self { at: now, pages: 0.0 }
    }

    /// Number of pages that may be fingerprinted now, if `rate` of them may be in each second; `None`: there is no
    /// limit.
    pub fn left(&mut self, rate: Option<u32>, now: Instant) -> u64 {
        let since = now.saturating_duration_since(std::mem::replace(&mut self.at, now));
        let Some(rate) = rate else {
            self.pages = 0.0;
            return u64::MAX;
        };
        let of = |time: Duration| f64::from(rate) * time.as_secs_f64();
        // Pages that were read while there was no limit are not subtracted. At a rate of one page in 10 s or less, the
        // sum must reach 1 all the same.
        self.pages = (self.pages.max(-(HUGE_PAGES as f64)) + of(since)).min(of(KEPT).max(1.0));
        self.pages.max(0.0) as u64
    }

    /// Subtracts pages that are about to be fingerprinted.
    pub fn spend(&mut self, pages: u64) {
        self.pages -= pages as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_kept_over_time_however_it_is_asked_for() {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        for step in [10, 250, 3000] {
            let (mut allowance, mut read) = (Allowance::new(begin), 0);
            for now in (0..=60_000).step_by(step) {
                let left = allowance.left(Some(50), at(now as u64));
                allowance.spend(left);
                read += left;
            }
            assert!((2990..=3000).contains(&read), "{read} pages in a minute, looked at every {step} ms");
        }
    }

    #[test]
    fn huge_page_is_paid_for_afterwards() {
        let begin = Instant::now();
        let mut allowance = Allowance::new(begin);
        assert_eq!(allowance.left(Some(50), begin), 0);
        assert_eq!(allowance.left(Some(50), begin + Duration::from_millis(20)), 1);
        allowance.spend(HUGE_PAGES);
        let allowed = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!([10, 11].map(|s| allowance.left(Some(50), allowed(s)) > 0), [false, true]);
        // An unused rate is not kept for long, and nothing is owed from a time without a rate.
        assert_eq!(allowance.left(Some(50), allowed(1000)), 500);
        assert_eq!(allowance.left(None, allowed(1000)), u64::MAX);
        allowance.spend(1 << 40);
        assert_eq!(allowance.left(Some(50), allowed(1011)), 38);
    }
}
