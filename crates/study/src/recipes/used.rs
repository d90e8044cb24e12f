//! `li-t1`: the memory that idle guests take, by their number. `li-exp1-1`: the same while somebody merges, at a low rate or at the
//! highest.

use super::{D256, D512, GROUP, Saved, alike, rep_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Group, Rate, Rig, System, VmsWanted, mb, pause};
use crate::stats;
use anyhow::Context;
use bench::workload::ZEROS_SCRIPT;
use std::time::{Duration, Instant};

/// Number of guests in the end.
const GUESTS: usize = 6;
/// Time after the last guest at which the paper's reader would look.
const MINUTE: Duration = Duration::from_secs(60);
/// Interval between two looks.
const LOOK: Duration = Duration::from_secs(1);

/// `li-exp1-1`.
pub fn by_rate(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let at_default_rate = planned.arm == "ksm-default";
    let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
    // As in the paper, it merges while guests come up.
    merger.on_for_later_guests()?;
    let begin = Instant::now();
    let mut timeline = Timeline { name: "saved".into(), unit: "MB".into(), ..Timeline::default() };
    let mut measured = Measured::default();
    // One by one in the full form, and all at once in the short one.
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
        // Proves that there was something to merge.
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

/// `li-t1`. In the arm `touched`, each guest has touched nearly all of its memory.
pub fn by_number(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut nobody = rig.merger("off", &[Group::of(GROUP)])?;
    let system = if planned.arm == "tiny" { System::TINY } else { System::DEBIAN };
    let wanted = VmsWanted { system, ..alike(1, rep_of(planned), D256) };
    let mut vms = rig.vms(&wanted, &mut nobody)?;
    let (mut measured, mut points) = (Measured::default(), Vec::new());
    loop {
        let guests = vms.guests.len();
        if planned.arm == "touched" {
            vms.tell(&vms.guests[guests - 1..], ZEROS_SCRIPT)?;
        }
        let used = mb(nobody.taken(&vms.pids())?.frames as f64);
        measured.put_at("used_mb", guests, used);
        points.push((guests as f64, used));
        if guests == GUESTS {
            break;
        }
        vms.add(rig, &wanted, &mut nobody)?;
    }
    let (_, slope) = stats::line(&points).context("one number of guests makes no line")?;
    measured.put("r_squared", stats::r_squared(&points).context("one number of guests makes no line")?);
    measured.put("slope_mb", slope);
    measured.put("slope_over_size", slope * 1e6 / D256 as f64);
    Ok(measured)
}
