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
//! Nothing that keeps memory right rests on an answer of this room. A wrong one costs time, or memory that could be
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
    /// The program has run for `age` and is idle. Of a program that was attached while it ran, nothing else is known of
    /// the time before.
    Idle {
        /// Time since the program started.
        age: Duration,
    },
    /// A round was made.
    Round {
        /// Pages that were written after they had rested, since the last round.
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
    /// Of a member in which nothing has changed. If it `is_eager`, pages are folded without asking whether the folds will
    /// last.
    pub const fn new(params: &'static Params, is_eager: bool, now: Instant) -> Self {
        Self { params, turnover: Turnover::new(params, now), is_eager }
    }

    /// Takes in what has happened by `now`.
    pub fn observe(&mut self, event: Event, now: Instant) {
        match event {
            Event::Idle { age } => self.turnover.begin_quiet(age, now),
            Event::Round { changed, pages, folds } => {
                self.turnover.add(changed, pages, now);
                self.turnover.judge(&folds, now);
            }
        }
    }

    /// The pages that are worth folding. [`History::admitted`] picks them.
    pub fn admit(&self, now: Instant) -> Worth {
        if self.is_eager { Worth::All } else { self.turnover.worth(now) }
    }

    /// How often to look at the member.
    pub fn cadence(&self, now: Instant) -> Cadence {
        let Params { seldom, busy, .. } = self.params;
        if self.is_eager {
            return Cadence { rounds: busy.rounds, closest: busy.closest, broken_first: 0, ..*seldom };
        }
        self.turnover.cadence(now)
    }

    /// The quiet interval; `None` in a burst.
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
