//! Guests of the lab for a study: restored from saved states, each of which was booted on its own once.

use super::fold::of_guest;
use super::{Rig, pause};
use crate::rig::Merger;
use anyhow::{Context, bail};
use bench::workload::Timed;
use cli::say;
use lab::{Guest, Idle, Image, Lab, Progress, Spec};
use serde_json::json;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Time limit for guests to become idle.
const SETTLE: Duration = Duration::from_secs(60);
/// Time limit of a command inside a guest.
const COMMAND: Duration = Duration::from_secs(60);
/// A balloon counts as having reached its size when it makes no progress for this time: 3 s.
const BALLOON: Duration = Duration::from_secs(3);
/// Time limit for a guest to do the first operation of a load.
const FIRST: Duration = Duration::from_secs(120);
/// Time limit of a command that is a load.
const LOAD: Duration = Duration::from_secs(180);

/// A request for guests.
#[derive(Clone, Debug)]
pub struct VmsWanted {
    /// Number of guests.
    pub guests: usize,
    /// Number of the first saved guest: other numbers are other boots.
    pub first: usize,
    /// Memory of each guest.
    pub memory_bytes: u64,
    /// Groups among which they are divided evenly.
    pub groups: Vec<String>,
    /// Their image, kernel and devices.
    pub system: System,
}

/// The image, kernel and devices of a guest.
#[derive(Clone, Copy, Debug)]
pub struct System {
    /// Image of the guest.
    pub image: Image,
    /// The Debian suite whose kernel the guest boots; `None` for the newest kernel that is installed on this host.
    pub kernel_of: Option<&'static str>,
    /// Words added to QEMU's command line.
    pub devices: &'static [&'static str],
}

impl System {
    /// Debian with MariaDB and Apache.
    pub const DEBIAN: Self = Self { image: Image::Debian, kernel_of: None, devices: &[] };
    /// `Self::DEBIAN` with a balloon.
    pub const BALLOONED: Self = Self { devices: &["-device", "virtio-balloon-pci"], ..Self::DEBIAN };
    /// A kernel and busybox.
    pub const TINY: Self = Self { image: Image::Tiny, kernel_of: None, devices: &[] };
}

/// Running VMs. Dropping them ends them.
pub struct Vms {
    lab: Lab,
    /// The guests.
    pub guests: Vec<Guest>,
}

impl Rig {
    /// Restores guests for a merger, and waits until they are idle, and members of the merger.
    ///
    /// # Errors
    /// A guest does not come up.
    pub fn vms(&mut self, wanted: &VmsWanted, merger: &mut Merger) -> anyhow::Result<Vms> {
        self.labs += 1;
        let dir = self.dir().join(format!("lab-{}", self.labs));
        self.guardian.keep_lab(&dir)?;
        let mut vms = Vms { lab: Lab::open(&dir)?, guests: Vec::new() };
        vms.add(self, wanted, merger)?;
        Ok(vms)
    }
}

impl Vms {
    /// Restores further guests.
    ///
    /// # Errors
    /// A guest does not come up.
    pub fn add(&mut self, rig: &Rig, wanted: &VmsWanted, merger: &mut Merger) -> anyhow::Result<()> {
        let System { image, kernel_of, devices } = wanted.system;
        let kernel = kernel_of.map(|suite| lab::kernel_of_suite(&rig.cache, suite)).transpose()?;
        let spec = Spec {
            kernel,
            qemu_args: devices.iter().map(|word| (*word).to_owned()).collect(),
            guests: wanted.guests,
            first_saved: wanted.first,
            groups: wanted.groups.clone(),
            memory_bytes: Some(wanted.memory_bytes),
            saved: true,
            fold: merger.lab()?,
            ..Spec::new(image)
        };
        let more = self.lab.up(&spec, &rig.cache, &|event| match event {
            Progress::Building(_) => say!("pagefold: building the image for the guests, once"),
            Progress::Saving => say!("pagefold: booting a guest to save it, once"),
            _ => {}
        });
        let more = more.context("the guests do not come up")?;
        self.settle()?;
        let member = |guest: &Guest| Ok((guest.pid.context("a guest without a process")?, guest.group.clone()));
        merger.meet(&more.iter().map(member).collect::<anyhow::Result<Vec<_>>>()?)?;
        self.guests.extend(more);
        Ok(())
    }

    /// Waits until all guests are idle.
    ///
    /// # Errors
    /// The guests are not idle after a minute.
    pub fn settle(&self) -> anyhow::Result<()> {
        let settled = self.lab.settle(Idle::default(), SETTLE, &|_| {})?;
        if !settled.idle {
            bail!("the guests are not idle after {} s: is something else busy on this host?", settled.waited.as_secs());
        }
        Ok(())
    }

    /// Process ids of the guests' QEMUs.
    pub fn pids(&self) -> Vec<u32> {
        self.guests.iter().filter_map(|guest| guest.pid).collect()
    }

    /// Plugs a disk into some guests: a file of the host, of which the host caches nothing.
    ///
    /// # Errors
    /// QEMU refuses, or the guest does not see it within a minute.
    pub fn plug<'a>(&'a self, guests: impl IntoIterator<Item = &'a Guest>, file: &Path) -> anyhow::Result<()> {
        let file = json!({"driver": "file", "filename": file, "cache": {"direct": true, "no-flush": false}});
        let disk = json!({"node-name": "data", "driver": "raw", "read-only": true, "file": file});
        for guest in guests {
            let mut qmp = guest.qmp(COMMAND)?;
            qmp.execute("blockdev-add", disk.clone())?;
            qmp.execute("device_add", json!({"driver": "virtio-blk-pci", "drive": "data", "id": "data"}))?;
            drop(qmp);
            let is_there = super::wait(COMMAND, || Ok(tell(guest, bench::workload::DATA_SCRIPT, COMMAND).is_ok()))?;
            anyhow::ensure!(is_there, "{} does not see its disk", guest.name);
        }
        Ok(())
    }

    /// Sets the sizes of the guests' balloons, in bytes of memory left to each guest, in their order.
    ///
    /// # Errors
    /// QEMU does not answer, or has no balloon.
    pub fn set_sizes(&self, bytes: &[u64]) -> anyhow::Result<()> {
        for (guest, bytes) in self.guests.iter().zip(bytes) {
            guest.qmp(COMMAND)?.execute("balloon", json!({"value": bytes}))?;
        }
        Ok(())
    }

    /// Sets the sizes of guests by their balloons, in their order. Waits until each guest has its size, or comes no
    /// nearer to it. Returns the sizes that they have.
    ///
    /// # Errors
    /// QEMU does not answer, or has no balloon.
    pub fn resize(&self, bytes: &[u64]) -> anyhow::Result<Vec<u64>> {
        self.set_sizes(bytes)?;
        let (mut sizes, mut since) = (self.sizes()?, Instant::now());
        while sizes.iter().zip(bytes).any(|(is, wanted)| is != wanted) && since.elapsed() < BALLOON {
            pause(Duration::from_millis(500))?;
            let now = self.sizes()?;
            if now != sizes {
                (sizes, since) = (now, Instant::now());
            }
        }
        Ok(sizes)
    }

    /// The sizes of the guests, as their balloon drivers report them.
    ///
    /// # Errors
    /// QEMU does not answer, or has no balloon.
    pub fn sizes(&self) -> anyhow::Result<Vec<u64>> {
        let size = |guest: &Guest| {
            let answer = guest.qmp(COMMAND)?.execute("query-balloon", json!({}))?;
            answer["actual"].as_u64().with_context(|| format!("QEMU told no size of {}", guest.name))
        };
        self.guests.iter().map(size).collect()
    }

    /// Runs a shell command in some guests, and returns what each printed.
    ///
    /// # Errors
    /// The command fails in a guest.
    pub fn tell<'a>(
        &'a self,
        guests: impl IntoIterator<Item = &'a Guest>,
        script: &str,
    ) -> anyhow::Result<Vec<String>> {
        guests.into_iter().map(|guest| tell(guest, script, COMMAND)).collect()
    }

    /// Runs a load in all guests at the same time, and waits for its end.
    ///
    /// # Errors
    /// The load fails in a guest.
    pub fn run(&self, load: Timed, seconds: u32) -> anyhow::Result<Vec<Speed>> {
        run(&self.guests, load, seconds)
    }

    /// Runs a load in all guests at the same time, so that their emulators translate it. It does not matter if a guest
    /// does not finish a single operation in this time.
    ///
    /// # Errors
    /// The load fails in a guest.
    pub fn run_first(&self, load: Timed, seconds: u32) -> anyhow::Result<()> {
        at_once(&self.guests, &load.script(seconds)).into_iter().try_for_each(|printed| printed.map(drop))
    }

    /// Processor time that these guests have used so far, in seconds. Threads of agents in their processes are not
    /// counted: they are the merger's.
    ///
    /// # Errors
    /// A guest has ended.
    pub fn cpu_s(guests: &[Guest]) -> anyhow::Result<f64> {
        guests.iter().filter_map(|guest| guest.pid).map(of_guest).sum()
    }

    /// Begins a load in some guests, and waits until each guest has done an operation.
    ///
    /// # Errors
    /// A guest does not begin.
    pub fn load<'a>(&'a self, guests: impl IntoIterator<Item = &'a Guest> + Clone, script: &str) -> anyhow::Result<()> {
        self.tell(guests.clone(), script)?;
        let begun = super::wait(FIRST, || {
            pause(Duration::from_millis(400))?;
            Ok(self.operations(guests.clone())?.iter().all(|n| *n > 0))
        })?;
        if begun { Ok(()) } else { bail!("a guest did no operation of its load within {} s", FIRST.as_secs()) }
    }

    /// The number of operations that the load of each guest has done.
    ///
    /// # Errors
    /// A guest does not answer.
    pub fn operations<'a>(&'a self, guests: impl IntoIterator<Item = &'a Guest>) -> anyhow::Result<Vec<u64>> {
        let counted = self.tell(guests, bench::workload::COUNT_SCRIPT)?;
        counted.iter().map(|text| text.parse().with_context(|| format!("a guest counts {text:?}"))).collect()
    }
}

/// Runs a load in these guests at the same time, and waits for its end.
///
/// # Errors
/// The load fails in a guest.
pub fn run(guests: &[Guest], load: Timed, seconds: u32) -> anyhow::Result<Vec<Speed>> {
    at_once(guests, &load.script(seconds)).into_iter().map(|printed| Speed::of(&printed?)).collect()
}

/// Runs a shell command in these guests at the same time, and returns what each printed.
fn at_once(guests: &[Guest], script: &str) -> Vec<anyhow::Result<String>> {
    thread::scope(|scope| {
        let run = |guest| scope.spawn(move || tell(guest, script, LOAD));
        let running: Vec<_> = guests.iter().map(run).collect();
        running.into_iter().map(|one| one.join().unwrap_or_else(|_| bail!("a thread panicked"))).collect()
    })
}

/// Runs a load in these guests at the same time. Returns how many guests finished it within three minutes.
pub fn finishers(guests: &[Guest], load: Timed) -> usize {
    at_once(guests, &load.script(0)).iter().filter(|printed| printed.is_ok()).count()
}

/// How fast a load was in a guest, by the guest's clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Operations that it did.
    pub operations: f64,
    /// Operations a second; of builds: an hour.
    pub rate: f64,
    /// 99th percentile of the time of an operation in milliseconds, 0 where it is not known.
    pub p99_ms: f64,
}

impl Speed {
    fn of(printed: &str) -> anyhow::Result<Self> {
        let numbers: Vec<f64> = printed.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let &[operations, rate, p99_ms] = &numbers[..] else { bail!("a load printed {printed:?}") };
        if operations <= 0.0 {
            bail!("a load did no operation");
        }
        Ok(Self { operations, rate, p99_ms })
    }
}

/// Runs a shell command in a guest, and returns what it printed.
///
/// # Errors
/// The command fails, or takes longer than `patience`.
pub fn tell(guest: &Guest, script: &str, patience: Duration) -> anyhow::Result<String> {
    let output = guest.exec(&["sh", "-c", script], patience)?;
    if output.status != 0 {
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        bail!("{}: {script}: status {}: {}", guest.name, output.status, errors.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

impl Drop for Vms {
    fn drop(&mut self) {
        if let Err(e) = self.lab.down() {
            say!("pagefold: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_says_three_numbers_and_did_something() {
        assert_eq!(Speed::of("12 3.5 80").unwrap(), Speed { operations: 12.0, rate: 3.5, p99_ms: 80.0 });
        for wrong in ["", "12 3.5", "0 0 0", "12 3.5 80 9"] {
            assert!(Speed::of(wrong).is_err(), "{wrong}");
        }
    }
}
