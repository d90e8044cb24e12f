//! Parks guests: they are stopped, with as little memory in frames as possible, until a command or a program wakes
//! them.
//!
//! ```text
//!   noted in DIR/parked, with its parker --> stands still --> equal pages are folded --> private pages are written to swap
//!                                            VM: QMP stop     its agent goes on          shrink.rs
//!                                            program: SIGSTOP its agent does not: it is folded before (folded.rs)
//!     --> noted without its parker
//! ```
//!
//! | event | what happens then |
//! |---|---|
//! | the guest is woken | it goes on --> the note is removed --> a clone's helper sets its clock |
//! | the process that parks it (its parker) fails before the end, or is interrupted | the parker wakes it |
//! | its parker is killed before the end | the next command that reads the notes wakes it. Balancers read them each round |
//! | a program that has woken it uses it | it is not parked again while that runs (awake.rs) |
//!
//! The note is written first, and its lock is held until the guest stands still. So there is a note of each guest that
//! stands still. The kernel decides who may park a guest: it takes the right to send its process signals, or to connect
//! to its QMP socket.

use crate::balloon::Balloon;
use crate::hold::{self, Target};
use crate::ledger::{Ledger, Turn};
use anyhow::{Context, bail};
use cli::journal::{By, Journal, Line};
use cli::say;
use guest::{Guest, GuestKind};
use host::ProcessId;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fs::{self, DirBuilder, File};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest wait for another process that holds the lock of the notes: 10 s. A guest is stopped in less.
pub const NOTES_WITHIN: Duration = Duration::from_secs(10);
/// Pause between two attempts to get that lock: 2 ms. It delays a guest that is woken.
const PAUSE: Duration = Duration::from_millis(2);
/// Longest note that is read, in bytes: 64 KiB.
const MOST_BYTES: u64 = 64 << 10;

/// A guest that is parked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parked {
    /// Its id.
    pub guest: String,
    /// Its name.
    pub name: String,
    /// Since when, in seconds since the host started.
    pub at_s: u64,
    /// Its process.
    pub process: ProcessId,
    qmp: Option<PathBuf>,
    /// The process that parks the guest, until parking is complete.
    parker: Option<ProcessId>,
}

/// The locked notes of parked guests: while this value lives, no other process reads or changes them.
#[derive(Debug)]
pub struct Parking {
    pub(crate) service: PathBuf,
    _lock: File,
}

impl Parking {
    /// Locks the notes of a service.
    ///
    /// # Errors
    /// They cannot be used, or another process has them for longer than `patience`.
    pub fn lock(service: &Path, patience: Duration) -> anyhow::Result<Self> {
        let dir = dir_of(service);
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&dir);
        made.with_context(|| format!("cannot make {}", dir.display()))?;
        let path = dir.join("lock");
        let cannot = || format!("cannot lock {}", path.display());
        let Some(lock) = host::lock_file(&path, patience, PAUSE).with_context(cannot)? else {
            bail!("another process holds {}: try again", path.display());
        };
        Ok(Self { service: service.to_owned(), _lock: lock })
    }

    /// Parked guests that live. Guests whose parker was killed before it was done are woken.
    ///
    /// # Errors
    /// The notes cannot be read.
    pub fn list(&self) -> anyhow::Result<Vec<Parked>> {
        let mut all = Vec::new();
        for parked in read_all(&self.service)? {
            if !parked.is_alive() {
                self.forget(&parked);
            } else if parked.parker.is_some_and(|parker| !parker.is_alive()) {
                let why = "the process that parked it was killed";
                say!("pagefold: {} goes on: {why}", cli::printable(&parked.guest));
                if let Err(why) = self.wake(&parked, why) {
                    say!("pagefold: {why:#}");
                }
            } else {
                all.push(parked);
            }
        }
        Ok(all)
    }

    /// Stops a guest, and notes it as parked. Until [`Self::keep`], it stays parked only for as long as this process
    /// lives. The caller holds the lock [`Turn`], so no balancer resumes the guest or moves its balloon meanwhile. The
    /// journal has the reason.
    ///
    /// # Errors
    /// The guest cannot be parked, does not run, or is used by a program. It goes on then.
    pub fn park(&self, guest: &Guest, ledger: &Ledger, _: &Turn, why: &str) -> anyhow::Result<Parked> {
        let parked = Parked::of(guest)?;
        if let Some(holder) = self.holder_of(parked.process) {
            bail!("{} is not parked: process {} keeps it awake", cli::printable(&guest.id), holder.pid);
        }
        check_balloon(guest, ledger)?;
        let noted = self.note(&parked).and_then(|()| self.write_down(&parked, "park", why));
        match noted.and_then(|()| parked.stop().map_err(anyhow::Error::msg)) {
            Ok(()) => Ok(parked),
            // A stop that failed may have taken effect.
            Err(why) => Err(self.give_up(&parked, &why)),
        }
    }

    /// Notes that parking is complete: the guest stays parked after this process has ended, until a command wakes it.
    ///
    /// # Errors
    /// The note cannot be written, or the guest was woken meanwhile.
    pub fn keep(&self, parked: &Parked) -> anyhow::Result<()> {
        if read(&self.path(parked)).ok().as_ref() != Some(parked) {
            bail!("somebody has woken it");
        }
        self.note(&Parked { parker: None, ..parked.clone() })
    }

    /// Wakes a guest that could not be parked. Returns an error with the reason.
    pub fn give_up(&self, parked: &Parked, why: &anyhow::Error) -> anyhow::Error {
        let guest = cli::printable(&parked.guest);
        match self.let_go_on(parked) {
            Ok(()) => {
                // The first reason counts.
                let _ = self.write_down(parked, "wake", &format!("it could not be parked: {why:#}"));
                anyhow::anyhow!("{guest} is not parked, and goes on: {why:#}")
            }
            Err(more) => anyhow::anyhow!("{guest} may stand still: {why:#}; {more}. pagefold wake tries again"),
        }
    }

    /// Wakes a parked guest. The journal has the reason.
    ///
    /// # Errors
    /// The guest does not go on, and is still noted. Or it goes on, and the journal cannot be written.
    pub fn wake(&self, parked: &Parked, why: &str) -> anyhow::Result<()> {
        let guest = cli::printable(&parked.guest);
        self.let_go_on(parked).map_err(|why| anyhow::anyhow!("{guest} does not go on: {why}"))?;
        self.write_down(parked, "wake", why).with_context(|| format!("{guest} goes on, and nothing tells of it"))
    }

    fn let_go_on(&self, parked: &Parked) -> Result<(), String> {
        match &parked.qmp {
            Some(qmp) => hold::resume(parked.process, qmp)?,
            None if parked.process.go_on() || !parked.is_alive() => {}
            None => return Err("its process takes no signal of ours".into()),
        }
        self.forget(parked);
        Ok(())
    }

    fn path(&self, parked: &Parked) -> PathBuf {
        dir_of(&self.service).join(format!("{}.json", parked.process.pid))
    }

    /// Writes the note of a guest, in place of an old one. Notes lose their meaning when the host restarts, so they
    /// need not be synced to the disk.
    fn note(&self, parked: &Parked) -> anyhow::Result<()> {
        let path = self.path(parked);
        let next = path.with_extension("next");
        let write = || {
            let mut file = File::options().create(true).write(true).truncate(true).mode(0o600).open(&next)?;
            file.write_all(&serde_json::to_vec(parked)?)?;
            fs::rename(&next, &path)
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }

    fn forget(&self, parked: &Parked) {
        // A note that cannot be removed does no harm: its guest runs or has ended, and is woken once more.
        let _ = fs::remove_file(self.path(parked));
    }

    fn write_down(&self, parked: &Parked, entry: &str, why: &str) -> anyhow::Result<()> {
        let more = json!({"entry": entry, "guest": parked.guest, "reason": why, "at_s": host::boot_clock_s()});
        let journal = Journal::of_service(&self.service);
        let written = journal.append(std::iter::once(Line::now(By::this_process(), "balance", more)));
        written.with_context(|| format!("cannot write {}", journal.path().display()))
    }
}

impl Parked {
    /// The note of a guest that is about to be parked. An error if the guest does not run, or cannot be parked.
    fn of(guest: &Guest) -> anyhow::Result<Self> {
        let id = cli::printable(&guest.id);
        let (process, qmp) = match guest.kind {
            GuestKind::Qemu => target_of(guest).map(|target| (target.process, Some(target.qmp)))?,
            GuestKind::Process => (running_process_of(guest)?, None),
            kind if kind.is_vm() => bail!("{id} is not parked: its VMM has no QMP; pause it by that VMM's own means"),
            _ => bail!("{id} is not parked: freeze a container by its runtime (docker pause, lxc-freeze)"),
        };
        let parker = Some(ProcessId::of(std::process::id())?);
        let (guest, name, at_s) = (guest.id.clone(), guest.name.clone(), host::boot_clock_s());
        Ok(Self { guest, name, at_s, process, qmp, parker })
    }

    fn stop(&self) -> Result<(), String> {
        match &self.qmp {
            Some(qmp) => {
                hold::stop_for_long(&Target { guest: self.guest.clone(), process: self.process, qmp: qmp.clone() })
            }
            None if self.process.stand_still() => Ok(()),
            None => Err("its process takes no signal of ours, or has ended".into()),
        }
    }

    /// Whether its process has not ended.
    pub fn is_alive(&self) -> bool {
        self.process.is_alive()
    }

    /// Whether it is a VM, whose clock stands still with it.
    pub const fn is_vm(&self) -> bool {
        self.qmp.is_some()
    }
}

fn target_of(guest: &Guest) -> anyhow::Result<Target> {
    let target = Target::of(guest).with_context(|| {
        format!("{} has no QMP socket: start its QEMU with -qmp unix:PATH,server=on,wait=off", guest.id)
    })?;
    hold::running(&target).map_err(|why| anyhow::anyhow!("{} is not parked: {why}", guest.id))?;
    Ok(target)
}

/// The running process of a program. A process that is already stopped is refused, and so is one under a debugger,
/// which would notice the stop.
fn running_process_of(guest: &Guest) -> anyhow::Result<ProcessId> {
    let pid = guest.pids.first().copied().context("a guest without a process")?;
    let process = ProcessId { pid, start_ticks: guest.facts.start_ticks };
    match process.stat().map(|stat| stat.state) {
        None => bail!("{} is not parked: it has ended", guest.id),
        Some(b'T' | b't') => bail!("{} is not parked: it is stopped already, or under a debugger", guest.id),
        Some(_) => Ok(process),
    }
}

/// Fails while a guest's balloon is on its way to the size that the guest was told to have.
fn check_balloon(guest: &Guest, ledger: &Ledger) -> anyhow::Result<()> {
    let Some(target) = ledger.target_bytes(guest).filter(|_| !ledger.has_arrived(guest)) else { return Ok(()) };
    let Some(mut balloon) = Balloon::open_known(guest, Some(None))? else { return Ok(()) };
    let (actual, ram) = (balloon.size_bytes()?, guest.ram_bytes.unwrap_or(0));
    if !balance::has_arrived(ram, actual, target) {
        let (id, [actual, target]) = (cli::printable(&guest.id), [actual, target].map(cli::bytes));
        bail!("{id} is not parked: its balloon is on its way from {actual} to {target}");
    }
    Ok(())
}

pub(crate) fn dir_of(service: &Path) -> PathBuf {
    service.join("parked")
}

fn read(path: &Path) -> anyhow::Result<Parked> {
    let text = host::read_plain_file(path, MOST_BYTES)?;
    serde_json::from_slice(&text).with_context(|| format!("{} is damaged", path.display()))
}

/// All notes. A note that cannot be read is left out.
fn read_all(service: &Path) -> anyhow::Result<Vec<Parked>> {
    let dir = dir_of(service);
    let is_note = |path: &PathBuf| path.extension().is_some_and(|ending| ending == "json");
    let listed = fs::read_dir(&dir).with_context(|| format!("cannot list {}", dir.display()))?;
    let mut all = Vec::new();
    for path in listed.filter_map(|entry| Some(entry.ok()?.path())).filter(is_note) {
        match read(&path) {
            Ok(parked) => all.push(parked),
            Err(_) if !path.exists() => {}
            Err(why) => say!("pagefold: a note of a parked guest is left out: {why:#}"),
        }
    }
    Ok(all)
}

/// Wakes guests whose parker was killed while it parked them.
pub fn wake_left(service: &Path) {
    if dir_of(service).is_dir() {
        // If another process holds the lock of the notes, the next round wakes them.
        let _ = Parking::lock(service, Duration::ZERO).and_then(|parking| parking.list());
    }
}

/// The processes of all guests that are noted as parked.
pub(crate) fn processes(service: &Path) -> Vec<ProcessId> {
    if !dir_of(service).is_dir() {
        return Vec::new();
    }
    read_all(service).unwrap_or_default().into_iter().map(|parked| parked.process).collect()
}

#[cfg(test)]
#[path = "park_tests.rs"]
mod tests;
