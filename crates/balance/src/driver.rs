//! Watches whether a balloon driver does what it was told.
//!
//! ```text
//!              no progress for 8 s                     Stuck
//!   Works ---- says a size, holds frames of more ----> Lies        (any) -- does as told again --> Works
//!         ---- grows without being told          ----> Deflated
//!         ---- no answer for 8 s                 ----> Silent
//! ```
//!
//! A driver makes progress if, in 8 s, it shortens the way to its target by an eighth. A page now and then is no
//! progress.

use serde::Serialize;
use std::time::Duration;

/// Time without progress, without an answer, or with too many frames, after which a driver is flagged: 8 s.
const PATIENCE: Duration = Duration::from_secs(8);
/// Part of the way to its target that a driver must make in that time, or it counts as stuck: 1/8.
const LEAST_PROGRESS: u64 = 8;
/// Distance from the target at which a driver counts as arrived, as a part of RAM: 1/128.
const NEAR: u64 = 128;
/// Part by which a slower withdrawal lowers the known speed: 1/4 of the difference.
const SLOWER: u64 = 4;
/// Frames that a guest may hold above the size that its driver tells, as a part of RAM: 1/16, for pages that are on
/// their way.
pub(crate) const EXTRA_FRAMES: u64 = 16;

/// Behaviour of a balloon driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverState {
    /// The guest has no balloon.
    #[default]
    Absent,
    /// The driver is not asked: no rule promises the guest a size, or the guest has more RAM than is known.
    Unused,
    /// The driver does as it is told.
    Works,
    /// The driver does not come nearer to its target.
    Stuck,
    /// The guest holds more frames than its size by the driver.
    Lies,
    /// The driver took memory back that it had given.
    Deflated,
    /// The driver or its QEMU does not answer.
    Silent,
}

impl DriverState {
    /// The name used in JSON and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Unused => "unused",
            Self::Works => "works",
            Self::Stuck => "stuck",
            Self::Lies => "lies",
            Self::Deflated => "deflated",
            Self::Silent => "silent",
        }
    }
}

/// What is seen of a guest at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// RAM.
    pub ram_bytes: u64,
    /// The size that it was told to have.
    pub target_bytes: Option<u64>,
    /// The guest's size by its balloon driver, in bytes; `None` if its QEMU does not answer.
    pub actual_bytes: Option<u64>,
    /// RAM in frames of the host.
    pub resident_bytes: u64,
    /// Whether it is known to have reached the target before: by this process, or by another one that has noted it.
    pub had_arrived: bool,
}

/// Whether a driver has the size that it was told to have, or nearly so.
pub const fn has_arrived(ram_bytes: u64, actual_bytes: u64, target_bytes: u64) -> bool {
    actual_bytes.abs_diff(target_bytes) <= ram_bytes / NEAR
}

/// What is known of one balloon driver.
#[derive(Clone, Debug, Default)]
pub struct Driver {
    state: DriverState,
    last: Option<(Duration, Sighting)>,
    /// When the way to the target was last shortened, and its length then.
    progress: Option<(Duration, u64)>,
    /// Whether the driver has said that the target is reached.
    arrived: bool,
    lies_since: Option<Duration>,
    silent_since: Option<Duration>,
    /// Speed at which the balloon takes memory, in bytes a second; 0 before the first withdrawal.
    bytes_per_s: u64,
    /// Speed of the last withdrawal as the driver told it, until the guest's frames have confirmed it.
    told_bytes_per_s: Option<u64>,
}

impl Driver {
    /// The state by the last sighting.
    pub const fn state(&self) -> DriverState {
        self.state
    }

    /// Whether the driver works or is absent, is not on its way to a target, and nothing about it is in doubt.
    pub fn is_settled(&self) -> bool {
        let in_doubt = self.progress.is_some() || self.lies_since.is_some() || self.silent_since.is_some();
        matches!(self.state, DriverState::Works | DriverState::Absent) && !in_doubt
    }

    /// Speed at which the balloon takes memory, in bytes a second. A faster withdrawal counts at once, a slower one by
    /// a quarter. `None` before the first.
    pub fn withdrawal_bytes_per_s(&self) -> Option<u64> {
        (self.bytes_per_s > 0).then_some(self.bytes_per_s)
    }

    /// Notes that the balloon took `bytes` in `seconds`.
    pub fn landed(&mut self, bytes: u64, seconds: f64) {
        self.told_bytes_per_s = Some((bytes as f64 / seconds.max(0.1)) as u64);
    }

    /// Takes the speed of a withdrawal into account: at once if it is faster, and otherwise by a quarter of the
    /// difference.
    fn withdrew(&mut self, bytes_per_s: u64) {
        let slower = self.bytes_per_s.saturating_sub(self.bytes_per_s.saturating_sub(bytes_per_s) / SLOWER);
        self.bytes_per_s = slower.max(bytes_per_s);
    }

    /// Takes a sighting at time `at` into account, and returns the driver's state. `at` counts from any fixed moment.
    pub fn see(&mut self, at: Duration, sighting: Sighting) -> DriverState {
        self.state = self.judge(at, sighting);
        self.last = Some((at, sighting));
        self.state
    }

    fn judge(&mut self, at: Duration, seen: Sighting) -> DriverState {
        let Some(actual) = seen.actual_bytes else {
            let since = *self.silent_since.get_or_insert(at);
            return if at - since >= PATIENCE { DriverState::Silent } else { self.known() };
        };
        self.silent_since = None;
        self.measure(at, seen, actual);
        if holds_more(seen, actual) {
            let since = *self.lies_since.get_or_insert(at);
            if at - since >= PATIENCE {
                return DriverState::Lies;
            }
        } else {
            self.lies_since = None;
            if let Some(bytes_per_s) = self.told_bytes_per_s.take() {
                self.withdrew(bytes_per_s);
            }
        }
        self.judge_way(at, seen, actual)
    }

    /// The state by how far the guest's size is from its target, and by whether that distance shrinks.
    fn judge_way(&mut self, at: Duration, seen: Sighting, actual: u64) -> DriverState {
        let Some(target) = seen.target_bytes else { return DriverState::Works };
        if self.last.is_none_or(|(_, last)| last.target_bytes != Some(target)) {
            self.progress = None;
            self.arrived = seen.had_arrived;
        }
        let way = actual.abs_diff(target);
        if has_arrived(seen.ram_bytes, actual, target) {
            self.arrived = true;
            self.progress = None;
            return DriverState::Works;
        }
        if self.arrived && actual > target {
            return DriverState::Deflated;
        }
        let (since, longest) = *self.progress.get_or_insert((at, way));
        if way <= longest.saturating_sub(longest.div_ceil(LEAST_PROGRESS)) {
            self.progress = Some((at, way));
            return DriverState::Works;
        }
        if at - since >= PATIENCE { DriverState::Stuck } else { self.known() }
    }

    /// The state that holds until a look shows another one.
    const fn known(&self) -> DriverState {
        match self.state {
            DriverState::Absent | DriverState::Unused => DriverState::Works,
            state => state,
        }
    }

    /// Measures how fast the balloon takes memory. A guest that still holds the frames has given nothing back.
    fn measure(&mut self, at: Duration, seen: Sighting, actual: u64) {
        let Some((before, Sighting { actual_bytes: Some(had), target_bytes, .. })) = self.last else { return };
        let ms = u64::try_from((at.saturating_sub(before)).as_millis()).unwrap_or(u64::MAX);
        // Longer pauses say little about the speed.
        if !(100..=5000).contains(&ms) || holds_more(seen, actual) {
            return;
        }
        let rate = had.saturating_sub(actual).saturating_mul(1000).checked_div(ms).unwrap_or(0);
        let is_on_its_way = |target: u64| actual > target.saturating_add(seen.ram_bytes / NEAR);
        if rate > self.bytes_per_s || target_bytes == seen.target_bytes && target_bytes.is_some_and(is_on_its_way) {
            self.withdrew(rate);
        }
    }
}

/// Whether a guest holds more frames than its size by its driver.
const fn holds_more(seen: Sighting, actual: u64) -> bool {
    seen.resident_bytes.saturating_sub(actual) > seen.ram_bytes / EXTRA_FRAMES
}

#[cfg(test)]
mod tests {
    use super::*;

    const M: u64 = 1 << 20;

    /// States at each second, by sizes in MiB: target, actual (`None`: silent) and resident. RAM is 256 MiB.
    fn states(seen: impl IntoIterator<Item = (u64, Option<u64>, u64)>) -> Vec<DriverState> {
        let mut driver = Driver::default();
        let look = |(second, (target, actual, resident)): (u64, (u64, Option<u64>, u64))| {
            let sighting = Sighting {
                ram_bytes: 256 * M,
                target_bytes: Some(target * M),
                actual_bytes: actual.map(|actual| actual * M),
                resident_bytes: resident * M,
                had_arrived: false,
            };
            driver.see(Duration::from_secs(second), sighting)
        };
        (0..).zip(seen).map(look).collect()
    }

    fn flagged_after(states: &[DriverState], flag: DriverState) -> Option<usize> {
        states.iter().position(|state| *state == flag)
    }

    #[test]
    fn driver_that_arrives_works() {
        let states = states((0..40).map(|s| (128, Some(256_u64.saturating_sub(4 * s).max(128)), 100)));
        assert!(states.iter().all(|state| *state == DriverState::Works), "{states:?}");
    }

    #[test]
    fn driver_without_progress_is_stuck_within_20_s() {
        for crumbs in [false, true] {
            let seen = (0..30).map(|s| (128, Some(256 - u64::from(crumbs) * s / 8), 200));
            let after = flagged_after(&states(seen), DriverState::Stuck);
            assert!(after.is_some_and(|s| s <= 20), "{after:?}");
        }
    }

    #[test]
    fn stuck_driver_that_goes_on_works_again() {
        let seen = (0..40).map(|s| (128, Some(if s < 20 { 256 } else { 128 }), 100));
        let states = states(seen);
        assert_eq!((states[15], states[25]), (DriverState::Stuck, DriverState::Works));
    }

    #[test]
    fn guest_that_holds_more_frames_than_it_says_lies() {
        let states = states((0..20).map(|_| (128, Some(128), 250)));
        assert!(flagged_after(&states, DriverState::Lies).is_some_and(|s| s <= 12), "{states:?}");
    }

    #[test]
    fn balloon_that_shrinks_by_itself_is_flagged_at_once() {
        let states = states([(128, Some(128), 100), (128, Some(128), 100), (128, Some(200), 100)]);
        assert_eq!(states[2], DriverState::Deflated);
    }

    #[test]
    fn new_target_is_no_deflation() {
        let states = states([(128, Some(128), 100), (64, Some(128), 100), (200, Some(130), 100)]);
        assert!(states.iter().all(|state| *state == DriverState::Works), "{states:?}");
    }

    #[test]
    fn silent_driver_is_flagged_and_its_answer_ends_that() {
        let seen = (0..20).map(|s| (128, (!(1..15).contains(&s)).then_some(128), 100));
        let states = states(seen);
        assert_eq!((states[5], states[14], states[16]), (DriverState::Works, DriverState::Silent, DriverState::Works));
    }

    #[test]
    fn driver_in_doubt_is_not_settled_although_it_works() {
        let settled_by = |actual_bytes: Option<u64>, resident_bytes| {
            let mut driver = Driver::default();
            let target_bytes = Some(128 * M);
            driver.see(
                Duration::ZERO,
                Sighting { ram_bytes: 256 * M, target_bytes, actual_bytes, resident_bytes, had_arrived: false },
            );
            assert_eq!(driver.state(), DriverState::Works);
            driver.is_settled()
        };
        assert!(settled_by(Some(128 * M), 100 * M));
        assert!(!settled_by(Some(200 * M), 100 * M), "on its way");
        assert!(!settled_by(Some(128 * M), 200 * M), "more frames than its size");
        assert!(!settled_by(None, 100 * M), "no answer");
    }

    fn sight(actual: u64, resident: u64) -> Sighting {
        Sighting {
            ram_bytes: 256 * M,
            target_bytes: Some(128 * M),
            actual_bytes: Some(actual * M),
            resident_bytes: resident * M,
            had_arrived: false,
        }
    }

    #[test]
    fn driver_that_took_memory_back_before_anybody_looked_is_flagged_at_the_first_look() {
        for (had_arrived, state) in [(true, DriverState::Deflated), (false, DriverState::Works)] {
            let sighting = Sighting { had_arrived, ..sight(225, 200) };
            assert_eq!(Driver::default().see(Duration::ZERO, sighting), state);
        }
    }

    #[test]
    fn speed_of_withdrawals_is_that_of_the_last_ones() {
        let mut driver = Driver::default();
        driver.see(Duration::ZERO, sight(256, 0));
        assert_eq!(driver.withdrawal_bytes_per_s(), None);
        driver.see(Duration::from_millis(500), sight(196, 0));
        assert_eq!(driver.withdrawal_bytes_per_s(), Some(120 * M));
        driver.see(Duration::from_millis(1500), sight(176, 0));
        assert_eq!(driver.withdrawal_bytes_per_s(), Some(95 * M), "a quarter of the way to 20 MiB");
        driver.see(Duration::from_millis(2500), sight(128, 0));
        driver.see(Duration::from_millis(3500), sight(128, 0));
        assert_eq!(driver.withdrawal_bytes_per_s(), Some(95 * M), "it has arrived");
    }

    /// Root inside a guest can write any size into the balloon device.
    #[test]
    fn size_without_frames_given_back_is_no_withdrawal() {
        for (resident, believed) in [(256, None), (145, None), (144, Some(1280 * M))] {
            let mut driver = Driver::default();
            driver.see(Duration::ZERO, sight(256, 256));
            driver.see(Duration::from_millis(100), sight(128, resident));
            assert_eq!(driver.withdrawal_bytes_per_s(), believed, "{resident} MiB are resident");
            let mut driver = Driver::default();
            driver.landed(128 * M, 0.1);
            driver.see(Duration::ZERO, sight(128, resident));
            assert_eq!(driver.withdrawal_bytes_per_s(), believed, "{resident} MiB are resident");
        }
    }
}
