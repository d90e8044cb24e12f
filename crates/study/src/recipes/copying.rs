//! `li-host`: a file is copied on a small host, and disturbs merging or not.
//!
//! ```text
//!   three guests in a control group -> merged until that is settled -> the group gets its limit: what it uses, and FREE more
//!     -> a file of many times FREE is copied in that group -> what is saved meanwhile, and when it is over
//! ```
//!
//! The host's memory is that of a control group. It swaps to a file of the turn's own.

use super::{D256, Saved, alike, merge, on_small_host, rep_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::Measured;
use crate::rig::{Rig, mb, pause};
use anyhow::{Context, ensure};
use page::PAGE_BYTES;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Number of guests.
const GUESTS: usize = 3;
/// Memory that is free on the host before the copy, in bytes: 128 MiB.
const FREE: u64 = 128 << 20;
/// Size of the file in the short form, in MiB: eight times what is free.
const SHORT_MIB: u64 = 1024;
/// Size of the file in the full form, in MiB.
const FULL_MIB: u64 = 4096;
/// Swap of the host, in MiB.
const SWAP: usize = 512;
/// Time between two readings of what is saved.
const LOOK: Duration = Duration::from_secs(1);
/// Time from the end of the copy to the last reading.
const REST: Duration = Duration::from_secs(10);

/// The recipe of `li-host`.
pub fn file(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let from = rig.data(if planned.length == Length::Full { FULL_MIB } else { SHORT_MIB })?;
    // The page cache is freed of the file, so that its pages are charged to the control group in which `cp` reads them.
    let dropped = Command::new("dd")
        .arg(format!("if={}", from.display()))
        .args(["iflag=nocache", "count=0", "status=none"])
        .status();
    ensure!(dropped.context("cannot run dd")?.success(), "dd does not drop the file from memory");
    let to = rig.dir().join("copy");
    let (small, _swap, merger, vms) = on_small_host(rig, planned, &alike(GUESTS, rep_of(planned), D256), SWAP)?;
    let (begin, mut timeline, mut measured) = merge(&merger, &vms)?;
    let pids = vms.pids();
    let saved = || anyhow::Ok(mb(Saved::of(&merger, &pids)?.all()));
    let before = saved()?;
    small.limit(small.used_bytes()? + FREE)?;
    timeline.events.push((begin.elapsed().as_secs_f64(), "the copy begins".into()));
    let (copied, mut least) = (Instant::now(), before);
    let mut copy = small
        .inside(|| Command::new("cp").arg(&from).arg(&to).stdin(Stdio::null()).spawn().context("cannot run cp"))?;
    let mut ended = None;
    while ended.is_none() {
        let looked = pause(LOOK).and_then(|()| saved()).inspect_err(|_| _ = copy.kill())?;
        timeline.points.push((begin.elapsed().as_secs_f64(), looked));
        least = least.min(looked);
        ended = copy.try_wait().context("cannot wait for cp")?;
    }
    let copy_s = copied.elapsed().as_secs_f64();
    std::fs::remove_file(&to).with_context(|| format!("cannot remove {}", to.display()))?;
    ensure!(ended.is_some_and(|status| status.success()), "the copy failed");
    timeline.events.push((begin.elapsed().as_secs_f64(), "it has ended".into()));
    let swapped: u64 = pids.iter().map(|pid| host::swapped_bytes(*pid)).sum::<Result<_, _>>()?;
    pause(REST)?;
    let after = saved()?;
    for (when, value) in [("before", before), ("least", least), ("after", after)] {
        measured.put_at("saved_mb", when, value);
    }
    measured.put("least_share", least / before.max(1.0));
    measured.put("after_share", after / before.max(1.0));
    measured.put("swapped_mb", mb(swapped as f64 / PAGE_BYTES as f64));
    measured.put("copy_s", copy_s);
    measured.timelines.push(timeline);
    Ok(measured)
}
