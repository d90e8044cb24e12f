//! `sonone-t2` and `kloster-fig8.1`: how fast loads run with and without a merger. `kloster-fig8.3`: the same by the
//! number of connections.
//!
//! ```text
//!   restore -> prepare, and run each load once, shortly -> merge until settled -> run each load, and time it
//! ```
//! A QEMU that was restored has translated no code yet: the first run of each load makes it do so.

use super::slices::{self, Design};
use super::{D256, GROUP, alike, first_of, merge, rep_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{Measured, OPERATIONS};
use crate::rig::{Group, Rig, Speed, Vms};
use crate::stats;
use anyhow::Context;
use bench::workload::{SOURCES_SCRIPT, TABLE_SCRIPT, Timed};

/// Number of guests that work at the same time.
const GUESTS: usize = 2;
/// Steps of a build.
const STEPS: u32 = 3;
/// Seconds of a load's first run, which is not counted.
const FIRST_RUN: u32 = 2;

/// The recipe of `sonone-t2`: a database under two loads.
pub fn transactions(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let loads = [("read/write", Timed::ReadWrite), ("point select", Timed::PointSelect)];
    if slices::merger_of(&planned.arm).is_some() {
        return slices::measure(rig, planned, &Design { seconds: 6, pairs: 10, ..design(planned, &loads) });
    }
    let seconds = if planned.length == Length::Full { 15 } else { 8 };
    timed(rig, planned, &loads, seconds)
}

/// The recipe of `kloster-fig8.1`: five loads.
pub fn five_loads(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let seconds = if planned.length == Length::Full { 10 } else { 5 };
    let loads = [
        ("OLTP", Timed::ReadWrite),
        ("IR", Timed::PointSelect),
        ("web", Timed::Web),
        ("files", Timed::Files),
        ("build", Timed::Build(STEPS)),
    ];
    if slices::merger_of(&planned.arm).is_some() {
        return slices::measure(rig, planned, &Design { seconds: 5, pairs: 12, ..design(planned, &loads) });
    }
    timed(rig, planned, &loads, seconds)
}

/// Numbers of connections of `kloster-fig8.3`.
const CONNECTIONS: [(&str, Timed); 2] = [("4", Timed::Connections(4)), ("64", Timed::Connections(64))];

/// The recipe of `kloster-fig8.3`.
pub fn connections(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let (pairs, seconds) = if planned.length == Length::Full { (10, 5) } else { (3, 4) };
    let design = Design { seconds, pairs, ..design(planned, &CONNECTIONS) };
    let mut measured = slices::measure(rig, planned, &design)?;
    let change = |of: &str| {
        let found = measured.samples.iter().find(|s| s.metric == "cpu_change" && s.x.as_deref() == Some(of));
        found.map(|sample| sample.value).context("a number of connections was not measured")
    };
    let interaction = change("64")? / change("4")?;
    measured.put("interaction", interaction);
    Ok(measured)
}

/// The design of a turn in slices with two guests, which are other boots in each repetition.
fn design<'a>(planned: &Planned, loads: &'a [(&'a str, Timed)]) -> Design<'a> {
    let first = first_of(planned, GUESTS);
    Design { guests: GUESTS, first, working: GUESTS, loads, seconds: 5, pairs: 10, before: None }
}

/// Makes in the guests what these loads need: a table, or the sources of a build.
///
/// # Errors
/// A guest cannot do it.
pub fn prepare(vms: &Vms, loads: &[(&str, Timed)]) -> anyhow::Result<()> {
    if loads.iter().any(|(_, load)| matches!(load, Timed::ReadWrite | Timed::PointSelect)) {
        vms.tell(&vms.guests, TABLE_SCRIPT)?;
    }
    if loads.iter().any(|(_, load)| matches!(load, Timed::Build(_))) {
        vms.tell(&vms.guests, SOURCES_SCRIPT)?;
    }
    Ok(())
}

fn timed(rig: &mut Rig, planned: &Planned, loads: &[(&str, Timed)], seconds: u32) -> anyhow::Result<Measured> {
    let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
    let vms = rig.vms(&alike(GUESTS, rep_of(planned), D256), &mut merger)?;
    prepare(&vms, loads)?;
    for (_, load) in loads {
        let first = if matches!(load, Timed::Build(_)) { Timed::Build(1) } else { *load };
        vms.run_first(first, FIRST_RUN)?;
    }
    let (begin, mut timeline, mut measured) = merge(&merger, &vms)?;
    let before = merger.cpu()?;
    let mut operations = 0.0;
    for (name, load) in loads {
        timeline.events.push((begin.elapsed().as_secs_f64(), format!("{name} begins")));
        let speeds = vms.run(*load, seconds)?;
        timeline.points.push((begin.elapsed().as_secs_f64(), crate::rig::mb(merger.saved_pages()? as f64)));
        operations += speeds.iter().map(|speed| speed.operations).sum::<f64>();
        put(name, &speeds, &mut measured);
    }
    measured.put("merger_cpu_s", merger.cpu()?.since(&before).total());
    measured.put(OPERATIONS, operations);
    measured.timelines.push(timeline);
    Ok(measured)
}

/// Puts the speed of a load, over all guests.
fn put(load: &str, speeds: &[Speed], measured: &mut Measured) {
    let late: Vec<f64> = speeds.iter().map(|speed| speed.p99_ms).collect();
    measured.put_at("rate", load, speeds.iter().map(|speed| speed.rate).sum::<f64>());
    if late.iter().all(|ms| *ms > 0.0) {
        measured.put_at("p99_ms", load, stats::mean(&late));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_add_up_and_percentiles_are_averaged_where_they_are_known() {
        let speed = |rate, p99_ms| Speed { operations: 1.0, rate, p99_ms };
        let of = |p99_ms| {
            let mut measured = Measured::default();
            put("x", &[speed(2.0, 10.0), speed(3.0, p99_ms)], &mut measured);
            measured.samples.iter().map(|s| (s.metric.clone(), s.value)).collect::<Vec<_>>()
        };
        assert_eq!(of(20.0), [("rate".to_owned(), 5.0), ("p99_ms".to_owned(), 15.0)]);
        assert_eq!(of(0.0), [("rate".to_owned(), 5.0)]);
    }
}
