//! `agarwal-fig6.4`: the cost of one more guest, by owner.

use super::{D512, GROUP, alike, as_guests, first_of};
use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Group, Rig, Vms, mb};
use anyhow::Context;
use census::{Cost, CostPart};
use std::time::Instant;
use survey::{Inside, Request, take};

/// `agarwal-fig6.4`.
pub fn next_guest(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
    let first = first_of(planned, 2);
    let mut vms = rig.vms(&alike(1, first, D512), &mut merger)?;
    let (begin, cpu_before) = (Instant::now(), merger.cpu()?);
    let mut timeline = Timeline { name: "saved".into(), unit: "MB".into(), ..Timeline::default() };
    merger.on_for_later_guests()?;
    merger.settle(begin, &mut timeline)?;
    vms.add(rig, &alike(1, first, D512), &mut merger)?;
    timeline.events.push((begin.elapsed().as_secs_f64(), "the second guest is there".into()));
    merger.settle(begin, &mut timeline)?;
    let cpu = merger.cpu()?.since(&cpu_before);
    let mut measured = Measured::default();
    costs(&vms, &mut measured)?;
    measured.put(MERGED, merger.taken(&vms.pids())?.merged_pages as f64);
    measured.put("settle_cpu_s", cpu.total());
    measured.timelines.push(timeline);
    Ok(measured)
}

fn name(part: CostPart) -> &'static str {
    match part {
        CostPart::Vmm => "vmm",
        CostPart::GuestKernel => "guest kernel",
        CostPart::GuestPageCache => "guest page cache",
        CostPart::GuestAnonymous => "guest anonymous",
        CostPart::GuestUnused => "guest unused",
        CostPart::GuestUnknown => "guest unknown",
    }
}

/// The second guest's cost by part.
fn costs(vms: &Vms, measured: &mut Measured) -> anyhow::Result<()> {
    let guests = as_guests(vms)?;
    let inside: Vec<Option<Inside>> =
        guests.iter().map(|guest| Inside::of(guest, None, false)).collect::<host::Result<_>>()?;
    let request = Request { inside: &inside, ..Request::of(&guests) };
    let findings = take(&request)?.0;
    let cost: Vec<Cost> = findings.guests.get(1).context("a census without the second guest")?.cost();
    anyhow::ensure!(!cost.is_empty(), "the kinds of the second guest's pages are not known");
    let total = cost.iter().map(|c| c.incremental_pages).sum::<u64>() as f64;
    for part in &cost {
        measured.put_at("cost_mb", name(part.part), mb(part.incremental_pages as f64));
    }
    let share =
        |part: CostPart| cost.iter().find(|c| c.part == part).map_or(0.0, |c| c.incremental_pages as f64 / total);
    measured.put("cost_total_mb", mb(total));
    measured.put("cache_share", share(CostPart::GuestPageCache));
    measured.put("vmm_share", share(CostPart::Vmm));
    Ok(())
}
