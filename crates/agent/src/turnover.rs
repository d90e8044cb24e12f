//! How fast the contents of a member's memory change, and how long a page must have stayed as it is to be worth folding.
//!
//! What is folded and written again within a minute was folded for nothing. Where so much is written that more than one page
//! in twenty would be written within the next minute, if it hit all alike, the member is *busy*. It does not hit all alike, so
//! pages are counted by how long they have stayed as they were: how many there are, and how many of them are written.
//!
//! ```text
//!            60 s x pages that change in a second > pages / 20
//!    QUIET ----------------------------------------------------> BUSY
//!   fold what was not written            fold what has stayed for 1, 2, 4, 8 or 16 minutes: the shortest of
//!   in a whole round                     these of which, in this time of work, fewer than one in twenty were
//!      ^                                 written within a minute; none before that could be seen
//!      |                                                          |
//!      `----------------------------------------------------------'
//!            not so any more; what was measured is forgotten by half every minute
//! ```

use std::time::{Duration, Instant};

/// What must not be written for so long after it was folded.
pub const LIFE: Duration = Duration::from_secs(60);
/// One page of so many may be.
const ONE_IN: f64 = 20.0;
/// How fast pages change counts half after this time.
const HALF_LIFE: Duration = Duration::from_secs(60);
/// And which of them after this.
const AGES_HALF_LIFE: Duration = Duration::from_secs(300);
/// Pages of an age say nothing before they have been seen for so long: what is done every other minute must not be missed.
const SEEN: Duration = Duration::from_secs(120);
/// Less time than this says nothing yet.
const LEAST: Duration = Duration::from_secs(1);

/// Ages that are told apart: less than a minute, less than 2, 4, 8 and 16 minutes, and more.
pub const AGES: usize = 6;

/// Numbers of pages, by age: by the time since they were written last.
pub type ByAge = [u64; AGES];

/// To which of the ages one belongs.
pub const fn age(seconds: u32) -> usize {
    match seconds / 60 {
        0 => 0,
        minutes @ 1..16 => minutes.ilog2() as usize + 1,
        _ => AGES - 1,
    }
}

/// What was not written for so many seconds could be folded in a round, if nothing had to stay for longer.
const ROUND: u32 = 12;

/// Pages that were written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Those that could have been folded before, or were never seen written.
    pub rested: u64,
    /// Those that had been seen written, by age.
    pub by_age: ByAge,
}

impl Written {
    /// Takes in one, so many seconds after it was written before, if it was.
    pub fn add(&mut self, before: Option<u32>) {
        self.rested += u64::from(before.is_none_or(|seconds| seconds >= ROUND));
        if let Some(count) = before.and_then(|seconds| self.by_age.get_mut(age(seconds))) {
            *count += 1;
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Turnover {
    /// Pages that changed since `since`.
    changed: u64,
    since: Instant,
    /// Parts of all pages that change in a second.
    rate: f64,
    busy_since: Option<Instant>,
    counted: Instant,
    /// Pages that were written while busy, by age.
    written: [f64; AGES],
    /// Seconds that pages were that old, summed up.
    lived: [f64; AGES],
}

impl Turnover {
    /// Nothing has changed yet.
    pub const fn new(now: Instant) -> Self {
        let (written, lived) = ([0.0; AGES], [0.0; AGES]);
        Self { changed: 0, since: now, rate: 0.0, busy_since: None, counted: now, written, lived }
    }

    /// Takes in that so many of so many pages have changed.
    pub fn add(&mut self, changed: u64, pages: u64, now: Instant) {
        self.changed += changed;
        let time = now.saturating_duration_since(self.since);
        if time < LEAST {
            return;
        }
        let rate = self.changed as f64 / pages.max(1) as f64 / time.as_secs_f64();
        self.rate = (self.rate * faded(time, HALF_LIFE)).max(rate);
        (self.changed, self.since) = (0, now);
        let was_busy = self.busy_since.is_some();
        let is_busy = self.rate * LIFE.as_secs_f64() * ONE_IN > 1.0;
        if is_busy != was_busy {
            (self.busy_since, self.counted) = (is_busy.then_some(now), now);
            (self.written, self.lived) = ([0.0; AGES], [0.0; AGES]);
        }
    }

    /// Takes in which pages were written since this was last called, and which there are.
    pub fn count(&mut self, written: &ByAge, there: &ByAge, now: Instant) {
        let time = now.saturating_duration_since(self.counted);
        self.counted = now;
        let fade = faded(time, AGES_HALF_LIFE);
        for age in 0..AGES {
            self.written[age] = self.written[age] * fade + written[age] as f64;
            self.lived[age] = self.lived[age] * fade + there[age] as f64 * time.as_secs_f64();
        }
    }

    /// How long a page must have stayed as it is; `None`: there is no telling.
    pub fn rest(&self, now: Instant) -> Option<Duration> {
        let Some(since) = self.busy_since else { return Some(Duration::ZERO) };
        let busy = now.saturating_duration_since(since);
        (1..AGES)
            .map(|age| (age, LIFE * (1 << (age - 1))))
            .take_while(|(_, rest)| busy >= *rest + SEEN)
            .find(|(age, _)| self.written[*age] * LIFE.as_secs_f64() * ONE_IN <= self.lived[*age])
            .map(|(_, rest)| rest)
    }
}

/// What is left of 1 after a time.
fn faded(time: Duration, half_life: Duration) -> f64 {
    0.5_f64.powf(time.as_secs_f64() / half_life.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_works_is_busy_at_once_and_for_a_while() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut turnover = Turnover::new(start);
        let rest = |turnover: &Turnover, seconds| turnover.rest(at(seconds));
        // A guest that does nothing writes some pages all the time.
        (1..20).for_each(|second| turnover.add(80, 100_000, at(second)));
        assert_eq!(rest(&turnover, 19), Some(Duration::ZERO));
        turnover.add(2000, 100_000, at(20));
        turnover.add(2000, 100_000, at(21));
        assert_eq!(rest(&turnover, 21), None);
        (22..200).for_each(|second| turnover.add(0, 100_000, at(second)));
        assert_ne!(rest(&turnover, 199), Some(Duration::ZERO));
        (200..400).for_each(|second| turnover.add(0, 100_000, at(second)));
        assert_eq!(rest(&turnover, 399), Some(Duration::ZERO));
    }

    #[test]
    fn ages_are_told_apart() {
        let ages = [0, 59, 60, 119, 120, 239, 240, 479, 480, 959, 960, u32::MAX].map(age);
        assert_eq!(ages, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]);
    }

    /// Pages of which all are written between 60 and 120 s after they were written last, beside others that stay.
    #[test]
    fn who_is_busy_folds_what_has_outlived_the_others() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut turnover = Turnover::new(start);
        let mut rests = Vec::new();
        for second in 1..1000 {
            turnover.add(500, 100_000, at(second));
            let there = [30_000, 20_000, if second < 120 { 0 } else { 5000 }, 0, 0, 0];
            turnover.count(&[0, 500, if second < 120 { 0 } else { 3 }, 0, 0, 0], &there, at(second));
            let rest = turnover.rest(at(second)).map(|rest| rest.as_secs());
            if rests.last().is_none_or(|(_, last)| *last != rest) {
                rests.push((second, rest));
            }
        }
        // Not before those that have stayed for two minutes were seen for a while.
        assert_eq!(rests, [(1, None), (241, Some(120))]);
    }
}
