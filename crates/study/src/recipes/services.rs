//! `sonone-fig2`, `sonone-fig4`, `sonone-fig6`: five idle guests with services.

use super::{D256, GROUP, alike, rep_of};
use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Group, Merger, Rig, Vms, account, mb};
use std::time::Instant;

/// Guests of the paper.
const GUESTS: usize = 5;

/// `sonone-fig2`: MariaDB in all.
pub fn databases(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    idle(rig, planned, GUESTS)
}

/// `sonone-fig4`: Apache in all.
pub fn web_servers(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    idle(rig, planned, 0)
}

/// `sonone-fig6`: three with MariaDB, two with Apache.
pub fn mixed(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    idle(rig, planned, 3)
}

/// Guests of which the first `databases` keep MariaDB alone, and the others Apache alone.
fn idle(rig: &mut Rig, planned: &Planned, databases: usize) -> anyhow::Result<Measured> {
    let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
    let vms = rig.vms(&alike(GUESTS, rep_of(planned), D256), &mut merger)?;
    let (with_database, with_web) = vms.guests.split_at(databases);
    vms.tell(with_database, "systemctl stop apache2")?;
    vms.tell(with_web, "systemctl stop mariadb")?;
    vms.settle()?;
    let off = merger.taken(&vms.pids())?.frames as f64;
    let (begin, cpu_before) = (Instant::now(), merger.cpu()?);
    let mut timeline = Timeline { name: "saved".into(), unit: "MB".into(), ..Timeline::default() };
    merger.on()?;
    merger.settle(begin, &mut timeline)?;
    let mut measured = Measured::default();
    measured.put("settle_cpu_s", merger.cpu()?.since(&cpu_before).total());
    memory(&vms, &merger, off, &mut measured)?;
    measured.timelines.push(timeline);
    Ok(measured)
}

/// Memory before and after, and whether the merger's account explains the difference.
fn memory(vms: &Vms, merger: &Merger, off: f64, measured: &mut Measured) -> anyhow::Result<()> {
    let saved = merger.saved_pages()? as f64;
    let taken = merger.taken(&vms.pids())?;
    let on = taken.frames as f64;
    measured.put(MERGED, taken.merged_pages as f64);
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
