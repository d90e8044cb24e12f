//! `kloster-fig2.2`: how fast the memory of guests changes.

use super::ram::Ram;
use super::{D256, GROUP, alike, first_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{Measured, OPERATIONS, Timeline};
use crate::rig::{Group, Rig, pause};
use bench::workload;
use page::{Fingerprint, HostVirt};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Interval between two readings of the memory.
const EVERY: Duration = Duration::from_secs(5);

/// The recipe of `kloster-fig2.2`.
pub fn over_time(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut merger = rig.merger("off", &[Group::of(GROUP)])?;
    let vms = rig.vms(&alike(1, first_of(planned, 1), D256), &mut merger)?;
    match planned.arm.as_str() {
        "web" => vms.load(&vms.guests, &workload::web_script())?,
        "oltp" => vms.load(&vms.guests, &workload::transactions_script())?,
        _ => {}
    }
    let ram = Ram::of(vms.pids()[0], D256 / 2)?;
    let time = if planned.length == Length::Full { 100 } else { 50 };
    let begin = Instant::now();
    let first = ram.fingerprints()?;
    let mut measured = Measured::default();
    measured.put_at("unchanged_share", 0, 100.0);
    let mut shares = vec![1.0];
    let mut timeline =
        Timeline { name: "unchanged".into(), unit: "%".into(), points: vec![(0.0, 100.0)], events: Vec::new() };
    for n in 1..=time / EVERY.as_secs() {
        pause((EVERY * n as u32).saturating_sub(begin.elapsed()))?;
        let share = unchanged(&first, &ram.fingerprints()?);
        let seconds = n * EVERY.as_secs();
        measured.put_at("unchanged_share", seconds, share * 100.0);
        timeline.points.push((begin.elapsed().as_secs_f64(), share * 100.0));
        shares.push(share);
    }
    let (half, end) = (shares[shares.len() / 2], shares[shares.len() - 1]);
    measured.put("unchanged_end", end);
    measured.put("late_change_share", (half - end) / (1.0 - end).max(f64::MIN_POSITIVE));
    let done = if planned.arm == "idle" { 1 } else { vms.operations(&vms.guests)?.iter().sum::<u64>() };
    measured.put(OPERATIONS, done as f64);
    measured.timelines.push(timeline);
    Ok(measured)
}

/// Of the pages that were resident first, the share that still holds the same content.
fn unchanged(first: &HashMap<HostVirt, Fingerprint>, then: &HashMap<HostVirt, Fingerprint>) -> f64 {
    let same = first.iter().filter(|(at, content)| then.get(at) == Some(content)).count();
    same as f64 / first.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use page::PAGE_BYTES;

    #[test]
    fn page_that_went_or_changed_is_not_unchanged() {
        let content = |byte| Fingerprint::of(&[byte; PAGE_BYTES]);
        let first =
            HashMap::from([(HostVirt(0), content(0)), (HostVirt(4096), content(1)), (HostVirt(8192), content(2))]);
        let then =
            HashMap::from([(HostVirt(0), content(0)), (HostVirt(4096), content(9)), (HostVirt(12288), content(2))]);
        assert!((unchanged(&first, &then) - 1.0 / 3.0).abs() < 1e-9);
    }
}
