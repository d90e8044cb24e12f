//! Troubles of the service itself, as long as they last: what is wrong, and what is lost by it.
//!
//! | trouble | found |
//! |---|---|
//! | `state_not_written` | the state file cannot be written, on a full disk say; folding goes on |
//! | `clock_set_back` | the clock of the host was set back; it is told for a minute |
//! | `no_prover` | a prover is wanted, and does not run |

use api::ask::Trouble;
use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

/// Name of the trouble with the state file.
pub const STATE: &str = "state_not_written";
/// Name of a step of the clock.
const CLOCK: &str = "clock_set_back";
/// Name of the trouble with the prover.
pub const PROVER: &str = "no_prover";

/// Step of the clock that counts: 2 s. Time servers correct smaller ones slowly.
const STEP: Duration = Duration::from_secs(2);
/// Time for which a step is told: 60 s.
const TOLD: Duration = Duration::from_secs(60);
/// Time without a prover that is no trouble: 5 s, as it is started again at once.
const PROVER_TIME: Duration = Duration::from_secs(5);

/// The troubles.
#[derive(Debug, Default)]
pub struct Troubles {
    now: BTreeMap<&'static str, String>,
    /// The last look at both clocks.
    clocks: Option<(Instant, SystemTime)>,
    step_told_until: Option<Instant>,
    without_prover_since: Option<Instant>,
}

impl Troubles {
    /// Notes that a trouble is there, or is over.
    pub fn set(&mut self, trouble: &'static str, detail: Option<String>) {
        match detail {
            Some(detail) => _ = self.now.insert(trouble, detail),
            None => _ = self.now.remove(trouble),
        }
    }

    /// Whether a trouble is there.
    pub fn has(&self, trouble: &str) -> bool {
        self.now.contains_key(trouble)
    }

    /// Compares the host's clock with one that is never set. Called once a second. Returns a step back that was found.
    pub fn look_at_clock(&mut self, now: Instant, clock: SystemTime) -> Option<Duration> {
        let before = self.clocks.replace((now, clock));
        if self.step_told_until.is_some_and(|until| until <= now) {
            self.step_told_until = None;
            self.set(CLOCK, None);
        }
        let (then, clock_then) = before?;
        let expected = clock_then + now.saturating_duration_since(then);
        let step = expected.duration_since(clock).ok().filter(|step| *step > STEP)?;
        self.step_told_until = Some(now + TOLD);
        let detail = format!(
            "the clock was set back by {} s: folding goes on. Times in logs overlap, and start times in metrics are those \
             of the clock before, until the service starts again",
            step.as_secs()
        );
        self.set(CLOCK, Some(detail));
        Some(step)
    }

    /// Notes whether a prover that is wanted runs. Called once a second.
    pub fn look_at_prover(&mut self, is_missing: bool, now: Instant) {
        if !is_missing {
            self.without_prover_since = None;
            return self.set(PROVER, None);
        }
        if now.saturating_duration_since(*self.without_prover_since.get_or_insert(now)) >= PROVER_TIME {
            let detail = "the prover does not run, see the log: members find out by themselves what is held, which costs \
                          them more, and slots that were freed are not used again";
            self.set(PROVER, Some(detail.into()));
        }
    }

    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = Trouble> {
        self.now.iter().map(|(trouble, detail)| Trouble { trouble: (*trouble).to_owned(), detail: detail.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_that_is_set_back_is_told_for_a_minute() {
        let (mut troubles, now, clock) =
            (Troubles::default(), Instant::now(), SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 30));
        let s = Duration::from_secs;
        assert_eq!(troubles.look_at_clock(now, clock), None);
        assert_eq!(troubles.look_at_clock(now + s(1), clock + s(1)), None);
        assert_eq!(troubles.look_at_clock(now + s(2), clock + s(3600)), None, "it was set forward");
        assert_eq!(troubles.look_at_clock(now + s(3), clock + s(1)), Some(s(3600)));
        assert!(troubles.has(CLOCK) && troubles.all().next().unwrap().detail.contains("by 3600 s"));
        assert_eq!(troubles.look_at_clock(now + s(4), clock + s(2)), None);
        assert!(troubles.has(CLOCK));
        troubles.look_at_clock(now + s(64), clock + s(62));
        assert!(!troubles.has(CLOCK));
        assert_eq!(troubles.look_at_clock(now + s(65), clock + s(62)), None, "a second is no step");
    }

    #[test]
    fn prover_that_starts_again_at_once_is_no_trouble() {
        let (mut troubles, now) = (Troubles::default(), Instant::now());
        troubles.look_at_prover(true, now);
        assert!(!troubles.has(PROVER));
        troubles.look_at_prover(false, now + PROVER_TIME);
        troubles.look_at_prover(true, now + PROVER_TIME);
        assert!(!troubles.has(PROVER));
        troubles.look_at_prover(true, now + 2 * PROVER_TIME);
        assert!(troubles.has(PROVER));
        troubles.look_at_prover(false, now + 3 * PROVER_TIME);
        assert!(!troubles.has(PROVER));
    }
}
