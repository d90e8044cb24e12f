//! `kloster-fig7.7`: many idle guests on a small host that they would fill several times over; then some wake.
//!
//! ```text
//!   idle guests in a control group -> merged until that is settled -> the group gets its limit
//!     -> a tenth of the guests fill memory -> who lives, what was swapped, how much merging was lost
//! ```
//!
//! The host's memory is that of a control group. It swaps to a file of the turn's own.

use super::{GROUP, on_small_host, rep_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Merger, Rig, System, Vms, VmsWanted, mb};
use anyhow::ensure;
use bench::workload;
use page::PAGE_BYTES;
use std::time::Instant;

/// Memory of a guest.
const K512: u64 = 512 << 20;
/// Guests of the short form.
const SHORT: usize = 24;
/// Guests of the full form: those of the paper.
const FULL: usize = 60;
/// Number of guests of which one wakes.
const WAKES: usize = 10;
/// Memory of the host.
const HOST: u64 = 2 << 30;
/// Swap of the host, in MiB.
const SWAP: usize = 1024;

/// `kloster-fig7.7`.
pub fn idle_then_awake(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let guests = if planned.length == Length::Full { FULL } else { SHORT };
    let wanted = VmsWanted {
        guests,
        first: rep_of(planned),
        memory_bytes: K512,
        groups: vec![GROUP.to_owned()],
        system: System::TINY,
    };
    let (small, _swap, merger, vms) = on_small_host(rig, planned, &wanted, SWAP)?;
    let begin = Instant::now();
    let mut timeline = Timeline { name: "saved".into(), unit: "MB".into(), ..Timeline::default() };
    let mut measured = Measured::default();
    merger.on()?;
    merger.settle(begin, &mut timeline)?;
    let idle = look(&merger, &vms, "idle", &mut measured)?;
    measured.put(MERGED, idle.merged_pages);
    measured.put("overcommitted", (guests as u64 * K512) as f64 / 1e6 / idle.all_mb);
    small.limit(HOST)?;
    let awake = &vms.guests[..guests.div_ceil(WAKES)];
    timeline.events.push((begin.elapsed().as_secs_f64(), format!("{} guests wake", awake.len())));
    vms.tell(awake, workload::WAKE_SCRIPT)?;
    merger.settle(begin, &mut timeline)?;
    let woken = look(&merger, &vms, "awake", &mut measured)?;
    measured.put("saving_kept", woken.saved_mb / idle.saved_mb);
    let alive = vms.tell(&vms.guests, "echo alive")?;
    ensure!(alive.len() == guests, "{} of {guests} guests answer", alive.len());
    measured.put("killed", small.kills() as f64);
    measured.timelines.push(timeline);
    Ok(measured)
}

/// Memory of all guests at one moment.
struct Seen {
    /// Memory that they take, swap included.
    all_mb: f64,
    saved_mb: f64,
    merged_pages: f64,
}

/// Looks at the guests, and notes what they take, what is saved, and what is swapped out.
fn look(merger: &Merger, vms: &Vms, when: &str, measured: &mut Measured) -> anyhow::Result<Seen> {
    let swapped: u64 = vms.pids().iter().map(|pid| host::swapped_bytes(*pid)).sum::<Result<_, _>>()?;
    let swapped_mb = mb(swapped as f64 / PAGE_BYTES as f64);
    let taken = merger.taken(&vms.pids())?;
    let (taken_mb, saved_mb) = (mb(taken.frames as f64), mb(merger.saved_pages()? as f64));
    measured.put_at("taken_mb", when, taken_mb);
    measured.put_at("saved_mb", when, saved_mb);
    measured.put_at("swapped_mb", when, swapped_mb);
    Ok(Seen { all_mb: taken_mb + swapped_mb, saved_mb, merged_pages: taken.merged_pages as f64 })
}
