//! Changes the pace of folding while the host is short of memory: groups for which folding saves memory fold faster,
//! others slower.
//!
//! | in the last 10 s, a group | pace |
//! |---|---|
//! | gained a page of net savings for each 64 that it fingerprinted | four times its scan rate. One without a limit folds all that rests already |
//! | fingerprinted 256 pages or more, gained nothing, and folded less than 1/64 of them to stay | a quarter of what it fingerprinted, 64 pages a second at least |
//! | neither | as before |
//!
//! A slower group takes less processor time, and fewer of its folded pages are written again. It is still noticed if
//! its pages become alike: the first row then gives it back its usual pace. Below the rung `pace` of the ladder, every
//! group has its usual pace.

use crate::facts::{Facts, GroupFacts};
use crate::ladder::Rung;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Time over which a group is judged: 10 s.
const JUDGED_OVER: Duration = Duration::from_secs(10);
/// Part of the fingerprinted pages that must be gained as net savings for a group to count as saving, or be folded to
/// stay for it not to be slowed down: 1/64.
const OF_USE: u64 = 64;
/// Fewest pages that must have been fingerprinted for a group to be slowed down: 256.
const LEAST_SEEN: u64 = 256;
/// Factor by which a group folds faster, and slower: 4.
const FACTOR: u32 = 4;
/// Scan rate below which no group is slowed down: 64 pages a second.
const SLOWEST: u32 = 64;
/// Size of a page in bytes.
const PAGE_BYTES: u64 = 4096;

/// How fast a group folds, against its own settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pace {
    /// By the group's own settings.
    #[default]
    Usual,
    /// Slower than by the group's own settings.
    Slower,
    /// Faster than by the group's own settings.
    Faster,
}

impl Pace {
    /// The name used in JSON and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Usual => "usual",
            Self::Slower => "slower",
            Self::Faster => "faster",
        }
    }
}

/// Another pace of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PaceChange {
    /// The group.
    pub group: String,
    /// Its pace.
    pub pace: Pace,
    /// Most pages that it fingerprints a second; `None`: as its settings have it.
    pub pages_per_s: Option<u32>,
    /// The reason.
    pub reason: String,
}

/// What is kept about one group.
#[derive(Clone, Copy, Debug)]
struct Watched {
    /// The group's figures at the beginning of the time over which it is judged.
    then: GroupFacts,
    since: Duration,
    /// The group's pace and pages a second, if the pace is not the usual one.
    told: Option<(Pace, u32)>,
}

/// Paces of all groups.
#[derive(Clone, Debug, Default)]
pub struct Paces(BTreeMap<String, Watched>);

impl Paces {
    /// Groups with another pace than the usual one, and their pages a second.
    pub fn in_force(&self) -> impl Iterator<Item = (&str, u32)> {
        self.0.iter().filter_map(|(group, watched)| watched.told.map(|(_, pages)| (group.as_str(), pages)))
    }

    /// Takes the groups' figures at a time into account; returns the changes, each with its reason.
    pub fn see(&mut self, at: Duration, facts: &Facts) -> Vec<PaceChange> {
        self.0.retain(|group, _| facts.groups.contains_key(group));
        let may = facts.host.rung >= Rung::Pace;
        let judge = |(group, figures): (&String, &GroupFacts)| {
            let watched = self.0.entry(group.clone()).or_insert(Watched { then: *figures, since: at, told: None });
            let before = watched.told;
            let reason = watched.judge(at, figures, may)?;
            let (pace, pages_per_s) = watched.told.unzip();
            let change = PaceChange { group: group.clone(), pace: pace.unwrap_or_default(), pages_per_s, reason };
            (watched.told != before).then_some(change)
        };
        facts.groups.iter().filter_map(judge).collect()
    }
}

impl Watched {
    /// Judges the group if that is due, and sets its pace. Returns the reason then. `may`: the ladder is high enough
    /// for other paces than the usual one.
    fn judge(&mut self, at: Duration, now: &GroupFacts, may: bool) -> Option<String> {
        if !may && self.told.take().is_some() {
            return Some("the host is less short of memory".into());
        }
        let seconds = at.saturating_sub(self.since).as_secs();
        if seconds < JUDGED_OVER.as_secs() {
            return None;
        }
        let done = Done::between(&self.then, now);
        (self.then, self.since) = (*now, at);
        if !may {
            return None;
        }
        self.told = if done.yields() {
            now.scan_rate.map(|rate| (Pace::Faster, rate.saturating_mul(FACTOR)))
        } else if done.is_in_vain() {
            slower(done.hashed.checked_div(seconds).unwrap_or(0), now.scan_rate)
                .or(self.told.filter(|(pace, _)| *pace == Pace::Slower))
        } else {
            self.told
        };
        Some(done.in_words(seconds))
    }
}

/// A slower pace for a group that fingerprints `hashed_per_s` pages a second in vain; `None` if it cannot be slower.
fn slower(hashed_per_s: u64, scan_rate: Option<u32>) -> Option<(Pace, u32)> {
    let pages = u32::try_from(hashed_per_s).unwrap_or(u32::MAX);
    let slower = (pages / FACTOR).max(SLOWEST);
    (slower < scan_rate.unwrap_or(u32::MAX).min(pages)).then_some((Pace::Slower, slower))
}

/// What a group has done and gained in the time over which it is judged.
struct Done {
    hashed: u64,
    lasting: u64,
    gained_bytes: i64,
}

impl Done {
    /// A hostile member can send any number, so the arithmetic saturates.
    fn between(then: &GroupFacts, now: &GroupFacts) -> Self {
        let folds = now.folds.saturating_sub(then.folds);
        Self {
            hashed: now.pages_hashed.saturating_sub(then.pages_hashed),
            lasting: folds.saturating_sub(now.short_folds.saturating_sub(then.short_folds)),
            gained_bytes: now.saved_bytes.saturating_sub(then.saved_bytes),
        }
    }

    fn yields(&self) -> bool {
        let pages = u64::try_from(self.gained_bytes).unwrap_or(0) / PAGE_BYTES;
        pages > 0 && pages.saturating_mul(OF_USE) >= self.hashed
    }

    const fn is_in_vain(&self) -> bool {
        self.hashed >= LEAST_SEEN && self.gained_bytes <= 0 && self.lasting.saturating_mul(OF_USE) < self.hashed
    }

    fn in_words(&self, seconds: u64) -> String {
        let Self { hashed, lasting, gained_bytes } = self;
        format!(
            "in {seconds} s, {hashed} pages were fingerprinted, {lasting} folded to stay, and net savings changed by {} KiB",
            gained_bytes >> 10
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATED: GroupFacts =
        GroupFacts { saved_bytes: 0, cpu_s: 0.0, pages_hashed: 0, folds: 0, short_folds: 0, scan_rate: Some(1000) };

    /// The group `a` after so many seconds on a rung.
    fn see(paces: &mut Paces, second: u64, rung: Rung, figures: GroupFacts) -> Option<(Pace, Option<u32>)> {
        let mut facts = Facts { groups: BTreeMap::from([("a".into(), figures)]), ..Facts::default() };
        facts.host.rung = rung;
        let changes = paces.see(Duration::from_secs(second), &facts);
        changes.first().map(|change| (change.pace, change.pages_per_s))
    }

    fn after_10_s(rung: Rung, then: GroupFacts, now: GroupFacts) -> Option<(Pace, Option<u32>)> {
        let mut paces = Paces::default();
        assert_eq!(see(&mut paces, 0, rung, then), None, "nothing is known");
        assert_eq!(see(&mut paces, 9, rung, now), None, "too early");
        see(&mut paces, 10, rung, now)
    }

    #[test]
    fn group_that_yields_folds_faster_and_one_that_does_not_slower() {
        let yields = GroupFacts { pages_hashed: 6400, folds: 100, saved_bytes: 100 << 12, ..RATED };
        let too_little = GroupFacts { saved_bytes: 99 << 12, ..yields };
        assert_eq!(after_10_s(Rung::Pace, RATED, yields), Some((Pace::Faster, Some(4000))));
        assert_eq!(after_10_s(Rung::Refuse, RATED, yields), Some((Pace::Faster, Some(4000))));
        assert_eq!(after_10_s(Rung::Pace, RATED, too_little), None);
        let in_vain = GroupFacts { pages_hashed: 8000, ..RATED };
        assert_eq!(after_10_s(Rung::Pace, RATED, in_vain), Some((Pace::Slower, Some(200))));
        for below in [Rung::Idle, Rung::Withdraw, Rung::Reclaim] {
            assert_eq!([yields, in_vain].map(|now| after_10_s(below, RATED, now)), [None; 2], "{below:?}");
        }
    }

    #[test]
    fn group_without_a_limit_is_slowed_down_and_never_hurried() {
        let free = GroupFacts { scan_rate: None, ..RATED };
        let in_vain = GroupFacts { pages_hashed: 40_000, ..free };
        assert_eq!(after_10_s(Rung::Pace, free, in_vain), Some((Pace::Slower, Some(1000))));
        assert_eq!(after_10_s(Rung::Pace, free, GroupFacts { saved_bytes: 1 << 30, ..in_vain }), None);
    }

    #[test]
    fn folds_that_stay_and_little_work_are_no_reason_to_slow_down() {
        let in_vain = GroupFacts { pages_hashed: 6400, folds: 500, short_folds: 401, ..RATED };
        assert_eq!(after_10_s(Rung::Pace, RATED, in_vain), Some((Pace::Slower, Some(160))));
        for change in [
            GroupFacts { short_folds: 400, ..in_vain },
            GroupFacts { saved_bytes: 1, ..in_vain },
            GroupFacts { pages_hashed: 255, ..in_vain },
            GroupFacts { scan_rate: Some(160), ..in_vain },
        ] {
            assert_eq!(after_10_s(Rung::Pace, RATED, change), None, "{change:?}");
        }
    }

    #[test]
    fn slowed_group_has_its_usual_pace_when_it_yields_or_pressure_ends() {
        let free = GroupFacts { scan_rate: None, ..RATED };
        for (rung, gained, wanted) in [
            (Rung::Pace, 1 << 20, Some((Pace::Usual, None))),
            (Rung::Reclaim, 0, Some((Pace::Usual, None))),
            (Rung::Pace, 0, None),
        ] {
            let mut paces = Paces::default();
            let mut figures = free;
            see(&mut paces, 0, Rung::Pace, figures);
            figures.pages_hashed = 40_000;
            assert_eq!(see(&mut paces, 10, Rung::Pace, figures), Some((Pace::Slower, Some(1000))));
            assert_eq!(paces.in_force().collect::<Vec<_>>(), [("a", 1000)]);
            // Too few pages are looked at to say anything but that it gains.
            (figures.pages_hashed, figures.saved_bytes) = (40_200, gained);
            assert_eq!(see(&mut paces, 20, rung, figures), wanted, "{rung:?}");
            assert_eq!(paces.in_force().count(), usize::from(wanted.is_none()));
        }
    }

    #[test]
    fn slowed_group_never_stands_still() {
        let mut paces = Paces::default();
        let (mut figures, mut rate, mut told) = (GroupFacts { scan_rate: None, ..RATED }, 4000, Vec::new());
        for second in (0..100).step_by(10) {
            if let Some((_, Some(pages))) = see(&mut paces, second, Rung::Pace, figures) {
                told.push(pages);
                rate = pages.into();
            }
            figures.pages_hashed += 10 * rate;
        }
        assert_eq!(told, [1000, 250, 64]);
    }
}
