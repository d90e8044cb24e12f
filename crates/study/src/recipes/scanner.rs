//! `sonone-fig1`: the processor time that a merger takes for scanning.

use super::{D256, GROUP, alike};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Asked, Group, Merger, Rate, Rig, account, pause};
use crate::stats;
use anyhow::Context;
use std::time::{Duration, Instant};

/// Number of idle guests at first.
const GUESTS: usize = 5;
/// Rates of ksmd: the name in the result, and that of the arm with this rate.
const RATES: [(&str, &str); 5] =
    [("1", "ksm-1k"), ("5", "ksm-5k"), ("10", "ksm-10k"), ("50", "ksm-50k"), ("100", "ksm-100k")];
/// Pages a second that the writer rewrites.
const WRITES: [u64; 4] = [0, 100, 1000, 10_000];
/// Number of equal parts of the time for which ksmd is watched at one rate.
const WINDOWS: u32 = 5;
/// Time after a change of a merger's rate that is not counted.
const GET_USED: Duration = Duration::from_secs(2);
/// Pause after merging has settled. In the minute after many folds, Pagefold scans more often.
const COME_TO_REST: Duration = Duration::from_secs(75);

/// The recipe of `sonone-fig1`.
pub fn cpu(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
    let mut vms = rig.vms(&alike(GUESTS, 0, D256), &mut merger)?;
    let mut writer = Asked::start(&mut merger, (GROUP, "writer"), &["writer"])?;
    let time = Duration::from_secs(if planned.length == Length::Full { 20 } else { 5 });
    let begin = Instant::now();
    let mut timeline = Timeline { name: "saved".into(), unit: "MB".into(), ..Timeline::default() };
    merger.on()?;
    merger.settle(begin, &mut timeline)?;
    let mut measured = Measured::default();
    measured.put(MERGED, merger.taken(&vms.pids())?.merged_pages as f64);
    if merger.ksmd().is_some() {
        by_rate(&merger, time, &mut measured)?;
        measured.timelines.push(timeline);
        return Ok(measured);
    }
    let once = resting(&merger, time)?;
    let mut by_writes = Vec::new();
    for rate in WRITES {
        writer.ask(&format!("rate {rate}"))?;
        timeline.events.push((begin.elapsed().as_secs_f64(), format!("{rate} pages written a second")));
        pause(GET_USED)?;
        by_writes.push(percent(&merger, time)?);
        measured.put_at("cpu_by_written", rate, by_writes[by_writes.len() - 1]);
    }
    measured.put("most_written_over_none", by_writes[WRITES.len() - 1] / by_writes[0]);
    writer.ask("rate 0")?;
    vms.add(rig, &alike(GUESTS, 0, D256), &mut merger)?;
    timeline.events.push((begin.elapsed().as_secs_f64(), "five more guests".into()));
    merger.settle(begin, &mut timeline)?;
    let twice = resting(&merger, time)?;
    measured.put_at("cpu_by_guests", GUESTS, once);
    measured.put_at("cpu_by_guests", 2 * GUESTS, twice);
    measured.put("twice_the_guests", twice / once);
    measured.timelines.push(timeline);
    Ok(measured)
}

/// Processor time of the merger in percent of a processor, with guests for which merging has just settled: over twice
/// the time.
fn resting(merger: &Merger, time: Duration) -> anyhow::Result<f64> {
    pause(COME_TO_REST)?;
    percent(merger, 2 * time)
}

/// Processor time of the merger over a time, in percent of a processor.
fn percent(merger: &Merger, time: Duration) -> anyhow::Result<f64> {
    let (begin, before) = (Instant::now(), merger.cpu()?);
    pause(time)?;
    Ok(merger.cpu()?.since(&before).total() * 100.0 / begin.elapsed().as_secs_f64())
}

fn by_rate(merger: &Merger, time: Duration, measured: &mut Measured) -> anyhow::Result<()> {
    let ksmd = merger.ksmd().context("another merger")?;
    // With `smart_scan`, ksmd also walks over pages that it does not count as scanned: few in some passes, most in
    // others.
    ksmd.scan_every_page()?;
    let mut points = Vec::new();
    for (name, arm) in RATES {
        ksmd.set_rate(Rate::of(arm).context("a rate without a name")?)?;
        pause(GET_USED)?;
        let windows = (0..WINDOWS).map(|_| window(merger, time / WINDOWS)).collect::<anyhow::Result<Vec<_>>>()?;
        let (per_s, cpu) = median(windows);
        measured.put_at("cpu_by_scanned", name, cpu);
        measured.put_at("scanned_per_s", name, per_s);
        points.push((per_s, cpu));
    }
    measured.put("r_squared", stats::r_squared(&points).context("ksmd scans at one rate only")?);
    Ok(())
}

/// Pages that ksmd scans a second, and its processor time in percent of a processor.
fn window(merger: &Merger, time: Duration) -> anyhow::Result<(f64, f64)> {
    let scanned = || -> anyhow::Result<u64> { account()?.pages_scanned.context("this kernel does not count scans") };
    let (begin, before) = (Instant::now(), scanned()?);
    let cpu = percent(merger, time)?;
    Ok(((scanned()? - before) as f64 / begin.elapsed().as_secs_f64(), cpu))
}

/// The window with the median processor time per page: a single window may be too long where a hypervisor takes the
/// processor away for a moment.
fn median(mut windows: Vec<(f64, f64)>) -> (f64, f64) {
    windows.sort_by(|one, other| (one.1 / one.0).total_cmp(&(other.1 / other.0)));
    windows[windows.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_in_which_the_processor_was_taken_away_does_not_count() {
        let windows = [(100.0, 1.0), (80.0, 5.0), (99.0, 1.1), (101.0, 0.9), (100.0, 1.05)];
        assert_eq!(median(windows.into()), (100.0, 1.05));
    }
}
