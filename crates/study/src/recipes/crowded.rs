//! `agarwal-fig4.1`: a guest that computes, among guests that spin.

use super::slices::{self, Design, Sliced};
use super::{D256, GROUP, alike, merge, rep_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{Measured, OPERATIONS};
use crate::rig::{Group, Rate, Rig, Vms};
use crate::stats;
use anyhow::Context;
use bench::workload::{self, Timed};
use std::thread::available_parallelism;

/// Numbers of guests for each processor.
const DENSITIES: [usize; 3] = [1, 2, 4];

/// The recipe of `agarwal-fig4.1`.
pub fn computing(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let repeated = if planned.length == Length::Full { 2 } else { 1 };
    let cores = available_parallelism().context("cannot count the processors")?.get();
    if slices::merger_of(&planned.arm).is_some() {
        return in_slices(rig, planned, cores);
    }
    let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
    let vms = rig.vms(&alike(cores * DENSITIES[DENSITIES.len() - 1], rep_of(planned), D256), &mut merger)?;
    // A first run makes the emulator translate the computation.
    compute(&vms, 1)?;
    let (begin, mut timeline, mut measured) = merge(&merger, &vms)?;
    if let Some(ksmd) = merger.ksmd() {
        // At its highest rate, ksmd would take a whole processor.
        ksmd.set_rate(Rate::of("ksm-default").context("a rate without a name")?)?;
    }
    let alone = compute(&vms, repeated)?;
    measured.put_at("run_s", "alone", alone);
    let (mut spinning, mut times) = (0, Vec::new());
    for density in DENSITIES {
        let wanted = cores * density - 1;
        vms.load(&vms.guests[1 + spinning..=wanted], &workload::spin_script())?;
        spinning = wanted;
        timeline.events.push((begin.elapsed().as_secs_f64(), format!("{density} guests a core")));
        times.push(compute(&vms, repeated)?);
        measured.put_at("run_s", density, times[times.len() - 1]);
    }
    measured.put("four_over_one", times[2] / times[0]);
    measured.put("two_over_one", times[1] / times[0]);
    measured.put(OPERATIONS, vms.operations(&vms.guests[1..])?.iter().sum::<u64>() as f64);
    measured.timelines.push(timeline);
    Ok(measured)
}

/// The same study in slices, with the merger on and off by turns. The other guests spin in both.
fn in_slices(rig: &mut Rig, planned: &Planned, cores: usize) -> anyhow::Result<Measured> {
    let guests = cores * DENSITIES[DENSITIES.len() - 1];
    let (first, loads) = (rep_of(planned), [("1", Timed::Compute)]);
    let design = Design { guests, first, working: 1, loads: &loads, seconds: 5, pairs: 10, before: None };
    let mut sliced = Sliced::start(rig, planned, &design)?;
    let mut spinning = 0;
    for density in DENSITIES {
        let wanted = cores * density - 1;
        sliced.vms.load(&sliced.vms.guests[1 + spinning..=wanted], &workload::spin_script())?;
        spinning = wanted;
        sliced.pairs(&design, &[(&density.to_string(), Timed::Compute)])?;
    }
    Ok(sliced.finish())
}

/// Seconds that the first guest's computation takes, on average over `times` runs.
fn compute(vms: &Vms, times: usize) -> anyhow::Result<f64> {
    let one = || -> anyhow::Result<f64> {
        let printed = vms.tell(&vms.guests[..1], workload::COMPUTE_SCRIPT)?;
        printed[0].parse().with_context(|| format!("the guest printed {:?}", printed[0]))
    };
    Ok(stats::mean(&(0..times).map(|_| one()).collect::<anyhow::Result<Vec<f64>>>()?))
}
