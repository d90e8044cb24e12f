//! `li-exp2-1`: sharing by the size of guests in which a memory hog runs, on a small host that swaps.
//!
//! ```text
//!   two guests in a control group -> balloons to the arm's size -> merged until that is settled
//!     -> the group gets its limit -> the array runs once in each guest -> merging goes on for a while -> what is shared, and swapped
//! ```
//!
//! The host's memory is that of a control group. It swaps to a file of the turn's own.

use super::{alike, merge, on_small_host, rep_of};
use crate::plan::Planned;
use crate::record::{Measured, Timeline};
use crate::rig::{Merger, Places, Rig, System, Vms, VmsWanted, account, mb, pause};
use anyhow::{Context, ensure};
use bench::workload;
use page::PAGE_BYTES;
use std::time::{Duration, Instant};

/// Guests that run the array.
const GUESTS: usize = 2;
/// Memory of a guest without a balloon, in MiB.
const WHOLE: u64 = 640;
/// Memory of the host, in MiB.
const HOST: u64 = 640;
/// Swap of the host, in MiB.
const SWAP: usize = 1024;
/// Time for which merging goes on after the array.
const REST: Duration = Duration::from_secs(15);

/// `li-exp2-1`.
pub fn by_size(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let size: u64 = planned.arm.rsplit('-').next().and_then(|mib| mib.parse().ok()).context("no size in the arm")?;
    let wanted = VmsWanted { system: System::BALLOONED, ..alike(GUESTS, rep_of(planned), WHOLE << 20) };
    let (small, _swap, merger, vms) = on_small_host(rig, planned, &wanted, SWAP)?;
    let reached = vms.resize(&[size << 20; GUESTS])?;
    ensure!(reached.iter().all(|bytes| *bytes == size << 20), "balloons stopped at {reached:?} bytes");
    let (begin, mut timeline, mut measured) = merge(&merger, &vms)?;
    let shared = look(&vms, planned, ["sharing", "shared"], &mut measured)?;
    small.limit(HOST << 20)?;
    let mut pages = 0.0;
    for guest in &vms.guests {
        timeline.events.push((begin.elapsed().as_secs_f64(), format!("array in {}", guest.name)));
        let printed = vms.tell([guest], workload::HOG_SCRIPT)?;
        pages += printed.concat().parse::<f64>().context("the array told no size")?;
    }
    measured.put("array_mb", mb(pages / GUESTS as f64));
    rest(&merger, &vms, begin, &mut timeline)?;
    let loaded = look(&vms, planned, ["sharing_loaded", "shared_loaded"], &mut measured)?;
    measured.put("sharing_pages", loaded.0);
    measured.put("shared_kept", loaded.1 / shared.1.max(1.0));
    let swapped: u64 = vms.pids().iter().map(|pid| host::swapped_bytes(*pid)).sum::<Result<_, _>>()?;
    measured.put("swapped_mb", mb(swapped as f64 / PAGE_BYTES as f64));
    if matches!(merger, Merger::Ksm(..)) {
        let (counted, taken) = (account()?.pages_sharing, merger.taken(&vms.pids())?);
        measured.put("counter_over_frames", counted as f64 / (taken.merged_pages as f64).max(1.0));
    }
    ensure!(small.kills() == 0, "{} processes were killed for want of memory on the small host", small.kills());
    measured.timelines.push(timeline);
    Ok(measured)
}

/// Places that hold a shared frame, and shared frames.
fn look(vms: &Vms, planned: &Planned, names: [&str; 2], measured: &mut Measured) -> anyhow::Result<(f64, f64)> {
    let (sharing, shared) = Places::of(&vms.pids())?.sharing_and_shared();
    measured.put_at(names[0], &planned.arm, sharing as f64);
    measured.put_at(names[1], &planned.arm, shared as f64);
    Ok((sharing as f64, shared as f64))
}

/// Lets merging go on, and notes what it saves.
fn rest(merger: &Merger, vms: &Vms, begin: Instant, timeline: &mut Timeline) -> anyhow::Result<()> {
    let until = Instant::now() + REST;
    while Instant::now() < until {
        pause(Duration::from_secs(1))?;
        let merged = merger.taken(&vms.pids())?.merged_pages as f64;
        timeline.points.push((begin.elapsed().as_secs_f64(), mb(merged)));
    }
    Ok(())
}
