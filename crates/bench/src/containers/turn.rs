//! One side's turn: it merges until merging is stable, then the containers are idle, then they are put under load.

use super::Args;
use super::scene::{Rates, Scene};
use crate::guardian::Guardian;
use crate::ksm::curve::Curve;
use crate::ksm::folding::{Folding, GROUP};
use crate::ksm::ksmd::Ksmd;
use crate::ksm::merger::Merger;
use crate::serving::pagefold;
use anyhow::{Context, ensure};
use cli::say;
use host::ThreadCpu;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::{Duration, Instant};

/// Number of points of a curve that are kept in the result.
const POINTS: usize = 50;
/// Longest time for a process to be detached, in seconds.
const DETACH_S: &str = "120";

/// The result of a turn.
#[derive(Serialize)]
pub struct Turn {
    /// Processes whose memory could be merged.
    pub processes: usize,
    /// Pages saved when merging was stable, by the merger's own account.
    pub merged_pages: u64,
    /// Processor time until then.
    pub cpu_s: f64,
    /// Time until then.
    pub wall_s: f64,
    /// Processor time a second while the containers are idle.
    pub idle_cpu_s_per_s: f64,
    /// Mean of the pages saved while the containers were under load, one look a second.
    pub merged_under_load: f64,
    /// Processor time meanwhile.
    pub load_cpu_s: f64,
    /// Requests answered.
    pub rates: Rates,
    /// The same over those while nobody merges, just before.
    pub over_plain: OverPlain,
    /// Until 99% was merged of what ksmd has merged in the end; absent if that was not reached.
    pub to_99: Option<Cost>,
    /// Merged pages over time, until merging was stable.
    pub curve: Curve,
}

/// Rates over those while nobody merges.
#[derive(Clone, Copy, Default, Serialize)]
pub struct OverPlain {
    /// Of transactions of sysbench.
    pub mariadb: f64,
    /// Of requests of ab.
    pub apache: f64,
}

/// Processor time and time.
#[derive(Clone, Copy, Serialize)]
pub struct Cost {
    /// Processor time, in seconds.
    pub cpu_s: f64,
    /// Time, in seconds.
    pub wall_s: f64,
}

/// A process that `pagefold attach --json` names.
#[derive(Deserialize)]
struct Attached {
    pid: u32,
}

impl Turn {
    /// Measures ksmd. Afterwards all that it has merged is unmerged.
    pub fn of_ksmd(scene: &Scene, args: &Args) -> anyhow::Result<Self> {
        let mut ksmd = Ksmd::new(false)?;
        let pids = scene.pids();
        // LXC's monitors are opted in, too.
        ksmd.meet(&pids.iter().chain(&scene.monitors()).map(|pid| (*pid, 0)).collect::<Vec<_>>())?;
        let turn = Self::take(scene, args, &mut ksmd, (pids.len(), &|| Ok(0.0)));
        ksmd.off()?;
        turn
    }

    /// Measures Pagefold, by a service of its own. Afterwards all processes are detached.
    pub fn of_pagefold(scene: &Scene, args: &Args, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Self> {
        let mut folding = Folding::start(dir, true, guardian)?;
        let service = folding.dir().to_owned();
        let mut pids = Vec::new();
        for name in scene.names() {
            let cgroup = format!("/lxc.payload.{name}");
            let words =
                ["attach", "--group", GROUP, "--all-anonymous", "--at-least", "64K", "--json", "--cgroup", &cgroup];
            let said = pagefold(&words, &service)?;
            let attached: Vec<Attached> =
                serde_json::from_slice(&said).context("pagefold attach says something else")?;
            pids.extend(attached.into_iter().map(|attached| attached.pid));
        }
        folding.meet(&pids.iter().map(|pid| (*pid, 0)).collect::<Vec<_>>())?;
        // The processes that stay beside attached programs use processor time for Pagefold, too.
        let helpers = folding.helpers()?;
        let turn = Self::take(scene, args, &mut folding, (pids.len(), &|| cpu_of(&helpers)));
        // Processes that have ended since cannot be detached.
        let left: Vec<String> = folding.helped()?.iter().map(u32::to_string).collect();
        let mut words = vec!["detach", "--wait", DETACH_S];
        words.extend(left.iter().map(String::as_str));
        pagefold(&words, &service)?;
        folding.off()?;
        turn
    }

    /// Fills in the time until this number of pages was merged, and the rates over those while nobody merges.
    pub fn judge(&mut self, reached: u64, plain: Rates) {
        let point = self.curve.reached(reached);
        self.to_99 = point.map(|point| Cost { cpu_s: point.so_far.cpu_s, wall_s: point.seconds });
        self.over_plain = OverPlain {
            mariadb: self.rates.mariadb_per_s / plain.mariadb_per_s,
            apache: self.rates.apache_per_s / plain.apache_per_s,
        };
        self.curve = self.curve.thinned(POINTS);
    }

    fn take(
        scene: &Scene,
        args: &Args,
        merger: &mut dyn Merger,
        (processes, beside): (usize, &dyn Fn() -> anyhow::Result<f64>),
    ) -> anyhow::Result<Self> {
        let cpu = |merger: &dyn Merger| Ok::<_, anyhow::Error>(merger.cpu_s()? + beside()?);
        scene.settle()?;
        let (before, begin) = (cpu(merger)?, Instant::now());
        merger.on()?;
        let curve = Curve::until_stable(begin, before, u64::MAX, crate::ksm::curve::SETTLE_S, || {
            let progress = merger.progress()?;
            Ok(crate::ksm::curve::Progress { cpu_s: progress.cpu_s + beside()?, ..progress })
        })?;
        let end = curve.end();
        say!("pagefold: {} pages are merged", end.so_far.merged_pages);
        std::thread::sleep(Duration::from_secs(args.rest));
        let idle_before = cpu(merger)?;
        std::thread::sleep(Duration::from_secs(args.steady));
        let load_before = cpu(merger)?;
        let mut samples = Vec::new();
        let rates = scene.load(args.load, || {
            samples.push(merger.progress()?.merged_pages);
            Ok(())
        })?;
        ensure!(!samples.is_empty(), "the load was over at once");
        Ok(Self {
            processes,
            merged_pages: end.so_far.merged_pages,
            cpu_s: end.so_far.cpu_s,
            wall_s: end.seconds,
            idle_cpu_s_per_s: (load_before - idle_before) / args.steady as f64,
            merged_under_load: samples.iter().sum::<u64>() as f64 / samples.len() as f64,
            load_cpu_s: cpu(merger)? - load_before,
            rates,
            over_plain: OverPlain::default(),
            to_99: None,
            curve,
        })
    }
}

/// Sum of the processes' processor time. A process that has ended counts 0.
fn cpu_of(pids: &[u32]) -> anyhow::Result<f64> {
    let of = |pid: &u32| ThreadCpu::of_process(*pid).unwrap_or_default();
    Ok(pids.iter().flat_map(of).map(|thread| thread.used.as_secs_f64()).sum())
}
