//! Takes over a changed configuration while the service runs (`SIGHUP`), as far as that is possible.
//!
//! | of the configuration | taken over |
//! |---|---|
//! | groups: new ones, their users, rules and settings | at once |
//! | a group that it names no more | at once, as at a start: members run on with the last limits, and there are no new ones |
//! | `[[enrol]]` | at once: processes that fit are attached within seconds; members stay members |
//! | `reserve`, `one-trust-domain`, tokens, `control` | at once |
//! | `[balance]`, `[[guest]]`, `[sketch]`, `[history]` | at once: the process for it is started again |
//! | `[park]` | at once: the process that parks is started again. Guests that are parked stay so |
//! | all else in `[service]` and `[api]` | by the next service |

use super::config::{Api, Config, GroupConfig};
use super::registry::Registry;
use super::trail::{changed, with};
use api::ask::NOT_CONFIGURED;
use cli::note;
use cli::size::plural;
use serde_json::json;
use std::collections::BTreeSet;

/// What is logged about a changed key that only the next service takes over.
const LATER: &str = "takes effect when the service is started again";

impl Registry {
    /// Takes over a configuration, and logs which parts take effect now and which do not.
    pub fn reload(&mut self, new: Config) {
        let old = std::mem::replace(&mut self.config, new);
        if old.enrol != self.config.enrol {
            let rules = plural(self.config.enrol.len() as u64, "rule");
            note!("SIGHUP: {rules} that enrol running processes, {} before", old.enrol.len());
        }
        for key in self.keep_what_stays(&old) {
            note!("SIGHUP: {key} {LATER}");
        }
        let named: BTreeSet<String> = self.config.groups.iter().flatten().map(|(name, _)| name.clone()).collect();
        let known: Vec<String> = self.groups.keys().cloned().collect();
        let mut changed = 0;
        for name in known.iter().chain(named.iter().filter(|name| !known.contains(name))) {
            changed += usize::from(self.reload_group(name));
        }
        let groups = plural(named.len() as u64, "group");
        note!("SIGHUP: the configuration is read again: {groups}, {changed} of them changed");
    }

    /// Keeps the old values of keys that only the next service takes over, and returns the names of those that have
    /// changed.
    fn keep_what_stays(&mut self, old: &Config) -> Vec<&'static str> {
        let new = &mut self.config;
        let mut kept = Vec::new();
        let mut keep = |key, is_same: bool| kept.extend((!is_same).then_some(key));
        keep("dir of [service]", new.dir == old.dir);
        keep("worker-uid-base of [service]", new.worker_uids == old.worker_uids);
        keep("prover of [service]", new.without_prover == old.without_prover);
        new.dir.clone_from(&old.dir);
        new.worker_uids.clone_from(&old.worker_uids);
        new.without_prover = old.without_prover;
        new.api = match (new.api.take(), &old.api) {
            (Some(new), Some(old)) => {
                let sockets = |api: &Api| (api.socket.clone(), api.group, api.listen);
                keep("a socket of [api]", sockets(&new) == sockets(old));
                let (socket, group, listen) = sockets(old);
                Some(Api { socket, group, listen, ..new })
            }
            (new, old) => {
                keep("[api]", new.is_some() == old.is_some());
                old.clone()
            }
        };
        kept
    }

    /// Takes over the new configuration of one group, which may be new or no longer configured. Returns whether
    /// anything has changed.
    fn reload_group(&mut self, name: &str) -> bool {
        let configured = self.config.groups.as_ref().and_then(|groups| groups.get(name)).cloned();
        let Some(group) = self.groups.get_mut(name) else {
            note!("group {name}: added");
            self.trail.write_own("configured", json!({ "group": name, "detail": "added" }));
            self.group(name);
            return true;
        };
        let Some(config) = configured else {
            if std::mem::replace(&mut group.is_configured, false) {
                note!("group {name}: {NOT_CONFIGURED}");
                self.trail.write_own("configured", json!({ "group": name, "detail": NOT_CONFIGURED }));
                group.config.processes.clear();
                return true;
            }
            return false;
        };
        if group.is_configured && group.config == config {
            return false;
        }
        let (detail, before) = (differences(&group.config, &config), group.settings());
        note!("group {name}: {detail}");
        self.state.keep_limits(name, &config);
        let change = self.state.change(name, config.settings).unwrap_or_default();
        group.configure(config, change);
        let more = with(changed(name, &before, &group.settings()), json!({ "detail": detail }));
        self.trail.write_own("configured", more);
        self.reschedule(name);
        true
    }
}

/// The parts in which two configurations of a group differ, in words.
fn differences(old: &GroupConfig, new: &GroupConfig) -> String {
    let parts = [
        ("settings", old.settings != new.settings),
        ("users", old.users != new.users),
        ("rules for processes", old.processes != new.processes),
    ];
    let changed: Vec<&str> = parts.into_iter().filter(|(_, differ)| *differ).map(|(part, _)| part).collect();
    if changed.is_empty() { "configured again".to_owned() } else { format!("other {}", changed.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::State;
    use api::change::Change;
    use api::control::{Fold, Settings};
    use api::place::Place;
    use std::collections::BTreeMap;
    use std::path::Path;

    fn group(pool_slots: u32) -> GroupConfig {
        GroupConfig { users: vec![7], settings: Settings { pool_slots, ..Settings::default() }, processes: Vec::new() }
    }

    fn config(groups: &[(&str, u32)]) -> Config {
        let groups: BTreeMap<_, _> = groups.iter().map(|(name, slots)| ((*name).to_owned(), group(*slots))).collect();
        Config { groups: Some(groups), ..Config::default() }
    }

    #[test]
    fn groups_follow_the_configuration() {
        let place = Place::at(Path::new("/nonexistent"));
        let mut registry = Registry::new(place, config(&[("acme", 1), ("beta", 2), ("gone", 3)]), State::default());
        for name in ["acme", "beta", "gone"] {
            registry.group(name);
        }
        // A change on the fly lasts until the configured settings of its group change.
        let off = Change { fold: Some(Fold::Off), ..Change::default() };
        for name in ["acme", "beta"] {
            let from = registry.group(name).config.settings;
            registry.state.set_change(name, off, from);
            registry.group(name).set(&off);
        }
        registry.reload(config(&[("acme", 10), ("beta", 2), ("new", 4)]));
        let mut of = |name: &str| {
            let group = registry.group(name);
            (group.is_configured, group.settings().pool_slots, group.settings().fold)
        };
        assert_eq!(of("acme"), (true, 10, Fold::On));
        assert_eq!(of("beta"), (true, 2, Fold::Off));
        assert_eq!(of("new"), (true, 4, Fold::On));
        assert_eq!(of("gone"), (false, 3, Fold::On));
        registry.reload(config(&[("gone", 5)]));
        let mut of = |name: &str| (registry.group(name).is_configured, registry.group(name).settings().pool_slots);
        assert_eq!((of("gone"), of("acme")), ((true, 5), (false, 10)));
    }

    #[test]
    fn only_the_next_service_takes_over_sockets_and_users() {
        let place = Place::at(Path::new("/nonexistent"));
        let old = Config { api: Some(Api::default()), ..config(&[]) };
        let mut registry = Registry::new(place, old.clone(), State::default());
        let api = Api { socket: Some("/x".into()), control: true, ..Api::default() };
        registry.config = Config { dir: Some("/y".into()), without_prover: true, api: Some(api), ..config(&[]) };
        let kept = registry.keep_what_stays(&old);
        assert_eq!(kept, ["dir of [service]", "prover of [service]", "a socket of [api]"]);
        let now = &registry.config;
        assert_eq!((&now.dir, now.without_prover), (&None, false));
        assert_eq!(now.api, Some(Api { control: true, ..Api::default() }));
        registry.config = config(&[]);
        assert_eq!(registry.keep_what_stays(&old), ["[api]"]);
        assert!(registry.config.api.is_some());
    }
}
