//! Durations of an event that was timed many times.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Durations in nanoseconds, and the number of durations that were too short to be kept one by one.
#[derive(Clone, Debug, Default)]
pub struct Timings {
    kept: Vec<u64>,
    short: u64,
    keep_from: u64,
}

/// The median and the upper percentiles of some times, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Number of times.
    pub count: u64,
    /// Median.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// Longest time.
    pub max_us: f64,
}

impl Timings {
    /// No durations yet. Those of at least `keep_from` will be kept; shorter ones will only be counted.
    pub fn new(keep_from: Duration) -> Self {
        Self { keep_from: keep_from.as_nanos() as u64, ..Self::default() }
    }

    /// Adds a time.
    pub fn add(&mut self, time: Duration) {
        let ns = time.as_nanos() as u64;
        if ns < self.keep_from { self.short += 1 } else { self.kept.push(ns) }
    }

    /// The spread of all durations; a short one counts as `keep_from`.
    pub fn spread(&self) -> Spread {
        self.of(self.short)
    }

    /// The spread of the durations that were kept.
    pub fn spread_of_kept(&self) -> Spread {
        self.of(0)
    }

    fn of(&self, short: u64) -> Spread {
        let mut sorted = self.kept.clone();
        sorted.sort_unstable();
        let count = short + sorted.len() as u64;
        let us = |ns: u64| ns as f64 / 1000.0;
        let at = |percent: u64| {
            let place = (count * percent / 100).min(count.saturating_sub(1));
            let kept = place.checked_sub(short).and_then(|n| sorted.get(n as usize));
            us(kept.copied().unwrap_or(self.keep_from))
        };
        if count == 0 {
            return Spread::default();
        }
        Spread { count, p50_us: at(50), p99_us: at(99), max_us: us(sorted.last().copied().unwrap_or(self.keep_from)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_times_are_counted_and_long_ones_kept() {
        let mut timings = Timings::new(Duration::from_micros(5));
        assert_eq!(timings.spread(), Spread::default());
        (1..=1000).for_each(|us| timings.add(Duration::from_micros(us)));
        assert_eq!(timings.spread(), Spread { count: 1000, p50_us: 501.0, p99_us: 991.0, max_us: 1000.0 });
        (0..99_000).for_each(|_| timings.add(Duration::from_nanos(80)));
        assert_eq!(timings.spread(), Spread { count: 100_000, p50_us: 5.0, p99_us: 5.0, max_us: 1000.0 });
        let kept = timings.spread_of_kept();
        assert_eq!((kept.count, kept.p50_us), (996, 503.0));
    }
}
