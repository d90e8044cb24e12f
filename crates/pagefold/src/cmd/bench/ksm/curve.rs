//! What was merged when, and what it had cost until then.

use super::merger::Folds;
use serde::Serialize;
use std::time::{Duration, Instant};

/// Between two looks.
const EVERY: Duration = Duration::from_millis(100);
/// It is stable when it has not grown by more than this share ...
const STABLE: f64 = 0.002;
/// ... for so long, if it has merged nearly all that there is, ...
const STABLE_FULL: (f64, Duration) = (0.97, Duration::from_secs(5));
/// ... and for so long if it has not: it may be waiting for something.
const STABLE_PART: Duration = Duration::from_secs(20);
/// And until it is stable.
const LONGEST: Duration = Duration::from_secs(240);

/// What a merger has done, and used, so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Progress {
    /// Pages saved, by its own account.
    pub merged_pages: u64,
    /// Processor time since some time before.
    pub cpu_s: f64,
    /// What else there is to be seen of Pagefold.
    #[serde(flatten)]
    pub details: Option<Details>,
}

/// See [`Progress`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Details {
    /// Pages that were merged, were written, and are private now.
    pub broken_pages: u64,
    /// Slots of the pool in use.
    pub slots: u64,
    /// Mappings of the guests' processes, as last counted.
    pub vmas: u64,
    /// How often pages were merged so far.
    pub folds: Folds,
}

/// A point of a curve; times since the merger was switched on.
#[derive(Clone, Copy, Debug, Default, Serialize, PartialEq)]
pub struct Point {
    /// When.
    pub seconds: f64,
    /// How far it was. Its processor time is since the beginning.
    #[serde(flatten)]
    pub so_far: Progress,
}

impl Point {
    /// See [`Details`].
    pub fn broken_pages(&self) -> u64 {
        self.so_far.details.map_or(0, |details| details.broken_pages)
    }
}

/// Points in order of time.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(transparent)]
pub struct Curve(pub Vec<Point>);

impl Curve {
    /// Adds what is now, `begin` being when the merger, which had used `cpu_s_before`, was switched on.
    pub fn add(&mut self, begin: Instant, cpu_s_before: f64, now: Progress) {
        self.0.push(Point {
            seconds: begin.elapsed().as_secs_f64(),
            so_far: Progress { cpu_s: now.cpu_s - cpu_s_before, ..now },
        });
    }

    /// Follows a merger until it merges no more of the pages that are equal.
    ///
    /// # Errors
    /// It cannot be looked at.
    pub fn until_stable(
        begin: Instant,
        cpu_s_before: f64,
        equal_pages: u64,
        mut look: impl FnMut() -> anyhow::Result<Progress>,
    ) -> anyhow::Result<Self> {
        let mut curve = Self::default();
        while !curve.is_stable(equal_pages) {
            curve.add(begin, cpu_s_before, look()?);
            std::thread::sleep(EVERY);
        }
        Ok(curve)
    }

    /// The last point.
    pub fn end(&self) -> Point {
        self.0.last().copied().unwrap_or_default()
    }

    fn is_stable(&self, equal_pages: u64) -> bool {
        let end = self.end();
        let full = end.so_far.merged_pages as f64 >= equal_pages as f64 * STABLE_FULL.0;
        let patience = if full { STABLE_FULL.1 } else { STABLE_PART }.as_secs_f64();
        let Some(earlier) = self.0.iter().rev().find(|p| p.seconds <= end.seconds - patience) else { return false };
        let grown = end.so_far.merged_pages as f64 > earlier.so_far.merged_pages as f64 * (1.0 + STABLE);
        !grown || end.seconds > LONGEST.as_secs_f64()
    }

    /// The first point with so many pages.
    pub fn reached(&self, pages: u64) -> Option<Point> {
        self.0.iter().find(|point| point.so_far.merged_pages >= pages).copied()
    }

    /// At most so many points of it, the last one among them.
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
    fn stable_is_no_growth_for_a_while() {
        let stable = |points: &[(f64, u64)]| curve(points).is_stable(1010);
        assert!(!stable(&[]));
        assert!(!stable(&[(0.0, 0), (10.0, 0)]));
        assert!(stable(&[(0.0, 0), (21.0, 0)]));
        assert!(!stable(&[(0.0, 0), (3.0, 1000), (4.0, 1000)]));
        assert!(!stable(&[(0.0, 0), (3.0, 990), (6.0, 1000)]));
        assert!(!stable(&[(0.0, 0), (3.0, 990), (5.0, 1000), (8.1, 1000)]));
        assert!(stable(&[(0.0, 0), (3.0, 999), (5.0, 1000), (8.1, 1000)]));
        assert!(!stable(&[(0.0, 0), (3.0, 500), (5.0, 500), (22.0, 500)]));
        assert!(stable(&[(0.0, 0), (3.0, 500), (5.0, 500), (23.1, 500)]));
        assert_eq!(curve(&[(0.0, 0), (3.0, 999)]).reached(500).map(|p| p.seconds), Some(3.0));
        let thin = curve(&(0..100).map(|n| (f64::from(n), 1)).collect::<Vec<_>>()).thinned(10);
        assert_eq!((thin.0.len(), thin.end().seconds), (10, 99.0));
    }
}
