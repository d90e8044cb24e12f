//! Finds events: the differences between two snapshots of all groups, members and troubles.

use crate::asker::Group;
use api::ask::{GroupState, MemberLine, Trouble};
use api::change::Printed;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A happening.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// There is a new group.
    GroupAdded,
    /// A group has ended.
    GroupEnded,
    /// A process has become a member.
    MemberJoined,
    /// A member has ended.
    MemberEnded,
    /// A member folds, or ceases to, or its reason is another one.
    MemberState,
    /// A worker has started: the group's first one, or the successor of one that ended.
    WorkerStarted,
    /// The worker has ended.
    WorkerEnded,
    /// No page gets a slot of its own any more.
    NoRoom,
    /// Pages get slots again.
    Room,
    /// Members share no pages with each other any more.
    Separated,
    /// Settings were changed.
    SettingsChanged,
    /// The worker does not reach the prover.
    NoProver,
    /// The worker reaches the prover again.
    Prover,
    /// Something is wrong with the service itself.
    Trouble,
    /// It is over.
    TroubleOver,
}

/// An event.
#[derive(Clone, Debug, PartialEq, Serialize, utoipa::ToSchema)]
pub struct Event {
    /// The kind of event.
    pub event: Kind,
    /// The group; none for the service itself.
    pub group: Option<String>,
    /// The member, if the event is about one member.
    pub member: Option<String>,
    /// More about it, for people.
    pub detail: String,
}

/// A snapshot of all groups, members and troubles of the service.
#[derive(Clone, Debug, Default)]
pub struct Look {
    groups: BTreeMap<String, Group>,
    /// Users of members, by group, name and process. The process is part of the key because a name may be reused.
    members: BTreeMap<(String, String, u32, u64), u32>,
    /// Troubles of the service itself.
    troubles: BTreeMap<String, String>,
}

impl Look {
    /// Makes a snapshot. A group whose state did not come this time has its state of the snapshot `before`.
    pub fn new(groups: Vec<Group>, members: &[MemberLine], before: Option<&Self>) -> Self {
        let known = |name: &str| before?.groups.get(name)?.state.clone();
        let groups = groups.into_iter().map(|group| {
            let name = group.line.name.clone();
            let state = group.state.or_else(|| known(&name));
            (name, Group { state, ..group })
        });
        let key = |m: &MemberLine| (m.group.clone(), m.identity.name.clone(), m.identity.pid, m.identity.started);
        Self {
            groups: groups.collect(),
            members: members.iter().map(|m| (key(m), m.uid)).collect(),
            troubles: BTreeMap::new(),
        }
    }

    /// This snapshot, with the troubles of the service itself.
    pub fn with_troubles(self, troubles: &[Trouble]) -> Self {
        let troubles = troubles.iter().map(|found| (found.trouble.clone(), found.detail.clone())).collect();
        Self { troubles, ..self }
    }

    /// The events between this snapshot and a later one: new groups and members first, then changes, then ended members
    /// and groups, and troubles last.
    pub fn events_until(&self, later: &Self) -> Vec<Event> {
        let mut events = Vec::new();
        let event = |event, group: &str, member: Option<&str>, detail: String| Event {
            event,
            group: Some(group.to_owned()),
            member: member.map(str::to_owned),
            detail,
        };
        for name in later.groups.keys().filter(|name| !self.groups.contains_key(*name)) {
            events.push(event(Kind::GroupAdded, name, None, String::new()));
        }
        for (key @ (group, name, pid, _), uid) in &later.members {
            if !self.members.contains_key(key) {
                events.push(event(Kind::MemberJoined, group, Some(name), format!("process {pid} of user {uid}")));
            }
        }
        for (name, after) in &later.groups {
            if let Some(before) = self.groups.get(name) {
                let push = |kind, member: Option<&str>, detail| events.push(event(kind, name, member, detail));
                changes(before, after, push);
            }
        }
        for key @ (group, name, pid, _) in self.members.keys() {
            if !later.members.contains_key(key) {
                events.push(event(Kind::MemberEnded, group, Some(name), format!("process {pid}")));
            }
        }
        for name in self.groups.keys().filter(|name| !later.groups.contains_key(*name)) {
            events.push(event(Kind::GroupEnded, name, None, String::new()));
        }
        events.extend(self.troubles_until(later));
        events
    }

    fn troubles_until(&self, later: &Self) -> Vec<Event> {
        let event = |event, detail| Event { event, group: None, member: None, detail };
        let new = later.troubles.iter().filter(|(name, _)| !self.troubles.contains_key(*name));
        let over = self.troubles.keys().filter(|name| !later.troubles.contains_key(*name));
        let new = new.map(|(name, detail)| event(Kind::Trouble, format!("{name}: {detail}")));
        new.chain(over.map(|name| event(Kind::TroubleOver, name.clone()))).collect()
    }
}

/// Calls `event` for each way in which a group has changed.
fn changes(before: &Group, after: &Group, mut event: impl FnMut(Kind, Option<&str>, String)) {
    let settings = settings_changes(before, after);
    if after.line.settings.intra_member_only && !before.line.settings.intra_member_only {
        event(Kind::Separated, None, "members share no pages with each other any more".into());
    }
    if !settings.is_empty() {
        event(Kind::SettingsChanged, None, settings.join(", "));
    }
    let worker = |group: &Group| group.state.as_ref().and_then(|state| state.worker_pid);
    match (worker(before), worker(after)) {
        (old, Some(new)) if old != Some(new) => event(Kind::WorkerStarted, None, format!("process {new}")),
        (Some(old), None) => event(Kind::WorkerEnded, None, format!("process {old}")),
        _ => {}
    }
    let (Some(old), Some(new)) = (&before.state, &after.state) else { return };
    match (&old.report.no_room, &new.report.no_room) {
        (None, Some(why)) => event(Kind::NoRoom, None, why.clone()),
        (Some(_), None) => event(Kind::Room, None, "pages get slots again".into()),
        _ => {}
    }
    match (old.report.no_prover, new.report.no_prover) {
        (false, true) => event(
            Kind::NoProver,
            None,
            "the worker does not reach the prover: slots that were freed are not used again".into(),
        ),
        (true, false) => event(Kind::Prover, None, "the worker reaches the prover again".into()),
        _ => {}
    }
    member_changes(old, new, event);
}

fn member_changes(old: &Arc<GroupState>, new: &Arc<GroupState>, mut event: impl FnMut(Kind, Option<&str>, String)) {
    for member in &new.report.members {
        let before = old.report.members.iter().find(|m| (m.pid, &m.name) == (member.pid, &member.name));
        let state = before.map(|m| &m.state).filter(|state| **state != member.state);
        if let Some(state) = state {
            let detail = if member.detail.is_empty() { String::new() } else { format!(": {}", member.detail) };
            event(Kind::MemberState, Some(&member.name), format!("{state} -> {}{detail}", member.state));
        }
    }
}

/// The changed settings of a group, each as `pool: 68719476736 -> 1073741824`.
fn settings_changes(before: &Group, after: &Group) -> Vec<String> {
    let printed = |group: &Group| serde_json::to_value(Printed::from(&group.line.settings)).unwrap_or_default();
    let (before, after) = (printed(before), printed(after));
    let Value::Object(after) = after else { return Vec::new() };
    let changed = after.iter().filter(|(key, value)| before[key.as_str()] != **value);
    changed.map(|(key, value)| format!("{key}: {} -> {value}", before[key.as_str()])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use api::ask::{GroupLine, PoolLimit, WorkerState};
    use api::control::{GroupReport, Identity, MemberReport, Settings};
    use api::enrol::Via;

    fn group(name: &str, pid: Option<u32>, settings: Settings, no_room: Option<&str>, state: &str) -> Group {
        let member = MemberReport { name: "m".into(), pid: 5, state: state.into(), ..MemberReport::default() };
        let no_room = no_room.map(str::to_owned);
        let report = GroupReport { members: vec![member], no_room, ..GroupReport::none() };
        let line =
            GroupLine { name: name.into(), members: 1, worker: WorkerState::Running, settings, configured: true };
        let state = GroupState {
            name: name.into(),
            settings,
            configured: true,
            worker: WorkerState::Running,
            worker_pid: pid,
            pool_limit: PoolLimit::of(&settings, None),
            pressure_scan_rate: None,
            fit: None,
            segments: 0,
            not_attached: Vec::new(),
            report,
        };
        Group { line, state: Some(Arc::new(state)) }
    }

    fn member(group: &str, name: &str, pid: u32) -> MemberLine {
        let identity = Identity { name: name.into(), pid, started: 1 };
        MemberLine {
            group: group.into(),
            identity,
            uid: 7,
            connected: true,
            family: None,
            attached_by: None,
            via: Via::Agent,
            domain: None,
        }
    }

    fn kinds(before: &Look, after: &Look) -> Vec<(Kind, String, Option<String>)> {
        before.events_until(after).into_iter().map(|e| (e.event, e.group.unwrap_or_default(), e.member)).collect()
    }

    #[test]
    fn each_difference_is_an_event() {
        let usual = Settings::default();
        let apart = Settings { intra_member_only: true, pool_slots: 256, ..usual };
        let before = Look::new(
            vec![group("acme", Some(1), usual, None, "folding"), group("old", None, usual, None, "folding")],
            &[member("acme", "a", 10), member("acme", "b", 11)],
            None,
        );
        assert!(before.events_until(&before).is_empty());
        let after = Look::new(
            vec![group("acme", Some(2), apart, Some("full"), "no_room"), group("new", None, usual, None, "folding")],
            &[member("acme", "a", 12), member("acme", "b", 11)],
            Some(&before),
        );
        let acme = |kind, member: Option<&str>| (kind, "acme".to_owned(), member.map(str::to_owned));
        let expected = [
            (Kind::GroupAdded, "new".to_owned(), None),
            acme(Kind::MemberJoined, Some("a")),
            acme(Kind::Separated, None),
            acme(Kind::SettingsChanged, None),
            acme(Kind::WorkerStarted, None),
            acme(Kind::NoRoom, None),
            acme(Kind::MemberState, Some("m")),
            acme(Kind::MemberEnded, Some("a")),
            (Kind::GroupEnded, "old".to_owned(), None),
        ];
        assert_eq!(kinds(&before, &after), expected);
        let events = before.events_until(&after);
        assert_eq!(events[3].detail, "intra_member_only: false -> true, pool: 68719476736 -> 1048576");
        assert_eq!(events[6].detail, "folding -> no_room");
        assert!(kinds(&after, &before).contains(&acme(Kind::Room, None)));
    }

    #[test]
    fn trouble_is_told_when_it_comes_and_when_it_is_over() {
        let full = Trouble { trouble: "state_not_written".into(), detail: "disk full".into() };
        let (fine, bad) = (Look::default(), Look::default().with_troubles(&[full]));
        let events = [fine.events_until(&bad), bad.events_until(&bad), bad.events_until(&fine)];
        let told = events.map(|events| events.into_iter().map(|e| (e.event, e.group, e.detail)).collect::<Vec<_>>());
        let begins = (Kind::Trouble, None, "state_not_written: disk full".to_owned());
        assert_eq!(told, [vec![begins], vec![], vec![(Kind::TroubleOver, None, "state_not_written".to_owned())]]);
    }

    #[test]
    fn state_that_could_not_be_had_is_no_event() {
        let usual = Settings::default();
        let one = Look::new(vec![group("acme", Some(1), usual, Some("full"), "no_room")], &[], None);
        let silent = Group { state: None, ..group("acme", Some(1), usual, None, "folding") };
        let two = Look::new(vec![silent], &[], Some(&one));
        let three = Look::new(vec![group("acme", Some(1), usual, Some("full"), "no_room")], &[], Some(&two));
        assert!(one.events_until(&two).is_empty() && two.events_until(&three).is_empty());
    }
}
