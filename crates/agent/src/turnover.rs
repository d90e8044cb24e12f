//! How fast the contents of a member's memory change, and what that says of folding.
//!
//! What is folded and written again within a minute was folded for nothing. Where so much is written that more than one page
//! in twenty would be written within the next minute, if it hit all alike, the member is *busy*:
//!
//! ```text
//!            60 s x pages that change in a second > pages / 20
//!    QUIET ----------------------------------------------------> BUSY
//!   fold what was not written            fold what has stayed for a minute or more: it is
//!   in a whole round                     likely to stay for another
//!      ^                                                          |
//!      `----------------------------------------------------------'
//!            not so any more; what was measured is forgotten by half every minute
//! ```

use std::time::{Duration, Instant};

/// What must not be written for so long after it was folded.
pub const LIFE: Duration = Duration::from_secs(60);
/// One page of so many may be.
const ONE_IN: f64 = 20.0;
/// What was measured counts half after this time.
const HALF_LIFE: Duration = Duration::from_secs(60);
/// Less time than this says nothing yet.
const LEAST: Duration = Duration::from_secs(1);

/// See the module.
#[derive(Debug)]
pub struct Turnover {
    /// Pages that changed since `since`.
    changed: u64,
    since: Instant,
    /// Parts of all pages that change in a second.
    rate: f64,
}

impl Turnover {
    /// Nothing has changed yet.
    pub const fn new(now: Instant) -> Self {
        Self { changed: 0, since: now, rate: 0.0 }
    }

    /// Takes in that so many of so many pages have changed.
    pub fn add(&mut self, changed: u64, pages: u64, now: Instant) {
        self.changed += changed;
        let time = now.saturating_duration_since(self.since);
        if time < LEAST {
            return;
        }
        let rate = self.changed as f64 / pages.max(1) as f64 / time.as_secs_f64();
        let faded = self.rate * 0.5_f64.powf(time.as_secs_f64() / HALF_LIFE.as_secs_f64());
        (self.rate, self.changed, self.since) = (faded.max(rate), 0, now);
    }

    /// Whether only what has stayed for long is worth being folded.
    pub fn is_busy(&self) -> bool {
        self.rate * LIFE.as_secs_f64() * ONE_IN > 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_works_is_busy_at_once_and_for_a_while() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut turnover = Turnover::new(start);
        // A guest that does nothing writes some pages all the time.
        (1..20).for_each(|second| turnover.add(80, 100_000, at(second)));
        assert!(!turnover.is_busy());
        turnover.add(2000, 100_000, at(20));
        turnover.add(2000, 100_000, at(21));
        assert!(turnover.is_busy());
        (22..200).for_each(|second| turnover.add(0, 100_000, at(second)));
        assert!(turnover.is_busy());
        (200..400).for_each(|second| turnover.add(0, 100_000, at(second)));
        assert!(!turnover.is_busy());
    }
}
