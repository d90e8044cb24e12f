//! Decisions of an operator about balancing: guaranteed sizes, and memory that is never lent.

use anyhow::Context;
use balance::GuestFacts;
use guest::{Glob, Guest};
use host::MemoryLimits;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::Path;

/// Memory that one guest may write in a break storm (many folded pages written at once) before it is paused, in bytes:
/// 64 MiB. docs/balance.md has storms of four guests.
const STORM_BYTES: u64 = 64 << 20;
/// Part of all memory that is kept for programs that are no guests: 1/20.
const RESERVED_PART: u64 = 20;
/// Most memory that is kept for these programs, in bytes: 1 GiB.
const MOST_RESERVED: u64 = 1 << 30;

/// Decisions of an operator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// Guaranteed size of guests whose id or name matches, in bytes. The first that matches counts. A guest without one
    /// keeps all its RAM, and its QEMU is left alone.
    pub guaranteed: Vec<(Glob, u64)>,
    /// Memory that is never lent, in bytes; `None`: [`usual_floor_bytes`].
    pub floor_bytes: Option<u64>,
    /// Control group whose memory limit stands for the host, as the kernel names it; `None`: all memory of the host.
    #[serde(default)]
    pub within: Option<String>,
    /// Users whose VMs are guests of this host, although nothing else says so.
    #[serde(default)]
    pub owners: Vec<u32>,
    /// Destinations of guests whose id or name matches, when they are proposed for another host. The first that matches
    /// counts. A guest without one is moved by nobody but an operator.
    #[serde(default)]
    pub moves: Vec<(Glob, String)>,
}

impl Rules {
    /// Whether a VM is one to which memory is promised. If a control group stands for the host (`within`), the VM must
    /// be in it, or in a group below it.
    pub(crate) fn counts(&self, guest: &Guest, limits: Option<&MemoryLimits>) -> bool {
        let is_inside = |within: &String| {
            let group = guest.pids.first().and_then(|pid| limits?.group_of(*pid));
            group.is_some_and(|group| Path::new(&group).starts_with(within))
        };
        let is_known = !guest.facts.is_strangers || self.owners.contains(&guest.facts.uid);
        is_known && self.within.as_ref().is_none_or(is_inside)
    }

    /// Guaranteed size of a guest; `None` if no rule has one.
    pub(crate) fn guaranteed_bytes(&self, guest: &Guest) -> Option<u64> {
        let found = self.guaranteed.iter().find(|(glob, _)| glob.matches(&guest.id) || glob.matches(&guest.name));
        found.map(|(_, bytes)| *bytes)
    }

    /// The destination of a guest that is proposed for another host; `None` if no rule has one. Owners choose the names
    /// of guests: if several of the guests in `all` have this guest's name, it has no destination.
    pub fn destination(&self, guest: &Guest, all: &[Guest]) -> Option<&str> {
        let has_its_name = |other: &&Guest| other.name == guest.name && !other.facts.is_strangers;
        if all.iter().filter(has_its_name).count() > 1 {
            return None;
        }
        let found = self.moves.iter().find(|(glob, _)| glob.matches(&guest.id) || glob.matches(&guest.name));
        found.map(|(_, to)| to.as_str())
    }

    /// Memory of the host, or of the control group that stands for it: all, and the part that is available.
    ///
    /// # Errors
    /// The kernel does not tell, or the control group has no limit.
    pub fn total_and_available(&self) -> anyhow::Result<(u64, u64)> {
        let Some(group) = &self.within else {
            let available = host::available_bytes().context("cannot tell how much memory is available")?;
            return Ok((host::ram_bytes(), available));
        };
        let found = MemoryLimits::find().and_then(|limits| limits.bound_and_left(group));
        found.with_context(|| format!("the control group {group} has no memory limit below the host's memory"))
    }

    /// Part of the last 10 s in which some task of the host waited for memory, in percent. `None` where a control group
    /// stands for the host.
    pub(crate) fn stalled_percent(&self) -> Option<f64> {
        if self.within.is_some() { None } else { host::memory_stalled_percent() }
    }

    /// Control groups whose page cache may be reclaimed: the one that stands for the host, or otherwise those of the
    /// guests.
    pub fn caches(&self, guests: &[Guest]) -> BTreeSet<String> {
        if let Some(group) = &self.within {
            return BTreeSet::from([group.clone()]);
        }
        let Some(limits) = MemoryLimits::find() else { return BTreeSet::new() };
        let pids = guests.iter().flat_map(|guest| &guest.pids);
        pids.filter_map(|pid| limits.group_of(*pid)).filter(|group| group != "/").collect()
    }

    /// Memory that is never lent, in bytes, of the `total_bytes` of the host or of the control group that stands for
    /// it. The kernel's watermarks are added for the host only: a control group has none.
    pub(crate) fn floor_bytes(&self, total_bytes: u64, guests: &[GuestFacts]) -> u64 {
        let watermarks = if self.within.is_some() { None } else { host::high_watermark_bytes() };
        let floor = self.floor_bytes.unwrap_or_else(|| usual_floor_bytes(total_bytes, guests));
        floor.saturating_add(watermarks.unwrap_or(0))
    }
}

/// Memory that is never lent if no `--floor` is given, in bytes: 1/20 of all, and 1 GiB at most; but at least as much
/// as guests may write in a break storm before they are paused.
pub fn usual_floor_bytes(total_bytes: u64, guests: &[GuestFacts]) -> u64 {
    let written = guests.iter().map(|guest| guest.folded_bytes.min(STORM_BYTES)).fold(0, u64::saturating_add);
    (total_bytes / RESERVED_PART).min(MOST_RESERVED).max(written)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_qemu::FakeQemu;

    const M: u64 = 1 << 20;

    fn folded(mib: &[u64]) -> Vec<GuestFacts> {
        let guest = |folded: &u64| GuestFacts { folded_bytes: folded * M, ..GuestFacts::default() };
        mib.iter().map(guest).collect()
    }

    #[test]
    fn usual_floor_grows_with_guests_that_have_folded_memory() {
        let of = |folded_mib: &[u64]| usual_floor_bytes(2000 * M, &folded(folded_mib)) / M;
        assert_eq!([of(&[]), of(&[64]), of(&[0; 50])], [100; 3]);
        assert_eq!([of(&[64, 64]), of(&[1000; 8]), of(&[1000, 30, 10])], [128, 512, 104]);
        assert_eq!(usual_floor_bytes(u64::MAX, &folded(&[64; 15])) / M, 1024);
        assert_eq!(usual_floor_bytes(u64::MAX, &folded(&[64; 17])) / M, 17 * 64);
    }

    #[test]
    fn floor_that_is_given_counts_whatever_is_folded() {
        let rules = Rules { floor_bytes: Some(7), within: Some("/any".into()), ..Rules::default() };
        assert_eq!(rules.floor_bytes(2000 * M, &folded(&[64; 9])), 7);
        let usual = Rules { floor_bytes: None, ..rules };
        assert_eq!(usual.floor_bytes(2000 * M, &folded(&[64; 9])), 9 * 64 * M);
    }

    #[test]
    fn first_rule_that_matches_all_of_a_name_or_id_counts() {
        let guest = |name: &str| FakeQemu::start(name, 1, std::path::Path::new("/nonexistent")).guest;
        let guaranteed = [("acme-1", 1), ("acme-*", 2), ("qemu:beta", 3), ("*-1", 4)];
        let guaranteed = guaranteed.map(|(glob, bytes)| (glob.parse().unwrap(), bytes)).to_vec();
        let rules = Rules { guaranteed, ..Rules::default() };
        let of = |name| rules.guaranteed_bytes(&guest(name));
        assert_eq!(["acme-1", "acme-11", "beta", "x-1"].map(of), [Some(1), Some(2), Some(3), Some(4)]);
        assert_eq!(["acme", "beta2", "x-10", "my-acme-2"].map(of), [None; 4]);
    }

    #[test]
    fn destination_is_that_of_the_first_rule_and_none_for_a_name_that_several_have() {
        let guest = |name: &str| FakeQemu::start(name, 1, Path::new("/nonexistent")).guest;
        let moves =
            [("acme-1", "tcp:a:1"), ("acme-*", "tcp:b:1")].map(|(glob, to)| (glob.parse().unwrap(), to.to_owned()));
        let rules = Rules { moves: moves.to_vec(), ..Rules::default() };
        let mut all = vec![guest("acme-1"), guest("acme-2"), guest("beta"), guest("acme-2")];
        let of = |all: &[Guest]| [0, 1, 2].map(|n| rules.destination(&all[n], all).map(str::to_owned));
        assert_eq!(of(&all), [Some("tcp:a:1".into()), None, None]);
        all[3].facts.is_strangers = true;
        assert_eq!(of(&all)[1], Some("tcp:b:1".into()));
    }

    #[test]
    fn guests_outside_of_the_control_group_that_stands_for_the_host_do_not_count() {
        let limits = MemoryLimits::find().expect("a tree of control groups");
        let mut guest = FakeQemu::start("acme-1", 1, Path::new("/nonexistent")).guest;
        guest.pids = vec![std::process::id()];
        let group = limits.group_of(std::process::id()).expect("a group");
        let counts = |within: Option<&str>| {
            let rules = Rules { within: within.map(str::to_owned), ..Rules::default() };
            rules.counts(&guest, Some(&limits))
        };
        assert!(counts(None) && counts(Some("/")) && counts(Some(&group)));
        let below = format!("{}/below", group.trim_end_matches('/'));
        assert!(!counts(Some(&below)) && !counts(Some(&format!("{group}x"))));
    }

    /// The kernel keeps memory below its high watermarks to itself.
    #[test]
    fn watermarks_are_never_lent() {
        let Some(watermarks) = host::high_watermark_bytes() else { return };
        let rules = Rules { floor_bytes: Some(7), ..Rules::default() };
        assert_eq!(rules.floor_bytes(2000 * M, &[]), 7 + watermarks);
    }
}
