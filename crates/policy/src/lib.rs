//! Which resting pages of a member are folded, and when. Pure: events and times in, answers out. So it is judged by
//! replaying what programs wrote (`pagefold bench policy`), in seconds.
//!
//! ```text
//!   the agent's map: pages folded, written, discarded          a round: pages changed, folds made, folds short-lived
//!           |                                                           |
//!           v                                                           v
//!   History: last write and last folds of each page            Policy: bursts, quiet intervals, ages (turnover.rs)
//!           |                                                           | admit()        | cadence()
//!           `---> History::admitted <------------ Worth ----------------'                v
//!                     | pages to fold                                       how often to look, and at what share
//! ```
//!
//! No program's memory becomes wrong by a wrong answer of this crate, which costs time, or memory that could have been
//! saved. All numbers are in [`params`].
#![forbid(unsafe_code)]

mod history;
pub mod params;
mod turnover;

pub use history::{History, NOTES_BYTES};
pub use params::{Cadence, LIFE, MOMENTS, Params, TODAY};
pub use turnover::{ByMoment, Folds, QuietInterval, Worth, moment};

use std::time::{Duration, Instant};
use turnover::Turnover;

/// An observation of a member.
#[derive(Clone, Copy, Debug)]
pub enum Event {
    /// The program started `age` ago and is idle now. If the agent was attached to a running program, this is all that
    /// is known of the time before.
    Idle {
        /// Time since the program started.
        age: Duration,
    },
    /// The agent has ended a round: it has found out which pages were written since the last one.
    Round {
        /// Pages that were written after they had been at rest ([`params::Pages::rest`]), since the last round.
        changed: u64,
        /// Pages of the member.
        pages: u64,
        /// Folds since the last round.
        folds: Folds,
    },
}

/// The policy of a member's agent.
#[derive(Debug)]
pub struct Policy {
    params: &'static Params,
    turnover: Turnover,
    is_eager: bool,
}

impl Policy {
    /// The policy of a member in which nothing has changed so far. If it `is_eager`, pages are folded without asking
    /// whether the folds will last.
    pub const fn new(params: &'static Params, is_eager: bool, now: Instant) -> Self {
        Self { params, turnover: Turnover::new(params, now), is_eager }
    }

    /// Learns what has happened by `now`.
    pub fn observe(&mut self, event: Event, now: Instant) {
        match event {
            Event::Idle { age } => self.turnover.begin_quiet(age, now),
            Event::Round { changed, pages, folds } => {
                self.turnover.add(changed, pages, now);
                self.turnover.judge(&folds, now);
            }
        }
    }

    /// The rule by which pages are worth folding at this time. [`History::admitted`] applies it to pages.
    pub fn admit(&self, now: Instant) -> Worth {
        if self.is_eager { Worth::All } else { self.turnover.worth(now) }
    }

    /// How often the agent looks at the member's memory at this time.
    pub fn cadence(&self, now: Instant) -> Cadence {
        let Params { seldom, busy, .. } = self.params;
        if self.is_eager {
            return Cadence { rounds: busy.rounds, closest: busy.closest, broken_first: 0, ..*seldom };
        }
        self.turnover.cadence(now)
    }

    /// The quiet interval that the member is in; `None` in a burst.
    pub fn quiet(&self, now: Instant) -> Option<QuietInterval> {
        self.turnover.quiet(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eager_policy_admits_all_at_once_and_looks_often() {
        let now = Instant::now();
        let [eager, other] = [true, false].map(|is_eager| Policy::new(&TODAY, is_eager, now));
        assert_eq!((eager.admit(now), other.admit(now) == Worth::All), (Worth::All, false));
        let (cadence, busiest) = (eager.cadence(now), other.cadence(now));
        assert_eq!((cadence.rounds, cadence.broken_first, cadence.is_little), (100, 0, true));
        assert_eq!((busiest, TODAY.busiest.broken_first), (TODAY.busiest, 2));
    }
}
