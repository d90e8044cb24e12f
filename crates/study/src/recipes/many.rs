//! `kloster-fig7.1`: memory of many idle guests.
//!
//! Under Xen, each guest had all of its memory in frames from the start, and untouched memory was shared zeros. Here
//! untouched memory has no frame. So it counts as shared here, to make shares of the configured memory comparable.

use super::ram::Ram;
use super::{GROUP, Saved, rep_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Group, Merger, Rig, System, Vms, VmsWanted, mb};
use page::PAGE_BYTES;
use std::time::Instant;

/// Memory of a guest.
const D128: u64 = 128 << 20;
/// Numbers of guests of the short form.
const SHORT: [usize; 3] = [4, 8, 12];
/// Numbers of guests of the full form.
const FULL: [usize; 4] = [4, 8, 16, 30];

/// The recipe of `kloster-fig7.1`.
pub fn idle(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let numbers = if planned.length == Length::Full { &FULL[..] } else { &SHORT[..] };
    let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
    let wanted = |guests| VmsWanted {
        guests,
        first: rep_of(planned),
        memory_bytes: D128,
        groups: vec![GROUP.to_owned()],
        system: System::TINY,
    };
    let mut vms = rig.vms(&wanted(numbers[0]), &mut merger)?;
    let vmm = vmm_pages(&merger, &vms)?;
    let begin = Instant::now();
    let mut timeline = Timeline { name: "saved".into(), unit: "MB".into(), ..Timeline::default() };
    let (mut measured, mut seen) = (Measured::default(), Vec::new());
    merger.on_for_later_guests()?;
    for number in numbers {
        let more = number - vms.guests.len();
        if more > 0 {
            vms.add(rig, &wanted(more), &mut merger)?;
            timeline.events.push((begin.elapsed().as_secs_f64(), format!("{number} guests")));
        }
        merger.settle(begin, &mut timeline)?;
        let shares = Shares::of(&merger, &vms, vmm)?;
        measured.put_at("shared_percent", number, shares.shared * 100.0);
        measured.put_at("zero_percent", number, shares.zeros * 100.0);
        measured.put_at("resident_percent", number, shares.of_resident * 100.0);
        seen.push(shares);
    }
    let (first, last) = (&seen[0], &seen[seen.len() - 1]);
    measured.put(MERGED, merger.taken(&vms.pids())?.merged_pages as f64);
    measured.put("last_over_first", last.shared / first.shared);
    measured.put("zeros_of_shared", last.zeros / last.shared);
    measured.put("touched_mb", last.touched_mb);
    measured.timelines.push(timeline);
    Ok(measured)
}

/// Private pages of QEMU outside the guest's RAM, counted before anything is merged.
fn vmm_pages(merger: &Merger, vms: &Vms) -> anyhow::Result<f64> {
    let pids = vms.pids();
    let mut of_ram = 0;
    for pid in &pids {
        of_ram += Ram::of(*pid, D128 / 2)?.resident()?.len();
    }
    anyhow::ensure!(of_ram > 0, "the RAM of the guests is not found");
    Ok((merger.taken(&pids)?.frames as f64 - of_ram as f64) / pids.len() as f64)
}

/// Shares of the guests' configured memory, and sizes.
struct Shares {
    /// Configured memory that takes no frame.
    shared: f64,
    /// The part of it that is zeros or was never touched.
    zeros: f64,
    /// Saved pages over what would be resident without merging.
    of_resident: f64,
    /// RAM of a guest that would be resident without merging.
    touched_mb: f64,
}

impl Shares {
    fn of(merger: &Merger, vms: &Vms, vmm: f64) -> anyhow::Result<Self> {
        let guests = vms.guests.len() as f64;
        let configured = guests * (D128 / PAGE_BYTES as u64) as f64;
        let saved = Saved::of(merger, &vms.pids())?;
        let frames = saved.frames - vmm * guests;
        let touched_mb = mb((frames + saved.all()) / guests);
        Ok(Self { touched_mb, ..Self::from(configured, frames, saved.all(), saved.zeros) })
    }

    /// From pages of the guests' RAM: configured ones, frames, saved ones, and zeros among these.
    fn from(configured: f64, frames: f64, saved: f64, zeros: f64) -> Self {
        let untouched = (configured - frames - saved).max(0.0);
        Self {
            shared: 1.0 - frames / configured,
            zeros: (untouched + zeros) / configured,
            of_resident: saved / (frames + saved),
            touched_mb: 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn untouched_memory_counts_as_shared_zeros() {
        let Shares { shared, zeros, of_resident, .. } = Shares::from(1000.0, 200.0, 300.0, 100.0);
        assert!((shared - 0.8).abs() < 1e-9, "all but the frames");
        assert!((zeros - 0.6).abs() < 1e-9, "500 were never touched, 100 were given back");
        assert!((of_resident - 0.6).abs() < 1e-9);
    }
}
