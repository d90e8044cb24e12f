//! Waits that double.

use std::ops::Add;

/// The wait after another failure: the last wait doubled, from `first` to `longest`. `last` is `None` before the first
/// failure.
///
/// ```
/// use std::time::Duration;
/// let bounds = (Duration::from_secs(1), Duration::from_secs(3));
/// let first = page::doubled(None, bounds);
/// let second = page::doubled(Some(first), bounds);
/// assert_eq!((first.as_secs(), second.as_secs(), page::doubled(Some(second), bounds).as_secs()), (1, 2, 3));
/// ```
#[allow(clippy::arithmetic_side_effects, reason = "waits are our own, and bounded")]
pub fn doubled<T: Copy + Ord + Add<Output = T>>(last: Option<T>, (first, longest): (T, T)) -> T {
    last.map_or(first, |last| (last + last).min(longest))
}
