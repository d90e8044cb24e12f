//! The service's part in enrolling running processes by rules. Another process (`pagefold enrol apply`) finds the
//! processes that rules fit, and attaches them. The supervisor tells that process the rules, decides on each
//! membership, and keeps the reasons why processes that a rule fits were not attached. `pagefold-attach` beside an
//! attached process reports the children of that process.
//!
//! ```text
//!   pagefold enrol apply --Rules, reasons--> supervisor        every 2 s, on the control socket
//!     |                 <--rules------------
//!     v
//!   pagefold-attach -------Attach----------> supervisor        for each process that is to be a member
//! ```

use api::ask::MemberLine;
use api::enrol::{MOST_NOT_ATTACHED, MOST_REASON, NotAttached};
use cli::note;
use host::ProcessId;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Time without a question for the rules after which the service reports that rules are not carried out: 15 s.
const SILENCE: Duration = Duration::from_secs(15);
/// Most new reasons that are logged when the rules are asked for.
const MOST_NOTES: usize = 10;

/// The state of enrolling.
#[derive(Debug, Default)]
pub struct Enrolment {
    not_attached: Vec<NotAttached>,
    /// Forked children that are no members, by their parent.
    children: HashMap<ProcessId, (Instant, Vec<NotAttached>)>,
    /// When the rules were last asked for; before the first time, since when there have been rules.
    heard: Option<Instant>,
}

impl Enrolment {
    /// Notes that the rules were asked for, and why processes that a rule fits were not attached. With `None`, the
    /// reasons told before still hold.
    pub fn heard(&mut self, told: Option<Vec<NotAttached>>, now: Instant) {
        self.heard = Some(now);
        let Some(mut told) = told else { return };
        told.truncate(MOST_NOT_ATTACHED.0);
        let is_known = |one: &NotAttached| self.not_attached.iter().any(|old| old.pid == one.pid && old.why == one.why);
        let failed = told.iter().filter(|one| one.again_s.is_some() && !is_known(one));
        for NotAttached { pid, program, group, why, .. } in failed.take(MOST_NOTES) {
            note!("group {group}: process {pid} ({program}) is not attached by a rule: {why}");
        }
        self.not_attached = told;
    }

    /// Notes which forked children of an attached member are no members, and why. The report is not trusted to name the
    /// children's group and family: both are set to those of the member.
    pub fn heard_of_children(&mut self, parent: &MemberLine, mut told: Vec<NotAttached>, now: Instant) {
        let id = ProcessId { pid: parent.identity.pid, start_ticks: parent.identity.started };
        let family = parent.family.as_ref().unwrap_or(&parent.identity.name);
        told.truncate(MOST_NOT_ATTACHED.1);
        for one in &mut told {
            (one.group, one.family) = (parent.group.clone(), Some(family.clone()));
            one.why = one.why.chars().take(MOST_REASON).collect();
            one.program = one.program.chars().take(MOST_REASON).collect();
        }
        if told.is_empty() {
            self.children.remove(&id);
        } else {
            self.children.insert(id, (now, told));
        }
    }

    /// Processes that belong to a group by a rule or their parent, and are not attached. Children whose parent is no
    /// member any more are forgotten.
    pub fn of_group(&mut self, group: &str, is_member: impl Fn(ProcessId) -> bool, now: Instant) -> Vec<NotAttached> {
        self.children.retain(|parent, _| is_member(*parent));
        let left = |one: &NotAttached, heard: Instant| NotAttached {
            again_s: one.again_s.map(|seconds| seconds.saturating_sub((now - heard).as_secs())),
            ..one.clone()
        };
        let children = self.children.values().flat_map(|(heard, all)| all.iter().map(|one| left(one, *heard)));
        let all = self.not_attached.iter().cloned().chain(children).filter(|one| one.group == group);
        all.take(MOST_NOT_ATTACHED.0).collect()
    }

    /// Whether the configuration has enrol rules, and no process has asked for them for [`SILENCE`], so that nobody carries
    /// them out. To be called once a second.
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
            family: None,
            why: "no".into(),
            again_s: None,
        };
        let mut enrolment = Enrolment::default();
        enrolment
            .heard(Some((0..1000).map(|pid| one(pid, if pid % 2 == 0 { "a" } else { "b" })).collect()), Instant::now());
        let count = |enrolment: &mut Enrolment, group| enrolment.of_group(group, |_| true, Instant::now()).len();
        assert_eq!(count(&mut enrolment, "a"), MOST_NOT_ATTACHED.0 / 2);
        enrolment.heard(None, Instant::now());
        assert_eq!(count(&mut enrolment, "b"), MOST_NOT_ATTACHED.0 / 2, "nothing new was told");
    }

    #[test]
    fn children_are_told_as_their_parents_until_that_leaves() {
        let mut enrolment = Enrolment::default();
        let text = r#"{"group": "a", "name": "server", "pid": 7, "started": 70, "uid": 0, "connected": true}"#;
        let parent: MemberLine = serde_json::from_str(text).unwrap();
        let child = r#"{"pid": 8, "program": "p", "group": "b", "family": "f", "why": "no", "again_s": 2}"#;
        let child: NotAttached = serde_json::from_str(child).unwrap();
        let long = NotAttached { why: "x".repeat(5000), ..child.clone() };
        let now = Instant::now();
        enrolment.heard_of_children(&parent, std::iter::repeat_n(long, 100).collect(), now);
        let told = enrolment.of_group("a", |id| id == ProcessId { pid: 7, start_ticks: 70 }, now);
        assert_eq!((told.len(), told[0].why.len(), told[0].family.as_deref()), (16, MOST_REASON, Some("server")));
        let later = now + Duration::from_secs(1);
        let count = |enrolment: &mut Enrolment, group, is_member| enrolment.of_group(group, |_| is_member, later).len();
        assert_eq!(count(&mut enrolment, "b", true), 0);
        // Children are kept when there are no rules any more.
        assert!(!enrolment.is_idle(false, now));
        assert_eq!(enrolment.of_group("a", |_| true, later)[0].again_s, Some(1));
        assert_eq!(count(&mut enrolment, "a", true), 16);
        assert_eq!(count(&mut enrolment, "a", false), 0);
        assert_eq!(count(&mut enrolment, "a", true), 0, "they were forgotten");
        enrolment.heard_of_children(&parent, vec![child], now);
        assert_eq!(count(&mut enrolment, "a", true), 1);
        enrolment.heard_of_children(&parent, Vec::new(), now);
        assert_eq!(count(&mut enrolment, "a", true), 0);
    }
}
