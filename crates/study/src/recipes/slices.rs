//! Cost under load, in slices: one set of guests, whose merger is switched on and off by turns. Studies of cost have
//! this in arms such as `slices-fold`.
//!
//! ```text
//!   restore -> each load once, shortly -> merge until settled
//!   on:  the merger is at work
//!   off: it is stopped; pages that are merged stay so until they are written
//!   a slice of each: processor time -> each load for some seconds -> processor time
//!   off on | on off | off on | ...     a pair is a slice of each kind; the order turns over from pair to pair
//! ```
//! A turn yields the geometric mean of its pairs' ratios, on over off. So each turn, with guests of its own, counts as
//! one sample.
//!
//! Processor time of an operation is that of the guests at work. In slices with merging, a part of the merger's time is
//! added: the share that the guests at work have of all guests. A page that was merged in one slice and is written in
//! the next counts in the next. In arms without slices, a turn without a merger merges nothing at all. Here merged
//! pages stay merged when the merger stops: Pagefold merges no page that was written lately, so it would find nothing
//! to merge in a slice if all were made private before.

use super::rates::prepare;
use super::{D256, GROUP, alike, merge};
use crate::plan::Planned;
use crate::record::{Measured, OPERATIONS, Timeline};
use crate::rig::{Group, Merger, Rig, Speed, Vms, mb, pause, run, wait};
use crate::stats;
use bench::workload::Timed;
use std::time::{Duration, Instant};

/// Beginning of the name of an arm in slices. The rest names its merger.
const SLICES: &str = "slices-";
/// Beginning of a merger's name in arms where Pagefold merges all the time, and only the merging of pages of zeros is
/// switched on and off.
const ZEROS: &str = "zeros-";
/// Where a command makes pages of zeros before a slice, the slice begins when this share of the settled saving is
/// merged again.
const ENOUGH: f64 = 0.9;
/// Time limit for that share to be merged.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause before each slice.
const REST: Duration = Duration::from_secs(1);
/// Seconds of a load's first run, which is not counted.
const FIRST_RUN: u32 = 2;

/// What a study measures in slices.
pub struct Design<'a> {
    /// Number of guests, all in one group.
    pub guests: usize,
    /// The number of the first saved guest.
    pub first: usize,
    /// Number of guests that work: the first ones.
    pub working: usize,
    /// Loads, each with its name.
    pub loads: &'a [(&'a str, Timed)],
    /// Seconds of a load in a slice.
    pub seconds: u32,
    /// Pairs of slices.
    pub pairs: usize,
    /// Shell command that the working guests run before each slice.
    pub before: Option<&'static str>,
}

/// The merger in the name of an arm in slices; `None` for other arms.
pub fn merger_of(arm: &str) -> Option<&str> {
    arm.strip_prefix(SLICES)
}

/// Measures a turn.
///
/// # Errors
/// Guests do not come up, or a load fails.
pub fn measure(rig: &mut Rig, planned: &Planned, design: &Design<'_>) -> anyhow::Result<Measured> {
    let mut sliced = Sliced::start(rig, planned, design)?;
    sliced.pairs(design, design.loads)?;
    Ok(sliced.finish())
}

/// Guests whose merger is switched on and off. They are dropped before the merger.
pub struct Sliced {
    /// The guests.
    pub vms: Vms,
    merger: Merger,
    is_of_zeros: bool,
    /// Saved pages when merging was settled.
    settled_pages: f64,
    /// Number of slices that had to wait until enough was merged, and of those among them that began with less.
    begun: (u32, u32),
    begin: Instant,
    timeline: Timeline,
    measured: Measured,
    operations: f64,
}

impl Sliced {
    /// Restores guests, runs each load once, and merges until merging has settled.
    ///
    /// # Errors
    /// Guests do not come up, or a load fails.
    pub fn start(rig: &mut Rig, planned: &Planned, design: &Design<'_>) -> anyhow::Result<Self> {
        let name = merger_of(&planned.arm).unwrap_or(&planned.arm);
        let (is_of_zeros, name) = name.strip_prefix(ZEROS).map_or((false, name), |name| (true, name));
        let mut merger = rig.merger(name, &[Group::of(GROUP)])?;
        let vms = rig.vms(&alike(design.guests, design.first, D256), &mut merger)?;
        prepare(&vms, design.loads)?;
        for (_, load) in design.loads {
            let first = if matches!(load, Timed::Build(_)) { Timed::Build(1) } else { *load };
            vms.run_first(first, FIRST_RUN)?;
        }
        if let Some(before) = design.before {
            vms.tell(&vms.guests[..design.working], before)?;
        }
        let (begin, timeline, measured) = merge(&merger, &vms)?;
        let settled_pages = merger.saved_pages()? as f64;
        let (begun, operations) = ((0, 0), 0.0);
        Ok(Self { vms, merger, is_of_zeros, settled_pages, begun, begin, timeline, measured, operations })
    }

    /// Measures these loads in pairs of slices, one slice with the merger on and one with it off.
    ///
    /// # Errors
    /// A load fails.
    pub fn pairs(&mut self, design: &Design<'_>, loads: &[(&str, Timed)]) -> anyhow::Result<()> {
        let mut pairs = vec![Vec::new(); loads.len()];
        for n in 0..design.pairs {
            let order = if n % 2 == 0 { [false, true] } else { [true, false] };
            let first = self.slice(design, loads, order[0])?;
            let second = self.slice(design, loads, order[1])?;
            let (off, on) = if order[0] { (second, first) } else { (first, second) };
            for (pair, (off, on)) in pairs.iter_mut().zip(off.into_iter().zip(on)) {
                pair.push(Pair { off, on });
            }
        }
        for ((name, _), pairs) in loads.iter().zip(&pairs) {
            put(name, pairs, &mut self.measured);
        }
        Ok(())
    }

    /// Measures a slice: the loads run one after the other.
    fn slice(&mut self, design: &Design<'_>, loads: &[(&str, Timed)], on: bool) -> anyhow::Result<Vec<Cost>> {
        self.switch(design, on)?;
        let working = &self.vms.guests[..design.working];
        let part = design.working as f64 / design.guests as f64;
        let cpu = || -> anyhow::Result<f64> {
            let merger = if on || self.is_of_zeros { self.merger.cpu()?.total() } else { 0.0 };
            Ok(Vms::cpu_s(working)? + merger * part)
        };
        let mut costs = Vec::new();
        for (_, load) in loads {
            let before = cpu()?;
            let speeds = run(working, *load, design.seconds)?;
            costs.push(Cost::of(&speeds, cpu()? - before));
            self.operations += speeds.iter().map(|speed| speed.operations).sum::<f64>();
        }
        Ok(costs)
    }

    /// Switches merging on or off, and waits until a slice can begin.
    fn switch(&mut self, design: &Design<'_>, on: bool) -> anyhow::Result<()> {
        match (self.is_of_zeros, on) {
            (true, _) => self.merger.share_zeros(on)?,
            (false, true) => self.merger.on()?,
            (false, false) => self.merger.hold()?,
        }
        if let Some(before) = design.before {
            self.vms.tell(&self.vms.guests[..design.working], before)?;
        }
        pause(REST)?;
        if on && design.before.is_some() {
            let wanted = self.settled_pages * ENOUGH;
            let is_enough = wait(PATIENCE, || Ok(self.merger.saved_pages()? as f64 >= wanted))?;
            self.begun.0 += 1;
            self.begun.1 += u32::from(!is_enough);
        }
        let saved = mb(self.merger.saved_pages()? as f64);
        self.timeline.points.push((self.begin.elapsed().as_secs_f64(), saved));
        Ok(())
    }

    /// The result of the turn.
    pub fn finish(mut self) -> Measured {
        let (all, short) = self.begun;
        if short > 0 {
            self.measured.note(format!("{short} of {all} slices began with less than 90% of the settled saving"));
        }
        self.measured.put(OPERATIONS, self.operations);
        self.measured.timelines.push(self.timeline);
        self.measured
    }
}

/// The cost of a load in one slice.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cost {
    /// Processor time of an operation, in milliseconds.
    cpu_ms: f64,
    /// Operations a second, of all guests at work.
    rate: f64,
    /// 99th percentile of the time of an operation in milliseconds, where it is known.
    p99_ms: Option<f64>,
}

impl Cost {
    fn of(speeds: &[Speed], cpu_s: f64) -> Self {
        let late: Vec<f64> = speeds.iter().map(|speed| speed.p99_ms).collect();
        Self {
            cpu_ms: cpu_s * 1e3 / speeds.iter().map(|speed| speed.operations).sum::<f64>(),
            rate: speeds.iter().map(|speed| speed.rate).sum(),
            p99_ms: late.iter().all(|ms| *ms > 0.0).then(|| stats::mean(&late)),
        }
    }
}

/// The costs of a load in two slices, with the merger off and on.
#[derive(Clone, Copy, Debug)]
struct Pair {
    off: Cost,
    on: Cost,
}

/// Puts how merging changes a load's rate and processor time, and the processor time in slices of each kind.
fn put(load: &str, pairs: &[Pair], measured: &mut Measured) {
    let change = |of: &dyn Fn(&Cost) -> Option<f64>| {
        let ratios = pairs.iter().filter_map(|pair| Some((of(&pair.on)? / of(&pair.off)?).ln()));
        let ratios: Vec<f64> = ratios.collect();
        (!ratios.is_empty()).then(|| stats::mean(&ratios).exp())
    };
    let changes = [
        ("cpu_change", change(&|cost| Some(cost.cpu_ms))),
        ("time_change", change(&|cost| Some(1.0 / cost.rate))),
        ("p99_change", change(&|cost| cost.p99_ms)),
    ];
    for (metric, value) in changes {
        value.into_iter().for_each(|value| measured.put_at(metric, load, value));
    }
    let mean = |of: fn(&Pair) -> Cost| stats::mean(&pairs.iter().map(|pair| of(pair).cpu_ms).collect::<Vec<_>>());
    measured.put_at("cpu_ms", format!("{load}, off"), mean(|pair| pair.off));
    measured.put_at("cpu_ms", format!("{load}, on"), mean(|pair| pair.on));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speed(rate: f64, p99_ms: f64) -> Speed {
        Speed { operations: rate * 5.0, rate, p99_ms }
    }

    #[test]
    fn cost_is_of_all_guests_at_work() {
        let cost = Cost::of(&[speed(2.0, 10.0), speed(3.0, 20.0)], 0.5);
        assert_eq!((cost.cpu_ms, cost.rate, cost.p99_ms), (20.0, 5.0, Some(15.0)));
        assert_eq!(Cost::of(&[speed(2.0, 10.0), speed(3.0, 0.0)], 0.5).p99_ms, None);
    }

    #[test]
    fn change_is_the_geometric_mean_of_pairs_on_over_off() {
        let cost = |cpu_ms, rate| Cost { cpu_ms, rate, p99_ms: None };
        let pair = |off, on| Pair { off, on };
        let pairs = [pair(cost(10.0, 4.0), cost(20.0, 2.0)), pair(cost(40.0, 1.0), cost(20.0, 2.0))];
        let mut measured = Measured::default();
        put("x", &pairs, &mut measured);
        let value = |metric: &str, x: &str| {
            measured.samples.iter().find(|s| s.metric == metric && s.x.as_deref() == Some(x)).map(|s| s.value)
        };
        assert!((value("cpu_change", "x").unwrap() - 1.0).abs() < 1e-9);
        assert!((value("time_change", "x").unwrap() - 1.0).abs() < 1e-9);
        assert_eq!(value("p99_change", "x"), None);
        assert_eq!((value("cpu_ms", "x, off"), value("cpu_ms", "x, on")), (Some(25.0), Some(20.0)));
        let mut measured = Measured::default();
        put("x", &pairs[..1], &mut measured);
        assert!((measured.samples[0].value - 2.0).abs() < 1e-9 && (measured.samples[1].value - 2.0).abs() < 1e-9);
    }

    #[test]
    fn arms_of_the_design_name_their_merger() {
        assert_eq!(merger_of("slices-ksm-50k"), Some("ksm-50k"));
        assert_eq!(merger_of("slices-zeros-fold"), Some("zeros-fold"));
        assert_eq!(merger_of("fold"), None);
    }
}
