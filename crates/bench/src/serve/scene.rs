//! A service with many members, and what the bench reads of it.

use super::Args;
use crate::serving::{Serving, program};
use crate::synthetic;
use anyhow::{Context, bail};
use api::change::Change;
use api::client::Service;
use api::control::Fold;
use api::place::Place;
use host::{ProcessStat, Usage};
use page::Savings;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time limit for members to be folded, and for all to be private again: 240 s.
const PATIENCE: Duration = Duration::from_secs(240);
/// Time without a change after which folding counts as settled: 25 s. Agents scan their members every 10 s at least,
/// and fold pages that two scans find unwritten.
const NO_CHANGE: Duration = Duration::from_secs(25);
/// Time without a change after which the pool is taken to keep the rest of its memory: 40 s. It gives back segments
/// that were idle for 30 s.
const POOL_RESTS: Duration = Duration::from_secs(40);
/// Interval between two readings while something is waited for: 500 ms.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Clock ticks of `/proc/PID/stat` in a second, which the kernel's interface fixes on x86-64.
const TICKS_A_SECOND: f64 = 100.0;

/// The name of a group.
pub fn group(number: u32) -> String {
    format!("bench-{number}")
}

/// Free memory of the host. `MemFree` does not count free pages on the processors' own lists, which may be more than a
/// gigabyte: they are added.
fn free_bytes() -> anyhow::Result<i64> {
    let zones = fs::read_to_string("/proc/zoneinfo").context("cannot read /proc/zoneinfo")?;
    let count = |line: &str| line.trim().strip_prefix("count:")?.trim().parse::<u64>().ok();
    let at_hand: u64 = zones.lines().filter_map(count).sum();
    Ok((host::free_bytes()? + page::pages_to_bytes(at_hand)).cast_signed())
}

/// Processes of the members. Each ends when its standard input closes: when this is dropped, or the bench ends.
pub struct Members(Vec<Child>);

impl Members {
    /// Starts the members, the same number in each group, and waits until each holds its pages.
    ///
    /// # Errors
    /// A member cannot be started.
    pub fn start(args: &Args, service: &Path) -> anyhow::Result<Self> {
        let program = program()?;
        let mut members = Self(Vec::new());
        for number in 0..args.members {
            let of = number % args.groups;
            let (group, name, pages) = (group(of), format!("m{number}"), args.pages.to_string());
            let mut command = Command::new(cli::pagefold());
            command.args(["run", "--group", &group, "--name", &name, "--all-anonymous", "--service"]).arg(service);
            command.arg("--").arg(&program);
            command.args(["bench-guest", "hold", "--number", &of.to_string(), "--pages", &pages]);
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            members.0.push(command.spawn().context("cannot start a member")?);
        }
        for member in &mut members.0 {
            let mut line = String::new();
            let out = member.stdout.take().context("a member without output")?;
            BufReader::new(out).read_line(&mut line).context("cannot hear from a member")?;
            if line != synthetic::READY {
                bail!("a member of the bench ended before its pages were there");
            }
        }
        Ok(members)
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        // All are told to end before the first is waited for, so that they end at the same time.
        self.0.iter_mut().for_each(|member| drop(member.stdin.take()));
        self.0.iter_mut().for_each(|member| _ = member.wait());
    }
}

/// A service with members.
pub struct Scene<'a> {
    /// Number of its groups.
    pub groups: u32,
    /// The service.
    pub serving: &'a Serving,
}

impl Scene<'_> {
    /// The socket of the service's web side.
    pub fn web_side(&self) -> PathBuf {
        self.serving.dir().join("api.sock")
    }

    /// The sum of the savings that the service shows for all groups.
    pub fn savings(&self) -> anyhow::Result<Savings> {
        let mut sum = Savings::default();
        for n in 0..self.groups {
            sum += self.serving.show(&group(n))?.report.savings;
        }
        Ok(sum)
    }

    /// Waits until members are folded and nothing changes any more. Returns the most threads that the service's
    /// processes had meanwhile.
    pub fn wait_until_nothing_changes(&self) -> anyhow::Result<usize> {
        let (begin, mut since, mut last) = (Instant::now(), Instant::now(), Savings::default());
        let mut most_tasks = 0;
        loop {
            most_tasks = most_tasks.max(self.tasks());
            let savings = self.savings()?;
            if savings != last {
                (last, since) = (savings, Instant::now());
            }
            if last.gross_bytes() > 0 && since.elapsed() >= NO_CHANGE {
                return Ok(most_tasks);
            }
            if begin.elapsed() > PATIENCE {
                bail!("savings still changed after {} s: {last:?}", PATIENCE.as_secs());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// The supervisor and its children: workers, the prover and the web side.
    fn processes(&self) -> Vec<u32> {
        let supervisor = self.serving.pid();
        let children = fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).unwrap_or_default();
        children.split_whitespace().filter_map(|pid| pid.parse().ok()).chain([supervisor]).collect()
    }

    /// Number of threads of the service's processes.
    fn tasks(&self) -> usize {
        let of = |pid: u32| fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
        self.processes().into_iter().map(of).sum()
    }

    /// Processor time of the service's processes, and of the members' agents, over `time`: in percent of a processor.
    pub fn idle(&self, time: Duration) -> anyhow::Result<[f64; 2]> {
        let used = || {
            let ticks = |pid: &u32| ProcessStat::read(*pid).map_or(0, |stat| stat.cpu_ticks);
            self.processes().iter().map(ticks).sum::<u64>() as f64 / TICKS_A_SECOND
        };
        let agents = || {
            let of_group = |n| anyhow::Ok(self.serving.show(&group(n))?.report.bill.agent_cpu_s);
            (0..self.groups).map(of_group).sum::<anyhow::Result<f64>>()
        };
        let (of_agents, began, of_service) = (agents()?, Instant::now(), used());
        std::thread::sleep(time);
        let (of_service, seconds) = (used() - of_service, began.elapsed().as_secs_f64());
        let of_agents = agents()? - of_agents;
        Ok([of_service, of_agents].map(|cpu_s| 100.0 * cpu_s / seconds))
    }

    /// Private memory of the service's processes without the workers' indexes, and the memory of these indexes, in MiB.
    pub fn memory(&self) -> anyhow::Result<(f64, f64)> {
        let mut index = 0;
        for n in 0..self.groups {
            index += self.serving.show(&group(n))?.report.index_bytes;
        }
        let of = |pid: &u32| Usage::of(*pid).map_or(0, |usage| usage.anonymous_bytes);
        let all: u64 = self.processes().iter().map(of).sum();
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        Ok((mib(all.saturating_sub(index)), mib(index)))
    }

    /// Savings of all groups by page frames. Other services of this host have pools, too, which the audit finds.
    pub fn audit(&self) -> anyhow::Result<i64> {
        let mut command = Command::new(cli::pagefold());
        command.args(["audit", "--json", "--service"]).arg(self.serving.dir());
        let output = command.stderr(Stdio::inherit()).output().context("cannot run pagefold audit")?;
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).context("pagefold audit says nothing")?;
        let of_groups = found["by_group"].as_array().context("pagefold audit lists no groups")?;
        (0..self.groups)
            .map(|n| {
                let of_group = of_groups.iter().find(|of| of["name"] == group(n));
                let saved = of_group.and_then(|of| of["saved_bytes"].as_i64());
                saved.with_context(|| format!("pagefold audit tells no savings of {}", group(n)))
            })
            .sum()
    }

    /// Unfolds everything. Returns the savings that the service shows then, and by how much the host's free memory
    /// fell.
    pub fn unfold(&self) -> anyhow::Result<(Savings, i64)> {
        let before = free_bytes()?;
        for n in 0..self.groups {
            let change = Change { fold: Some(Fold::Unfold), ..Change::default() };
            Service::connect_soon(&Place::at(self.serving.dir()))?.set(&group(n), change)?;
        }
        let (begin, mut pool) = (Instant::now(), (u64::MAX, Instant::now()));
        loop {
            let savings = self.savings()?;
            if savings.pool_bytes != pool.0 {
                pool = (savings.pool_bytes, Instant::now());
            }
            // Memory that the pool does not give back is missing both in the savings and in the free memory.
            let pool_rests = pool.0 == 0 || pool.1.elapsed() >= POOL_RESTS;
            if savings.gross_bytes() == 0 && pool_rests {
                return Ok((savings, before - free_bytes()?));
            }
            if begin.elapsed() > PATIENCE {
                bail!("everything was to be unfolded, and was not in {} s: {savings:?}", PATIENCE.as_secs());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}
