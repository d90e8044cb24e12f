//! How fast the contents of a member's memory change, and which pages are worth folding while it works.
//!
//! What is folded and written again within a minute was folded for nothing. Where more than one page in twenty was written
//! within the last minute, the member is *busy*: as many would be in the next, if it hit all alike. It does not, so
//! pages are counted by age, the time since they were written last: how many there are, and how many of them are written.
//! Pages of an age are folded if, as far as was seen in this time of work, fewer than one in twenty of them would be written
//! within a minute. Memory that is used for a while and then for something else is worth folding while it is young, and what
//! has outlived all that is so again.
//!
//! ```text
//!            more than a twentieth was written within a minute
//!    QUIET ----------------------------------------------------> BUSY
//!   fold what was not written            fold what has an age at which pages stay; none
//!   in a whole round                     of an age that was not seen for long enough
//!      ^                                                          |
//!      `----------------------------------------------------------'
//!            not so any more
//! ```

use std::time::{Duration, Instant};

/// What must not be written for so long after it was folded.
pub const LIFE: Duration = Duration::from_secs(60);
/// One page of so many may be.
const ONE_IN: f64 = 20.0;
/// The last minute is known in so many parts, and the one that has begun.
const PARTS: usize = 6;
/// Which pages were written counts half after this time.
const AGES_HALF_LIFE: Duration = Duration::from_secs(300);
/// Pages of an age say nothing before they could be seen for so long: what is done every other minute must not be missed.
const SEEN: Duration = Duration::from_secs(60);

/// Ages that are told apart: less than 8 s, less than 16 s, and so on, and more than 1024 s.
pub const AGES: usize = 9;

/// Numbers of pages, by age.
pub type ByAge = [u64; AGES];

/// To which of the ages one belongs.
pub const fn age(seconds: u32) -> usize {
    match seconds / 8 {
        0 => 0,
        eighths @ 1..128 => eighths.ilog2() as usize + 1,
        _ => AGES - 1,
    }
}

/// When an age begins.
fn begin(age: usize) -> f64 {
    if age == 0 { 0.0 } else { f64::from(4_u32 << age) }
}

/// Ages of pages that may be folded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ages(u16);

impl Ages {
    /// Whatever their age.
    pub const ALL: Self = Self(u16::MAX);

    /// These.
    #[cfg(test)]
    pub fn of(ages: &[usize]) -> Self {
        Self(ages.iter().fold(0, |all, age| all | 1 << age))
    }

    /// Whether pages that were written so many seconds ago are among them.
    pub const fn has(self, seconds: u32) -> bool {
        self.0 >> age(seconds) & 1 == 1
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
    /// Pages that changed in the part of a minute that began then, and in the ones before.
    changed: [u64; PARTS + 1],
    since: Instant,
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
        Self { changed: [0; PARTS + 1], since: now, busy_since: None, counted: now, written, lived }
    }

    /// Takes in that so many of so many pages have changed.
    pub fn add(&mut self, changed: u64, pages: u64, now: Instant) {
        let part = LIFE / PARTS as u32;
        while now.saturating_duration_since(self.since) >= part {
            let over = self.changed.iter().all(|changed| *changed == 0);
            self.since = if over { now } else { self.since + part };
            self.changed.rotate_right(1);
            self.changed[0] = 0;
        }
        self.changed[0] += changed;
        let was_busy = self.busy_since.is_some();
        let is_busy = self.changed.iter().sum::<u64>() as f64 * ONE_IN > pages as f64;
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

    /// Of which age pages are worth folding.
    pub fn ages(&self, now: Instant) -> Ages {
        let Some(since) = self.busy_since else { return Ages::ALL };
        let busy = now.saturating_duration_since(since);
        let is_worth = |age: &usize| {
            let is_short = begin(age + 1) - begin(*age) < LIFE.as_secs_f64();
            // Of an age that is over so soon, what comes after it counts too.
            let until = if is_short { begin(age + 1) } else { begin(*age) };
            busy >= Duration::from_secs_f64(until) + LIFE + SEEN
                && self.ended(*age) * ONE_IN < 1.0
                && (!is_short || self.ended(age + 1) * ONE_IN < 1.0)
        };
        Ages((1..AGES).filter(is_worth).fold(0, |ages, age| ages | 1 << age))
    }

    /// Which part of the pages that reach this age is written within a minute.
    fn ended(&self, age: usize) -> f64 {
        let (mut from, end) = (begin(age), begin(age) + LIFE.as_secs_f64());
        let mut sum = 0.0;
        for at in age..AGES {
            let until = if at + 1 < AGES { begin(at + 1).min(end) } else { end };
            if self.written[at] > 0.0 {
                sum += self.written[at] / self.lived[at].max(1.0) * (until - from).max(0.0);
            }
            from = until;
        }
        1.0 - (-sum).exp()
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
        // A guest that does nothing writes some pages all the time.
        (1..20).for_each(|second| turnover.add(80, 100_000, at(second)));
        assert_eq!(turnover.ages(at(19)), Ages::ALL);
        turnover.add(3000, 100_000, at(20));
        turnover.add(3000, 100_000, at(21));
        assert_eq!(turnover.ages(at(21)), Ages(0));
        (22..80).for_each(|second| turnover.add(0, 100_000, at(second)));
        assert_ne!(turnover.ages(at(79)), Ages::ALL);
        (80..95).for_each(|second| turnover.add(0, 100_000, at(second)));
        assert_eq!(turnover.ages(at(94)), Ages::ALL);
        // However long nobody looked.
        turnover.add(9000, 100_000, at(95));
        assert_eq!(turnover.ages(at(95)), Ages(0));
        turnover.add(0, 100_000, at(100_000));
        assert_eq!(turnover.ages(at(100_000)), Ages::ALL);
    }

    #[test]
    fn ages_are_told_apart() {
        let ages = [0, 7, 8, 15, 16, 31, 32, 64, 128, 256, 512, 1023, 1024, u32::MAX].map(age);
        assert_eq!(ages, [0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 7, 8, 8]);
        assert_eq!([0, 1, 2, 8].map(begin), [0.0, 8.0, 16.0, 1024.0]);
        assert!(Ages(0b1_0010).has(8) && Ages(0b1_0010).has(100) && !Ages(0b1_0010).has(16) && !Ages(0).has(0));
    }

    /// A thousand pages that are written every `period` seconds, one after the other, beside ten thousand that were written once; how
    /// old those are that may be folded, whenever that changes.
    fn open_ages(period: u32) -> Vec<(u32, Vec<usize>)> {
        let start = Instant::now();
        let mut turnover = Turnover::new(start);
        let mut seen = vec![(0, Vec::new())];
        for second in 1..2000_u32 {
            let at = start + Duration::from_secs(second.into());
            let (mut written, mut there) = (ByAge::default(), ByAge::default());
            for page in 0..1000 {
                let first = page * period / 1000;
                let since = second.checked_sub(first).map_or(second, |time| time % period);
                if second > period && since == 0 {
                    written[age(period)] += 1;
                }
                there[age(since)] += 1;
            }
            there[age(second)] += 10_000;
            turnover.add(500, 100_000, at);
            turnover.count(&written, &there, at);
            let ages = turnover.ages(at);
            let open: Vec<usize> = (0..AGES).filter(|age| ages.0 >> age & 1 == 1).collect();
            if seen.last().is_some_and(|(_, last)| *last != open) {
                seen.push((second, open));
            }
        }
        seen
    }

    #[test]
    fn who_is_busy_folds_what_stays() {
        // Written again before a minute is over: only what was written once.
        let short = open_ages(40);
        assert!(short.iter().all(|(second, open)| *second < 180 || open.iter().all(|age| *age >= 4)), "{short:?}");
        assert!(short.last().is_some_and(|(_, open)| *open == [4, 5, 6, 7, 8]), "{short:?}");
        // Written again after four minutes: also what is young, but not what will soon be written.
        let long = open_ages(240);
        assert!(long.iter().any(|(second, open)| *second < 200 && open.starts_with(&[1, 2, 3])), "{long:?}");
        assert!(long.last().is_some_and(|(_, open)| *open == [1, 2, 3, 4, 6, 7, 8]), "{long:?}");
    }
}
