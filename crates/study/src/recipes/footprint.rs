//! `agarwal-fig6.4`: the cost of one more guest, by owner.

use super::{D512, GROUP, alike, as_guests, first_of};
use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Group, Rig, Vms, mb};
use anyhow::Context;
use census::{CostPart, GuestFindings};
use page::Region;
use std::time::Instant;
use survey::{Inside, Request, take};

/// The recipe of `agarwal-fig6.4`.
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

/// Puts the cost of the second guest, part by part.
fn costs(vms: &Vms, measured: &mut Measured) -> anyhow::Result<()> {
    let guests = as_guests(vms)?;
    let inside: Vec<Option<Inside>> =
        guests.iter().map(|guest| Inside::of(guest, None, false)).collect::<host::Result<_>>()?;
    let request = Request { inside: &inside, ..Request::of(&guests) };
    let findings = take(&request)?.0;
    put(findings.guests.get(1).context("a census without the second guest")?, measured)
}

/// Puts a guest's cost, part by part: the page frames that only this guest maps. Code that an emulator has translated
/// is a part of its own, since a VM under KVM has none.
fn put(guest: &GuestFindings, measured: &mut Measured) -> anyhow::Result<()> {
    let mut cost = guest.cost();
    anyhow::ensure!(!cost.is_empty(), "the kinds of the second guest's pages are not known");
    let of_code = guest.regions.iter().filter(|region| region.region == Region::TranslationCache);
    let translated: u64 = of_code.map(|region| region.incremental_pages).sum();
    for vmm in cost.iter_mut().filter(|cost| cost.part == CostPart::Vmm) {
        vmm.incremental_pages -= translated;
    }
    let total = cost.iter().map(|part| part.incremental_pages).sum::<u64>() as f64;
    for part in &cost {
        measured.put_at("owner_mb", name(part.part), mb(part.incremental_pages as f64));
    }
    let share =
        |part: CostPart| cost.iter().find(|c| c.part == part).map_or(0.0, |c| c.incremental_pages as f64 / total);
    measured.put("translated_mb", mb(translated as f64));
    measured.put("owners_mb", mb(total));
    measured.put("cache_part", share(CostPart::GuestPageCache));
    measured.put("vmm_part", share(CostPart::Vmm));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use census::{KindFindings, RegionFindings};
    use page::GuestPageKind;

    #[test]
    fn translated_code_is_no_part_of_the_cost() {
        let region = |region, incremental_pages| RegionFindings {
            region,
            resident_pages: incremental_pages,
            zero_pages: 0,
            duplicate_pages: 0,
            incremental_pages,
            incremental_folded_pages: 0,
        };
        let cache = KindFindings { incremental_pages: 600, ..KindFindings::empty(GuestPageKind::PageCache, false) };
        let guest = GuestFindings {
            regions: vec![
                region(Region::GuestRam, 600),
                region(Region::Heap, 150),
                region(Region::Stack, 50),
                region(Region::TranslationCache, 800),
            ],
            kinds: vec![cache],
            ..GuestFindings::default()
        };
        let mut measured = Measured::default();
        put(&guest, &mut measured).unwrap();
        let value = |name: &str, x: Option<&str>| {
            measured.samples.iter().find(|s| s.metric == name && s.x.as_deref() == x).unwrap().value
        };
        assert_eq!((value("vmm_part", None), value("cache_part", None)), (0.25, 0.75));
        assert_eq!((value("owner_mb", Some("vmm")), value("translated_mb", None)), (mb(200.0), mb(800.0)));
        assert_eq!(value("owners_mb", None), mb(800.0));
        assert!(put(&GuestFindings::default(), &mut measured).is_err(), "kinds are not known");
    }
}
