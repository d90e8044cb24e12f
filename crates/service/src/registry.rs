//! The groups of a service, their members, and the users who may change them.

use super::config::{Config, GroupConfig, WORKER_UIDS};
use super::group::Group;
use super::state::State;
use api::ask::NOT_CONFIGURED;
use api::place::{Place, own_uid};
use cli::note;
use std::collections::{BTreeMap, BTreeSet};

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
}

impl Registry {
    /// A registry without groups.
    pub fn new(place: Place, config: Config, state: State) -> Self {
        Self { place, config, state, groups: BTreeMap::new() }
    }

    /// The group of this name, which is made if it is not there.
    pub fn group(&mut self, name: &str) -> &mut Group {
        let Self { config, state, groups, .. } = self;
        groups.entry(name.to_owned()).or_insert_with(|| {
            let all = config.groups.as_ref();
            let found = all.map_or_else(|| Some(GroupConfig::default()), |all| all.get(name).cloned());
            let is_configured = found.is_some();
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
            Group::new(name, config, is_configured, change)
        })
    }

    /// Forgets groups that are configured no more, and have neither a member nor a worker.
    pub fn forget_ended(&mut self) {
        let state = &self.state;
        let is_over = |g: &Group| !g.is_configured && g.worker.is_none() && state.members_of(&g.name) == 0;
        let over: Vec<String> = self.groups.values().filter(|g| is_over(g)).map(|g| g.name.clone()).collect();
        for name in over {
            let bill = self.state.total(&name);
            let cpu_s = bill.worker_cpu_s + bill.agent_cpu_s;
            note!("group {name}: ended for good, with {} folds and {cpu_s:.1} s of processor time", bill.folds);
            self.groups.remove(&name);
            self.state.forget_group(&name);
        }
    }

    /// The user that a group's worker runs as: of root's service, one that nobody else has.
    pub fn worker_uid(&mut self, group: &str) -> Option<u32> {
        if own_uid() != 0 {
            return None;
        }
        if let Some(uid) = self.state.worker_uids.get(group) {
            return Some(*uid);
        }
        let processes = host::pids().unwrap_or_default();
        let mut taken: BTreeSet<u32> =
            processes.into_iter().filter_map(|pid| Some(host::Process::read(pid).ok()?.uid)).collect();
        taken.extend(self.state.worker_uids.values());
        let uid = self.config.worker_uids.clone().unwrap_or(WORKER_UIDS).find(|uid| !taken.contains(uid))?;
        self.state.worker_uids.insert(group.to_owned(), uid);
        self.state.touch();
        Some(uid)
    }

    /// Whether a user may start members of a group and change it.
    pub fn may(&self, uid: u32, config: &GroupConfig) -> bool {
        uid == 0 || uid == own_uid() || config.users.contains(&uid)
    }
}
