//! `kloster-t8.1`: forks in a guest whose memory is merged, and forks of a process that is a member itself.

use super::slices::{self, Design};
use super::{D256, GROUP, alike, first_of, merge, rep_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{Measured, OPERATIONS};
use crate::rig::{Asked, Group, Merger, Rig, Vms, pause, wait};
use crate::stats;
use anyhow::Context;
use bench::workload::{self, Rates, Timed};
use std::time::{Duration, Instant};

/// Numbers of mappings that folding is to make in a process. Pagefold itself stops at half of the kernel's default
/// limit.
const MAPPINGS: [u32; 4] = [0, 5_000, 15_000, 30_000];
/// Time limit for a process to be folded.
const PATIENCE: Duration = Duration::from_secs(60);
/// Interval between two readings.
const LOOK: Duration = Duration::from_millis(400);

/// The recipe of `kloster-t8.1`.
pub fn rates(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    if slices::merger_of(&planned.arm).is_some() {
        let loads = [("fork", Timed::Fork), ("exec", Timed::Exec)];
        let first = first_of(planned, 2);
        let design = Design { guests: 2, first, working: 1, loads: &loads, seconds: 5, pairs: 10, before: None };
        return slices::measure(rig, planned, &design);
    }
    let seconds = if planned.length == Length::Full { 6 } else { 3 };
    let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
    // Two guests, so that the first has pages to share.
    let vms = rig.vms(&alike(2, rep_of(planned), D256), &mut merger)?;
    one(&vms, 1)?;
    let (_, timeline, mut measured) = merge(&merger, &vms)?;
    let rates = one(&vms, seconds)?;
    for (kind, rate) in rates.0 {
        measured.put_at("rate", kind, rate);
    }
    measured.put(OPERATIONS, rates.0.iter().map(|(_, rate)| rate * f64::from(seconds)).sum());
    measured.timelines.push(timeline);
    if planned.arm == "fold" {
        of_processes(&mut merger, &mut measured)?;
    }
    Ok(measured)
}

/// The rates of processes in the first guest.
fn one(vms: &Vms, seconds: u32) -> anyhow::Result<Rates> {
    let printed = vms.tell(&vms.guests[..1], &workload::process_rates_script(seconds))?;
    Rates::of(&printed[0]).with_context(|| format!("the guest printed {:?}", printed[0]))
}

/// Measures forks of processes that are members, with more and more mappings.
fn of_processes(merger: &mut Merger, measured: &mut Measured) -> anyhow::Result<()> {
    let (mut points, mut running) = (Vec::new(), Vec::new());
    for wanted in MAPPINGS {
        let mut forker = Asked::start(merger, (GROUP, &format!("forker-{wanted}")), &["forker", &wanted.to_string()])?;
        let begin = Instant::now();
        let mut seen: Vec<u64> = Vec::new();
        // Waits until there are as many mappings as wanted, or their number grows no more.
        wait(PATIENCE, || {
            pause(LOOK)?;
            seen.push(forker.ask("mappings")?["mappings"].as_u64().context("no number of mappings")?);
            let before = seen.len().saturating_sub(20);
            let rests = begin.elapsed().as_secs() >= 10 && seen[before] == seen[seen.len() - 1];
            Ok(seen[seen.len() - 1] >= u64::from(wanted) || rests)
        })?;
        let answer = forker.ask("fork")?;
        let ms = answer["fork_ms"].as_f64().with_context(|| format!("the process answers {answer}"))?;
        let mappings = *seen.last().context("no look")? as f64;
        measured.put_at("fork_ms", wanted, ms);
        measured.put_at("mappings", wanted, mappings);
        points.push((mappings, ms));
        // Each stays until all are measured: the merger's later queries fail if one of its members has ended.
        running.push(forker);
    }
    measured.put("r_squared", stats::r_squared(&points).context("folding made no mappings")?);
    measured.put("most_over_none", points[points.len() - 1].1 / points[0].1);
    Ok(())
}
