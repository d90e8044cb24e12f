//! Compares policies that decide which guests give memory up, under the same pressure, one after the other, each on six
//! guests of its own.
//!
//! ```text
//!   idle guests:  much memory that was used and is free again
//!   busy guests:  page cache of a disk that all have, read again and again; little is free
//!   all are folded: the page cache of the busy ones takes frames once
//!
//!   for each policy: guests anew, until folding comes to rest -> others want a part of the host -> what is left
//! ```
//!
//! Guests run busybox, or Debian restored from saved states. Policies of Pagefold run as `pagefold balance apply
//! --every`. Rules of other programs set sizes without any rule of Pagefold's, and make their rounds as often as their
//! authors have it.
//!
//! Other programs of the host take the memory that they want as soon as it is there, and leave 1%. Each policy is to
//! keep a fifth of the host's memory available: MOM and Proxmox VE have that in their rules, and the others have a
//! floor of 16%, and withdraw until 5/4 of the floor are available.

use super::applying::Applying;
use super::load::{Load, Suffered, System};
use super::rig::{self, Baseline, Rig};
use super::small_host::SmallHost;
use crate::guardian::Guardian;
use crate::serving::Serving;
use anyhow::Context;
use cli::say;
use lab::Image;
use serde::Serialize;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Part of the host's memory that is available before the pressure, in percent: 22%.
const BEFORE: u64 = 22;
/// Part of the host's memory that others want, in percent: 20%. With 16%, MOM's rules lost 2 MiB of sharing, too little
/// to compare with. With 28%, guests and the group's worker were killed under them, and with 20% in two of three runs.
const WANTED: u64 = 20;
/// Part of the host's memory that others leave, in percent: 1%.
const LEFT: u64 = 1;
/// Most memory that other programs take of the host at a time: 16 MiB.
const GULP: u64 = 16 << 20;
/// Time between two such takings: 100 ms.
const LOOK: Duration = Duration::from_millis(100);
/// Time between two rounds of our policies and of squeezed: 5 s.
const EVERY: Duration = Duration::from_secs(5);
/// Time between two rounds of MOM's and Proxmox VE's rules: 10 s.
const SLOW: Duration = Duration::from_secs(10);
/// Time for which a policy is put under pressure: 90 s.
const PRESSED: Duration = Duration::from_secs(90);
/// Time without a change of the savings after which folding counts as settled: 30 s. Folding that goes on under
/// pressure would hide a loss of savings.
const REST: Duration = Duration::from_secs(30);
/// Part of the savings below which growth counts as none: 1/100.
const NO_CHANGE: u64 = 100;
/// Time between two readings of the savings under pressure: 2 s.
const SAVINGS_EVERY: Duration = Duration::from_secs(2);
/// Time limit for folding to settle: 10 min. Where processors are slow, 5 min are too few.
const RESTS_WITHIN: Duration = Duration::from_secs(600);
/// Part of the host's memory that is never lent, for policies that have such a floor, in percent: 16%.
const FLOOR: u64 = 16;

/// Numbers and sizes of the guests.
#[derive(Clone, Copy)]
struct Sizes {
    /// Idle and busy guests.
    guests: [usize; 2],
    /// RAM of an idle and of a busy guest.
    ram_bytes: [u64; 2],
    /// Guaranteed size of each guest, which is the least one for baselines.
    kept_bytes: u64,
    /// Least savings of folding before a policy is tried: most of what guests have in common.
    folded_bytes: u64,
}

impl Sizes {
    /// Sizes with which the idle guests alone can give up all memory that is wanted.
    const fn of(system: System) -> Self {
        match system {
            System::Tiny => {
                let (ram_bytes, folded_bytes) = ([640 << 20, 240 << 20], super::load::DISK / 2 * 3);
                Self { guests: [3, 3], ram_bytes, kept_bytes: 128 << 20, folded_bytes }
            }
            System::Debian => {
                let (ram_bytes, folded_bytes) = ([512 << 20, 512 << 20], 1000 << 20);
                Self { guests: [3, 3], ram_bytes, kept_bytes: 208 << 20, folded_bytes }
            }
        }
    }
}

/// The figures of one policy.
#[derive(Debug, Serialize)]
pub struct Figures {
    /// Its name.
    name: &'static str,
    /// Frames of the host that guests gave up.
    freed_bytes: u64,
    /// Net savings of folding that were gone, at the worst moment. Guests that read again what they lost have it folded again.
    sharing_lost_bytes: u64,
    /// Difference between those savings and what page frames show, before the pressure or at its end, whichever is more.
    account_off_bytes: u64,
    /// Processes that guests killed for want of memory.
    guest_oom_kills: u64,
    /// Allocations in guests that had to reclaim memory first.
    guest_stalls: u64,
    /// Rounds of the policy.
    rounds: usize,
    /// Least memory that was available on the host.
    least_available_bytes: u64,
    /// Seconds until others had the memory that they wanted, of 90 at most.
    waited_s: f64,
    /// Processes of the host that were killed for want of memory. `freed_bytes` has the memory of killed guests, too. Their stalls are not known.
    kills: u64,
}

/// The result as text.
pub fn text(policies: &[Figures]) -> String {
    policies.iter().map(|policy| policy.line() + "\n").collect()
}

impl Figures {
    fn line(&self) -> String {
        format!(
            "{:<12} {:>4} MiB freed, {:>4} MiB of sharing lost (account {} MiB off page frames), {:>5} stalls and {} kills in guests, \
             {:>4} MiB available at least, {} rounds, others waited {:.0} s, {} processes of the host killed",
            self.name,
            self.freed_bytes >> 20,
            self.sharing_lost_bytes >> 20,
            self.account_off_bytes >> 20,
            self.guest_stalls,
            self.guest_oom_kills,
            self.least_available_bytes >> 20,
            self.rounds,
            self.waited_s,
            self.kills
        )
    }
}

/// Six guests, on a host of their own, for one policy.
struct Bench {
    host: SmallHost,
    rig: Rig,
    serving: Serving,
    load: Load,
    /// Memory limit of the control group that stands for the host.
    total_bytes: u64,
}

/// Compares these policies. If one of them cannot be tried, those after it are not tried either, and the figures of
/// those before it are returned.
///
/// # Errors
/// The first policy cannot be tried.
pub fn run(
    dir: &Path,
    system: System,
    names: &[&'static str],
    guardian: &mut Guardian,
) -> anyhow::Result<Vec<Figures>> {
    let mut figures = Vec::new();
    for name in names {
        let turn = Bench::start(dir, system, name, guardian).and_then(|mut bench| {
            let turn = bench.turn(name, guardian).with_context(|| bench.how_it_went(name))?;
            bench.end().map(|()| turn)
        });
        match turn {
            Ok(turn) => {
                say!("pagefold: policies: {}", turn.line());
                figures.push(turn);
            }
            Err(e) if figures.is_empty() => return Err(e),
            Err(e) => {
                say!("pagefold: policies: {name} could not be tried: {e:#}");
                break;
            }
        }
    }
    Ok(figures)
}

impl Bench {
    /// Starts the guests and their load, waits until folding is settled, and limits the host's memory so that they
    /// nearly fill it.
    fn start(dir: &Path, system: System, name: &str, guardian: &mut Guardian) -> anyhow::Result<Self> {
        let dir = &dir.join(name);
        DirBuilder::new().mode(0o711).create(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let host = SmallHost::make(name, guardian)?;
        let config = format!("[[group]]\nname = '{}'\n", rig::group());
        let disk = if system == System::Tiny { Some(Load::make_disk(dir)?) } else { None };
        let disk = disk.as_deref().map(Load::disk_of);
        let arguments = disk.as_ref().map_or(&[][..], |words| &words[..]);
        let Sizes { guests: numbers, ram_bytes: [idle, busy], kept_bytes, folded_bytes } = Sizes::of(system);
        let (serving, rig, guests) = host.inside(|| {
            let serving = Serving::start(dir, &config, guardian)?;
            let mut rig = Rig::folded(dir, &serving, (idle, kept_bytes), guardian)?;
            rig.set_image(if system == System::Debian { Image::Debian } else { Image::Tiny });
            let mut guests = rig.up(numbers[0], arguments)?;
            rig.set_ram(busy);
            guests.extend(rig.up(numbers[1], arguments)?);
            Ok((serving, rig, guests))
        })?;
        let load = Load::start((system, guests), numbers[0], name, guardian)?;
        let mut bench = Self { host, rig, serving, load, total_bytes: 0 };
        let saved = bench.wait_until_folded(folded_bytes)?;
        say!("pagefold: policies: {name}: six guests run, and folding saves {} MiB", saved >> 20);
        bench.cut()?;
        Ok(bench)
    }

    /// Ends the guests and the service, and frees the memory of the host that was taken.
    fn end(mut self) -> anyhow::Result<()> {
        self.load.give_way()?;
        self.rig.down()?;
        self.serving.end()
    }

    fn saved(&self) -> anyhow::Result<i64> {
        Ok(self.serving.show(&rig::group())?.report.savings.saved_bytes())
    }

    /// Difference between the group's savings by the service's account and by an audit of page frames.
    fn account_off(&self) -> anyhow::Result<u64> {
        let found = self.serving.audit(&rig::group())?;
        Ok(found.saved_bytes.abs_diff(found.engine_saved_bytes.unwrap_or_default()))
    }

    /// Waits until folding saves at least this many bytes and has settled. Returns how many it saves.
    fn wait_until_folded(&self, least: u64) -> anyhow::Result<u64> {
        let end = Instant::now() + RESTS_WITHIN;
        let (mut most, mut since) = (0, Instant::now());
        loop {
            let saved = u64::try_from(self.saved()?).unwrap_or(0);
            if saved > most + most / NO_CHANGE {
                (most, since) = (saved, Instant::now());
            }
            if most > 0 && saved >= least && since.elapsed() > REST {
                return Ok(saved);
            }
            anyhow::ensure!(Instant::now() < end, "folding saves {} MiB only", saved >> 20);
            std::thread::sleep(Duration::from_millis(500));
        }
    }

    /// Limits the memory of the control group so that `BEFORE` percent of it are available.
    fn cut(&mut self) -> anyhow::Result<()> {
        // `available_bytes` leaves a twentieth of the limit out, and counts idle page cache as available.
        let limit = host::ram_bytes() / 2;
        let needed = (limit - limit / 20).saturating_sub(self.host.available_bytes()?);
        self.total_bytes = needed * 100 / (95 - BEFORE);
        self.host.limit(self.total_bytes)
    }

    /// Puts one policy under pressure: other programs take memory of the host, and the policy's rounds go on.
    fn turn(&mut self, name: &'static str, guardian: &mut Guardian) -> anyhow::Result<Figures> {
        let (suffered, saved, available) = (self.load.suffered()?, self.saved()?, self.host.available_bytes()?);
        let (killed, mut least, mut least_saved) = (self.host.kills(), u64::MAX, saved);
        let account_off = self.account_off()?;
        let mut policy = self.policy(name, guardian)?;
        let (wanted, left) = (self.total_bytes / 100 * WANTED, self.total_bytes / 100 * LEFT);
        let (began, mut round, mut savings, mut waited) = (Instant::now(), Instant::now(), Instant::now(), PRESSED);
        while began.elapsed() < PRESSED {
            if Instant::now() >= round {
                round += if matches!(name, "mom" | "proxmox") { SLOW } else { EVERY };
                policy.round()?;
            }
            if Instant::now() >= savings {
                savings += SAVINGS_EVERY;
                least_saved = least_saved.min(self.saved()?);
            }
            let there = self.host.available_bytes()?;
            least = least.min(there);
            let lacking = wanted.saturating_sub(self.load.taken_bytes());
            self.press(lacking.min(there.saturating_sub(left)).min(GULP))?;
            if lacking < GULP && waited == PRESSED {
                waited = began.elapsed();
            }
            std::thread::sleep(LOOK);
        }
        let account_off = account_off.max(self.account_off()?);
        let rounds = policy.end()?;
        let freed = (self.host.available_bytes()? + self.load.taken_bytes()).saturating_sub(available);
        let lost = u64::try_from(saved - least_saved).unwrap_or(0);
        let Suffered { stalls, kills } = self.suffered_since(&suffered, self.host.kills() > killed)?;
        Ok(Figures {
            name,
            freed_bytes: freed,
            sharing_lost_bytes: lost,
            account_off_bytes: account_off,
            guest_oom_kills: kills,
            guest_stalls: stalls,
            rounds,
            least_available_bytes: least,
            waited_s: waited.as_secs_f64(),
            kills: self.host.kills() - killed,
        })
    }

    /// Allocation stalls and killed processes in all guests since `before`. If the host killed processes, a guest may
    /// have ended, and is left out.
    fn suffered_since(&self, before: &[Option<Suffered>], may_have_ended: bool) -> anyhow::Result<Suffered> {
        let now = self.load.suffered()?;
        anyhow::ensure!(may_have_ended || !now.contains(&None), "a guest has ended by itself");
        let both = now.into_iter().zip(before).filter_map(|(now, before)| Some(now?.since((*before)?)));
        Ok(both.fold(Suffered::default(), Suffered::plus))
    }

    /// The host's state under this policy, to put before an error.
    fn how_it_went(&self, name: &str) -> String {
        let available = self.host.available_bytes().unwrap_or(0) >> 20;
        format!(
            "under {name}, with {available} MiB available and {} processes killed for want of memory",
            self.host.kills()
        )
    }

    /// Takes this many bytes of the host's memory, rounded down to whole MiB.
    fn press(&mut self, bytes: u64) -> anyhow::Result<()> {
        if bytes >> 20 == 0 {
            return Ok(());
        }
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
    /// `pagefold balance apply`, a process that makes its rounds by itself.
    Ours(Applying),
    /// Rules of another program, of which the bench makes each round; and the number of rounds so far.
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
