//! Troubles of the service itself, as long as they last: what is wrong, and what does not work because of it.
//!
//! | trouble | found |
//! |---|---|
//! | `state_not_written` | the state file cannot be written, on a full disk say; folding goes on |
//! | `no_prover` | a prover is wanted, and does not run |
//! | `journal_not_written` | the journal cannot be written; nobody but root changes anything meanwhile |
//! | `rules_not_carried_out` | there are rules, and nobody asks for them |
//!
//! A clock that is set back is no trouble: nothing here asks for the time of day.

use api::ask::Trouble;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Name of the trouble with the state file.
pub const STATE: &str = "state_not_written";
/// Name of the trouble with the journal.
pub const JOURNAL: &str = "journal_not_written";
/// Name of the trouble with the prover.
pub const PROVER: &str = "no_prover";
/// Name of the trouble with rules.
pub const ENROL: &str = "rules_not_carried_out";

/// Time without a prover from which on that counts as a trouble: 5 s. One that has ended is usually started again
/// sooner.
const PROVER_TIME: Duration = Duration::from_secs(5);

/// The troubles that the service has at present.
#[derive(Debug, Default)]
pub struct Troubles {
    now: BTreeMap<&'static str, String>,
    without_prover_since: Option<Instant>,
}

impl Troubles {
    /// Notes that a trouble is there, with its description, or that it is over (`None`).
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

    /// All troubles.
    pub fn all(&self) -> impl Iterator<Item = Trouble> {
        self.now.iter().map(|(trouble, detail)| Trouble { trouble: (*trouble).to_owned(), detail: detail.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
