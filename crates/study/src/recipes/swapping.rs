//! `li-exp2-1`: how much is shared by guests of different sizes in which a program fills memory, on a small host that
//! swaps.
//!
//! ```text
//!   two guests in a control group -> balloons to the arm's size -> merged until that is settled
//!     -> the group gets its limit -> the array runs once in each guest -> merging goes on for a while -> what is shared, and swapped
//! ```
//!
//! The host's memory is that of a control group. It swaps to a file of the turn's own.

use super::overcommit::Toll;
use super::{alike, first_of, merge, on_small_host};
use crate::plan::Planned;
use crate::record::{Measured, Timeline};
use crate::rig::{Merger, Places, Rig, System, Vms, VmsWanted, account, mb, pause};
use anyhow::{Context, ensure};
use bench::workload;
use page::PAGE_BYTES;
use std::time::{Duration, Instant};

/// Number of guests that run the program, which fills an array.
const GUESTS: usize = 2;
/// Memory of a guest without a balloon, in MiB.
const WHOLE: u64 = 640;
/// Memory limit of the control group that stands for the host, in MiB.
const HOST: u64 = 640;
/// Swap of the host, in MiB.
const SWAP: usize = 1024;
/// Time for which merging goes on after the program has run.
const REST: Duration = Duration::from_secs(15);

/// The recipe of `li-exp2-1`.
pub fn by_size(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let size: u64 = planned.arm.rsplit('-').next().and_then(|mib| mib.parse().ok()).context("no size in the arm")?;
    let wanted = VmsWanted { system: System::BALLOONED, ..alike(GUESTS, first_of(planned, GUESTS), WHOLE << 20) };
    let (small, _swap, merger, vms) = on_small_host(rig, planned, &wanted, SWAP)?;
    let reached = vms.resize(&[size << 20; GUESTS])?;
    ensure!(reached.iter().all(|bytes| *bytes == size << 20), "balloons stopped at {reached:?} bytes");
    let (begin, mut timeline, mut measured) = merge(&merger, &vms)?;
    let before = Sharing::of(&vms)?;
    before.put(&planned.arm, ["sharing", "shared"], &mut measured);
    before.put_saved(size, "saved_mb", &mut measured);
    measured.put("sharing_before", before.places);
    small.limit(HOST << 20)?;
    let loaded = array(&merger, &vms, begin, &mut timeline).and_then(|array_mb| {
        measured.put("array_mb", array_mb);
        after(&merger, &vms, &mut measured)
    });
    if let Some((loaded, swapped_mb)) = Toll::of(&small, &vms.guests).put(loaded, &mut measured)? {
        loaded.put(&planned.arm, ["sharing_loaded", "shared_loaded"], &mut measured);
        loaded.put_saved(size, "saved_loaded_mb", &mut measured);
        measured.put("sharing_pages", loaded.places);
        measured.put("shared_kept", loaded.frames / before.frames.max(1.0));
        measured.put("swapped_mb", swapped_mb);
        measured.put_at("swapped_by_size_mb", size, swapped_mb);
    }
    measured.timelines.push(timeline);
    Ok(measured)
}

/// Runs the program in one guest after the other, and lets merging go on for a while. Returns the mean size of the
/// arrays.
fn array(merger: &Merger, vms: &Vms, begin: Instant, timeline: &mut Timeline) -> anyhow::Result<f64> {
    let mut pages = 0.0;
    for guest in &vms.guests {
        timeline.events.push((begin.elapsed().as_secs_f64(), format!("array in {}", guest.name)));
        let printed = vms.tell([guest], workload::HOG_SCRIPT)?;
        pages += printed.concat().parse::<f64>().context("the array told no size")?;
    }
    let until = Instant::now() + REST;
    while Instant::now() < until {
        pause(Duration::from_secs(1))?;
        let merged = merger.taken(&vms.pids())?.merged_pages as f64;
        timeline.points.push((begin.elapsed().as_secs_f64(), mb(merged)));
    }
    Ok(mb(pages / GUESTS as f64))
}

/// Measures the guests after the program has run: what is shared, and memory in swap in MB. Compares ksmd's counter
/// with page frames.
fn after(merger: &Merger, vms: &Vms, measured: &mut Measured) -> anyhow::Result<(Sharing, f64)> {
    let loaded = Sharing::of(vms)?;
    let swapped: u64 = vms.pids().iter().map(|pid| host::swapped_bytes(*pid)).sum::<Result<_, _>>()?;
    if matches!(merger, Merger::Ksm(..)) {
        let (counted, taken) = (account()?.pages_sharing, merger.taken(&vms.pids())?);
        measured.put("counter_over_frames", counted as f64 / (taken.merged_pages as f64).max(1.0));
    }
    Ok((loaded, mb(swapped as f64 / PAGE_BYTES as f64)))
}

/// What guests share at one time, by page frames.
struct Sharing {
    /// Page-table entries of frames that several entries map.
    places: f64,
    /// Number of these frames.
    frames: f64,
}

impl Sharing {
    fn of(vms: &Vms) -> anyhow::Result<Self> {
        let (places, frames) = Places::of(&vms.pids())?.sharing_and_shared();
        Ok(Self { places: places as f64, frames: frames as f64 })
    }

    /// Puts both figures, with the arm as the variable, for pictures.
    fn put(&self, arm: &str, [sharing, shared]: [&str; 2], measured: &mut Measured) {
        measured.put_at(sharing, arm, self.places);
        measured.put_at(shared, arm, self.frames);
    }

    /// Puts the memory that is saved at this size of the guests, so that mergers are compared at the same size.
    fn put_saved(&self, size: u64, metric: &str, measured: &mut Measured) {
        measured.put_at(metric, size, mb(self.places - self.frames));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::losses;
    use crate::record::Samples;

    #[test]
    fn less_sharing_shows_as_a_loss_at_the_same_size_alone() {
        let study = crate::data::all().into_iter().find(|study| study.id == "li-exp2-1").unwrap();
        let mut samples = Samples::default();
        for (arm, size, places) in [("ksm-640", 640, 450.0), ("ksm-384", 384, 900.0), ("fold-640", 640, 140.0)] {
            for rep in 0..3 {
                let mut measured = Measured::default();
                Sharing { places, frames: 100.0 }.put_saved(size, "saved_loaded_mb", &mut measured);
                samples.add(arm, rep, &measured.samples);
            }
        }
        let found = losses::of(&study, &samples.records(&study));
        let theirs: Vec<_> = found.iter().map(|loss| (loss.theirs.0.as_str(), loss.decided)).collect();
        assert_eq!(theirs, [("ksm-640", true)]);
    }
}
