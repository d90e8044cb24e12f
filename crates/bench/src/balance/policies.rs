//! Policies under the same pressure, in turns, on the same six guests.
//!
//! ```text
//!   three idle guests:  much memory that was used and is free again
//!   three busy guests:  page cache of a disk that all have, read again and again; little is free
//!   all are folded: the page cache of the busy ones takes frames once
//!
//!   for each policy: all sizes as they were, all memory as it was -> memory of the host is taken, step by step -> what is left
//! ```
//!
//! Our policies run as `pagefold balance apply --every`. Baselines set sizes as they wish, which is how their programs do it.
//! Each program takes its rounds as often as its authors have it.
//! All are to have a fifth of the host available. MOM and Proxmox VE have that in their rules. The others have a floor of 16%,
//! and withdraw until 5/4 of it are available.

use super::applying::Applying;
use super::load::{Load, Suffered};
use super::rig::{self, Baseline, PATIENCE, Rig};
use super::small_host::SmallHost;
use crate::guardian::Guardian;
use crate::serving::Serving;
use anyhow::Context;
use cli::say;
use serde::Serialize;
use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

/// RAM of an idle and of a busy guest: 512 and 256 MiB. Idle ones alone have nearly all that is wanted.
const RAM: [u64; 2] = [512 << 20, 256 << 20];
/// Guaranteed size of each guest, which is the least one for baselines: 128 MiB.
const KEPT: u64 = 128 << 20;
/// Guests of each kind.
const OF_A_KIND: usize = 3;
/// Part of the host's memory that is available before the pressure, in percent: 22%.
const BEFORE: u64 = 22;
/// Part of the host's memory that is available after the first step, in percent: 2%.
const FIRST: u64 = 2;
/// Part of the host's memory that each further step takes, in percent: 2%.
const STEP: u64 = 2;
/// Number of further steps.
const STEPS: u32 = 8;
/// Time between two steps, and between two rounds of our policies and of squeezed: 5 s.
const EVERY: Duration = Duration::from_secs(5);
/// Time between two rounds of MOM and of Proxmox VE: 10 s.
const SLOW: Duration = Duration::from_secs(10);
/// Time under pressure: 80 s.
const PRESSED: Duration = Duration::from_secs(80);
/// Part of the first savings that folding must have reached before a policy's turn, in percent: 90%.
const FOLDED: u64 = 90;
/// Least savings of folding before the first turn: twice the disk.
const LEAST_FOLDED: u64 = 2 * super::load::DISK;
/// Time without a change of the savings after which folding has come to rest: 10 s.
const REST: Duration = Duration::from_secs(10);
/// Floor of the policies that have one, in percent: 16%.
const FLOOR: u64 = 16;

/// The figures of one policy.
#[derive(Debug, Serialize)]
pub struct Figures {
    /// Its name.
    name: &'static str,
    /// Frames of the host that guests gave up.
    freed_bytes: u64,
    /// Net savings of folding that are gone.
    sharing_lost_bytes: u64,
    /// Processes that guests killed for want of memory.
    guest_oom_kills: u64,
    /// Allocations in guests that had to reclaim memory first.
    guest_stalls: u64,
    /// Rounds of the policy.
    rounds: usize,
    /// Least memory that was available on the host.
    least_available_bytes: u64,
}

/// The result as text.
pub fn text(policies: &[Figures]) -> String {
    let mut text = String::new();
    for policy in policies {
        let _ = writeln!(
            text,
            "{:<12} {:>4} MiB freed, {:>4} MiB of sharing lost, {:>5} stalls and {} kills in guests, {:>4} MiB available at least, \
             {} rounds",
            policy.name,
            policy.freed_bytes >> 20,
            policy.sharing_lost_bytes >> 20,
            policy.guest_stalls,
            policy.guest_oom_kills,
            policy.least_available_bytes >> 20,
            policy.rounds
        );
    }
    text
}

/// The guests, on their host.
struct Bench {
    host: SmallHost,
    rig: Rig,
    serving: Serving,
    load: Load,
    /// Memory of the host.
    total_bytes: u64,
}

/// Compares these policies.
///
/// # Errors
/// Guests or the service do not start, or nothing is folded.
pub fn run(dir: &Path, names: &[&'static str], guardian: &mut Guardian) -> anyhow::Result<Vec<Figures>> {
    let host = SmallHost::make(guardian)?;
    let config = format!("[[group]]\nname = '{}'\n", rig::group());
    let disk = Load::make_disk(dir)?;
    let (serving, rig, guests) = host.inside(|| {
        let serving = Serving::start(dir, &config, guardian)?;
        let mut rig = Rig::folded(dir, &serving, (RAM[0], KEPT), guardian)?;
        let mut guests = rig.up(OF_A_KIND, &Load::disk_of(&disk))?;
        rig.set_ram(RAM[1]);
        guests.extend(rig.up(OF_A_KIND, &Load::disk_of(&disk))?);
        Ok((serving, rig, guests))
    })?;
    let load = Load::start(guests, OF_A_KIND, guardian)?;
    let mut bench = Bench { host, rig, serving, load, total_bytes: 0 };
    let saved = bench.wait_until_folded(LEAST_FOLDED)?;
    say!("pagefold: policies: six guests run, and folding saves {} MiB", saved >> 20);
    bench.cut()?;
    let mut figures = Vec::new();
    for name in names {
        bench.put_back(saved)?;
        say!("pagefold: policies: {name}");
        figures.push(bench.turn(name, guardian)?);
    }
    bench.rig.down()?;
    bench.serving.end()?;
    Ok(figures)
}

impl Bench {
    fn saved(&self) -> anyhow::Result<i64> {
        Ok(self.serving.show(&rig::group())?.report.savings.saved_bytes())
    }

    /// Waits until folding has saved so much, and saves no more. Returns how much it saves.
    fn wait_until_folded(&self, least: u64) -> anyhow::Result<u64> {
        let end = Instant::now() + PATIENCE;
        let (mut most, mut since) = (0, Instant::now());
        loop {
            let saved = u64::try_from(self.saved()?).unwrap_or(0);
            if saved > most + most / 50 {
                (most, since) = (saved, Instant::now());
            }
            if most > 0 && saved >= least && since.elapsed() > REST {
                return Ok(saved);
            }
            anyhow::ensure!(Instant::now() < end, "folding saves {} MiB only", saved >> 20);
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    /// Cuts the host such that its guests leave a part of it.
    fn cut(&mut self) -> anyhow::Result<()> {
        // `available` leaves a twentieth out.
        self.total_bytes = self.host.used_bytes()? * 100 / (95 - BEFORE);
        self.host.limit(self.total_bytes)
    }

    /// All sizes and all memory as they were before the first turn.
    fn put_back(&mut self, saved: u64) -> anyhow::Result<()> {
        self.load.give_way()?;
        self.load.set_sizes()?;
        self.load.fill()?;
        self.wait_until_folded(saved / 100 * FOLDED).map(drop)
    }

    /// One policy under pressure.
    fn turn(&mut self, name: &'static str, guardian: &mut Guardian) -> anyhow::Result<Figures> {
        let (suffered, saved, available) = (self.load.suffered()?, self.saved()?, self.host.available_bytes()?);
        let mut least = u64::MAX;
        let mut policy = self.policy(name, guardian)?;
        let (began, mut step, mut next, mut round) = (Instant::now(), 0, Instant::now(), Instant::now());
        self.press(available.saturating_sub(self.total_bytes / 100 * FIRST))?;
        while began.elapsed() < PRESSED {
            if Instant::now() >= next {
                next += EVERY;
                if (1..=STEPS).contains(&step) {
                    self.press(self.total_bytes / 100 * STEP)?;
                }
                step += 1;
            }
            if Instant::now() >= round {
                round += if matches!(name, "mom" | "proxmox") { SLOW } else { EVERY };
                policy.round()?;
            }
            least = least.min(self.host.available_bytes()?);
            std::thread::sleep(Duration::from_millis(100));
        }
        let rounds = policy.end()?;
        let freed = (self.host.available_bytes()? + self.load.taken_bytes()).saturating_sub(available);
        let lost = u64::try_from(saved - self.saved()?).unwrap_or(0);
        let Suffered { stalls, kills } = self.load.suffered()?.since(suffered);
        Ok(Figures {
            name,
            freed_bytes: freed,
            sharing_lost_bytes: lost,
            guest_oom_kills: kills,
            guest_stalls: stalls,
            rounds,
            least_available_bytes: least,
        })
    }

    /// Takes so much memory of the host.
    fn press(&mut self, bytes: u64) -> anyhow::Result<()> {
        let load = &mut self.load;
        self.host.inside(|| load.take(bytes))
    }

    fn policy(&self, name: &'static str, guardian: &mut Guardian) -> anyhow::Result<Running> {
        let floor = self.total_bytes / 100 * FLOOR;
        Ok(match balance::baseline::named(name) {
            Some(policy) => {
                Running::Baseline(Box::new(self.rig.baseline(policy, self.load.pids(), self.host.group(), floor)?), 0)
            }
            None => {
                let every = EVERY.as_secs();
                Running::Ours(self.rig.apply(name, every, self.host.group(), floor, guardian)?)
            }
        })
    }
}

/// A policy at work.
enum Running {
    /// A process that goes round by itself.
    Ours(Applying),
    /// Rounds of our own, and their number.
    Baseline(Box<Baseline>, usize),
}

impl Running {
    fn round(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Ours(applying) => applying.check(),
            Self::Baseline(baseline, rounds) => {
                *rounds += 1;
                baseline.round().context("a round of a baseline")
            }
        }
    }

    fn end(mut self) -> anyhow::Result<usize> {
        match &mut self {
            Self::Ours(applying) => applying.check().map(|()| applying.rounds()),
            Self::Baseline(_, rounds) => Ok(*rounds),
        }
    }
}
