//! `kim-live`: a group's scan rate, changed while its guests work.

use super::groups::{GROUPS, two_groups};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{MERGED, Measured, OPERATIONS, Timeline};
use crate::rig::{Merger, Rig, pause};
use crate::stats;
use anyhow::Context;
use std::time::{Duration, Instant};

/// The two rates, in pages a second. The load rewrites more than the higher one.
const RATES: [u32; 2] = [50, 500];
/// Interval between two looks.
const LOOK: Duration = Duration::from_millis(250);
/// Time in which a new rate counts as acting: that of a window in which pages are counted.
const WINDOW: usize = 2;
/// Time for which each rate is kept.
const KEPT: Duration = Duration::from_secs(4);

/// `kim-live`.
pub fn rate(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let changes = if planned.length == Length::Full { 20 } else { 10 };
    let mut merger = rig.merger("fold", &GROUPS)?;
    let vms = rig.vms(&two_groups(), &mut merger)?;
    merger.on()?;
    vms.load(&vms.guests, &bench::workload::rewrite_script(0.2))?;
    let counts = vms.operations(&vms.guests)?;
    let begin = Instant::now();
    let mut timeline = Timeline { name: "fingerprinted".into(), unit: "pages/s".into(), ..Timeline::default() };
    let (mut times, mut reached) = (Vec::new(), [Vec::new(), Vec::new()]);
    // The first rate is waited for, and not counted: folding without a limit comes before it.
    for change in 0..=changes {
        let of = change % 2;
        merger.set_scan_rate(GROUPS[0].name, RATES[of])?;
        timeline.events.push((begin.elapsed().as_secs_f64(), format!("at most {} pages/s", RATES[of])));
        let seen = follow(&merger, begin, &mut timeline)?;
        if change > 0 {
            times.push(acts_after(&seen, RATES[of] > RATES[1 - of]));
        }
        reached[of].push(stats::mean(&seen[seen.len() / 2..].iter().map(|(_, rate)| *rate).collect::<Vec<_>>()));
    }
    let mut measured = Measured::default();
    measured.put(MERGED, merger.taken(&vms.pids())?.merged_pages as f64);
    measured.put("slowest_s", times.iter().copied().fold(0.0, f64::max));
    measured.put("median_s", stats::quantile(&times, 0.5).context("no change of the rate")?);
    for (rate, seen) in RATES.iter().zip(&reached) {
        measured.put_at("reached_per_s", rate, stats::mean(seen));
    }
    let after = vms.operations(&vms.guests)?;
    let more = after.iter().zip(&counts).map(|(now, then)| now.saturating_sub(*then));
    measured.put("least_passes", more.min().unwrap_or(0) as f64);
    measured.put(OPERATIONS, after.iter().sum::<u64>() as f64);
    measured.timelines.push(timeline);
    Ok(measured)
}

/// Seconds since the change, and the pages that were fingerprinted a second by then.
fn follow(merger: &Merger, begin: Instant, timeline: &mut Timeline) -> anyhow::Result<Vec<(f64, f64)>> {
    let since = Instant::now();
    let mut counted: Vec<(f64, u64)> = vec![(0.0, merger.hashed_pages(GROUPS[0].name)?)];
    let mut seen = Vec::new();
    while since.elapsed() < KEPT {
        pause(LOOK)?;
        counted.push((since.elapsed().as_secs_f64(), merger.hashed_pages(GROUPS[0].name)?));
        let (now, then) = (counted[counted.len() - 1], counted[counted.len().saturating_sub(WINDOW + 1)]);
        let rate = now.1.saturating_sub(then.1) as f64 / (now.0 - then.0);
        seen.push((now.0, rate));
        timeline.points.push((begin.elapsed().as_secs_f64(), rate));
    }
    Ok(seen)
}

/// Seconds until the rate is nearer, in ratio, to the new one than to the old; the whole time if it never is.
fn acts_after(seen: &[(f64, f64)], up: bool) -> f64 {
    let middle = (f64::from(RATES[0]) * f64::from(RATES[1])).sqrt();
    let acts = |(_, rate): &&(f64, f64)| if up { *rate > middle } else { *rate < middle };
    seen.iter().find(acts).or(seen.last()).map_or(KEPT.as_secs_f64(), |(at, _)| *at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_acts_when_it_is_nearer_to_the_new_one() {
        let seen = [(0.25, 50.0), (0.5, 100.0), (0.75, 225.0), (1.0, 500.0)];
        assert_eq!((acts_after(&seen, true), acts_after(&seen, false)), (0.75, 0.25));
        assert_eq!(acts_after(&[(0.25, 50.0), (4.0, 52.0)], true), 4.0, "it never does");
    }
}
