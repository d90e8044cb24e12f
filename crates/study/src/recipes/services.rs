//! `sonone-fig2`, `sonone-fig4`, `sonone-fig6`: memory of five idle guests with services; they are VMs or containers.

use super::{CONTAINER, D256, GROUP, alike, merger_of, rep_of};
use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Crowd, Group, Merger, Rig, Taken, account, mb};
use lab::Image;
use std::time::Instant;

/// Number of guests, as in the paper.
const GUESTS: usize = 5;

/// The recipe of `sonone-fig2`: MariaDB in all guests.
pub fn databases(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    idle(rig, planned, GUESTS)
}

/// The recipe of `sonone-fig4`: Apache in all guests.
pub fn web_servers(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    idle(rig, planned, 0)
}

/// The recipe of `sonone-fig6`: three guests with MariaDB, two with Apache.
pub fn mixed(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    idle(rig, planned, 3)
}

/// Starts the guests. The first `databases` of them run MariaDB alone, the others Apache alone.
fn start(rig: &mut Rig, planned: &Planned, databases: usize, merger: &mut Merger) -> anyhow::Result<Crowd> {
    if planned.arm.ends_with(CONTAINER) {
        let (first, others) = (Image::LxcMariadb, Image::LxcApache);
        let (first, guests) = if databases > 0 { (first, databases) } else { (others, GUESTS) };
        let mut containers = rig.containers(first, guests, (&mut *merger, GROUP))?;
        if guests < GUESTS {
            containers.add(rig, others, GUESTS - guests, (merger, GROUP))?;
        }
        return Ok(Crowd::Containers(containers));
    }
    let vms = rig.vms(&alike(GUESTS, rep_of(planned), D256), merger)?;
    let (with_database, with_web) = vms.guests.split_at(databases);
    vms.tell(with_database, "systemctl stop apache2")?;
    vms.tell(with_web, "systemctl stop mariadb")?;
    vms.settle()?;
    Ok(Crowd::Vms(vms))
}

fn idle(rig: &mut Rig, planned: &Planned, databases: usize) -> anyhow::Result<Measured> {
    let mut merger = rig.merger(merger_of(planned), &[Group::of(GROUP)])?;
    let mut five = start(rig, planned, databases, &mut merger)?;
    let off = merger.taken(&five.pids())?;
    let (begin, cpu_before) = (Instant::now(), merger.cpu()?);
    five.attach(&merger)?;
    let mut timeline = Timeline { name: "saved".into(), unit: "MB".into(), ..Timeline::default() };
    merger.on()?;
    merger.settle(begin, &mut timeline)?;
    let mut measured = Measured::default();
    measured.put("settle_cpu_s", merger.cpu()?.since(&cpu_before).total());
    memory(&five, &merger, off, &mut measured)?;
    measured.timelines.push(timeline);
    Ok(measured)
}

/// Puts the memory before and after merging, and whether the merger's account explains the difference. `off` was
/// measured before.
fn memory(five: &Crowd, merger: &Merger, off: Taken, measured: &mut Measured) -> anyhow::Result<()> {
    let saved = merger.saved_pages()? as f64;
    let taken = merger.taken(&five.pids())?;
    // Forked processes of a container share frames even before anything is merged: these are subtracted.
    measured.put(MERGED, taken.merged_pages.saturating_sub(off.merged_pages) as f64);
    let (off, on) = (off.frames as f64, taken.frames as f64);
    measured.put_at("memory_mb", "off", mb(off));
    measured.put_at("memory_mb", "on", mb(on));
    measured.put("memory_on_mb", mb(on));
    measured.put("fall", 1.0 - on / off);
    measured.put("explained", saved / (off - on));
    if merger.ksmd().is_some() {
        let ksm = account()?;
        measured.put("sharing_over_shared", ksm.pages_sharing as f64 / (ksm.pages_shared as f64).max(1.0));
    }
    Ok(())
}
