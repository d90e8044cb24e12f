//! The pressure ladder: steps against memory pressure on the host, the mildest first. None of them kills.
//!
//! ```text
//!   idle -> withdraw -> reclaim -> pace -> migrate -> refuse
//!    <--- one rung down after 60 s without pressure ---
//!         one rung up after each 10 s with it  ------>
//! ```
//!
//! Pressure begins when less than the floor is available, or tasks wait for memory for 10% of the time. It ends at 5/4 of
//! the floor and below 1%. Between the two nothing changes.

use serde::Serialize;
use std::time::Duration;

/// Time on a rung before the next one up: 10 s.
const UP_AFTER: Duration = Duration::from_secs(10);
/// Time without pressure before the next rung down: 60 s.
const DOWN_AFTER: Duration = Duration::from_secs(60);
/// Part of time with some task waiting at which pressure begins: 10%.
const STALLED: f64 = 10.0;
/// Part of time below which pressure ends: 1%.
const RELIEVED: f64 = 1.0;

/// Pressure on the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pressure {
    /// There is none.
    None,
    /// Between the bounds: things stay as they are.
    Some,
    /// There is.
    High,
}

impl Pressure {
    /// The pressure by available memory, and by the part of time that some task waits for memory (PSI, in percent).
    pub fn of(available_bytes: u64, floor_bytes: u64, stalled_percent: Option<f64>) -> Self {
        let stalled = stalled_percent.unwrap_or(0.0);
        if available_bytes < floor_bytes || stalled >= STALLED {
            Self::High
        } else if available_bytes >= floor_bytes.saturating_add(floor_bytes / 4) && stalled < RELIEVED {
            Self::None
        } else {
            Self::Some
        }
    }
}

/// A rung of the ladder; each includes those below it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rung {
    /// Nothing is done.
    #[default]
    Idle,
    /// Loans are withdrawn.
    Withdraw,
    /// Guests give up free pages and cold page cache.
    Reclaim,
    /// Groups scan more slowly where folding yields little, and faster where it yields.
    Pace,
    /// An operator is advised to move a guest away.
    Migrate,
    /// No reservation is granted.
    Refuse,
}

impl Rung {
    const ALL: [Self; 6] = [Self::Idle, Self::Withdraw, Self::Reclaim, Self::Pace, Self::Migrate, Self::Refuse];

    /// The name used in JSON and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Withdraw => "withdraw",
            Self::Reclaim => "reclaim",
            Self::Pace => "pace",
            Self::Migrate => "migrate",
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

/// The place on the ladder.
#[derive(Clone, Debug, Default)]
pub struct Ladder {
    rung: Rung,
    /// Since when the pressure has been as it is, on this rung.
    since: Option<(Pressure, Duration)>,
}

impl Ladder {
    /// The rung.
    pub const fn rung(&self) -> Rung {
        self.rung
    }

    /// Takes the pressure at a time into account; a step comes with its reason.
    pub fn see(&mut self, at: Duration, pressure: Pressure) -> Option<RungEvent> {
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
            Pressure::High if waited >= UP_AFTER => (place + 1, format!("{} did not help in 10 s", self.rung.name())),
            Pressure::None if place > 0 && waited >= DOWN_AFTER => (place - 1, "no pressure for 60 s".to_owned()),
            _ => return None,
        };
        self.rung = *Rung::ALL.get(next)?;
        self.since = Some((pressure, at));
        Some(RungEvent { rung: self.rung, reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_climbs_rung_by_rung_and_descends_slowly() {
        let mut ladder = Ladder::default();
        let mut reached = Vec::new();
        for second in 0..400 {
            let pressure = if second < 100 { Pressure::High } else { Pressure::None };
            if let Some(event) = ladder.see(Duration::from_secs(second), pressure) {
                reached.push((second, event.rung));
            }
        }
        assert_eq!(
            reached,
            [
                (0, Rung::Withdraw),
                (10, Rung::Reclaim),
                (20, Rung::Pace),
                (30, Rung::Migrate),
                (40, Rung::Refuse),
                (160, Rung::Migrate),
                (220, Rung::Pace),
                (280, Rung::Reclaim),
                (340, Rung::Withdraw),
            ]
        );
    }

    #[test]
    fn pressure_about_a_bound_changes_nothing() {
        let mut ladder = Ladder::default();
        ladder.see(Duration::ZERO, Pressure::High);
        for second in 1..500 {
            let pressure = if second % 7 == 0 { Pressure::High } else { Pressure::Some };
            assert_eq!(ladder.see(Duration::from_secs(second), pressure), None);
        }
    }

    #[test]
    fn pressure_has_two_bounds() {
        let of = |available, stalled| Pressure::of(available, 100, stalled);
        assert_eq!([of(99, None), of(100, None), of(125, None)], [Pressure::High, Pressure::Some, Pressure::None]);
        assert_eq!([of(500, Some(10.0)), of(500, Some(1.0))], [Pressure::High, Pressure::Some]);
    }
}
