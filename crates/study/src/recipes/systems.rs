//! `li-exp1-3`, `kloster-t7.2`, `kim-group`: guests of two systems. The second is a kernel with busybox.

use super::ram::Ram;
use super::{D256, GROUP, Saved, alike, rep_of, timeline};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{MERGED, Measured};
use crate::rig::{Group, Merger, Rig, System, Vms, VmsWanted, account, mb};
use anyhow::bail;
use page::Fingerprint;
use std::collections::HashSet;
use std::time::Instant;

/// The Debian suite whose kernel the second system boots in some arms.
const OTHER_KERNEL: &str = "trixie";
/// Names of the groups to which guests are assigned by their fingerprints.
const GROUPS: [&str; 2] = ["first", "second"];
/// Guests count as alike if they both hold at least this share of all contents that either holds.
const ALIKE: f64 = 0.2;

/// A request for guests of a system, in a group.
pub(super) fn of(system: System, guests: usize, first: usize, group: &str) -> VmsWanted {
    VmsWanted { system, groups: vec![group.to_owned()], ..alike(guests, first, D256) }
}

/// The two systems that an arm's name stands for.
fn systems(arm: &str) -> [System; 2] {
    let (debian, tiny) = (System::DEBIAN, System::TINY);
    match arm {
        "debian" => [debian, debian],
        "tiny" => [tiny, tiny],
        "mixed-kernels" => [debian, System { kernel_of: Some(OTHER_KERNEL), ..tiny }],
        _ => [debian, tiny],
    }
}

/// ksmd, and this number of guests of each of two systems. Nothing is merged yet.
fn pair(rig: &mut Rig, planned: &Planned, each: usize) -> anyhow::Result<(Merger, Vms)> {
    let mut merger = rig.merger("ksm", &[Group::of(GROUP)])?;
    let [first, second] = systems(&planned.arm);
    let mut vms = rig.vms(&of(first, each, rep_of(planned), GROUP), &mut merger)?;
    vms.add(rig, &of(second, each, rep_of(planned), GROUP), &mut merger)?;
    Ok((merger, vms))
}

/// The recipe of `li-exp1-3`: two guests of each system.
pub fn counters(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let (merger, vms) = pair(rig, planned, 2)?;
    let (mut measured, mut timeline) = (Measured::default(), timeline());
    merger.on()?;
    merger.settle(Instant::now(), &mut timeline)?;
    let (ksm, taken) = (account()?, merger.taken(&vms.pids())?);
    let (sharing, shared) = (ksm.pages_sharing as f64, (ksm.pages_shared as f64).max(1.0));
    measured.put(MERGED, taken.merged_pages as f64);
    measured.put("sharing_mb", mb(sharing));
    measured.put("shared_mb", mb(shared));
    measured.put("sharing_over_shared", sharing / shared);
    measured.put_at("ratio_by_arm", &planned.arm, sharing / shared);
    measured.put("counter_over_frames", sharing / (taken.merged_pages as f64).max(1.0));
    measured.timelines.push(timeline);
    Ok(measured)
}

/// The recipe of `kloster-t7.2`: one guest of each system.
pub fn pairs(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let (merger, vms) = pair(rig, planned, 1)?;
    let (mut measured, mut timeline) = (Measured::default(), timeline());
    merger.on()?;
    merger.settle(Instant::now(), &mut timeline)?;
    let saved = Saved::of(&merger, &vms.pids())?;
    let a_guest = mb(saved.merged) / vms.guests.len() as f64;
    let between = common(&vms)?;
    measured.put(MERGED, saved.merged);
    measured.put("reclaimed_mb", a_guest);
    measured.put_at("reclaimed_by_arm_mb", &planned.arm, a_guest);
    measured.put("zero_mb", mb(saved.zeros) / vms.guests.len() as f64);
    measured.put("common_mb", mb(between as f64));
    measured.put_at("common_by_arm_mb", &planned.arm, mb(between as f64));
    measured.timelines.push(timeline);
    Ok(measured)
}

/// The contents of each guest's RAM, without zeros.
pub(super) fn contents(vms: &Vms) -> anyhow::Result<Vec<HashSet<Fingerprint>>> {
    let zero = Fingerprint::of(&[0; page::PAGE_BYTES]);
    let of_guest = |pid: u32| -> anyhow::Result<HashSet<Fingerprint>> {
        let mut found: HashSet<Fingerprint> = Ram::of(pid, D256 / 2)?.fingerprints()?.into_values().collect();
        found.remove(&zero);
        Ok(found)
    };
    vms.pids().into_iter().map(of_guest).collect()
}

/// Number of contents that both guests of a pair hold.
fn common(vms: &Vms) -> anyhow::Result<usize> {
    let contents = contents(vms)?;
    let [first, second] = &contents[..] else { bail!("{} guests are no pair", contents.len()) };
    Ok(first.intersection(second).count())
}

/// The recipe of `kim-group`. The arms: all guests in one group, groups by fingerprints, and one guest alone.
pub fn grouped(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let each = if planned.length == Length::Full { 4 } else { 2 };
    let wanted = [of(System::DEBIAN, each, rep_of(planned), GROUP), of(System::TINY, each, rep_of(planned), GROUP)];
    let groups: Vec<&'static str> = match planned.arm.as_str() {
        "alone" => vec![GROUPS[0]],
        "global" => vec![GROUPS[0]; 2 * each],
        _ => by_fingerprints(rig, &wanted)?,
    };
    let mut merger = rig.merger("fold", &GROUPS.map(Group::of))?;
    let mut vms: Option<Vms> = None;
    for (n, group) in groups.iter().enumerate() {
        let wanted = &wanted[n / each];
        let one = VmsWanted { guests: 1, groups: vec![(*group).to_owned()], ..wanted.clone() };
        match &mut vms {
            None => vms = Some(rig.vms(&one, &mut merger)?),
            Some(vms) => vms.add(rig, &one, &mut merger)?,
        }
    }
    let Some(vms) = vms else { bail!("no guest") };
    let (mut measured, mut timeline) = (Measured::default(), timeline());
    merger.on()?;
    merger.settle(Instant::now(), &mut timeline)?;
    let saved = Saved::of(&merger, &vms.pids())?;
    measured.put(MERGED, saved.merged);
    measured.put("saved_mb", mb(saved.all()));
    measured.put_at("saved_by_arm_mb", &planned.arm, mb(saved.all()));
    measured.put("saved_share", saved.share());
    measured.put("groups", groups.iter().collect::<HashSet<_>>().len() as f64);
    measured.put("cross_group_frames", merger.cross_group_frames()? as f64);
    measured.timelines.push(timeline);
    Ok(measured)
}

/// Assigns a group to each guest, by the contents of its memory: that of the first guest that it is like. For this the
/// guests run without a merger, and end when their memory has been read.
fn by_fingerprints(rig: &mut Rig, [first, second]: &[VmsWanted; 2]) -> anyhow::Result<Vec<&'static str>> {
    let mut nobody = rig.merger("off", &[Group::of(GROUP)])?;
    let mut vms = rig.vms(first, &mut nobody)?;
    vms.add(rig, second, &mut nobody)?;
    let numbers = clusters(&contents(&vms)?);
    numbers
        .into_iter()
        .map(|n| match GROUPS.get(n) {
            Some(group) => Ok(*group),
            None => bail!("fingerprints make more than {} groups", GROUPS.len()),
        })
        .collect()
}

/// For each guest, the number of the cluster of guests that are alike.
pub(super) fn clusters<T: Eq + std::hash::Hash>(contents: &[HashSet<T>]) -> Vec<usize> {
    let mut heads: Vec<&HashSet<T>> = Vec::new();
    let mut numbers = Vec::new();
    for guest in contents {
        let is_like = |head: &&HashSet<T>| {
            let both = head.intersection(guest).count();
            both as f64 / (head.len() + guest.len() - both).max(1) as f64 >= ALIKE
        };
        let found = heads.iter().position(is_like);
        numbers.push(found.unwrap_or(heads.len()));
        if found.is_none() {
            heads.push(guest);
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_that_share_a_fifth_of_all_contents_are_one_cluster() {
        let set = |range: std::ops::Range<u32>| range.collect::<HashSet<u32>>();
        assert_eq!(clusters(&[set(0..10), set(100..110), set(5..15), set(90..105), set(8..18)]), [0, 1, 0, 1, 2]);
    }
}
