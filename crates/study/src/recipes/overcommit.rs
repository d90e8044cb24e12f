//! `kloster-fig7.7`: many idle guests on a small host that they would fill several times over; then some wake.
//!
//! ```text
//!   idle guests in a control group -> merged until that is settled -> the group gets its limit
//!     -> a tenth of the guests fill memory -> who lives, what was swapped, how much merging was lost
//! ```
//!
//! The host's memory is that of a control group. It swaps to a file of the turn's own.

use super::{GROUP, rep_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Group, Merger, Rig, System, Vms, VmsWanted, mb};
use anyhow::ensure;
use bench::workload;
use bench::{SmallHost, Swap};
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
    let small = SmallHost::make(rig.guardian())?;
    let dir = rig.dir().to_owned();
    let swap = Swap::on(&dir, SWAP, rig.guardian())?;
    let wanted = VmsWanted {
        guests,
        first: rep_of(planned),
        memory_bytes: K512,
        groups: vec![GROUP.to_owned()],
        system: System::TINY,
    };
    let (merger, vms) = small.inside(|| {
        let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
        let vms = rig.vms(&wanted, &mut merger)?;
        Ok((merger, vms))
    })?;
    let begin = Instant::now();
    let mut timeline = Timeline { name: "saved".into(), unit: "MB".into(), ..Timeline::default() };
    let mut measured = Measured::default();
    merger.on()?;
    merger.settle(begin, &mut timeline)?;
    let idle = look(&merger, &vms, "idle", &mut measured)?;
    measured.put(MERGED, merger.taken(&vms.pids())?.merged_pages as f64);
    measured.put("overcommitted", (guests as u64 * K512) as f64 / 1e6 / idle.0);
    small.limit(HOST)?;
    let awake = &vms.guests[..guests.div_ceil(WAKES)];
    timeline.events.push((begin.elapsed().as_secs_f64(), format!("{} guests wake", awake.len())));
    vms.tell(awake, workload::WAKE_SCRIPT)?;
    merger.settle(begin, &mut timeline)?;
    let woken = look(&merger, &vms, "awake", &mut measured)?;
    measured.put("saving_kept", woken.1 / idle.1);
    let alive = vms.tell(&vms.guests, "echo alive")?;
    ensure!(alive.len() == guests, "{} of {guests} guests answer", alive.len());
    measured.put("killed", small.kills() as f64);
    measured.timelines.push(timeline);
    // In this order: guests, merger, swap, host.
    drop((vms, merger, swap, small));
    Ok(measured)
}

/// Memory that the guests take, and that is saved, in MB. Notes both, and what is swapped out.
fn look(merger: &Merger, vms: &Vms, when: &str, measured: &mut Measured) -> anyhow::Result<(f64, f64)> {
    let swapped: u64 = vms.pids().iter().map(|pid| host::swapped_bytes(*pid)).sum::<Result<_, _>>()?;
    let swapped = mb(swapped as f64 / PAGE_BYTES as f64);
    let taken = mb(merger.taken(&vms.pids())?.frames as f64);
    let saved = mb(merger.saved_pages()? as f64);
    measured.put_at("taken_mb", when, taken);
    measured.put_at("saved_mb", when, saved);
    measured.put_at("swapped_mb", when, swapped);
    Ok((taken + swapped, saved))
}
