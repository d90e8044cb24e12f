//! The questions of the command line, and the answers to them.
//!
//! ```text
//!   Join, Groups, Members, Set, Pace, Admit   answered at once
//!   Show, Set that unfolds         answered with the report of the group's worker, for which the client waits
//!   Why                            answered by the group's worker, and the client waits, too
//! ```
//!
//! A question reads and changes nothing but the [`Registry`]. The next question of a client is read when the client has
//! read its answers. A client that does not read them in time is disconnected.

#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

use super::client::{Client, Waits, Wants};
use super::decide;
use super::enrol_config::MOST_RULES;
use super::hidden;
use super::member_facts;
use super::registry::Registry;
use super::trail::{self, with};
use api::ask::{
    self, Answer, Ask, GroupLine, GroupState, MOST_PACED_S, MemberLine, NOT_CONFIGURED, PoolLimit, PoolLimitBy,
};
use api::change::Change;
use api::control::{Fold, GroupReport, Identity, MemberReport, MemberRoom, Needs, Settings};
use api::enrol::{NOT_ONE_DOMAIN, NotAttached, Rule, Via};
use api::name;
use api::place::own_uid;
use api::promise::Asked;
use cli::journal::{By, Lines};
use cli::note;
use guest::domain_of;
use host::{KsmStat, Mapping, Peer, PeerProcess, Process, ProcessId, Seqpacket, Shares};
use page::pages_to_bytes;
use rustix::event::PollFlags;
use rustix::fd::{AsFd, BorrowedFd};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Time after which a client that has asked nothing is disconnected, whether it still has to read answers or not: 10 s.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time for a worker to report, after which the client that waits for the report is refused: 3 s.
const WORKER_PATIENCE: Duration = Duration::from_secs(3);
/// Most pages of zeros for which memory is promised at once (256 MiB), because only the members' own counts say how
/// many there are.
const ZERO_PAGES: u64 = 1 << 16;
/// Longest name of a token that the journal keeps, in characters. The rest of a longer one is cut off.
const MOST_NAME_CHARS: usize = 64;
/// Most client addresses that are named in one line of the journal about invalid tokens.
const MOST_ADDRESSES: usize = 8;
/// Most clients at a user's own socket.
const OWN_PLACES: usize = 64;
/// Most clients at the socket for everybody: 64, and 8 of one user.
const PLACES: Shares = Shares { most: 64, roots: 0, others: (64, 8) };

/// All clients.
#[derive(Default)]
pub struct Clients(Vec<Client>);

impl Clients {
    /// Whether another connection to this user's own socket would have a place. At the socket for everybody (`None`),
    /// connections are always accepted, and closed if they get no place.
    pub fn has_room(&self, entrance: Option<u32>) -> bool {
        entrance.is_none() || self.at(entrance).count() < OWN_PLACES
    }

    fn at(&self, entrance: Option<u32>) -> impl Iterator<Item = &Client> + Clone {
        self.0.iter().filter(move |client| client.entrance == entrance)
    }

    /// Takes a new connection to this user's own socket, or to the socket for everybody. If its user has no place
    /// there, it is closed.
    pub fn add(&mut self, socket: Seqpacket, entrance: Option<u32>) {
        // Nothing is read about a process that gets no place.
        let user = Peer::user_of(&socket);
        let fits = |uid| PLACES.have_room(uid, &BTreeSet::new(), self.at(None).map(|client| client.peer.uid));
        if let Some(uid) = user.ok().filter(|uid| entrance.is_none() && !fits(*uid)) {
            return note!("user {uid} has too many questions at once");
        }
        match Client::new(socket, entrance) {
            Ok(client) => self.0.push(client),
            Err(e) => note!("a question was refused: {e}"),
        }
    }

    /// The next time at which a client may ask that may not ask yet; `None`: every client may ask now.
    pub fn due(&self, now: Instant) -> Option<Instant> {
        self.0.iter().map(|client| client.next).filter(|next| *next > now).min()
    }

    /// Whether there is no client.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Sockets of clients, each with the event for which it is polled.
    pub fn sockets(&self, now: Instant) -> impl Iterator<Item = (BorrowedFd<'_>, PollFlags)> {
        self.0.iter().filter_map(move |client| Some((client.socket.as_fd(), client.awaited(now)?)))
    }

    /// Sends the clients answers that wait, and answers new questions.
    pub fn hear(&mut self, registry: &mut Registry, buffer: &mut Vec<u8>) {
        let now = Instant::now();
        for client in &mut self.0 {
            client.flush();
            if client.done || client.awaited(now) != Some(PollFlags::IN) {
                continue;
            }
            match ask::receive(&client.socket, buffer) {
                Ok(Some(question)) => {
                    client.heard();
                    Request { registry, client }.hear(question);
                }
                Ok(None) => {}
                Err(_) => client.done = true,
            }
        }
        self.0.retain(|client| !client.done);
    }

    /// Disconnects clients that have asked nothing for [`PATIENCE`], and refuses questions to which a worker has not
    /// answered for [`WORKER_PATIENCE`]. Called once a second.
    pub fn forget_silent(&mut self) {
        for client in &mut self.0 {
            if client.wants.is_some() && client.since.elapsed() > WORKER_PATIENCE {
                client.wants = None;
                client.answer(&Answer::Refused("the group's worker does not answer; see the service's log".into()));
            }
        }
        self.0.retain(|client| client.since.elapsed() < PATIENCE);
    }

    /// Answers the clients that wait for the report of a group's worker.
    pub fn reported(&mut self, registry: &mut Registry, group: &str, report: &GroupReport) {
        let answered = registry.group(group).answered();
        for client in &mut self.0 {
            // A report that was asked for before the client asked may be older than the client's last change.
            let is_it = |waits: &mut Waits| {
                waits.group == group && waits.report <= answered && !matches!(waits.wants, Wants::Why)
            };
            if let Some(waits) = client.wants.take_if(is_it) {
                Request { registry, client }.use_report(group, waits.wants, report);
            }
        }
    }

    /// Passes a worker's answer on to the client that has asked why pages are not folded, by the number of the
    /// question.
    pub fn because(&mut self, group: &str, question: u64, reasons: &[u8]) {
        for client in &mut self.0 {
            let is_it = |waits: &mut Waits| {
                waits.group == group && waits.report == question && matches!(waits.wants, Wants::Why)
            };
            if client.wants.take_if(is_it).is_some() {
                client.answer(&Answer::Because(reasons.to_vec()));
            }
        }
    }

    /// Whether a client waits for a group's report.
    pub fn wait_for(&self, group: &str) -> bool {
        self.0.iter().any(|client| client.wants.as_ref().is_some_and(|waits| waits.group == group))
    }
}

/// Bytes of a process's private mappings of pools. That much memory may be needed when all of these pages become
/// private.
fn pooled_bytes(pid: u32) -> Result<u64, String> {
    let all = Mapping::list(pid).map_err(|e| e.to_string())?;
    let pooled = all.iter().filter(|mapping| !mapping.shared && guest::pool_group(mapping).is_some());
    Ok(pooled.map(Mapping::bytes).fold(0, u64::saturating_add))
}

/// Bytes of a member's pages that may become private when the member is detached.
fn shared_bytes(member: &MemberLine) -> Result<u64, String> {
    let pid = member.identity.pid;
    match member.via {
        Via::Agent => pooled_bytes(pid),
        Via::Ksm => {
            let stat = KsmStat::of(pid).map_err(|e| e.to_string())?;
            let pages =
                [stat.ksm_merging_pages, stat.ksm_zero_pages].into_iter().flatten().fold(0, u64::saturating_add);
            Ok(pages_to_bytes(pages))
        }
    }
}

/// A question of a client while it is answered.
struct Request<'a> {
    registry: &'a mut Registry,
    client: &'a mut Client,
}

impl Request<'_> {
    fn hear(&mut self, question: Ask) {
        if let Some(why) = self.registry.forbidden(self.client.peer.uid, &question) {
            return self.client.answer(&Answer::Refused(why.to_owned()));
        }
        let named = question.group().map(str::to_owned);
        let answered = match question {
            Ask::Join { group, name, program, via } => self.join(&group, name, &program, via),
            Ask::Attach { pid, started, group, name, by_rule, via, dry_run } => {
                self.attach(ProcessId { pid, start_ticks: started }, &group, name, by_rule, via, dry_run)
            }
            Ask::MayLeave { pid, started, for_good } => {
                self.may_leave(ProcessId { pid, start_ticks: started }, for_good)
            }
            Ask::Children { pid, started, not_attached } => {
                self.take_in_children(ProcessId { pid, start_ticks: started }, not_attached)
            }
            Ask::Rules { not_attached } => self.list_rules(not_attached),
            Ask::AddRule(rule) => self.add_rule(rule),
            Ask::DropRules { cgroup, container } => self.drop_rules(&cgroup, &container),
            Ask::Leave { pid, started } => self.leave(ProcessId { pid, start_ticks: started }),
            Ask::Groups => self.list_groups(),
            Ask::Members => self.list_members(),
            Ask::Troubles => self.list_troubles(),
            Ask::Show { group } => self.ask_worker(&group, Wants::Show),
            Ask::Why { group, pid, pages } => self.ask_why(&group, pid, pages),
            Ask::Set { group, change, by } => self.change(&group, change, self.by(by)),
            Ask::Admit { asked, by } => self.admit(&asked, &self.by(by)),
            Ask::Reset { group } => match self.registry.groups.get(&group).map(|known| known.config.settings) {
                Some(configured) => self.change(&group, Change::to(&configured), self.by(None)),
                None => self.allow(&group, false),
            },
            Ask::Journal { after } => self.read_journal(after),
            Ask::LoginFailed { times, addresses } => self.login_failed(times, addresses),
            Ask::Pace { group, pages_per_s, for_s } => self.pace(&group, pages_per_s, for_s),
        };
        if let Err(why) = answered {
            // A client without rights gets the same answer for a group that exists and for one that does not.
            let may_know = self.registry.may(self.client.peer.uid, &Default::default());
            let is_unknown = |group: String| may_know && !self.registry.groups.contains_key(&group);
            self.client.answer(&if named.is_some_and(is_unknown) {
                Answer::NoGroup(why)
            } else {
                Answer::Refused(why)
            });
        }
    }

    /// Checks that the client may start members in a group and change it. With `make`, a missing group is made if there
    /// is no configuration that names the groups.
    fn allow(&mut self, group: &str, make: bool) -> Result<(), String> {
        name::check("group", group)?;
        let uid = self.client.peer.uid;
        let (config, known) = match self.registry.groups.get(group) {
            Some(found) => (found.config.clone(), true),
            None => Default::default(),
        };
        if !self.registry.may(uid, &config) {
            return Err(format!("user {uid} may not deal with group {group}: add it to the group's users"));
        }
        if known {
            return Ok(());
        }
        match &self.registry.config.groups {
            None if make => _ = self.registry.group(group),
            None => return Err(format!("there is no group {group}")),
            Some(groups) => {
                let names: Vec<&str> = groups.keys().map(String::as_str).take(20).collect();
                return Err(format!("the configuration has no group {group}; it has {}", names.join(", ")));
            }
        }
        Ok(())
    }

    /// Checks that the service allows merging by this merger (agent or ksmd).
    fn allow_via(&self, via: Via) -> Result<(), String> {
        let may = via == Via::Agent || self.registry.config.one_trust_domain;
        may.then_some(()).ok_or_else(|| NOT_ONE_DOMAIN.to_owned())
    }

    fn join(&mut self, group: &str, wanted: Option<String>, program: &str, via: Via) -> Result<(), String> {
        self.allow(group, true)?;
        self.allow_via(via)?;
        let PeerProcess { id, uid } = self.client.peer;
        let name = wanted.unwrap_or_else(|| name::of_process(program, id.pid));
        name::check("member", &name)?;
        // libvirt puts a process into the domain's control group before it executes the emulator or a wrapper.
        let domain = Process::read_without_arguments(id.pid).ok().and_then(|process| domain_of(&process.cgroups));
        let name = self.name_of(group, name, id, domain.is_some());
        let identity = Identity { name: name.clone(), pid: id.pid, started: id.start_ticks };
        let known = self.registry.state.find(id);
        if known.is_none() && !self.registry.group(group).is_configured {
            return Err(format!("group {group}: {NOT_CONFIGURED}; add it to the service's configuration"));
        }
        let connected = self.registry.state.find(id).is_some_and(|m| m.connected);
        // The state is written before the answer, so that a later supervisor knows the member too.
        let attached_by = None;
        let group_name = group.to_owned();
        let member = MemberLine { group: group_name, identity, uid, connected, family: None, attached_by, via, domain };
        self.registry.keep(|state| state.add(member))?;
        self.registry.group(group).idle_since = None;
        note!("group {group}: process {} of user {uid} is member {name}", id.pid);
        self.client.answer(&Answer::Joined(name));
        Ok(())
    }

    /// The name of a new member: the wanted one. If another living member has it and the process runs a libvirt domain,
    /// the pid is appended. While a domain migrates between two libvirts on this host, it exists twice, and its start
    /// must not fail.
    fn name_of(&self, group: &str, name: String, id: ProcessId, is_domain: bool) -> String {
        let mut others = self.registry.state.members().iter();
        let is_namesake = |other: &MemberLine| {
            let of = ProcessId { pid: other.identity.pid, start_ticks: other.identity.started };
            other.group == group && other.identity.name == name && of != id && of.is_alive()
        };
        if is_domain && others.any(is_namesake) { name::numbered(&name, id.pid) } else { name }
    }

    /// Makes another process a member. The client itself puts an agent into that process, or turns on merging in it:
    /// the kernel decides whether the client may.
    fn attach(
        &mut self,
        id: ProcessId,
        group: &str,
        wanted: Option<String>,
        by_rule: bool,
        via: Via,
        dry_run: bool,
    ) -> Result<(), String> {
        self.allow(group, !dry_run)?;
        self.allow_via(via)?;
        if !self.registry.group(group).is_configured {
            return Err(format!("group {group}: {NOT_CONFIGURED}; add it to the service's configuration"));
        }
        let process = self.attachable(id, group, by_rule)?;
        if via == Via::Agent {
            hidden::check(id, self.client.peer.uid)?;
        }
        if let Some(member) = self.registry.state.find(id).filter(|member| member.is_left_alone()) {
            return self
                .take_over(MemberLine { attached_by: Some(self.client.peer.id.pid), ..member.clone() }, dry_run);
        }
        let family = match via {
            Via::Agent => decide::family_of(id, group, &self.registry.state, &self.registry.groups)?,
            Via::Ksm => None,
        };
        let name = wanted.unwrap_or_else(|| name::of_process(process.called(), id.pid));
        name::check("member", &name)?;
        let domain = domain_of(&process.cgroups);
        let name = self.name_of(group, name, id, domain.is_some());
        if dry_run {
            return self.joined(name);
        }
        let asker = self.client.peer;
        let (by, is_new) = (self.place_in_journal()?, self.registry.state.find(id).is_none());
        let identity = Identity { name: name.clone(), pid: id.pid, started: id.start_ticks };
        let (uid, connected, attached_by) = (process.uid, false, Some(asker.id.pid));
        let member = MemberLine { group: group.to_owned(), identity, uid, connected, family, attached_by, via, domain };
        self.registry.keep(|state| {
            state.set_detached(id, false);
            state.add(member)
        })?;
        self.registry.group(group).idle_since = None;
        note!("group {group}: user {} attaches process {} of user {uid} as member {name}", asker.uid, id.pid);
        if is_new {
            let how = json!({ "by_rule": by_rule, "via": via });
            self.registry.trail.write(by, "attached", with(of_member(group, &name, id, uid), how));
        }
        self.joined(name)
    }

    fn joined(&mut self, name: String) -> Result<(), String> {
        self.client.answer(&Answer::Joined(name));
        Ok(())
    }

    /// Lets the client take the place of a `pagefold-attach` that was killed beside an attached member.
    fn take_over(&mut self, member: MemberLine, dry_run: bool) -> Result<(), String> {
        let name = member.identity.name.clone();
        if !dry_run {
            note!("group {}: process {} looks after member {name}", member.group, self.client.peer.id.pid);
            self.registry.keep(|state| state.add(member))?;
        }
        self.client.answer(&Answer::Joined(name));
        Ok(())
    }

    /// Checks that the client may attach a process, and returns the facts about the process.
    fn attachable(&self, id: ProcessId, group: &str, by_rule: bool) -> Result<Process, String> {
        let process = Process::read_without_arguments(id.pid).map_err(|e| e.to_string())?;
        if process.stat.start_ticks != id.start_ticks {
            return Err(format!("process {} has ended", id.pid));
        }
        let asker = self.client.peer;
        if asker.uid != 0 && asker.uid != process.uid {
            return Err(format!("process {} belongs to user {}", id.pid, process.uid));
        }
        // The client may repeat the question, if the supervisor was restarted before it answered. So it is no error
        // that this client has attached the process already.
        let is_again = |member: &&MemberLine| {
            member.group == group && (member.attached_by == Some(asker.id.pid) || member.is_left_alone())
        };
        if let Some(member) = self.registry.state.find(id).filter(|member| !is_again(member)) {
            return Err(format!("process {} is a member of group {} already", id.pid, member.group));
        }
        if by_rule && self.registry.state.is_detached(id) {
            return Err(format!("process {} was detached by hand, and no rule attaches it again", id.pid));
        }
        Ok(process)
    }

    /// Promises memory for a process all of whose pages are to become private, as to a separate group. If the process
    /// was started as a member, its worker tells the agent to leave. If it was attached, the client tells the
    /// `pagefold-attach` beside it.
    fn may_leave(&mut self, id: ProcessId, for_good: bool) -> Result<(), String> {
        let member = self.own_member(id)?;
        if !member.was_attached() && !for_good {
            return Err(format!("process {} was not attached", id.pid));
        }
        let needed = shared_bytes(&member)?;
        let needs = Needs { members: vec![MemberRoom { pid: id.pid, bytes: needed }], whole: true };
        self.registry.within_limits(&needs).map_err(|why| format!("{why}: raise the limit, and try again"))?;
        let name = format!("process {} of {}", id.pid, member.group);
        self.registry.promise(|room, memory| room.promise_all(&name, needed, memory, Instant::now()))?;
        if !member.was_attached() && !self.registry.group(&member.group).take_out(member.identity.clone()) {
            self.registry.room.take_back(&name);
            return Err(format!("the worker of group {} cannot be told at the moment; try again", member.group));
        }
        if for_good {
            self.registry.keep(|state| {
                state.set_detached(id, true);
                Ok(())
            })?;
        }
        self.client.answer(&Answer::Done);
        Ok(())
    }

    /// Records which children of an attached process are no members. Only a client that may attach and detach that
    /// process may report this.
    fn take_in_children(&mut self, id: ProcessId, told: Vec<NotAttached>) -> Result<(), String> {
        let member = self.attached(id)?;
        self.registry.enrolment.heard_of_children(&member, told, Instant::now());
        self.client.answer(&Answer::Done);
        Ok(())
    }

    /// Checks that the client may ask for rules, which concern all processes of the host.
    fn may_rule(&self) -> Result<(), String> {
        let uid = self.client.peer.uid;
        let is_owner = uid == 0 || uid == own_uid();
        is_owner.then_some(()).ok_or_else(|| format!("user {uid} may not deal with rules: root may"))
    }

    fn list_rules(&mut self, not_attached: Option<Vec<NotAttached>>) -> Result<(), String> {
        self.may_rule()?;
        self.registry.enrolment.heard(not_attached, Instant::now());
        for rule in self.registry.rules() {
            self.client.answer(&Answer::Rule(rule.clone()));
        }
        self.client.answer(&Answer::Done);
        Ok(())
    }

    fn add_rule(&mut self, rule: Rule) -> Result<(), String> {
        self.may_rule()?;
        self.allow(&rule.group, true)?;
        self.allow_via(rule.via)?;
        if !self.registry.group(&rule.group).is_configured {
            return Err(format!("group {}: {NOT_CONFIGURED}; add it to the service's configuration", rule.group));
        }
        if self.registry.state.rules.len() >= MOST_RULES {
            return Err(format!("there are {MOST_RULES} rules already: drop some, with pagefold detach"));
        }
        let by = self.place_in_journal()?;
        note!("group {}: enrols processes of {rule}", rule.group);
        let more = json!({ "group": rule.group, "rule": rule.to_string() });
        self.registry.keep(|state| {
            state.rules.retain(|other| other.to_string() != rule.to_string());
            state.rules.push(rule);
            state.touch();
            Ok(())
        })?;
        self.registry.trail.write(by, "rule_added", more);
        self.client.answer(&Answer::Done);
        Ok(())
    }

    fn drop_rules(&mut self, cgroup: &Option<String>, container: &Option<String>) -> Result<(), String> {
        self.may_rule()?;
        let by = self.place_in_journal()?;
        let dropped = self.registry.keep(|state| {
            let is_meant = |rule: &mut Rule| (&rule.cgroup, &rule.container) == (cgroup, container);
            let dropped: Vec<Rule> = state.rules.extract_if(.., is_meant).collect();
            state.touch();
            Ok(dropped)
        })?;
        for rule in dropped {
            let more = json!({ "group": rule.group, "rule": rule.to_string() });
            self.registry.trail.write(by.clone(), "rule_dropped", more);
        }
        self.client.answer(&Answer::Done);
        Ok(())
    }

    /// Ends the membership of a process whose pages are private again: by the kernel's word, the process maps nothing
    /// of a pool any more, or asks ksmd for merging no more. The worker is told to end its connection to the process.
    fn leave(&mut self, id: ProcessId) -> Result<(), String> {
        if self.registry.state.find(id).is_some() && id.is_alive() {
            let member = self.own_member(id)?;
            let by = self.place_in_journal()?;
            if member.via == Via::Ksm {
                if KsmStat::of(id.pid).is_ok_and(|stat| stat.ksm_merge_any == Some(true)) {
                    return Err(format!("process {} still has its memory merged by ksmd", id.pid));
                }
            } else if pooled_bytes(id.pid)? > 0 {
                return Err(format!("process {} maps pages of group {} yet", id.pid, member.group));
            }
            if member.via == Via::Agent && !self.registry.group(&member.group).dismiss(member.identity.clone()) {
                return Err(format!("the worker of group {} cannot be told at the moment; try again", member.group));
            }
            self.registry.keep(|state| {
                state.remove(id);
                Ok(())
            })?;
            note!("group {}: member {} has left: process {} was detached", member.group, member.identity.name, id.pid);
            let of = of_member(&member.group, &member.identity.name, id, member.uid);
            self.registry.trail.write(by, "detached", with(of, json!({ "via": member.via })));
        }
        self.client.answer(&Answer::Done);
        Ok(())
    }

    /// The attached member with this process, if the client may detach it.
    fn attached(&self, id: ProcessId) -> Result<MemberLine, String> {
        let member = self.own_member(id)?;
        member.was_attached().then_some(member).ok_or_else(|| format!("process {} was not attached", id.pid))
    }

    /// The member with this process, attached or started, if the client may detach it.
    fn own_member(&self, id: ProcessId) -> Result<MemberLine, String> {
        let member = self.registry.state.find(id).ok_or_else(|| format!("process {} is no member", id.pid))?;
        let uid = self.client.peer.uid;
        if uid != 0 && uid != member.uid {
            return Err(format!("process {} belongs to user {}", id.pid, member.uid));
        }
        Ok(member.clone())
    }

    fn list_groups(&mut self) -> Result<(), String> {
        let uid = self.client.peer.uid;
        for group in self.registry.groups.values().filter(|g| self.registry.may(uid, &g.config)) {
            self.client.answer(&Answer::Group(GroupLine {
                name: group.name.clone(),
                members: self.registry.state.members_of(&group.name),
                worker: group.worker_state(),
                settings: group.settings(),
                configured: group.is_configured,
            }));
        }
        self.client.answer(&Answer::Done);
        Ok(())
    }

    fn list_members(&mut self) -> Result<(), String> {
        let uid = self.client.peer.uid;
        // A user without rights may ask again and again, and must not cause a check of all members' processes.
        if self.registry.groups.values().any(|group| self.registry.may(uid, &group.config)) {
            self.registry.state.forget_dead();
        }
        for member in self.registry.state.members() {
            if self.registry.groups.get(&member.group).is_some_and(|g| self.registry.may(uid, &g.config)) {
                self.client.answer(&Answer::Member(member.clone()));
            }
        }
        self.client.answer(&Answer::Done);
        Ok(())
    }

    fn list_troubles(&mut self) -> Result<(), String> {
        let uid = self.client.peer.uid;
        if self.registry.users().contains(&uid) || uid == 0 {
            self.registry.troubles.all().for_each(|trouble| self.client.answer(&Answer::Trouble(trouble)));
        }
        self.client.answer(&Answer::Done);
        Ok(())
    }

    fn ask_worker(&mut self, group: &str, wants: Wants) -> Result<(), String> {
        self.allow(group, false)?;
        if let Some(report) = self.registry.group(group).ask_report() {
            self.client.wants = Some(Waits { group: group.to_owned(), report, wants });
            return Ok(());
        }
        self.use_report(group, wants, &GroupReport::none());
        Ok(())
    }

    fn ask_why(&mut self, group: &str, pid: u32, pages: Vec<(u64, u16)>) -> Result<(), String> {
        self.allow(group, false)?;
        let question = self.registry.group(group).ask_why(pid, pages);
        let report = question.ok_or_else(|| format!("group {group} has no worker that answers; try again"))?;
        self.client.wants = Some(Waits { group: group.to_owned(), report, wants: Wants::Why });
        Ok(())
    }

    fn use_report(&mut self, group: &str, wants: Wants, report: &GroupReport) {
        match wants {
            Wants::Show => {
                let bill = self.registry.state.total(group);
                // A missing prover counts only if the service has one.
                let no_prover = report.no_prover && self.registry.has_prover;
                let state = &self.registry.state;
                let is_member = |parent| state.find(parent).is_some();
                let not_attached = self.registry.enrolment.of_group(group, is_member, Instant::now());
                // Only a client that may see all groups gets this figure, which covers all of them.
                let sees_all = self.may_know_of_all() || self.registry.is_history(self.client.peer.uid);
                let fit = if sees_all { super::admissions::fit(self.registry, group) } else { None };
                let mut report = GroupReport { bill, no_prover, ..report.clone() };
                member_facts::add(self.registry, group, &mut report.members);
                let group = self.registry.group(group);
                self.client.answer(&Answer::Report(Box::new(GroupState {
                    name: group.name.clone(),
                    settings: group.settings(),
                    configured: group.is_configured,
                    worker: group.worker_state(),
                    worker_pid: group.worker.as_ref().map(|w| w.process.pid),
                    pool_limit: group.pool_limit(),
                    pressure_scan_rate: group.pressure_scan_rate(),
                    fit,
                    segments: group.segments.len(),
                    not_attached,
                    report: named(report, &group.pool_limit()),
                })));
            }
            Wants::Why => {}
            Wants::Unfold(change, by) => {
                let answer = self.promise_room(group, report, &change);
                if let Err(why) = answer.and_then(|()| self.set(group, &change, by)) {
                    self.client.answer(&Answer::Refused(why));
                }
            }
        }
    }

    fn change(&mut self, group: &str, change: Change, by: By) -> Result<(), String> {
        if self.makes_private(group, &change) {
            return self.ask_worker(group, Wants::Unfold(change, by));
        }
        self.set(group, &change, by)
    }

    /// Who is named in the journal: the user of the client. If the client is the web side, it is the caller of the web
    /// side, given as `web`.
    fn by(&self, web: Option<By>) -> By {
        let PeerProcess { id, uid } = self.client.peer;
        match web.filter(|_| self.registry.is_web(uid)) {
            Some(By { user, token, address, .. }) => By {
                user,
                pid: None,
                web: true,
                token: token.map(|token| token.chars().take(MOST_NAME_CHARS).collect()),
                address: address.filter(|address| address.parse::<IpAddr>().is_ok()),
            },
            None => By { user: Some(uid), pid: Some(id.pid), ..By::default() },
        }
    }

    /// Reserves a line in the journal for the change that the client wants, and returns who is named in it. Fails if
    /// the client has made too many changes within the hour, or the journal cannot be written.
    fn place_in_journal(&mut self) -> Result<By, String> {
        let by = self.by(None);
        self.registry.trail.place(&by, Instant::now())?;
        Ok(by)
    }

    fn read_journal(&mut self, after: u64) -> Result<(), String> {
        if !self.may_know_of_all() {
            return Err(format!("user {} may not read the journal: root may", self.client.peer.uid));
        }
        let Lines { lines, next } = self.registry.trail.read(after)?;
        let lines = lines.into_iter().filter_map(|(place, line)| Some((place, serde_json::from_str(&line).ok()?)));
        self.client.answer(&Answer::Journal(lines.collect(), next));
        Ok(())
    }

    /// Writes failed logins at the web side to the journal, with at most [`MOST_ADDRESSES`] addresses. These lines have
    /// one bound together, as the lines of a user do.
    fn login_failed(&mut self, times: u32, addresses: BTreeMap<String, u32>) -> Result<(), String> {
        let uid = self.client.peer.uid;
        if !self.registry.is_web(uid) {
            return Err(format!("user {uid} is not the web side's"));
        }
        let by = By { web: true, ..By::default() };
        self.registry.trail.place(&by, Instant::now())?;
        let known = addresses.into_iter().filter(|(address, _)| address.parse::<IpAddr>().is_ok()).take(MOST_ADDRESSES);
        let addresses: BTreeMap<_, _> = known.collect();
        self.registry.trail.write(by, "login_failed", json!({ "times": times, "addresses": addresses }));
        self.client.answer(&Answer::Done);
        Ok(())
    }

    fn makes_private(&self, group: &str, change: &Change) -> bool {
        self.registry.groups.get(group).is_some_and(|group| makes_private(&group.settings(), change))
    }

    /// Promises a group memory for all of its pages that a change makes private.
    fn promise_room(&mut self, group: &str, report: &GroupReport, change: &Change) -> Result<(), String> {
        let (needs, needed) = needs_of(report, change);
        let allowed = self.registry.within_limits(&needs);
        allowed
            .map_err(|why| format!("{why}: raise the limit, and try again (fold off leaves everything as it is)"))?;
        self.registry.promise(|room, memory| room.promise_all(group, needed, memory, Instant::now()))
    }

    fn set(&mut self, group: &str, change: &Change, by: By) -> Result<(), String> {
        self.allow(group, false)?;
        self.registry.trail.place(&by, Instant::now())?;
        let before = self.registry.group(group).settings();
        let (all, from) = (self.registry.group(group).change.then(change), self.registry.group(group).config.settings);
        self.registry.keep(|state| {
            state.set_change(group, all, from);
            Ok(())
        })?;
        self.registry.group(group).set(change);
        self.registry.reschedule(group);
        note!("group {group}: user {} has changed its settings", self.client.peer.uid);
        let changed = trail::changed(group, &before, &self.registry.group(group).settings());
        self.registry.trail.write(by, "settings_changed", changed);
        self.client.answer(&Answer::Set(Box::new(self.registry.group(group).settings())));
        Ok(())
    }

    /// Whether the client is root, the service's owner, or the web side, which knows what it shows to whom.
    fn may_know_of_all(&self) -> bool {
        let uid = self.client.peer.uid;
        uid == 0 || uid == own_uid() || self.registry.is_web(uid)
    }

    /// Answers a request for memory for further guests. Only root, the service's own user and the web side may have
    /// memory promised; the web side checks the rights of its users by itself.
    fn admit(&mut self, asked: &Asked, by: &By) -> Result<(), String> {
        if !self.may_know_of_all() {
            return Err(format!("user {} may not have memory promised: root may", self.client.peer.uid));
        }
        let answered = super::admissions::ask(self.registry, asked, by)?;
        self.client.answer(&Answer::Admission(Box::new(answered)));
        Ok(())
    }

    fn pace(&mut self, group: &str, pages_per_s: Option<u32>, for_s: u32) -> Result<(), String> {
        self.allow(group, false)?;
        if pages_per_s == Some(0) {
            return Err("a group fingerprints a page a second at least".into());
        }
        let end = Instant::now() + Duration::from_secs(for_s.min(MOST_PACED_S).into());
        self.registry.group(group).pace(pages_per_s.map(|pages| (pages, end)));
        self.client.answer(&Answer::Done);
        Ok(())
    }
}

/// The fields of a journal line that name a member.
fn of_member(group: &str, name: &str, id: ProcessId, uid: u32) -> Value {
    json!({ "group": group, "member": name, "process": id.pid, "of_user": uid })
}

/// Completes a report whose pool is full: if the members' memory limits bound the pool, the reason says so.
fn named(mut report: GroupReport, limit: &PoolLimit) -> GroupReport {
    let Some(why) = report.no_room.take() else { return report };
    let more = match limit.by {
        PoolLimitBy::MembersMemory => {
            format!("{why}; the pool is limited to {} by its members' memory limits", cli::bytes(limit.bytes))
        }
        PoolLimitBy::Settings => why.clone(),
    };
    report.members.iter_mut().filter(|member| member.detail == why).for_each(|member| member.detail.clone_from(&more));
    report.no_room = Some(more);
    report
}

/// Memory that each member needs for a change that makes pages private, and all of them together.
///
/// The worker itself counts all pages that map a slot, so no member's own count is taken for more than this number.
/// Pages of zeros need memory only when everything is unfolded. Only the members' own counts say how many there are, so
/// no more than [`ZERO_PAGES`] count, which is what a worker asks for at a time. The worker asks again for the rest,
/// and waits if there is no room.
fn needs_of(report: &GroupReport, change: &Change) -> (Needs, u64) {
    let mut zeros_left = if change.fold == Some(Fold::Unfold) { ZERO_PAGES } else { 0 };
    let mut zeros = 0;
    let of_member = |member: &MemberReport| {
        let zero_pages = member.zero_pages.min(zeros_left);
        (zeros_left, zeros) = (zeros_left.saturating_sub(zero_pages), zero_pages.saturating_add(zeros));
        let pages = member.folded_pages.min(report.sharing_pages).saturating_add(zero_pages);
        MemberRoom { pid: member.pid, bytes: pages_to_bytes(pages) }
    };
    let members = report.members.iter().map(of_member).collect();
    (Needs { members, whole: true }, pages_to_bytes(report.sharing_pages.saturating_add(zeros)))
}

/// Whether a change makes folded pages private: unfolding does, and so does the end of sharing between members.
fn makes_private(settings: &Settings, change: &Change) -> bool {
    let separates = change.intra_member_only == Some(true) && !settings.intra_member_only;
    change.fold == Some(Fold::Unfold) || separates
}

#[cfg(test)]
#[path = "leave_tests.rs"]
mod leave_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::state::State;
    use api::place::Place;
    use std::path::Path;

    #[test]
    fn stranger_who_asks_for_members_causes_no_look_at_them() {
        let mut registry = Registry::new(Place::at(Path::new("/nonexistent")), Config::default(), State::default());
        registry.group("acme");
        let gone = ProcessId { pid: u32::MAX >> 1, start_ticks: 1 };
        let mut left_after = |uid| {
            registry.state.add(crate::state::member("acme", "gone", gone)).unwrap();
            let (_theirs, ours) = Seqpacket::pair().unwrap();
            let mut client = Client::new(ours, Some(0)).unwrap();
            client.peer.uid = uid;
            Request { registry: &mut registry, client: &mut client }.hear(Ask::Members);
            registry.state.members().len()
        };
        assert_eq!([left_after(4242), left_after(0)], [1, 0]);
    }

    /// Two members have 10 shared pages each, and a third one reports false numbers of pages.
    #[test]
    fn liars_zeros_keep_nobody_from_unfolding() {
        let member =
            |pid, folded_pages, zero_pages| MemberReport { pid, folded_pages, zero_pages, ..MemberReport::default() };
        let unfold = Change { fold: Some(Fold::Unfold), ..Change::default() };
        let separate = Change { intra_member_only: Some(true), ..Change::default() };
        for lie in [0, 1, 1 << 52, u64::MAX] {
            let members = vec![member(1, 10, 5), member(2, lie, lie), member(3, 10, lie)];
            let zero_pages = lie.saturating_mul(2).saturating_add(5);
            let report = GroupReport { members, sharing_pages: 30, zero_pages, ..GroupReport::none() };
            let pages = |change: &Change| {
                let (needs, needed) = needs_of(&report, change);
                (needs.members.iter().map(|room| room.bytes >> 12).collect::<Vec<_>>(), needed >> 12)
            };
            let zeros = lie.min(ZERO_PAGES - 5);
            let other_zeros = lie.min(ZERO_PAGES - 5 - zeros);
            let all = vec![15, lie.min(30) + zeros, 10 + other_zeros];
            assert_eq!(pages(&unfold), (all, 30 + 5 + zeros + other_zeros));
            assert_eq!(pages(&separate), (vec![10, lie.min(30), 10], 30), "zeros of a member stay its own");
        }
    }

    #[test]
    fn separation_of_members_needs_room_like_unfolding() {
        let (sharing, apart) = (Settings::default(), Settings { intra_member_only: true, ..Settings::default() });
        let separate = Change { intra_member_only: Some(true), ..Change::default() };
        let unfold = Change { fold: Some(Fold::Unfold), ..Change::default() };
        assert!(makes_private(&sharing, &separate) && makes_private(&sharing, &unfold));
        assert!(makes_private(&apart, &unfold) && !makes_private(&apart, &separate));
        assert!(!makes_private(&sharing, &Change { fold: Some(Fold::Off), ..Change::default() }));
    }
}
