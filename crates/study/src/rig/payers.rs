//! Who pays for processor time: the party whose processes are in the control group in which it is spent, in the
//! hierarchy that accounts processor time.

use act::CgroupHome;
use anyhow::Context;
use std::collections::{BTreeMap, BTreeSet};

/// A party that pays for processor time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Payer {
    /// A trust group, by its name.
    Group(String),
    /// No group: the host pays, for all groups together.
    Nobody,
}

/// Processor time of merging by payer, in seconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cpu(pub BTreeMap<Payer, f64>);

impl Cpu {
    /// The processor time of all payers together.
    pub fn total(&self) -> f64 {
        self.0.values().sum()
    }

    /// Processor time for which this party pays.
    pub fn of(&self, payer: &Payer) -> f64 {
        self.0.get(payer).copied().unwrap_or(0.0)
    }

    /// The time that was spent since an earlier reading.
    pub fn since(&self, before: &Self) -> Self {
        Self(self.0.iter().map(|(payer, time)| (payer.clone(), time - before.of(payer))).collect())
    }
}

/// Control groups by path, each with the parties whose processes are in it.
pub struct Payers(BTreeMap<String, BTreeSet<Payer>>);

impl Payers {
    /// Finds the control groups in which these parties' processes are. Processes that have ended are left out.
    pub fn of(processes: &[(u32, Payer)]) -> Self {
        let mut all: BTreeMap<String, BTreeSet<Payer>> = BTreeMap::new();
        for (pid, payer) in processes {
            if let Ok(cgroup) = cgroup_of(*pid) {
                all.entry(cgroup).or_default().insert(payer.clone());
            }
        }
        Self(all)
    }

    /// The party that pays for a process: the only party with processes in its control group. In the root group, where
    /// processes of all are, nobody does.
    ///
    /// # Errors
    /// The process has ended.
    pub fn payer(&self, pid: u32) -> anyhow::Result<Payer> {
        Ok(self.payer_of(&cgroup_of(pid)?))
    }

    fn payer_of(&self, cgroup: &str) -> Payer {
        match self.0.get(cgroup) {
            Some(parties) if cgroup != "/" && parties.len() == 1 => parties.first().cloned(),
            _ => None,
        }
        .unwrap_or(Payer::Nobody)
    }
}

/// Path of the control group by which a process's processor time is accounted.
fn cgroup_of(pid: u32) -> anyhow::Result<String> {
    let path = format!("/proc/{pid}/cgroup");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    accounted_in(&text).with_context(|| format!("{path} has no control group that accounts processor time"))
}

/// The path of the `cpuacct` hierarchy in the text of `/proc/PID/cgroup`; without such a hierarchy, that of version 2.
fn accounted_in(text: &str) -> Option<String> {
    let trees = text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    let of = |wanted: fn(&str) -> bool| trees.clone().find(|(controllers, _)| wanted(controllers));
    let found = of(|controllers| controllers.split(',').any(|c| c == "cpuacct")).or_else(|| of(str::is_empty));
    found.map(|(_, path)| path.to_owned())
}

/// A control group for each trust group, into which its guests are put, as operators do. Dropping this removes those
/// that are empty.
pub struct Homes(Vec<(String, CgroupHome)>);

impl super::Rig {
    /// Makes a control group for each of these trust groups.
    ///
    /// # Errors
    /// The host has no control groups, or lets none be made.
    pub fn homes(&mut self, groups: &[&str]) -> anyhow::Result<Homes> {
        let parent = format!("pagefold-study-{}", std::process::id());
        let mut homes = Homes(Vec::new());
        for group in groups {
            let home = CgroupHome::make(&parent, group).context("cannot make a control group for guests")?;
            for dir in home.dirs() {
                self.guardian.keep_cgroup(dir)?;
            }
            homes.0.push(((*group).to_owned(), home));
        }
        Ok(homes)
    }
}

impl Homes {
    /// Moves a process into the control group of its trust group.
    ///
    /// # Errors
    /// The process has ended, or the host forbids it.
    pub fn add(&self, group: &str, pid: u32) -> anyhow::Result<()> {
        let (_, home) = self.0.iter().find(|(name, _)| name == group).context("a guest of no group")?;
        home.add(pid).with_context(|| format!("cannot move process {pid} into the control group of {group}"))
    }
}

impl Drop for Homes {
    fn drop(&mut self) {
        for (_, home) in &self.0 {
            home.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_is_kept_apart_by_payer() {
        let cpu = |a: f64, nobody: f64| Cpu([(Payer::Group("a".into()), a), (Payer::Nobody, nobody)].into());
        let used = cpu(3.0, 1.0).since(&cpu(1.0, 0.5));
        assert_eq!((used.total(), used.of(&Payer::Nobody), used.of(&Payer::Group("b".into()))), (2.5, 0.5, 0.0));
    }

    #[test]
    fn time_is_accounted_in_one_tree() {
        assert_eq!(accounted_in("4:memory:/m\n2:cpu,cpuacct:/a\n0::/u\n").as_deref(), Some("/a"));
        assert_eq!(accounted_in("1:cpu:/c\n0::/u\n").as_deref(), Some("/u"));
        assert_eq!(accounted_in("4:memory:/m\n"), None);
    }

    #[test]
    fn group_pays_for_control_groups_in_which_it_is_alone() {
        let group = |name: &str| Payer::Group(name.into());
        let parties = |all: &[Payer]| all.iter().cloned().collect::<BTreeSet<_>>();
        let payers = Payers(
            [
                ("/a".to_owned(), parties(&[group("acme")])),
                ("/both".to_owned(), parties(&[group("acme"), group("beta")])),
                ("/".to_owned(), parties(&[group("acme")])),
                ("/service".to_owned(), parties(&[Payer::Nobody])),
            ]
            .into(),
        );
        assert_eq!(payers.payer_of("/a"), group("acme"));
        for path in ["/both", "/", "/service", "/other"] {
            assert_eq!(payers.payer_of(path), Payer::Nobody, "{path}");
        }
    }
}
