//! The service's part in enrolling running processes by rules. Another process looks for them and attaches them
//! (`pagefold enrol apply`). This one tells it the rules, decides on each membership, and keeps what it tells of processes
//! that a rule fits in vain.
//!
//! ```text
//!   pagefold enrol apply --Rules, reasons--> supervisor        every 2 s, on the control socket
//!     |                 <--rules------------
//!     v
//!   pagefold-attach -------Attach----------> supervisor        for each process that is to be a member
//! ```

use api::enrol::{MOST_NOT_ATTACHED, NotAttached};
use cli::note;
use std::time::{Duration, Instant};

/// Time without a question for the rules after which nobody enrols: 15 s.
const SILENCE: Duration = Duration::from_secs(15);
/// Most reasons in the log for each report.
const MOST_NOTES: usize = 10;

/// The state of enrolling.
#[derive(Debug, Default)]
pub struct Enrolment {
    not_attached: Vec<NotAttached>,
    /// When the rules were last asked for, or first wanted.
    heard: Option<Instant>,
}

impl Enrolment {
    /// Notes that the rules were asked for, and what was told.
    pub fn heard(&mut self, told: Option<Vec<NotAttached>>, now: Instant) {
        self.heard = Some(now);
        let Some(mut told) = told else { return };
        told.truncate(MOST_NOT_ATTACHED);
        let is_known = |one: &NotAttached| self.not_attached.iter().any(|old| old.pid == one.pid && old.why == one.why);
        let failed = told.iter().filter(|one| one.again_s.is_some() && !is_known(one));
        for NotAttached { pid, program, group, why, .. } in failed.take(MOST_NOTES) {
            note!("group {group}: process {pid} ({program}) is not attached by a rule: {why}");
        }
        self.not_attached = told;
    }

    /// Processes of a group's that are not attached.
    pub fn of_group(&self, group: &str) -> Vec<NotAttached> {
        self.not_attached.iter().filter(|one| one.group == group).cloned().collect()
    }

    /// Whether nobody carries out rules that there are. Called once a second.
    pub fn is_idle(&mut self, has_rules: bool, now: Instant) -> bool {
        if !has_rules {
            (self.heard, self.not_attached) = (None, Vec::new());
            return false;
        }
        now.saturating_duration_since(*self.heard.get_or_insert(now)) > SILENCE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_idle_only_while_there_are_rules() {
        let (mut enrolment, now) = (Enrolment::default(), Instant::now());
        assert!(!enrolment.is_idle(true, now));
        assert!(!enrolment.is_idle(true, now + SILENCE));
        assert!(enrolment.is_idle(true, now + SILENCE * 2));
        enrolment.heard(None, now + SILENCE * 2);
        assert!(!enrolment.is_idle(true, now + SILENCE * 2));
        assert!(!enrolment.is_idle(false, now + SILENCE * 9));
        assert!(!enrolment.is_idle(true, now + SILENCE * 9), "it has its time again");
    }

    #[test]
    fn list_is_bounded_and_told_by_group() {
        let one = |pid, group: &str| NotAttached {
            pid,
            program: "p".into(),
            group: group.into(),
            why: "no".into(),
            again_s: None,
        };
        let mut enrolment = Enrolment::default();
        enrolment
            .heard(Some((0..1000).map(|pid| one(pid, if pid % 2 == 0 { "a" } else { "b" })).collect()), Instant::now());
        assert_eq!(enrolment.of_group("a").len(), MOST_NOT_ATTACHED / 2);
        enrolment.heard(None, Instant::now());
        assert_eq!(enrolment.of_group("b").len(), MOST_NOT_ATTACHED / 2, "nothing new was told");
    }
}
