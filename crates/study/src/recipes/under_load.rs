//! `sonone-fig8`: what merging saves of guests that are idle, under a load, and idle again.
//!
//! ```text
//!   ksm, fold                merge until settled -> load -> quiet
//!   under-ksm, under-fold    merge until settled -> make all private again -> load -> merge under it -> quiet
//! ```
//! In the latter each guest also reads a disk of its own that is larger than its memory.

use super::{D256, GROUP, alike, rep_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{MERGED, Measured, OPERATIONS, Timeline};
use crate::rig::{Group, Merger, Rig, mb, pause};
use crate::stats;
use bench::workload;
use std::time::{Duration, Instant};

/// Number of guests in the short form.
const SHORT: usize = 3;
/// Number of guests in the full form: as many as in the paper.
const FULL: usize = 5;
/// Beginning of the name of an arm whose merger begins under the load.
const UNDER: &str = "under-";
/// Size of the disk that a guest reads in arms `under-`, in MiB. A guest has 256 MiB of memory.
const DATA_MIB: u64 = 300;
/// Time of the load before merging begins: the guests' page caches fill.
const BEFORE: Duration = Duration::from_secs(30);
/// Interval between two readings of what is saved.
const LOOK: Duration = Duration::from_secs(1);
/// After the load, the saving counts as back when it reaches this share of the saving before the load. If the load
/// leaves more than that, nothing can come back.
const BACK: f64 = 0.8;

/// The recipe of `sonone-fig8`.
pub fn saving(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let full = planned.length == Length::Full;
    let under = planned.arm.strip_prefix(UNDER);
    let mut merger = rig.merger(under.unwrap_or(&planned.arm), &[Group::of(GROUP)])?;
    let vms = rig.vms(&alike(if full { FULL } else { SHORT }, rep_of(planned), D256), &mut merger)?;
    for (n, guest) in vms.guests.iter().enumerate().filter(|_| under.is_some()) {
        vms.plug([guest], &rig.data_of(n as u64, DATA_MIB)?)?;
    }
    let mut traced = Traced::begin(&merger);
    merger.on()?;
    merger.settle(traced.begin, &mut traced.timeline)?;
    let mut measured = Measured::default();
    measured.put(MERGED, merger.taken(&vms.pids())?.merged_pages as f64);
    let idle = merger.saved_pages()? as f64;
    let loaded = if under.is_some() {
        merger.undo()?;
        vms.load(&vms.guests, &workload::transactions_and_reads_script())?;
        traced.event("transactions and reads begin, nobody merges");
        traced.follow(BEFORE)?;
        traced.event("merging begins");
        merger.on()?;
        traced.follow(Duration::from_secs(if full { 100 } else { 40 }))?
    } else {
        vms.load(&vms.guests, &workload::paced_transactions_script())?;
        traced.event("transactions begin");
        traced.follow(Duration::from_secs(if full { 60 } else { 20 }))?
    };
    vms.tell(&vms.guests, workload::STOP_SCRIPT)?;
    measured.put(OPERATIONS, vms.operations(&vms.guests)?.iter().sum::<u64>() as f64);
    traced.event("transactions end");
    let quiet = traced.follow(Duration::from_secs(if full { 120 } else { 30 }))?;
    put(idle, &loaded, &quiet, &mut measured);
    measured.timelines.push(traced.timeline);
    Ok(measured)
}

/// Puts the figures, from the saved pages of idle guests and from readings each second, under the load and after it.
fn put(idle: f64, loaded: &[f64], quiet: &[f64], measured: &mut Measured) {
    // Only the second half counts: by then the load has filled the memory that it uses.
    let under_load = stats::mean(&loaded[loaded.len() / 2..]);
    let after = quiet[quiet.len() - 1];
    for (phase, saved) in [("idle", idle), ("load", under_load), ("after", after)] {
        measured.put_at("saved_mb", phase, mb(saved));
    }
    measured.put("load_share", under_load / idle);
    if under_load < idle * BACK {
        let back = quiet.iter().position(|saved| *saved >= idle * BACK).unwrap_or(quiet.len());
        measured.put("back_share", after / idle);
        measured.put("back_s", (back + 1) as f64 * LOOK.as_secs_f64());
    } else {
        measured.note("the load left more than 80% of the saving: nothing could come back");
    }
}

/// Measures the saving over time.
struct Traced<'a> {
    merger: &'a Merger,
    begin: Instant,
    timeline: Timeline,
}

impl<'a> Traced<'a> {
    fn begin(merger: &'a Merger) -> Self {
        let timeline = Timeline { name: "saved".into(), unit: "MB".into(), ..Timeline::default() };
        Self { merger, begin: Instant::now(), timeline }
    }

    fn event(&mut self, text: &str) {
        self.timeline.events.push((self.begin.elapsed().as_secs_f64(), text.to_owned()));
    }

    /// Saved pages, read once a second, for this time.
    fn follow(&mut self, time: Duration) -> anyhow::Result<Vec<f64>> {
        let (since, mut seen) = (Instant::now(), Vec::new());
        loop {
            pause(LOOK)?;
            let saved = self.merger.saved_pages()? as f64;
            self.timeline.points.push((self.begin.elapsed().as_secs_f64(), mb(saved)));
            seen.push(saved);
            if since.elapsed() >= time {
                return Ok(seen);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saving_comes_back_only_where_a_load_took_it() {
        let of = |loaded: &[f64], quiet: &[f64]| {
            let mut measured = Measured::default();
            put(100.0, loaded, quiet, &mut measured);
            let value = |name: &str| measured.samples.iter().find(|s| s.metric == name).map(|s| s.value);
            (value("load_share").unwrap(), value("back_share"), value("back_s"), measured.notes.len())
        };
        assert_eq!(of(&[90.0, 40.0], &[60.0, 80.0, 95.0]), (0.4, Some(0.95), Some(2.0), 0));
        assert_eq!(of(&[90.0, 40.0], &[60.0, 70.0]), (0.4, Some(0.7), Some(3.0), 0), "it is not back in time");
        assert_eq!(of(&[10.0, 90.0], &[95.0]), (0.9, None, None, 1));
    }
}
