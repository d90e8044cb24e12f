//! What a supervisor keeps in a file for the next one: members, what was changed on the fly (settings and rules), last
//! limits, bills, and users that workers run as.

#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

use super::bill::Account;
use super::config::GroupConfig;
use anyhow::Context;
use api::ask::MemberLine;
use api::change::Change;
use api::control::{Bill, GroupReport, Settings};
use api::enrol::Rule;
use api::name;
use host::ProcessId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Longest state file that is read: 16 MiB, some ten thousands of members.
const MOST_BYTES: u64 = 16 << 20;

/// Most members of a group. Its worker serves 1,024 of them at a time.
const MOST_MEMBERS: usize = 4096;

/// Number of calls of [`State::forget_some_dead`] after which the start time of every member's process has been
/// compared.
const TURNS: usize = 15;

/// The state that outlives a supervisor.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct State {
    /// Processes that are members as long as they live.
    members: Vec<MemberLine>,
    /// Changes of settings on the fly, by group.
    changes: BTreeMap<String, OnTheFly>,
    /// Users that workers run as, by group; the prover, the web side and the process that keeps a history have entries,
    /// too. No user is given to another group as long as the service's directory exists.
    pub worker_uids: BTreeMap<String, u32>,
    /// The last configuration of each group, for the time when the configuration names it no more.
    #[serde(default)]
    limits: BTreeMap<String, Limits>,
    /// Bills of the groups.
    #[serde(default)]
    bills: BTreeMap<String, Account>,
    /// Rules that were added on the fly.
    #[serde(default)]
    pub rules: Vec<Rule>,
    /// Processes that a user has detached: no rule attaches them again.
    #[serde(default)]
    detached: Vec<ProcessId>,
    #[serde(skip)]
    changed: bool,
    #[serde(skip)]
    turn: usize,
}

/// The part of a group's configuration that still binds its members when the configuration no longer names the group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Limits {
    users: Vec<u32>,
    settings: Settings,
}

/// Settings that were changed on the fly.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct OnTheFly {
    change: Change,
    /// The configured settings at the time of the change. The change counts only as long as the group is configured so.
    from: Settings,
}

fn process_of(member: &MemberLine) -> ProcessId {
    ProcessId { pid: member.identity.pid, start_ticks: member.identity.started }
}

impl State {
    /// Reads the file. Without a file the state is empty.
    ///
    /// # Errors
    /// The file cannot be read, or is corrupt. An empty state in its place would lose settings that keep members apart.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        if path.symlink_metadata().is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
            return Ok(Self::default());
        }
        let bytes = host::read_plain_file(path, MOST_BYTES);
        let parsed = bytes.map_err(anyhow::Error::from).and_then(|bytes| Ok(serde_json::from_slice::<Self>(&bytes)?));
        let mut state = parsed.with_context(|| {
            format!(
                "cannot use {}: move it away to start without it; members that run then have to be started again, and \
                 settings changed on the fly are gone",
                path.display()
            )
        })?;
        state.members.retain(|m| name::check("group", &m.group).is_ok());
        state.forget_dead();
        Ok(state)
    }

    /// Makes a change of the state, and writes the file. If either fails, the state is as it was before.
    ///
    /// # Errors
    /// The change is refused, or the file cannot be written.
    pub fn keep<T>(&mut self, path: &Path, change: impl FnOnce(&mut Self) -> Result<T, String>) -> Result<T, String> {
        let before = self.clone();
        let done = change(self).and_then(|done| self.write(path).map(|()| done).map_err(|e| format!("{e:#}")));
        if done.is_err() {
            *self = before;
        }
        done
    }

    /// Writes the file if the state has changed. A crash, of the host too, leaves the old file or the new one, never a
    /// part.
    ///
    /// # Errors
    /// It cannot be written. The next call tries again.
    pub fn write(&mut self, path: &Path) -> anyhow::Result<()> {
        if !self.changed {
            return Ok(());
        }
        let next = PathBuf::from(format!("{}.next", path.display()));
        let write = || {
            let mut file = File::create(&next)?;
            file.set_permissions(Permissions::from_mode(0o600))?;
            file.write_all(&serde_json::to_vec_pretty(self)?)?;
            file.sync_all()?;
            fs::rename(&next, path)
        };
        write()
            .inspect_err(|_| _ = fs::remove_file(&next))
            .with_context(|| format!("cannot write {}", path.display()))?;
        self.changed = false;
        Ok(())
    }

    /// The change on the fly of a group; `None` if there is none, or if it was made from other configured settings than
    /// these.
    pub fn change(&self, group: &str, configured: Settings) -> Option<Change> {
        self.changes.get(group).filter(|kept| kept.from == configured).map(|kept| kept.change)
    }

    /// Keeps a change on the fly of the configured settings `from`, as far as it makes a difference to them.
    pub fn set_change(&mut self, group: &str, change: Change, from: Settings) {
        let change = change.beyond(&from);
        if change.is_empty() {
            self.changes.remove(group);
        } else {
            self.changes.insert(group.to_owned(), OnTheFly { change, from });
        }
        self.changed = true;
    }

    /// Keeps a group's configuration for the time when the configuration names the group no more.
    pub fn keep_limits(&mut self, group: &str, config: &GroupConfig) {
        let limits = Limits { users: config.users.clone(), settings: config.settings };
        if self.limits.get(group) != Some(&limits) {
            self.limits.insert(group.to_owned(), limits);
            self.changed = true;
        }
    }

    /// The last configuration of a group that the configuration names no more. It has no rules, so that no process
    /// becomes a new member by one.
    pub fn last_limits(&self, group: &str) -> Option<GroupConfig> {
        let Limits { users, settings } = self.limits.get(group)?.clone();
        Some(GroupConfig { users, settings, processes: Vec::new() })
    }

    /// Takes a worker's bill into account.
    pub fn bill(&mut self, group: &str, worker: ProcessId, bill: &Bill) {
        self.changed |= self.bills.entry(group.to_owned()).or_default().heard(worker, bill);
    }

    /// Takes the processor time of ended workers that were not waited for yet into account.
    pub fn look_at_ended_workers(&mut self) {
        for account in self.bills.values_mut() {
            self.changed |= account.look_at_ended();
        }
    }

    /// The bill of a group over all its workers.
    pub fn total(&self, group: &str) -> Bill {
        // The sum begins with zeros for all reasons of failures, so that each is named.
        let mut total = GroupReport::none().bill;
        if let Some(account) = self.bills.get(group) {
            total.add(&account.total());
        }
        total
    }

    /// Forgets what is kept of a group that has ended for good.
    pub fn forget_group(&mut self, group: &str) {
        self.changes.remove(group);
        self.limits.remove(group);
        self.bills.remove(group);
        self.changed = true;
    }

    /// Notes that a public field (`worker_uids`, `rules`) was changed, so that the next [`State::write`] writes the
    /// file.
    pub fn touch(&mut self) {
        self.changed = true;
    }

    /// The members. The processes of some may have ended a moment ago.
    pub fn members(&self) -> &[MemberLine] {
        &self.members
    }

    /// Number of members of a group.
    pub fn members_of(&self, group: &str) -> usize {
        self.members.iter().filter(|m| m.group == group).count()
    }

    /// The member with this process.
    pub fn find(&self, process: ProcessId) -> Option<&MemberLine> {
        self.members.iter().find(|m| process_of(m) == process)
    }

    /// Notes that a member's agent has connected.
    pub fn set_connected(&mut self, process: ProcessId) {
        if let Some(member) = self.members.iter_mut().find(|m| process_of(m) == process && !m.connected) {
            member.connected = true;
            self.changed = true;
        }
    }

    /// Adds a member, or gives it another name.
    ///
    /// # Errors
    /// The name is taken, the group has as many members as it may have, or the process is a member of another group.
    /// The process cannot change its group, because it may still map slots of that one.
    pub fn add(&mut self, member: MemberLine) -> Result<(), String> {
        self.forget_dead();
        let process = process_of(&member);
        if let Some(found) = self.find(process).filter(|found| found.group != member.group) {
            return Err(format!(
                "process {} is a member of group {} already, and stays one until it ends",
                process.pid, found.group
            ));
        }
        let namesake = |m: &&MemberLine| m.group == member.group && m.identity.name == member.identity.name;
        if let Some(other) = self.members.iter().filter(namesake).find(|m| process_of(m) != process) {
            return Err(format!(
                "group {} has a member {} already: process {}",
                member.group, other.identity.name, other.identity.pid
            ));
        }
        if self.find(process).is_none() && self.members_of(&member.group) >= MOST_MEMBERS {
            return Err(format!(
                "group {} has {MOST_MEMBERS} members, as many as it may: end some first",
                member.group
            ));
        }
        self.members.retain(|m| process_of(m) != process);
        self.members.push(member);
        self.changed = true;
        Ok(())
    }

    /// Removes a member whose process runs on.
    pub fn remove(&mut self, process: ProcessId) {
        self.members.retain(|m| process_of(m) != process);
        self.changed = true;
    }

    /// Notes that a user has detached a process, so that no rule attaches it, or that a user has attached it again.
    pub fn set_detached(&mut self, process: ProcessId, detached: bool) {
        self.detached.retain(|other| *other != process);
        self.detached.extend(detached.then_some(process));
        self.changed = true;
    }

    /// Whether a user has detached a process, so that no rule attaches it.
    pub fn is_detached(&self, process: ProcessId) -> bool {
        self.detached.contains(&process)
    }

    /// Removes members whose process has ended, at little cost; called every second. A member whose pid no process has
    /// is removed at once. Whether a process with the pid is still the same one (by its start time) is checked for one
    /// in [`TURNS`] members at each call.
    pub fn forget_some_dead(&mut self) {
        self.turn = self.turn.wrapping_add(1) % TURNS;
        let (turn, before) = (self.turn, self.members.len());
        let mut number = 0_usize;
        self.members.retain(|m| {
            number = number.wrapping_add(1);
            let process = process_of(m);
            process.has_pid() && (number % TURNS != turn || process.is_alive())
        });
        self.changed |= self.members.len() != before;
    }

    /// Removes all members whose process has ended.
    pub fn forget_dead(&mut self) {
        let before = self.members.len();
        self.members.retain(|m| process_of(m).is_alive());
        let detached = self.detached.len();
        self.detached.retain(ProcessId::is_alive);
        self.changed |= (self.members.len(), self.detached.len()) != (before, detached);
    }
}

#[cfg(test)]
impl State {
    /// A state with these members, for tests.
    pub fn of(members: Vec<MemberLine>) -> Self {
        Self { members, ..Self::default() }
    }
}

/// A member of root's, for tests.
#[cfg(test)]
pub fn member(group: &str, name: &str, process: ProcessId) -> MemberLine {
    let identity = api::control::Identity { name: name.into(), pid: process.pid, started: process.start_ticks };
    MemberLine {
        group: group.into(),
        identity,
        uid: 0,
        connected: false,
        family: None,
        attached_by: None,
        via: api::enrol::Via::Agent,
        domain: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn ended_member_is_forgotten_within_its_turns() {
        let mut state = State::default();
        let mut children: Vec<_> = (0..7).map(|_| Command::new("sleep").arg("60").spawn().unwrap()).collect();
        for child in &children {
            state.add(member("a", &child.id().to_string(), ProcessId::of(child.id()).unwrap())).unwrap();
        }
        // One child is waited for at once, and the others stay zombies.
        children.iter_mut().for_each(|child| child.kill().unwrap());
        let first = ProcessId::of(children[0].id()).unwrap();
        children[0].wait().unwrap();
        state.forget_some_dead();
        assert!(state.find(first).is_none() && state.changed);
        while children[1..].iter().any(|child| ProcessId::of(child.id()).is_ok_and(|process| process.is_alive())) {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        (0..TURNS).for_each(|_| state.forget_some_dead());
        (0..TURNS).for_each(|_| state.forget_some_dead());
        assert_eq!(state.members().len(), 0);
        children.iter_mut().for_each(|child| _ = child.wait());
    }

    #[test]
    fn member_lasts_as_long_as_its_process() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        let own = ProcessId::of(std::process::id()).unwrap();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let other = ProcessId::of(child.id()).unwrap();
        let mut state = State::default();
        state.add(member("acme", "web", own)).unwrap();
        assert!(state.add(member("acme", "web", other)).unwrap_err().contains("has a member web already"));
        assert!(state.add(member("beta", "web", own)).unwrap_err().contains("member of group acme"));
        state.add(member("beta", "web", other)).unwrap();
        state.add(member("acme", "db", own)).unwrap();
        let (change, usual) = (Change { intra_member_only: Some(true), ..Change::default() }, Settings::default());
        state.set_change("acme", change, usual);
        let config = GroupConfig { users: vec![7], settings: Settings { pool_slots: 9, ..usual }, processes: vec![] };
        state.keep_limits("acme", &config);
        state.bill("acme", own, &Bill { folds: 5, ..Bill::default() });
        state.write(&path).unwrap();
        let again = State::read(&path).unwrap();
        assert_eq!((again.members(), &again.changes), (state.members(), &state.changes));
        assert_eq!(again.change("acme", usual), Some(change));
        let limits = again.last_limits("acme").unwrap();
        assert_eq!(again.total("beta").fold_failures["no_vma"], 0, "all reasons are named from the beginning");
        assert_eq!((limits.users, limits.settings.pool_slots, again.total("acme").folds), (vec![7], 9, 5));
        let other = Settings { pool_slots: 7, ..usual };
        assert_eq!(again.change("acme", other), None, "the configuration was changed since");
        assert_eq!(again.find(own).unwrap().identity.name, "db");
        let reused = ProcessId { start_ticks: own.start_ticks + 1, ..own };
        assert_eq!(again.find(reused), None, "another process with the same pid");
        child.kill().unwrap();
        child.wait().unwrap();
        let again = State::read(&path).unwrap();
        assert_eq!((again.members_of("acme"), again.members_of("beta")), (1, 0));
    }

    #[test]
    fn file_of_an_earlier_version_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        let settings = r#"{"scan-rate":null,"zero-pages":"share","split-huge-at-percent":30,"fold":"on",
            "intra-member-only":false,"pool-slots":7,"index-pages":9}"#;
        let change = r#"{"scan_rate":{"Pages":1234},"zero_pages":null,"huge_pages":null,"fold":"off",
            "intra_member_only":null}"#;
        let text = format!(
            r#"{{"members":[],"changes":{{"acme":{{"change":{change},"from":{settings}}}}},"worker_uids":{{"acme":61184}}}}"#
        );
        fs::write(&path, text).unwrap();
        let state = State::read(&path).unwrap();
        let from = Settings { split_huge_at_percent: Some(30), pool_slots: 7, index_pages: 9, ..Settings::default() };
        let set = state.change("acme", from).unwrap().apply(from);
        assert_eq!((set.scan_rate, set.pool_slots), (Some(1234), 7));
    }

    #[test]
    fn group_has_no_more_processes_than_it_may_and_others_have_their_own() {
        let own = ProcessId::of(std::process::id()).unwrap();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let other = ProcessId::of(child.id()).unwrap();
        let mut state = State::of((0..MOST_MEMBERS).map(|n| member("acme", &n.to_string(), own)).collect());
        let [refused, others] = ["acme", "beta"].map(|group| state.add(member(group, "new", other)));
        state.remove(other);
        let last = process_of(state.members.last().unwrap());
        state.members.truncate(MOST_MEMBERS - 1);
        let fits = state.add(member("acme", "new", other));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(refused.is_err_and(|why| why.contains("as many as it may")) && others.is_ok() && fits.is_ok());
        assert_eq!(last, own);
    }

    #[test]
    fn corrupt_file_is_no_empty_state() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        assert!(State::read(&path).unwrap().members().is_empty());
        for corrupt in ["", "{\"members\": [{\"group\": \"\\u001b\""] {
            fs::write(&path, corrupt).unwrap();
            let why = format!("{:#}", State::read(&path).unwrap_err());
            assert!(why.contains("state.json: move it away"), "{why}");
        }
    }

    #[test]
    fn change_that_cannot_be_written_is_not_made_and_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        let obstacle = dir.path().join("state.json.next");
        let own = ProcessId::of(std::process::id()).unwrap();
        let mut state = State::default();
        // A directory lies where the next file would be written.
        fs::create_dir(&obstacle).unwrap();
        let why = state.keep(&path, |state| state.add(member("acme", "web", own))).unwrap_err();
        assert!(why.contains("cannot write"), "{why}");
        assert_eq!(state.find(own), None);
        state.touch();
        assert!(state.write(&path).is_err() && state.write(&path).is_err(), "the second call forgot the change");
        fs::remove_dir(&obstacle).unwrap();
        state.keep(&path, |state| state.add(member("acme", "web", own))).unwrap();
        assert!(State::read(&path).unwrap().find(own).is_some());
    }
}
