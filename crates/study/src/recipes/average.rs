//! `agarwal-fig6.2`: the average footprint against the number of guests.
//!
//! Of n guests that have a part I of their own each, and a part in common, the average is I + (F - I)/n. F is the footprint
//! of one guest alone. The recipe fits I and F to all averages, and forecasts the last from the first ones.

use super::{CONTAINER, D256, GROUP, alike, merger_of, rep_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Crowd, Group, Merger, Rig, footprint, mb};
use crate::stats;
use anyhow::Context;
use lab::Image;
use std::time::Instant;

/// Numbers of guests that run at a time, one after the other, in the short form of the study.
const SHORT: [usize; 4] = [1, 2, 4, 8];
/// Numbers of guests that run at a time, one after the other, in the full form of the study.
const FULL: [usize; 5] = [1, 2, 4, 8, 12];
/// Ending of the name of an arm in which ksmd passes over pages, if the host's `smart_scan` has it do so.
const SMART: &str = "-smart";
/// The forecast is made from the averages of up to this many guests.
const KNOWN: usize = 4;

/// The recipe of `agarwal-fig6.2`: averages for each number of guests, and how well they follow the law.
pub fn by_number(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let numbers = if planned.length == Length::Full { &FULL[..] } else { &SHORT[..] };
    let mut merger = rig.merger(merger_of(planned), &[Group::of(GROUP)])?;
    let mut crowd = start(rig, planned, &mut merger)?;
    let begin = Instant::now();
    let mut timeline = Timeline { name: "saved".into(), unit: "MB".into(), ..Timeline::default() };
    if planned.arm.ends_with(SMART) {
        merger.on()?;
    } else {
        merger.on_for_later_guests()?;
    }
    let (mut measured, mut averages) = (Measured::default(), Vec::new());
    for &guests in numbers {
        if guests > crowd.guests() {
            add(rig, planned, (&mut crowd, guests), &mut merger)?;
            timeline.events.push((begin.elapsed().as_secs_f64(), format!("{guests} guests")));
        }
        merger.settle(begin, &mut timeline)?;
        let (memory_mb, merged_pages) = look(&crowd, &merger)?;
        let average = memory_mb / guests as f64;
        measured.put_at("average_mb", guests, average);
        averages.push((guests as f64, average));
        if guests == numbers[numbers.len() - 1] {
            measured.put(MERGED, merged_pages);
            measured.put("average_end_mb", average);
        }
    }
    shape(&averages, &mut measured)?;
    measured.timelines.push(timeline);
    Ok(measured)
}

/// Starts the first guest, a VM or a container.
fn start(rig: &mut Rig, planned: &Planned, merger: &mut Merger) -> anyhow::Result<Crowd> {
    if !planned.arm.ends_with(CONTAINER) {
        return Ok(Crowd::Vms(rig.vms(&alike(1, rep_of(planned), D256), merger)?));
    }
    let mut first = rig.containers(Image::LxcShared, 1, (&mut *merger, GROUP))?;
    first.attach(merger)?;
    Ok(Crowd::Containers(first))
}

/// Starts further guests, until there are `guests` of them.
fn add(
    rig: &mut Rig,
    planned: &Planned,
    (crowd, guests): (&mut Crowd, usize),
    merger: &mut Merger,
) -> anyhow::Result<()> {
    let more = guests - crowd.guests();
    match crowd {
        Crowd::Vms(vms) => vms.add(rig, &alike(more, rep_of(planned), D256), merger),
        Crowd::Containers(containers) => {
            containers.add(rig, Image::LxcShared, more, (&mut *merger, GROUP))?;
            containers.attach(merger)
        }
    }
}

/// Memory of all guests in MB, and the number of merged pages. For VMs, both are counted from page frames. For
/// containers, memory is the PSS, which has pages of files, too; and merged pages are those of the merger's account,
/// since forked processes share frames without any merging.
fn look(crowd: &Crowd, merger: &Merger) -> anyhow::Result<(f64, f64)> {
    match crowd {
        Crowd::Vms(_) => {
            let taken = merger.taken(&crowd.pids())?;
            Ok((mb(taken.frames as f64), taken.merged_pages as f64))
        }
        Crowd::Containers(_) => {
            let pss_bytes = footprint(&crowd.pids(), (merger, GROUP))?.pss_bytes;
            Ok((pss_bytes as f64 / 1e6, merger.saved_pages()? as f64))
        }
    }
}

/// Fits the law to the averages. Puts how far they are from it, and how well the last average is forecast.
fn shape(averages: &[(f64, f64)], measured: &mut Measured) -> anyhow::Result<()> {
    let rise = averages.windows(2).map(|two| two[1].1 - two[0].1).fold(f64::NEG_INFINITY, f64::max);
    let law = Law::of(averages)?;
    let known: Vec<(f64, f64)> = averages.iter().copied().filter(|(n, _)| *n <= KNOWN as f64).collect();
    let (last, average) = averages[averages.len() - 1];
    measured.put("largest_rise_mb", rise);
    measured.put("asymptote_mb", law.own);
    measured.put("fit_error", averages.iter().map(|at| law.error(*at)).fold(0.0, f64::max));
    measured.put("forecast_error", Law::of(&known)?.error((last, average)));
    Ok(())
}

/// The law of the module's documentation: `own` is I, and `common` is F - I.
struct Law {
    own: f64,
    common: f64,
}

impl Law {
    fn of(averages: &[(f64, f64)]) -> anyhow::Result<Self> {
        let points: Vec<(f64, f64)> = averages.iter().map(|(n, average)| (1.0 / n, *average)).collect();
        let (own, common) = stats::line(&points).context("averages of one number of guests make no curve")?;
        Ok(Self { own, common })
    }

    /// How far an average is from the law, as a share of the average.
    fn error(&self, (n, average): (f64, f64)) -> f64 {
        ((self.own + self.common / n) / average - 1.0).abs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn averages_by_the_law_have_no_error_and_others_have_theirs() {
        let law = |n: f64| (n, 90.0 + 97.0 / n);
        let of = |averages: &[(f64, f64)], metric: &str| {
            let mut measured = Measured::default();
            shape(averages, &mut measured).unwrap();
            measured.samples.iter().find(|s| s.metric == metric).unwrap().value
        };
        let exact = [law(1.0), law(2.0), law(4.0), law(8.0)];
        assert!((of(&exact, "asymptote_mb") - 90.0).abs() < 1e-9);
        assert!(of(&exact, "fit_error") < 1e-9 && of(&exact, "forecast_error") < 1e-9);
        assert!(of(&exact, "largest_rise_mb") < 0.0);
        let bent = [law(1.0), law(2.0), law(4.0), (8.0, 130.0)];
        assert!(of(&bent, "forecast_error") > 0.2 && of(&bent, "largest_rise_mb") > 0.0);
    }
}
