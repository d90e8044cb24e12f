//! The groups of a service, their members, and the users who may change them.

use super::config::{Config, GroupConfig, WORKER_UIDS};
use super::enrolment::Enrolment;
use super::group::Group;
use super::latency::Unscheduled;
use super::room::{Memory, Room};
use super::segments::Segments;
use super::state::State;
use super::trail::Trail;
use super::trouble::Troubles;
use act::FileStore;
use api::ask::{Ask, NOT_CONFIGURED};
use api::control::{MemberRoom, Needs};
use api::enrol::Rule;
use api::place::{Place, own_uid};
use api::promise::Looks;
use cli::note;
use host::MemoryLimits;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

/// Time for adopted workers to send their first message, in which they tell what they were promised: 2 s. No memory is
/// promised to anybody before, unless that time is over.
const HEARING_TIME: Duration = Duration::from_secs(2);

/// The groups and members of a service.
pub struct Registry {
    /// The directory of the service.
    pub place: Place,
    /// The configuration.
    pub config: Config,
    /// The members, and the settings changed on the fly.
    pub state: State,
    /// The groups by name.
    pub groups: BTreeMap<String, Group>,
    /// Memory that is promised to groups whose folded pages become private again.
    pub room: Room,
    /// Memory limits of members' control groups; `None` where the kernel does not tell them.
    limits: Option<MemoryLimits>,
    /// The user of the web side, if the web side has a user of its own.
    pub web_uid: Option<u32>,
    /// The user of the process that keeps a history, if it has a user of its own.
    pub history_uid: Option<u32>,
    /// Whether the service has a prover.
    pub has_prover: bool,
    /// What is wrong with the service itself.
    pub troubles: Troubles,
    /// The state of enrolling processes by rules.
    pub enrolment: Enrolment,
    /// What the process that balances memory last found on this host, as read from its file.
    pub looks: Looks,
    /// The service manager's store, which keeps open files for the next supervisor (systemd's file descriptor store).
    pub store: Rc<FileStore>,
    /// The journal, in which it is noted who has changed what.
    pub trail: Trail,
    /// Members whose threads' scheduling policies are to be set.
    pub unscheduled: Unscheduled,
}

impl Registry {
    /// A registry without groups.
    pub fn new(place: Place, config: Config, state: State) -> Self {
        let limits = MemoryLimits::find();
        Self {
            trail: Trail::new(place.dir()),
            place,
            config,
            state,
            groups: BTreeMap::new(),
            room: Room::default(),
            limits,
            web_uid: None,
            history_uid: None,
            has_prover: false,
            troubles: Troubles::default(),
            enrolment: Enrolment::default(),
            looks: Looks::default(),
            store: Rc::default(),
            unscheduled: Unscheduled::default(),
        }
    }

    /// The group of this name, which is made if it is not there.
    pub fn group(&mut self, name: &str) -> &mut Group {
        let Self { config, state, groups, store, .. } = self;
        groups.entry(name.to_owned()).or_insert_with(|| {
            let found = config.groups.as_ref().and_then(|all| all.get(name).cloned());
            // Without a configuration, any group may be made. A group has the limits that it last had.
            let is_configured = found.is_some() || config.groups.is_none();
            let config = found.or_else(|| state.last_limits(name)).unwrap_or_default();
            if is_configured {
                state.keep_limits(name, &config);
            } else {
                note!("group {name}: {NOT_CONFIGURED}");
            }
            let change = state.change(name, config.settings).unwrap_or_default();
            if !change.is_empty() {
                note!("group {name}: runs as it was set on the fly, and not as it is configured");
            }
            Group::new(name, config, is_configured, change, Segments::new(name, store))
        })
    }

    /// The rules by which running processes are enrolled: first those of the configuration, then those added on the
    /// fly. Rules for a group that the configuration no longer names are left out, because the group takes no new
    /// members.
    pub fn rules(&self) -> impl Iterator<Item = &Rule> {
        let takes_members = |rule: &&Rule| self.groups.get(&rule.group).is_some_and(|group| group.is_configured);
        self.config.enrol.iter().chain(&self.state.rules).filter(takes_members)
    }

    /// Whether there is any rule by which running processes are enrolled.
    pub fn has_rules(&self) -> bool {
        self.rules().next().is_some()
    }

    /// Forgets groups that the configuration no longer names, and that have neither a member nor a worker nor a loaded
    /// template.
    pub fn forget_ended(&mut self) {
        let state = &self.state;
        let is_over = |g: &Group| {
            let is_used =
                g.worker.is_some() || state.members_of(&g.name) > 0 || g.segments.templates().next().is_some();
            !g.is_configured && !is_used
        };
        let over: Vec<String> = self.groups.values().filter(|g| is_over(g)).map(|g| g.name.clone()).collect();
        for name in over {
            let bill = self.state.total(&name);
            let cpu_s = bill.worker_cpu_s + bill.agent_cpu_s;
            note!("group {name}: ended for good, with {} folds and {cpu_s:.1} s of processor time", bill.folds);
            self.groups.remove(&name);
            self.state.forget_group(&name);
        }
    }

    /// Bounds the pool of every group by half of the memory that its members may have together, by the limits of their
    /// control groups. Each slot replaces at least two pages of members, so no tenant needs a larger pool. And by this
    /// bound, a tenant gets no more memory through the pool than its own limits allow.
    pub fn bound_pools(&mut self) {
        let Some(limits) = &self.limits else { return };
        let ram = host::ram_bytes();
        for group in self.groups.values_mut() {
            let members = self.state.members().iter().filter(|member| member.group == group.name);
            let groups = members.filter_map(|member| limits.group_of(member.identity.pid)).collect();
            group.bound_pool(limits.most_bytes(&groups, ram).map(|bytes| bytes / 2));
        }
    }

    /// Calls `promise` with the host's available memory, out of which it promises memory for pages that become private.
    ///
    /// # Errors
    /// `promise` refuses. Or a worker that an earlier supervisor has started may still hold a promise of memory, and
    /// has not reported it yet.
    pub fn promise<T>(&mut self, promise: impl FnOnce(&mut Room, Memory) -> Result<T, String>) -> Result<T, String> {
        let silent =
            |g: &&Group| g.worker.as_ref().is_some_and(|w| w.adopted && !w.heard && w.since.elapsed() < HEARING_TIME);
        if let Some(group) = self.groups.values().find(silent) {
            return Err(format!("the worker of group {} has not told what it was promised; try again", group.name));
        }
        promise(&mut self.room, Memory::of_host(self.config.reserve)?)
    }

    /// Reduces the memory that members need for pages that become private to what the memory limits of their control
    /// groups leave. The kernel would kill a member that used more.
    ///
    /// # Errors
    /// The limits leave nothing; or they leave less than what is needed, and only all of it is of use
    /// ([`Needs::whole`]). The text has the sizes.
    pub fn within_limits(&self, needs: &Needs) -> Result<Needs, String> {
        let Some(limits) = &self.limits else { return Ok(needs.clone()) };
        let (mut left, mut least) = (limits.left(), None);
        let mut allow = |room: &MemberRoom| {
            let group = limits.group_of(room.pid).unwrap_or_default();
            let bytes = left.take(&group, room.bytes);
            if bytes < room.bytes {
                least.get_or_insert_with(|| {
                    let [needed, bytes] = [room.bytes, bytes].map(cli::bytes);
                    format!("unfolding needs {needed} in control group {group}, whose memory limit leaves {bytes}")
                });
            }
            MemberRoom { bytes, ..*room }
        };
        let members: Vec<MemberRoom> = needs.members.iter().map(&mut allow).collect();
        let has_some = members.iter().any(|room| room.bytes > 0);
        match least {
            Some(why) if needs.whole || !has_some => Err(why),
            _ => Ok(Needs { members, whole: needs.whole }),
        }
    }

    /// The user that a group's worker runs as: for root's service, a user that no other process has.
    ///
    /// # Errors
    /// All such users are taken, or the state cannot be written. A worker must not run as root then.
    pub fn worker_uid(&mut self, group: &str) -> Result<Option<u32>, String> {
        if own_uid() != 0 {
            return Ok(None);
        }
        if let Some(uid) = self.state.worker_uids.get(group) {
            return Ok(Some(*uid));
        }
        let processes = host::pids().unwrap_or_default();
        let mut taken: BTreeSet<u32> = processes.into_iter().filter_map(|pid| host::effective_uid(pid).ok()).collect();
        taken.extend(self.state.worker_uids.values());
        let mut uids = self.config.worker_uids.clone().unwrap_or(WORKER_UIDS);
        let uid = uids.find(|uid| !taken.contains(uid)).ok_or("every user set aside for workers is taken")?;
        self.keep(|state| {
            state.worker_uids.insert(group.to_owned(), uid);
            state.touch();
            Ok(Some(uid))
        })
    }

    /// Makes a change of the state, and writes the state for the next supervisor ([`State::keep`]).
    ///
    /// # Errors
    /// The change is refused, or cannot be written.
    pub fn keep<T>(&mut self, change: impl FnOnce(&mut State) -> Result<T, String>) -> Result<T, String> {
        self.state.keep(&self.place.state_file(), change)
    }

    /// The users who may start members in, or change, at least one group.
    pub fn users(&self) -> BTreeSet<u32> {
        let named = self.groups.values().flat_map(|group| group.config.users.iter().copied());
        named.chain([own_uid()]).chain(self.web_uid).chain(self.history_uid).collect()
    }

    /// Why a user that a helper of this service runs as (the web side, or the process that keeps a history) may not ask
    /// this question; `None` if the user may.
    pub fn forbidden(&self, uid: u32, question: &Ask) -> Option<&'static str> {
        match question {
            Ask::Groups | Ask::Show { .. } => None,
            _ if self.history_uid == Some(uid) => Some("a history is made of reports alone"),
            _ => self.forbidden_to_web(uid, question),
        }
    }

    /// Why the web side may not ask this question; `None` if it may. An attacker who controls the web side can ask no
    /// other questions.
    fn forbidden_to_web(&self, uid: u32, question: &Ask) -> Option<&'static str> {
        let control = self.config.api.as_ref().is_some_and(|api| api.control);
        match question {
            _ if self.web_uid != Some(uid) => None,
            Ask::Groups | Ask::Members | Ask::Troubles | Ask::Show { .. } => None,
            Ask::Journal { .. } | Ask::LoginFailed { .. } => None,
            Ask::Set { .. } | Ask::Reset { .. } | Ask::Admit { .. } if control => None,
            Ask::Admit { .. } => {
                Some("memory is not promised over HTTP: control = true in [api] of the configuration allows it")
            }
            Ask::Set { .. } | Ask::Reset { .. } => {
                Some("settings are not changed over HTTP: control = true in [api] of the configuration allows it")
            }
            Ask::Join { .. } | Ask::Attach { .. } | Ask::MayLeave { .. } | Ask::Leave { .. } | Ask::Children { .. } => {
                Some("membership is not the web side's business")
            }
            Ask::Rules { .. } | Ask::AddRule(_) | Ask::DropRules { .. } => {
                Some("rules are not the web side's business")
            }
            Ask::Pace { .. } => Some("a pace under pressure is not the web side's business"),
            Ask::Why { .. } => Some("single pages are not the web side's business"),
        }
    }

    /// Whether the web side runs as this user. In a service that is not root's, it runs as the service's own user.
    pub fn is_web(&self, uid: u32) -> bool {
        uid == self.web_uid.unwrap_or_else(own_uid)
    }

    /// Whether the process that keeps a history runs as this user, which no other process does.
    pub fn is_history(&self, uid: u32) -> bool {
        self.history_uid == Some(uid)
    }

    /// Whether a user may start members of a group and change the group. [`Self::forbidden`] restricts the web side, and
    /// the process that keeps a history, further.
    pub fn may(&self, uid: u32, config: &GroupConfig) -> bool {
        uid == 0
            || uid == own_uid()
            || config.users.contains(&uid)
            || [self.web_uid, self.history_uid].contains(&Some(uid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::Worker;
    use api::control::Settings;
    use host::{Files, SeqpacketListener};
    use std::path::Path;

    #[test]
    fn next_supervisor_promises_nothing_before_workers_are_heard() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::at(dir.path());
        std::fs::create_dir(place.worker_socket("a").parent().unwrap()).unwrap();
        // A worker that says nothing.
        let _listener = SeqpacketListener::bind(&place.worker_socket("a"), Files::Taken).unwrap();
        let worker = Worker::adopt(&place, "a").unwrap().unwrap();
        let _ = worker.home.as_ref().map(act::CgroupHome::remove);
        let mut registry = Registry::new(place, Config::default(), State::default());
        registry.group("a").worker = Some(worker);
        let promise = |registry: &mut Registry| registry.promise(|_, _| Ok(()));
        assert!(promise(&mut registry).unwrap_err().contains("worker of group a has not told"));
        let worker = registry.group("a").worker.as_mut().unwrap();
        worker.since = worker.since.checked_sub(HEARING_TIME).unwrap();
        assert_eq!(promise(&mut registry), Ok(()), "it had its time");
        let worker = registry.group("a").worker.as_mut().unwrap();
        (worker.since, worker.heard) = (std::time::Instant::now(), true);
        assert_eq!(promise(&mut registry), Ok(()));
    }

    /// An adopted worker reads nothing, and its supervisor must not queue long questions for it.
    #[test]
    fn worker_that_does_not_read_is_asked_no_further_questions() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::at(dir.path());
        std::fs::create_dir(place.worker_socket("a").parent().unwrap()).unwrap();
        let _listener = SeqpacketListener::bind(&place.worker_socket("a"), Files::Taken).unwrap();
        let mut worker = Worker::adopt(&place, "a").unwrap().unwrap();
        let _ = worker.home.as_ref().map(act::CgroupHome::remove);
        let mut registry = Registry::new(place, Config::default(), State::default());
        worker.heard = true;
        registry.group("a").worker = Some(worker);
        let ask = |_: &usize| registry.group("a").ask_why(1, vec![(1 << 40, 1); 2000]).is_some();
        let asked = (0..2000).take_while(ask).count();
        assert!((1..100).contains(&asked), "{asked} questions of some 30 KiB are kept");
    }

    #[test]
    fn group_keeps_its_limits_whatever_becomes_of_the_configuration() {
        let with = |names: &[&str]| {
            let settings = Settings { pool_slots: 9, ..Settings::default() };
            let group = GroupConfig { users: vec![7], settings, processes: Vec::new() };
            let groups = names.iter().map(|name| ((*name).to_owned(), group.clone())).collect();
            Config { groups: Some(groups), ..Config::default() }
        };
        let mut state = State::default();
        for (config, is_configured) in
            [(with(&["acme"]), true), (with(&["beta"]), false), (Config::default(), true), (with(&[]), false)]
        {
            let mut registry = Registry::new(Place::at(Path::new("/nonexistent")), config, state);
            let group = registry.group("acme");
            assert_eq!(
                (group.is_configured, group.settings().pool_slots, &group.config.users[..]),
                (is_configured, 9, &[7][..])
            );
            state = registry.state;
        }
        let mut registry = Registry::new(Place::at(Path::new("/nonexistent")), with(&[]), state);
        registry.group("acme");
        registry.forget_ended();
        assert!(registry.groups.is_empty() && registry.state.last_limits("acme").is_none());
        assert_eq!(registry.group("acme").settings(), Settings::default());
    }
}
