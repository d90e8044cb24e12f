//! `kim-live`: a group's scan rate, changed while its guests work.

use super::groups::{GROUPS, two_groups};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{MERGED, Measured, OPERATIONS, Timeline};
use crate::rig::{Merger, Rig, pause};
use crate::stats;
use anyhow::Context;
use std::time::{Duration, Instant};

/// The two scan rates, in pages a second. The load rewrites more pages than the higher one.
const RATES: [u32; 2] = [50, 500];
/// Interval between two readings.
const LOOK: Duration = Duration::from_millis(250);
/// Number of readings whose mean says whether a new rate has taken effect.
const WINDOW: usize = 2;
/// Least time for which a new rate must go on being observed.
const LASTS: Duration = Duration::from_secs(1);
/// Time for which each rate stays set.
const KEPT: Duration = Duration::from_secs(4);

/// The recipe of `kim-live`.
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
    // The first change is made and not counted: before it, pages are folded without a limit.
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
    measured.put("slowest_for_good_s", times.iter().copied().fold(0.0, f64::max));
    measured.put("median_for_good_s", stats::quantile(&times, 0.5).context("no change of the rate")?);
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

/// Follows a rate: seconds since the change, and the pages that were fingerprinted a second by then.
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

/// Seconds until the observed rate is nearer, in ratio, to the new rate than to the old one, and the mean of all later
/// readings is, too. If that never happens, it is the whole time. A single reading proves nothing, since agents work in
/// bursts.
fn acts_after(seen: &[(f64, f64)], up: bool) -> f64 {
    let middle = (f64::from(RATES[0]) * f64::from(RATES[1])).sqrt();
    let is_new = |rate: f64| if up { rate > middle } else { rate < middle };
    let end = seen.last().map_or(KEPT.as_secs_f64(), |(at, _)| *at);
    let lasts = |n: usize| {
        let later: Vec<f64> = seen[n + 1..].iter().map(|(_, rate)| *rate).collect();
        end - seen[n].0 >= LASTS.as_secs_f64() && is_new(stats::mean(&later))
    };
    (0..seen.len()).find(|n| is_new(seen[*n].1) && lasts(*n)).map_or(end, |n| seen[n].0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Windows a quarter of a second apart, with these rates.
    fn acts(rates: &[f64], up: bool) -> f64 {
        let seen: Vec<_> = rates.iter().zip(1..).map(|(rate, n)| (f64::from(n) * 0.25, *rate)).collect();
        acts_after(&seen, up)
    }

    #[test]
    fn rate_acts_when_it_stays_nearer_to_the_new_one() {
        assert_eq!(acts(&[50.0, 100.0, 225.0, 500.0, 500.0, 500.0, 500.0, 500.0], true), 0.75);
        assert_eq!(acts(&[500.0, 300.0, 100.0, 50.0, 50.0, 50.0, 50.0, 50.0], false), 0.75);
        assert_eq!(acts(&[50.0, 52.0, 50.0, 52.0, 50.0, 52.0, 50.0, 52.0], true), 2.0, "it never does");
        assert_eq!(acts(&[50.0, 50.0, 50.0, 50.0, 50.0, 500.0, 500.0, 500.0], true), 2.0, "too late to tell");
    }

    #[test]
    fn burst_or_pause_at_the_old_rate_is_no_new_rate() {
        let bursts = [200.0, 0.0, 0.0, 0.0, 200.0, 0.0, 0.0, 0.0];
        assert_eq!(acts(&bursts, true), 2.0, "50 a second, in bursts");
        let pauses = [0.0, 666.0, 666.0, 666.0, 0.0, 666.0, 666.0, 666.0];
        assert_eq!(acts(&pauses, false), 2.0, "500 a second, with pauses");
    }
}
