//! The pressure ladder: steps against memory pressure on the host, the mildest first. None of them kills.
//!
//! ```text
//!   idle -> withdraw -> reclaim -> pace -> advise -> refuse
//!    <--- one rung down after 60 s without pressure ---
//!         one rung up after each 10 s with it  ------>
//! ```
//!
//! | rung | step |
//! |---|---|
//! | `withdraw` | loans are withdrawn, the cheapest first, until 5/4 of the floor is available; nobody grows but to a guarantee |
//! | `reclaim` | control groups give page cache back, as much as is missing |
//! | `pace` | groups whose folding yields memory fold faster, and others scan slower: `pace.rs` |
//! | `advise` | a guest is proposed that should go to another host: `proposal.rs` |
//! | `refuse` | no reservation is granted |
//!
//! Pressure begins when less than the floor (memory that is never lent) is available. It also begins when tasks wait
//! for memory for 10% of the time, and less than twice the floor is available. It ends at 5/4 of the floor, if tasks
//! wait for less than 1% of the time or twice the floor is available. Between the two nothing changes. If tasks wait
//! although the host has memory, they are in a control group at its own limit.

use crate::facts::{Facts, HostFacts};
use crate::pause::DANGER;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Time under pressure on a rung after which the ladder goes up by one: 10 s.
const UP_AFTER: Duration = Duration::from_secs(10);
/// Time without pressure after which the ladder goes down by one rung: 60 s.
const DOWN_AFTER: Duration = Duration::from_secs(60);
/// Part of time in which some task waits for memory (PSI), in percent, at which pressure begins.
const STALLED: f64 = 10.0;
/// Multiple of the floor: if that much is available, waiting tasks say nothing about the host's memory.
const STALLS_COUNT: u64 = 2;
/// Part of time in which some task waits for memory, in percent, below which pressure ends.
const RELIEVED: f64 = 1.0;
/// Least memory that is withdrawn under pressure, as a part of RAM: 1/64.
const LEAST_RELIEF: u64 = 64;

/// Pressure on the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pressure {
    /// There is no pressure.
    None,
    /// Between the bounds: things stay as they are.
    Some,
    /// There is pressure.
    High,
}

impl Pressure {
    /// The pressure on a host.
    pub fn of(host: &HostFacts) -> Self {
        let is_hosts = host.available_bytes < host.floor_bytes.saturating_mul(STALLS_COUNT);
        let stalled = host.stalled_percent.filter(|_| is_hosts).unwrap_or(0.0);
        if host.available_bytes < host.floor_bytes || stalled >= STALLED {
            Self::High
        } else if host.available_bytes >= relieved_at(host.floor_bytes) && stalled < RELIEVED {
            Self::None
        } else {
            Self::Some
        }
    }
}

/// Memory that has to be freed to end the pressure, in bytes: all that is missing to 5/4 of the floor, but at least
/// 1/64 of RAM, because tasks may wait for memory although some is available. 0 without pressure.
pub fn relief_bytes(host: &HostFacts) -> u64 {
    if Pressure::of(host) == Pressure::None {
        return 0;
    }
    relieved_at(host.floor_bytes).saturating_sub(host.available_bytes).max(host.total_bytes / LEAST_RELIEF)
}

/// Memory that has to be freed at any price, because the host runs out of memory otherwise, in bytes: all that is
/// missing to half of the floor.
pub fn last_resort_bytes(host: &HostFacts) -> u64 {
    (host.floor_bytes / DANGER).saturating_sub(host.available_bytes)
}

/// Available memory at which pressure ends.
const fn relieved_at(floor_bytes: u64) -> u64 {
    floor_bytes.saturating_add(floor_bytes / 4)
}

/// A rung of the ladder; each includes those below it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rung {
    /// Nothing is done.
    #[default]
    Idle,
    /// Loans are withdrawn.
    Withdraw,
    /// Control groups give page cache back.
    Reclaim,
    /// Groups fold faster or scan slower.
    Pace,
    /// A guest is proposed that should go to another host.
    Advise,
    /// No reservation is granted.
    Refuse,
}

impl Rung {
    const ALL: [Self; 6] = [Self::Idle, Self::Withdraw, Self::Reclaim, Self::Pace, Self::Advise, Self::Refuse];

    /// The name used in JSON and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Withdraw => "withdraw",
            Self::Reclaim => "reclaim",
            Self::Pace => "pace",
            Self::Advise => "advise",
            Self::Refuse => "refuse",
        }
    }
}

/// A step on the ladder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RungEvent {
    /// The rung that was reached.
    pub rung: Rung,
    /// The reason.
    pub reason: String,
}

/// The present rung of the ladder, and what decides about the next step.
#[derive(Clone, Debug, Default)]
pub struct Ladder {
    rung: Rung,
    /// The present pressure, and the time since which it has lasted on this rung.
    since: Option<(Pressure, Duration)>,
}

impl Ladder {
    /// The rung.
    pub const fn rung(&self) -> Rung {
        self.rung
    }

    /// Takes the host's memory at time `at` into account. Returns the step if the rung changes, with its reason.
    pub fn see(&mut self, at: Duration, facts: &Facts) -> Option<RungEvent> {
        let event = self.step(at, Pressure::of(&facts.host))?;
        Some(RungEvent { reason: format!("{}: {}", event.reason, state_of(&facts.host)), ..event })
    }

    fn step(&mut self, at: Duration, pressure: Pressure) -> Option<RungEvent> {
        let since = match self.since {
            Some((before, since)) if before == pressure => since,
            _ => at,
        };
        self.since = Some((pressure, since));
        let place = Rung::ALL.iter().position(|rung| *rung == self.rung).unwrap_or(0);
        let waited = at.saturating_sub(since);
        let (next, reason) = match pressure {
            // The first step is taken at once.
            Pressure::High if place == 0 => (1, "memory is short".to_owned()),
            Pressure::High if waited >= UP_AFTER => {
                (place.saturating_add(1), format!("{} did not help in 10 s", self.rung.name()))
            }
            Pressure::None if place > 0 && waited >= DOWN_AFTER => {
                (place.saturating_sub(1), "no pressure for 60 s".to_owned())
            }
            _ => return None,
        };
        self.rung = *Rung::ALL.get(next)?;
        self.since = Some((pressure, at));
        Some(RungEvent { rung: self.rung, reason })
    }
}

fn state_of(host: &HostFacts) -> String {
    let stalled =
        host.stalled_percent.map_or_else(String::new, |part| format!(", tasks waited for {part:.0}% of 10 s"));
    format!("{} MiB are available, {} of them never lent{stalled}", host.available_bytes >> 20, host.floor_bytes >> 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    const M: u64 = 1 << 20;

    fn facts(available: u64, stalled_percent: Option<f64>) -> Facts {
        let host = HostFacts {
            total_bytes: 6400 * M,
            available_bytes: available * M,
            floor_bytes: 100 * M,
            stalled_percent,
            ..HostFacts::default()
        };
        Facts { host, ..Facts::default() }
    }

    #[test]
    fn pressure_climbs_rung_by_rung_and_descends_slowly() {
        let mut ladder = Ladder::default();
        let mut reached = Vec::new();
        for second in 0..500 {
            let available = if second < 100 { 50 } else { 500 };
            if let Some(event) = ladder.see(Duration::from_secs(second), &facts(available, None)) {
                reached.push((second, event.rung));
            }
        }
        assert_eq!(
            reached,
            [
                (0, Rung::Withdraw),
                (10, Rung::Reclaim),
                (20, Rung::Pace),
                (30, Rung::Advise),
                (40, Rung::Refuse),
                (160, Rung::Advise),
                (220, Rung::Pace),
                (280, Rung::Reclaim),
                (340, Rung::Withdraw),
                (400, Rung::Idle),
            ]
        );
    }

    #[test]
    fn pressure_about_a_bound_changes_nothing() {
        let mut ladder = Ladder::default();
        ladder.see(Duration::ZERO, &facts(99, None));
        for second in 1..500 {
            let available = if second % 7 == 0 { 99 } else { 110 };
            assert_eq!(ladder.see(Duration::from_secs(second), &facts(available, None)), None);
        }
    }

    #[test]
    fn pressure_has_two_bounds() {
        let of = |available, stalled| Pressure::of(&facts(available, stalled).host);
        assert_eq!([of(99, None), of(100, None), of(125, None)], [Pressure::High, Pressure::Some, Pressure::None]);
        assert_eq!([of(199, Some(10.0)), of(199, Some(1.0))], [Pressure::High, Pressure::Some]);
    }

    /// A tenant's tasks may wait for memory all the time, at the limit of the tenant's own control group.
    #[test]
    fn tasks_that_wait_on_a_host_with_memory_climb_no_rung() {
        let (mut ladder, mut lack) = (Ladder::default(), Ladder::default());
        for second in 0..600 {
            assert_eq!(ladder.see(Duration::from_secs(second), &facts(200, Some(99.0))), None);
            lack.see(Duration::from_secs(second), &facts(150, Some(99.0)));
        }
        assert_eq!((ladder.rung(), lack.rung()), (Rung::Idle, Rung::Refuse));
    }

    #[test]
    fn relief_is_all_that_is_missing_and_none_without_pressure() {
        let of = |available| relief_bytes(&facts(available, None).host) / M;
        assert_eq!([of(0), of(20), of(110), of(500)], [125, 105, 100, 0]);
    }
}
