//! `li-t1`: how much memory idle guests take, by their number. `li-exp1-1`: the same while they are merged at a low or
//! at the highest rate.

use super::{D256, D512, GROUP, Saved, alike, rep_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Group, Rate, Rig, System, VmsWanted, mb, pause};
use crate::stats;
use anyhow::Context;
use bench::workload::ZEROS_SCRIPT;
use std::time::{Duration, Instant};

/// Number of guests at the end.
const GUESTS: usize = 6;
/// Time after the start of the last guest at which the paper's figure is taken.
const MINUTE: Duration = Duration::from_secs(60);
/// Interval between two readings.
const LOOK: Duration = Duration::from_secs(1);
/// Command that prints the KiB that a guest has touched after [`ZEROS_SCRIPT`]: all of its memory but a tenth of what is free now.
const TOUCHED_SCRIPT: &str = "sync; echo 3 >/proc/sys/vm/drop_caches; \
    awk '/^MemTotal/ { all = $2 } /^MemFree/ { free = $2 } END { print int(all - free / 10) }' /proc/meminfo";

/// The recipe of `li-exp1-1`.
pub fn by_rate(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let at_default_rate = planned.arm == "ksm-default";
    let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
    // As in the paper, merging goes on while guests come up.
    merger.on_for_later_guests()?;
    let begin = Instant::now();
    let mut timeline = Timeline { name: "saved".into(), unit: "MB".into(), ..Timeline::default() };
    let mut measured = Measured::default();
    // In the full form, guests come up one by one; in the short one, all at once.
    let step = if planned.length == Length::Full { 1 } else { GUESTS };
    let wanted = alike(step, rep_of(planned), D512);
    let mut vms = rig.vms(&wanted, &mut merger)?;
    loop {
        let now = Saved::of(&merger, &vms.pids())?;
        let guests = vms.guests.len();
        timeline.events.push((begin.elapsed().as_secs_f64(), format!("{guests} guests")));
        measured.put_at("used_mb", guests, mb(now.frames));
        measured.put_at("unmerged_mb", guests, mb(now.frames + now.all()));
        if guests == GUESTS {
            break;
        }
        vms.add(rig, &wanted, &mut merger)?;
    }
    let since = Instant::now();
    while at_default_rate && since.elapsed() < MINUTE {
        pause(LOOK)?;
        timeline.points.push((begin.elapsed().as_secs_f64(), mb(Saved::of(&merger, &vms.pids())?.all())));
    }
    if since.elapsed() >= MINUTE {
        measured.put("minute_share", Saved::of(&merger, &vms.pids())?.share());
    }
    if let Some(ksmd) = merger.ksmd().filter(|_| at_default_rate) {
        // At its highest rate, ksmd merges what there is to merge: this proves that there was something.
        ksmd.set_rate(Rate::of("ksm").context("a rate without a name")?)?;
        timeline.events.push((begin.elapsed().as_secs_f64(), "its highest rate".into()));
    }
    merger.settle(begin, &mut timeline)?;
    if !at_default_rate {
        measured.put("settled_share", Saved::of(&merger, &vms.pids())?.share());
        measured.put("settled_s", since.elapsed().as_secs_f64());
    }
    measured.put(MERGED, merger.taken(&vms.pids())?.merged_pages as f64);
    measured.timelines.push(timeline);
    Ok(measured)
}

/// The recipe of `li-t1`. In the arm `touched`, each guest has written nearly all of its memory.
pub fn by_number(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut nobody = rig.merger("off", &[Group::of(GROUP)])?;
    let system = if planned.arm == "tiny" { System::TINY } else { System::DEBIAN };
    let wanted = VmsWanted { system, ..alike(1, rep_of(planned), D256) };
    let mut vms = rig.vms(&wanted, &mut nobody)?;
    let (mut measured, mut points, mut touched) = (Measured::default(), Vec::new(), Vec::new());
    loop {
        let guests = vms.guests.len();
        if planned.arm == "touched" {
            let last = &vms.guests[guests - 1..];
            touched.push(bytes(&vms.tell(last, TOUCHED_SCRIPT)?.concat())?);
            vms.tell(last, ZEROS_SCRIPT)?;
        }
        let used = mb(nobody.taken(&vms.pids())?.frames as f64);
        measured.put_at("used_mb", guests, used);
        points.push((guests as f64, used));
        if guests == GUESTS {
            break;
        }
        vms.add(rig, &wanted, &mut nobody)?;
    }
    compare(&points, &touched, &mut measured)?;
    Ok(measured)
}

/// Bytes of a number of KiB that a guest printed.
fn bytes(printed: &str) -> anyhow::Result<f64> {
    let kib: f64 = printed.parse().with_context(|| format!("a guest's memory is {printed:?}"))?;
    Ok(kib * 1024.0)
}

/// Fits a line to the memory that more and more guests take, in MB. Its slope is compared with a guest's configured
/// memory, and with the bytes that the guest has written.
fn compare(points: &[(f64, f64)], touched: &[f64], measured: &mut Measured) -> anyhow::Result<()> {
    let (_, slope) = stats::line(points).context("one number of guests makes no line")?;
    measured.put("r_squared", stats::r_squared(points).context("one number of guests makes no line")?);
    measured.put("slope_mb", slope);
    measured.put("slope_over_size", slope * 1e6 / D256 as f64);
    if !touched.is_empty() {
        measured.put("touched_mb", stats::mean(touched) / 1e6);
        measured.put("slope_over_touched", slope * 1e6 / stats::mean(touched));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_is_held_against_what_it_touched() {
        let points: Vec<(f64, f64)> = (1..=6).map(|n| (f64::from(n), 30.0 + 215.0 * f64::from(n))).collect();
        let of = |touched: &[f64], metric: &str| {
            let mut measured = Measured::default();
            compare(&points, touched, &mut measured).unwrap();
            measured.samples.iter().find(|s| s.metric == metric).map(|s| s.value)
        };
        let touched = [bytes("210000").unwrap(), bytes("209960").unwrap()];
        let ratio = of(&touched, "slope_over_touched").unwrap();
        assert!((ratio - 1.0).abs() < 1e-3, "{ratio}");
        assert!(of(&touched, "slope_over_size").unwrap() < 0.9, "a tenth of the free memory was left alone");
        assert_eq!(of(&[], "slope_over_touched"), None, "other arms touch nothing");
        assert!(bytes("").is_err());
    }
}
