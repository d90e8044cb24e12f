//! `kloster-t7.1` and `kloster-fig7.3`: a build in a guest whose free memory is zeros, shared or not.

use super::ram::Ram;
use super::slices::{self, Design};
use super::{D256, GROUP, alike, first_of, settle_or_rest};
use crate::plan::Planned;
use crate::record::{MERGED, Measured, OPERATIONS, Timeline};
use crate::rig::{Group, Merger, Rig, Vms, mb, pause};
use anyhow::bail;
use bench::workload::{self, BUILD_STEPS, SOURCES_SCRIPT, Timed};
use page::HostVirt;
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// Ending of the name of an arm in which pages of zeros are not merged.
const FILTERED: &str = "-filtered";
/// Interval between two readings of the zero pages.
const LOOK: Duration = Duration::from_millis(500);
/// Time limit of a build.
const PATIENCE: Duration = Duration::from_secs(180);

/// A guest whose free memory is resident and zero, before a build. The guest is dropped before its merger.
struct Prepared {
    vms: Vms,
    merger: Merger,
    /// The addresses of the guest's RAM in QEMU.
    ram: Ram,
    /// Addresses of the pages of zeros whose frames the merger has freed.
    shared: HashSet<HostVirt>,
    begin: Instant,
    timeline: Timeline,
    measured: Measured,
}

fn prepare(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Prepared> {
    let group = Group { zero_pages: !planned.arm.ends_with(FILTERED), ..Group::of(GROUP) };
    let mut merger = rig.merger(&planned.arm, &[group])?;
    let vms = rig.vms(&alike(1, first_of(planned, 1), D256), &mut merger)?;
    vms.tell(&vms.guests, SOURCES_SCRIPT)?;
    // One step of a build makes the emulator translate the build's programs.
    vms.run(Timed::Build(1), 0)?;
    vms.tell(&vms.guests, workload::ZEROS_SCRIPT)?;
    let ram = Ram::of(vms.pids()[0], D256 / 2)?;
    let zeros = ram.zeros()?;
    let begin = Instant::now();
    let mut timeline = Timeline { name: "shared zero pages".into(), unit: "MB".into(), ..Timeline::default() };
    merger.on()?;
    settle_or_rest(&merger, begin, &mut Timeline::default())?;
    let resident = ram.resident()?;
    let shared: HashSet<HostVirt> = zeros.difference(&resident).copied().collect();
    timeline.points.push((begin.elapsed().as_secs_f64(), mb(shared.len() as f64)));
    let mut measured = Measured::default();
    measured.put("zero_mb", mb(shared.len() as f64));
    measured.put(MERGED, merger.saved_pages()? as f64);
    Ok(Prepared { vms, merger, ram, shared, begin, timeline, measured })
}

/// The recipe of `kloster-t7.1`: the time of a build.
pub fn run_time(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    if slices::merger_of(&planned.arm).is_some() {
        let loads = [("build", Timed::Build(BUILD_STEPS))];
        let (first, before) = (first_of(planned, 1), Some(workload::ZEROS_SCRIPT));
        let design = Design { guests: 1, first, working: 1, loads: &loads, seconds: 0, pairs: 10, before };
        return slices::measure(rig, planned, &design);
    }
    let Prepared { merger, vms, mut measured, .. } = prepare(rig, planned)?;
    let before = merger.cpu()?;
    let speed = vms.run(Timed::Build(BUILD_STEPS), 0)?[0];
    let seconds = 3600.0 / speed.rate;
    measured.put("merger_cpu_s", merger.cpu()?.since(&before).total());
    measured.put("build_s", seconds);
    measured.put_at("build_by_arm_s", &planned.arm, seconds);
    measured.put(OPERATIONS, speed.operations);
    Ok(measured)
}

/// The recipe of `kloster-fig7.3`: the zero pages that a build writes, over time.
pub fn zeros_consumed(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    // The merger is bound to a name, so that it is not dropped and goes on during the build.
    let Prepared { merger: _merger, vms, ram, shared, begin, mut timeline, mut measured } = prepare(rig, planned)?;
    vms.tell(&vms.guests, &workload::in_background(&workload::build_script(BUILD_STEPS)))?;
    let since = Instant::now();
    let mut quarters = Quarters::default();
    loop {
        pause(LOOK)?;
        let resident = ram.resident()?;
        let broken = shared.intersection(&resident).count();
        timeline.points.push((begin.elapsed().as_secs_f64(), mb((shared.len() - broken) as f64)));
        let done = vms.operations(&vms.guests)?[0] as u32;
        quarters.see(done, broken as f64 / shared.len().max(1) as f64);
        if done >= BUILD_STEPS {
            break;
        }
        if since.elapsed() > PATIENCE {
            bail!("the build is not done: {done} of {BUILD_STEPS} steps after {} s", PATIENCE.as_secs());
        }
    }
    measured.put("build_s", since.elapsed().as_secs_f64());
    for (part, share) in ["1/4", "1/2", "3/4", "end"].into_iter().zip(quarters.0) {
        measured.put_at("broken_percent", part, share * 100.0);
    }
    measured.put("broken_first_quarter", quarters.0[0]);
    measured.put("broken_end", quarters.0[3]);
    measured.put(OPERATIONS, f64::from(BUILD_STEPS));
    measured.timelines.push(timeline);
    Ok(measured)
}

/// For each quarter of the build, the share of zero pages that were written by its end.
#[derive(Default)]
struct Quarters([f64; 4]);

impl Quarters {
    /// Notes the share of zero pages that are broken after this many steps. For each quarter, the last reading within
    /// it stays.
    fn see(&mut self, done: u32, broken: f64) {
        for (n, share) in self.0.iter_mut().enumerate() {
            if done <= (n as u32 + 1) * BUILD_STEPS / 4 {
                *share = broken;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_quarter_has_its_last_look() {
        let mut quarters = Quarters::default();
        for (done, broken) in [(0, 0.1), (2, 0.2), (2, 0.3), (3, 0.5), (4, 0.6), (6, 0.8), (8, 0.9)] {
            quarters.see(done, broken);
        }
        assert_eq!(quarters.0, [0.3, 0.6, 0.8, 0.9]);
    }
}
