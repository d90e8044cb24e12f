//! Guests with balloons, and `pagefold balance` with a ledger of its own for them alone.

use super::applying::Applying;
use crate::guardian::Guardian;
use crate::serving::Serving;
use anyhow::{Context, bail};
use balance::{GuestFacts, Policy};
use cli::exit::Stop;
use cli::say;
use lab::{Cache, Fold, Guest, Image, Lab, Progress, Spec};
use lend::{Balloon, Gatherer, Ledger, Rules, Saved};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// RAM of each guest: 192 MiB.
pub const RAM: u64 = 192 << 20;
/// Guaranteed size of each guest: 112 MiB.
pub const KEPT: u64 = 112 << 20;
/// Balloon device with which a guest takes memory back from its balloon before its kernel kills processes for want of
/// memory.
pub const BALLOON: &str = "virtio-balloon-pci,deflate-on-oom=on";
/// Time that a guest may take to run a command: 2 min.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// A script that runs in several guests at once has the time limit `PATIENCE` once for every 2 of them: guests share
/// the processors.
const TOGETHER: usize = 2;

/// Time that guests may take to boot, all at once: 15 min.
const BOOTED_WITHIN: Duration = Duration::from_secs(900);

/// Guests of one bench, and the directory in which `pagefold balance` keeps their sizes.
pub struct Rig {
    lab: Lab,
    ledger: PathBuf,
    /// Name of the guests' group. No other guest of the host is in it.
    group: String,
    fold: Option<Fold>,
    image: Image,
    /// Whether guests go on from saved states.
    saved: bool,
    ram_bytes: u64,
    kept_bytes: u64,
}

impl Rig {
    /// A rig without guests.
    ///
    /// # Errors
    /// The lab cannot be opened.
    pub fn new(dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Self> {
        let lab = dir.join("lab");
        guardian.keep_lab(&lab)?;
        Ok(Self {
            lab: Lab::open(&lab)?,
            ledger: dir.join("ledger"),
            group: group(),
            fold: None,
            image: Image::Tiny,
            saved: false,
            ram_bytes: RAM,
            kept_bytes: KEPT,
        })
    }

    /// A rig without guests, for guests that go on from saved states.
    ///
    /// # Errors
    /// The lab cannot be opened.
    pub fn saved(dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Self> {
        Ok(Self { saved: true, ..Self::new(dir, guardian)? })
    }

    /// A rig without guests, for guests that a service folds.
    ///
    /// # Errors
    /// The lab cannot be opened.
    pub fn folded(
        dir: &Path,
        serving: &Serving,
        (ram_bytes, kept_bytes): (u64, u64),
        guardian: &mut Guardian,
    ) -> anyhow::Result<Self> {
        let fold = Some(Fold { pagefold: cli::pagefold().to_owned(), service: Some(serving.dir().to_owned()) });
        Ok(Self { fold, ledger: serving.dir().to_owned(), ram_bytes, kept_bytes, ..Self::new(dir, guardian)? })
    }

    /// Adds guests, with further arguments of QEMU.
    ///
    /// # Errors
    /// A guest does not come up.
    pub fn up(&self, guests: usize, qemu_args: &[&str]) -> anyhow::Result<Vec<Guest>> {
        self.up_with(guests, BALLOON, qemu_args)
    }

    /// Adds guests with this balloon device.
    ///
    /// # Errors
    /// A guest does not come up.
    pub fn up_with(&self, guests: usize, balloon: &str, qemu_args: &[&str]) -> anyhow::Result<Vec<Guest>> {
        let words = ["-device", balloon];
        let words = words.iter().chain(qemu_args);
        let spec = Spec {
            guests,
            groups: vec![self.group.clone()],
            fold: self.fold.clone(),
            memory_bytes: Some(self.ram_bytes),
            qemu_args: words.map(|word| (*word).to_owned()).collect(),
            // Debian takes minutes to boot without KVM.
            saved: self.saved || self.image == Image::Debian,
            patience: BOOTED_WITHIN,
            ..Spec::new(self.image)
        };
        let up = self.lab.up(&spec, &Cache::open(&lab::cache_dir()?)?, &|event| {
            if let Progress::Building(_) = event {
                say!("pagefold: building the image for the guests, once");
            }
        });
        Ok(up?)
    }

    /// Ends all guests.
    ///
    /// # Errors
    /// A guest cannot be ended.
    pub fn down(&self) -> anyhow::Result<()> {
        self.lab.down().map(drop).context("cannot end the guests")
    }

    /// Sets the RAM of guests that are started from now on.
    pub fn set_ram(&mut self, bytes: u64) {
        self.ram_bytes = bytes;
    }

    /// Sets the image of guests that are started from now on.
    pub fn set_image(&mut self, image: Image) {
        self.image = image;
    }

    /// A command of `pagefold balance` for these guests alone. They all have the same guaranteed size.
    fn command(&self, action: &[&str]) -> anyhow::Result<Command> {
        self.command_by("equal", action)
    }

    fn command_by(&self, policy: &str, action: &[&str]) -> anyhow::Result<Command> {
        let mut command = Command::new(cli::pagefold());
        command.args(["balance", "--guest", &format!("{}-*", self.group)]).args(action).arg("--json");
        command.args(["--guaranteed", &format!("{}-*={}", self.group, self.kept_bytes), "--policy", policy]);
        command.arg("--service").arg(&self.ledger);
        Ok(command)
    }

    /// Starts a balancer that withdraws everything that was lent to guests, round by round: with a floor above the
    /// host's memory, the host is always short. The balancer's rules take one second for `hurry` seconds.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn withdraw_all(&self, hurry: u32, guardian: &mut Guardian) -> anyhow::Result<Applying> {
        let (every, hurry) = ((5 / hurry).max(1).to_string(), hurry.to_string());
        Applying::start(self.command(&["apply", "--every", &every, "--hurry", &hurry, "--floor", "100T"])?, guardian)
    }

    /// Starts a balancer that lends memory to guests and withdraws it, round by round. The limit of this control group
    /// counts as the host's memory.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn lend_within(&self, group: &str, floor_bytes: u64, guardian: &mut Guardian) -> anyhow::Result<Applying> {
        let floor = floor_bytes.to_string();
        Applying::start(self.command(&["apply", "--every", "2", "--within", group, "--floor", &floor])?, guardian)
    }

    /// Starts a balancer with this policy. The limit of the control group counts as the host's memory.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn apply(
        &self,
        policy: &str,
        every_s: u64,
        group: &str,
        floor_bytes: u64,
        guardian: &mut Guardian,
    ) -> anyhow::Result<Applying> {
        let (every, floor) = (every_s.to_string(), floor_bytes.to_string());
        let words = ["apply", "--every", &every, "--within", group, "--floor", &floor];
        Applying::start(self.command_by(policy, &words)?, guardian)
    }

    /// The rules of another program for these guests. The limit of the control group counts as the host's memory.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn baseline(
        &self,
        policy: &'static dyn Policy,
        pids: Vec<u32>,
        group: &str,
        floor_bytes: u64,
    ) -> anyhow::Result<Baseline> {
        let rules = Rules {
            guaranteed: self.guaranteed()?,
            floor_bytes: Some(floor_bytes),
            within: Some(group.to_owned()),
            owners: Vec::new(),
            moves: Vec::new(),
        };
        Ok(Baseline { policy, pids, gatherer: Gatherer::new(rules), ledger: Ledger::open(&self.ledger)? })
    }

    /// The facts of all guests, as a round of `pagefold balance` gathers them.
    ///
    /// # Errors
    /// A fact cannot be read.
    pub fn facts(&self) -> anyhow::Result<Vec<GuestFacts>> {
        let mut guests = guest::Survey::take()?.guests(&[], &[]);
        guests.retain(|guest| guest.name.starts_with(&format!("{}-", self.group)));
        let rules = Rules { guaranteed: self.guaranteed()?, ..Rules::default() };
        let ledger = Ledger::open(&self.ledger)?;
        Ok(Gatherer::new(rules).gather(&guests, &ledger, &Saved::default())?.guests)
    }

    fn guaranteed(&self) -> anyhow::Result<Vec<(guest::Glob, u64)>> {
        Ok(vec![(format!("{}-*", self.group).parse().map_err(anyhow::Error::msg)?, self.kept_bytes)])
    }

    /// All lines of the balancer's journal, parsed.
    ///
    /// # Errors
    /// A line is not complete JSON.
    pub fn journal(&self) -> anyhow::Result<Vec<Value>> {
        let text = std::fs::read_to_string(cli::journal::Journal::of_service(&self.ledger).path()).unwrap_or_default();
        text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }
}

/// Rules of another program at work: they get the facts of guests and return sizes, to which no rule of Pagefold's is
/// applied.
pub struct Baseline {
    policy: &'static dyn Policy,
    pids: Vec<u32>,
    gatherer: Gatherer,
    ledger: Ledger,
}

impl Baseline {
    /// One round: the rules choose a size for each guest, and its balloon is told where the guest has another one.
    ///
    /// # Errors
    /// Facts of the guests or the host cannot be read.
    pub fn round(&mut self) -> anyhow::Result<()> {
        // The survey finds all VMs of the host: those of other programs are left out.
        let mut guests = guest::Survey::take()?.guests(&self.pids, &[]);
        guests.retain(|guest| guest.pids.iter().any(|pid| self.pids.contains(pid)));
        let facts = self.gatherer.gather(&guests, &self.ledger, &Saved::default())?;
        for (facts, wish) in facts.guests.iter().zip(self.policy.sizes(&facts, 0)) {
            let Some(guest) = guests.iter().find(|guest| guest.id == facts.id) else { continue };
            if wish.size_bytes == facts.actual_bytes {
                continue;
            }
            // A guest that does not answer is told again in the next round.
            let told =
                Balloon::open(guest).and_then(|balloon| balloon.map_or(Ok(()), |mut one| one.set(wish.size_bytes)));
            if let Err(error) = told {
                say!("pagefold: {}: {error:#}", guest.id);
            }
        }
        Ok(())
    }
}

/// Runs a script in all guests at once. They share the processors, so each may take longer the more there are.
///
/// # Errors
/// The script fails in one of the guests.
pub fn on_all(guests: &[Guest], script: impl Fn(usize) -> String) -> anyhow::Result<()> {
    let patience = PATIENCE * u32::try_from(guests.len().div_ceil(TOGETHER))?;
    std::thread::scope(|scope| {
        let run = |(n, guest)| {
            let script = script(n);
            scope.spawn(move || shell_within(guest, &script, patience))
        };
        let running: Vec<_> = guests.iter().enumerate().map(run).collect();
        running.into_iter().try_for_each(|one| one.join().map_err(|_| anyhow::anyhow!("a thread has failed"))?)
    })
}

/// Name of the group of this bench's guests.
pub fn group() -> String {
    format!("bench{}", std::process::id())
}

/// Runs a shell script in a guest.
///
/// # Errors
/// The script fails.
pub fn shell(guest: &Guest, script: &str) -> anyhow::Result<()> {
    shell_within(guest, script, PATIENCE)
}

fn shell_within(guest: &Guest, script: &str, patience: Duration) -> anyhow::Result<()> {
    let output = guest.exec(&["sh", "-c", script], patience)?;
    if output.status != 0 {
        bail!("{} in {}: {}", script, guest.name, String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// The guest's id in the output and the journal of `pagefold balance`.
pub fn id(guest: &Guest) -> String {
    format!("qemu:{}", guest.name)
}

/// Process id of a guest's QEMU.
///
/// # Errors
/// The guest has no process.
pub fn pid(guest: &Guest) -> anyhow::Result<rustix::process::Pid> {
    let pid = guest.pid.and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed()));
    pid.ok_or_else(|| Stop::Usage(format!("{} has no process", guest.name)).into())
}
