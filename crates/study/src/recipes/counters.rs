//! `li-exp1-2`: KSM's counters against the number of like guests.

use super::{D256, GROUP, alike, rep_of};
use crate::plan::Planned;
use crate::record::{MERGED, Measured, Timeline};
use crate::rig::{Group, Rig, account, mb};
use anyhow::Context;
use std::time::Instant;

/// Numbers of guests.
const NUMBERS: [usize; 4] = [1, 2, 4, 6];

/// The recipe of `li-exp1-2`.
pub fn by_number(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
    let wanted = |guests| alike(guests, rep_of(planned), D256);
    let mut vms = rig.vms(&wanted(NUMBERS[0]), &mut merger)?;
    let begin = Instant::now();
    let mut timeline = Timeline { name: "saved".into(), unit: "MB".into(), ..Timeline::default() };
    let (mut measured, mut seen, mut merged) = (Measured::default(), Vec::new(), 0);
    merger.on_for_later_guests()?;
    for guests in NUMBERS {
        if guests > vms.guests.len() {
            vms.add(rig, &wanted(guests - vms.guests.len()), &mut merger)?;
            timeline.events.push((begin.elapsed().as_secs_f64(), format!("{guests} guests")));
        }
        merger.settle(begin, &mut timeline)?;
        let (ksm, taken) = (account()?, merger.taken(&vms.pids())?);
        let (sharing, shared) = (ksm.pages_sharing as f64, (ksm.pages_shared as f64).max(1.0));
        measured.put_at("sharing_mb", guests, mb(sharing));
        measured.put_at("shared_mb", guests, mb(shared));
        measured.put_at("sharing_over_shared", guests, sharing / shared);
        seen.push(Seen {
            ratio: sharing / shared,
            shared,
            over_frames: sharing / (taken.merged_pages as f64).max(1.0),
        });
        merged = taken.merged_pages;
    }
    measured.put(MERGED, merged as f64);
    let last = seen.last().context("no number of guests")?;
    measured.put("counter_over_frames", last.over_frames);
    measured.put("least_rise", least_rise(&seen));
    measured.put("shared_growth", last.shared / seen[1].shared);
    measured.timelines.push(timeline);
    Ok(measured)
}

/// What KSM's counters say with one number of guests.
struct Seen {
    ratio: f64,
    shared: f64,
    over_frames: f64,
}

/// The least rise of the counters' ratio from one number of guests to the next.
fn least_rise(seen: &[Seen]) -> f64 {
    seen.windows(2).map(|two| two[1].ratio - two[0].ratio).fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratio_that_falls_once_has_a_negative_least_rise() {
        let of = |ratios: &[f64]| {
            let seen: Vec<Seen> =
                ratios.iter().map(|ratio| Seen { ratio: *ratio, shared: 1.0, over_frames: 1.0 }).collect();
            least_rise(&seen)
        };
        assert!((of(&[1.0, 2.0, 2.5]) - 0.5).abs() < 1e-9);
        assert!(of(&[1.0, 3.0, 2.5]) < 0.0);
    }
}
