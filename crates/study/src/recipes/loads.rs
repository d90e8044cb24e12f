//! `kloster-fig7.6`, `kloster-fig7.4`, `kloster-fig7.2`, `kloster-fig7.9`, `kloster-s7.9` with `kloster-fig7.5`: how
//! much memory merging saves while guests work, and after they have done the same work.
//!
//! Shares are of the memory that the guests were given. Pages of zeros are left out, as in the paper.

use super::{D256, GROUP, Saved, alike, rep_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::{MERGED, Measured, OPERATIONS, Timeline};
use crate::rig::{Group, Merger, Places, Rig, Vms, mb, pause, wait};
use crate::stats;
use anyhow::bail;
use bench::workload::{self, BUILD_STEPS, SOURCES_SCRIPT, Timed};
use lab::Guest;
use page::PAGE_BYTES;
use std::time::{Duration, Instant};

/// Interval between two readings of what is saved.
const LOOK: Duration = Duration::from_secs(1);
/// Time limit for a load to run, until each guest has done an operation of it: 90 s.
const PATIENCE: Duration = Duration::from_secs(90);

/// Name of a load, and the function that makes its script.
type Load = (&'static str, fn() -> String);

/// Loads of `kloster-fig7.6`: in each of them, all guests have the same load.
const LIKE: [Load; 3] = [
    ("database", workload::paced_transactions_script),
    ("web", workload::web_script),
    ("build", workload::builds_script),
];
/// Loads of `kloster-fig7.4`: each guest has another one.
const DIFFERENT: [Load; 7] = [
    ("database", workload::paced_transactions_script),
    ("web", workload::web_script),
    ("build", workload::builds_script),
    ("files", workload::files_script),
    ("compress", workload::compress_script),
    ("processes", workload::processes_script),
    ("rewrite", || workload::rewrite_script(1.0)),
];

/// A server of `kloster-s7.9`: services that are stopped because it does not need them, and its load.
struct Server {
    stops: &'static str,
    load: Option<Load>,
}

/// Servers of different roles. The last one is idle, like a host that people only log in to.
const SERVERS: [Server; 5] = [
    Server { stops: "mariadb", load: Some(("web", workload::web_script)) },
    Server { stops: "apache2", load: Some(("database", workload::paced_transactions_script)) },
    Server { stops: "mariadb apache2", load: Some(("files", workload::files_script)) },
    Server { stops: "mariadb apache2", load: Some(("build", workload::builds_script)) },
    Server { stops: "mariadb apache2", load: None },
];

/// Sizes of guests in `kloster-fig7.9`, in MiB, in the short form.
const SHORT_SIZES: [u64; 3] = [192, 320, 512];
/// Sizes of guests in `kloster-fig7.9`, in MiB, in the full form.
const FULL_SIZES: [u64; 5] = [192, 256, 320, 384, 512];
/// Number of guests in `kloster-fig7.9`.
const BUILDERS: usize = 4;
/// Pause of a guest between two parts of random builds, in seconds.
const BUILD_PAUSE: u64 = 2;
/// Time for which builds run in each size of guests: 30 s.
const RANDOM_BUILDS: Duration = Duration::from_secs(30);

/// Guests whose memory is merged, and merging has settled. They are dropped before their merger.
struct Settled {
    vms: Vms,
    merger: Merger,
    begin: Instant,
    timeline: Timeline,
    measured: Measured,
}

impl Settled {
    /// Restores guests, has each do `work`, if given, and merges until merging has settled.
    fn with(rig: &mut Rig, planned: &Planned, guests: usize, work: Option<Timed>) -> anyhow::Result<Self> {
        let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
        let vms = rig.vms(&alike(guests, rep_of(planned), D256), &mut merger)?;
        vms.tell(&vms.guests, SOURCES_SCRIPT)?;
        let mut measured = Measured::default();
        if let Some(work) = work {
            let done = vms.run(work, 0)?;
            measured.put(OPERATIONS, done.iter().map(|speed| speed.operations).sum());
            vms.settle()?;
        }
        let begin = Instant::now();
        let mut timeline = Timeline { name: "saved, without zeros".into(), unit: "MB".into(), ..Timeline::default() };
        merger.on()?;
        merger.settle(begin, &mut Timeline::default())?;
        measured.put(MERGED, merger.taken(&vms.pids())?.merged_pages as f64);
        timeline.points.push((begin.elapsed().as_secs_f64(), mb(Saved::of(&merger, &vms.pids())?.merged)));
        Ok(Self { vms, merger, begin, timeline, measured })
    }

    fn saved(&self) -> anyhow::Result<Saved> {
        Saved::of(&self.merger, &self.vms.pids())
    }

    /// Pages as a share of the guests' memory, in percent.
    fn percent(&self, pages: f64) -> f64 {
        mb(pages) * 1e6 * 100.0 / (self.vms.guests.len() as u64 * D256) as f64
    }

    /// Runs each guest's load for `time`, and longer if a guest has done no operation yet. Returns the share of the
    /// guests' memory that is saved meanwhile, in percent.
    fn under(&mut self, name: &str, load_of: impl Fn(usize) -> Option<Load>, time: Duration) -> anyhow::Result<f64> {
        self.timeline.events.push((self.begin.elapsed().as_secs_f64(), format!("{name} begins")));
        let mut busy: Vec<&Guest> = Vec::new();
        for (n, guest) in self.vms.guests.iter().enumerate() {
            if let Some((_, script)) = load_of(n) {
                self.vms.tell([guest], &script())?;
                busy.push(guest);
            }
        }
        let pids = self.vms.pids();
        let (since, mut saved, mut counts) = (Instant::now(), Vec::new(), Vec::new());
        let all_worked = wait(PATIENCE, || {
            pause(LOOK)?;
            let pages = Saved::of(&self.merger, &pids)?.merged;
            self.timeline.points.push((self.begin.elapsed().as_secs_f64(), mb(pages)));
            saved.push(pages);
            counts = if since.elapsed() < time { Vec::new() } else { self.vms.operations(busy.iter().copied())? };
            Ok(!counts.is_empty() && counts.iter().all(|n| *n > 0))
        })?;
        if !all_worked {
            bail!("a guest did no operation of its load ({name}) within {} s: {counts:?}", PATIENCE.as_secs());
        }
        self.vms.tell(&self.vms.guests, workload::STOP_SCRIPT)?;
        self.timeline.events.push((self.begin.elapsed().as_secs_f64(), format!("{name} ends")));
        // Only the second half counts: by then the load has filled the memory that it uses.
        let percent = self.percent(stats::mean(&saved[saved.len() / 2..]));
        self.measured.put_at("reclaimed_percent", name, percent);
        self.measured.put_at("operations_of", name, counts.iter().sum::<u64>() as f64);
        Ok(percent)
    }
}

/// The recipe of `kloster-fig7.6`.
pub fn by_load(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let full = planned.length == Length::Full;
    let (guests, time) = if full { (4, Duration::from_secs(15)) } else { (3, Duration::from_secs(8)) };
    let mut settled = Settled::with(rig, planned, guests, None)?;
    let idle = settled.percent(settled.saved()?.merged);
    settled.measured.put_at("reclaimed_percent", "idle", idle);
    // Each repetition has another order, because a load finds in memory what the one before it left there.
    let mut names = ["database", "web", "build", "mixed"];
    names.rotate_left(rep_of(planned) % 4);
    let (mut like, mut mixed) = (Vec::new(), 0.0);
    for name in names {
        let percent = settled.under(name, |n| in_guest(name, n), time)?;
        if name == "mixed" {
            mixed = percent
        } else {
            like.push(percent)
        }
        // A load that is told to stop finishes its pass first.
        settled.vms.settle()?;
    }
    settled.measured.put("like_less_mixed", stats::mean(&like) - mixed);
    settled.finish()
}

/// The load of guest number `n` in the load `name`. In `mixed`, each guest has another one, and the last of four none.
fn in_guest(name: &str, n: usize) -> Option<Load> {
    if name == "mixed" { LIKE.get(n % 4).copied() } else { LIKE.into_iter().find(|(load, _)| *load == name) }
}

/// The recipe of `kloster-fig7.4`.
pub fn all_different(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let time = Duration::from_secs(if planned.length == Length::Full { 60 } else { 20 });
    let mut settled = Settled::with(rig, planned, DIFFERENT.len() + 1, None)?;
    let idle = settled.percent(settled.saved()?.merged);
    settled.measured.put_at("reclaimed_percent", "idle", idle);
    let percent = settled.under("all different", |n| DIFFERENT.get(n).copied(), time)?;
    settled.measured.put("loaded_over_idle", percent / idle);
    settled.finish()
}

/// The recipe of `kloster-s7.9` (guests that compute, then servers of different roles), and after it `kloster-fig7.5`
/// (builds in a random order).
pub fn servers_then_builds(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let full = planned.length == Length::Full;
    let time = |short| Duration::from_secs(if full { 4 * short } else { short });
    let mut settled = Settled::with(rig, planned, SERVERS.len(), None)?;
    settled.under("computing", |_| Some(("computing", workload::spin_script)), time(6))?;
    for (guest, server) in settled.vms.guests.iter().zip(SERVERS) {
        settled.vms.tell([guest], &format!("systemctl stop {}", server.stops))?;
    }
    settled.vms.settle()?;
    settled.under("servers", |n| SERVERS[n].load, time(12))?;
    settled.vms.settle()?;
    settled.under("builds", |_| Some(("builds", workload::random_builds_script)), time(20))?;
    let saved = Places::of(&settled.vms.pids())?.saved_by_each();
    let of_guests: Vec<f64> = saved.into_iter().map(|pages| pages * PAGE_BYTES as f64 * 100.0 / D256 as f64).collect();
    settled.measured.put("guest_deviation", stats::deviation(&of_guests));
    settled.finish()
}

/// The recipe of `kloster-fig7.9`: builds in a random order, in guests of one size after the other.
pub fn by_size(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let sizes = if planned.length == Length::Full { &FULL_SIZES[..] } else { &SHORT_SIZES[..] };
    let (mut measured, mut seen, mut merged, mut operations) = (Measured::default(), Vec::new(), f64::MAX, 0.0);
    for size in sizes {
        let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
        let vms = rig.vms(&alike(BUILDERS, 0, size << 20), &mut merger)?;
        vms.tell(&vms.guests, SOURCES_SCRIPT)?;
        merger.on()?;
        vms.tell(&vms.guests, &workload::paused_random_builds_script(BUILD_PAUSE))?;
        let (since, mut pages) = (Instant::now(), Vec::new());
        while since.elapsed() < RANDOM_BUILDS {
            pause(LOOK)?;
            pages.push(Saved::of(&merger, &vms.pids())?.merged);
        }
        operations += vms.operations(&vms.guests)?.iter().sum::<u64>() as f64;
        // Only the second half counts: by then the builds have filled the memory that they use.
        let pages = stats::mean(&pages[pages.len() / 2..]);
        let percent = pages * PAGE_BYTES as f64 * 100.0 / (BUILDERS as u64 * (size << 20)) as f64;
        measured.put_at("reclaimed_mb", size, mb(pages));
        measured.put_at("reclaimed_percent", size, percent);
        merged = pages.min(merged);
        seen.push((mb(pages), percent));
    }
    let percents: Vec<f64> = seen.iter().map(|(_, percent)| *percent).collect();
    let mean = stats::mean(&percents);
    measured.put("largest_over_smallest", seen[seen.len() - 1].0 / seen[0].0);
    measured.put("off_mean", percents.iter().map(|percent| (percent / mean - 1.0).abs()).fold(0.0, f64::max));
    measured.put(MERGED, merged);
    measured.put(OPERATIONS, operations);
    Ok(measured)
}

/// The recipe of `kloster-fig7.2`.
pub fn after_build(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let guests = if planned.length == Length::Full { 8 } else { 4 };
    let mut settled = Settled::with(rig, planned, guests, Some(Timed::Build(BUILD_STEPS)))?;
    let saved = settled.saved()?;
    let percent = settled.percent(saved.all());
    settled.measured.put("reclaimed", percent / 100.0);
    settled.measured.put("zero_share", saved.zeros / saved.all().max(1.0));
    for (part, pages) in [("zeros", saved.zeros), ("others", saved.merged), ("together", saved.all())] {
        let percent = settled.percent(pages);
        settled.measured.put_at("reclaimed_percent", part, percent);
    }
    Ok(settled.measured)
}

impl Settled {
    /// The result of the turn, with the sum of all operations.
    fn finish(mut self) -> anyhow::Result<Measured> {
        let of_loads = self.measured.samples.iter().filter(|s| s.metric == "operations_of");
        let operations = of_loads.map(|s| s.value).sum();
        self.measured.put(OPERATIONS, operations);
        self.measured.timelines.push(self.timeline);
        Ok(self.measured)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixed_guests_have_different_loads_and_like_ones_the_same() {
        let names = |load| (0..4).map(|n| in_guest(load, n).map(|(name, _)| name)).collect::<Vec<_>>();
        assert_eq!(names("mixed"), [Some("database"), Some("web"), Some("build"), None]);
        assert_eq!(names("web"), [Some("web"); 4]);
    }
}
