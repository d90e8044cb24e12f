//! Merged pages and processor time of a merger over time.

use super::merger::Folds;
use serde::Serialize;
use std::time::{Duration, Instant};

/// Interval between two points of the curve.
const EVERY: Duration = Duration::from_millis(100);
/// Growth of the merged pages below which merging counts as stable: 0.2%.
const STABLE: f64 = 0.002;
/// Share of the pages that could be merged, from which on merging counts as nearly complete: 97%.
const FULL: f64 = 0.97;
/// Seconds without growth after which merging counts as stable once it is nearly complete. Before that it takes twice
/// as many: the merger may be waiting for something.
pub const SETTLE_S: u64 = 10;
/// Time after which merging counts as stable even if it goes on: 4 min.
const LONGEST: Duration = Duration::from_secs(240);

/// A merger's work up to some moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Progress {
    /// Pages saved, by the merger's own account.
    pub merged_pages: u64,
    /// Processor time since a moment that is the same for all points.
    pub cpu_s: f64,
    /// Details that only Pagefold reports.
    #[serde(flatten)]
    pub details: Option<Details>,
}

/// Part of [`Progress`] that only Pagefold reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Details {
    /// Pages that were merged, then written, and are private again.
    pub broken_pages: u64,
    /// Slots of the pool in use.
    pub slots: u64,
    /// Mappings of the guests' processes, as last counted.
    pub vmas: u64,
    /// Number of folds since the service began.
    pub folds: Folds,
}

/// A point of a curve; its times begin when the merger was switched on.
#[derive(Clone, Copy, Debug, Default, Serialize, PartialEq)]
pub struct Point {
    /// Time of the point.
    pub seconds: f64,
    /// Progress up to this point. Its processor time begins with the curve.
    #[serde(flatten)]
    pub so_far: Progress,
}

impl Point {
    /// Broken pages, or 0 where they are not reported (see [`Details`]).
    pub fn broken_pages(&self) -> u64 {
        self.so_far.details.map_or(0, |details| details.broken_pages)
    }
}

/// Points in order of time.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(transparent)]
pub struct Curve(pub Vec<Point>);

impl Curve {
    /// Adds a point for the progress `now`. The merger was switched on at `begin`, and had used `cpu_s_before` by
    /// then.
    pub fn add(&mut self, begin: Instant, cpu_s_before: f64, now: Progress) {
        self.0.push(Point {
            seconds: begin.elapsed().as_secs_f64(),
            so_far: Progress { cpu_s: now.cpu_s - cpu_s_before, ..now },
        });
    }

    /// Follows a merger until the number of merged pages is stable. `equal_pages` is the number that could be merged,
    /// and `settle_s` the seconds without growth that count as stable (see [`SETTLE_S`]).
    ///
    /// # Errors
    /// The progress cannot be read.
    pub fn until_stable(
        begin: Instant,
        cpu_s_before: f64,
        equal_pages: u64,
        settle_s: u64,
        mut look: impl FnMut() -> anyhow::Result<Progress>,
    ) -> anyhow::Result<Self> {
        let mut curve = Self::default();
        while !curve.is_stable(equal_pages, settle_s) {
            curve.add(begin, cpu_s_before, look()?);
            std::thread::sleep(EVERY);
        }
        Ok(curve)
    }

    /// The last point.
    pub fn end(&self) -> Point {
        self.0.last().copied().unwrap_or_default()
    }

    fn is_stable(&self, equal_pages: u64, settle_s: u64) -> bool {
        let end = self.end();
        let full = end.so_far.merged_pages as f64 >= equal_pages as f64 * FULL;
        let patience = if full { settle_s } else { 2 * settle_s } as f64;
        let Some(earlier) = self.0.iter().rev().find(|p| p.seconds <= end.seconds - patience) else { return false };
        let grown = end.so_far.merged_pages as f64 > earlier.so_far.merged_pages as f64 * (1.0 + STABLE);
        !grown || end.seconds > LONGEST.as_secs_f64()
    }

    /// The first point with at least `pages` merged pages.
    pub fn reached(&self, pages: u64) -> Option<Point> {
        self.0.iter().find(|point| point.so_far.merged_pages >= pages).copied()
    }

    /// A selection of at most `most` points at equal distances, the last point among them.
    pub fn thinned(&self, most: usize) -> Self {
        let step = self.0.len().div_ceil(most.max(1)).max(1);
        let mut kept: Vec<Point> = self.0.iter().rev().step_by(step).copied().collect();
        kept.reverse();
        Self(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(f64, u64)]) -> Curve {
        let point = |&(seconds, merged_pages): &(f64, u64)| Point {
            seconds,
            so_far: Progress { merged_pages, cpu_s: seconds, details: None },
        };
        Curve(points.iter().map(point).collect())
    }

    #[test]
    fn curve_without_growth_for_a_span_is_stable() {
        let stable = |points: &[(f64, u64)]| curve(points).is_stable(1010, SETTLE_S);
        assert!(!stable(&[]));
        assert!(!stable(&[(0.0, 0), (10.0, 0)]));
        assert!(stable(&[(0.0, 0), (21.0, 0)]));
        assert!(!stable(&[(0.0, 0), (3.0, 1000), (4.0, 1000)]));
        assert!(!stable(&[(0.0, 0), (3.0, 990), (11.0, 1000)]));
        assert!(!stable(&[(0.0, 0), (3.0, 990), (5.0, 1000), (13.1, 1000)]));
        assert!(stable(&[(0.0, 0), (3.0, 999), (5.0, 1000), (13.1, 1000)]));
        assert!(!stable(&[(0.0, 0), (3.0, 500), (5.0, 500), (22.0, 500)]));
        assert!(stable(&[(0.0, 0), (3.0, 500), (5.0, 500), (23.1, 500)]));
        assert_eq!(curve(&[(0.0, 0), (3.0, 999)]).reached(500).map(|p| p.seconds), Some(3.0));
        let thin = curve(&(0..100).map(|n| (f64::from(n), 1)).collect::<Vec<_>>()).thinned(10);
        assert_eq!((thin.0.len(), thin.end().seconds), (10, 99.0));
    }
}
