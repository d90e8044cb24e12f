//! Guests that stand still until somebody wakes them, with as little memory as may be.
//!
//! ```text
//!   noted in DIR/parked, with its parker --> stands still --> equal pages are folded --> private pages are written to swap
//!                                            VM: QMP stop     its agent goes on          MADV_PAGEOUT, where there is swap
//!                                            program: SIGSTOP its agent does not: it is folded before
//!     --> noted without its parker
//! ```
//!
//! | event | what happens then |
//! |---|---|
//! | the guest is woken | it goes on --> the note is removed --> a clone's helper sets its clock |
//! | its parker fails before the end, or is interrupted | the parker wakes it |
//! | its parker is killed before the end | whoever looks at the notes next wakes it. Balancers do each round |
//!
//! The note comes first, and nobody else reads or changes notes until the guest stands still. So there is a note of each guest that
//! stands still. The kernel decides who may park a guest: it takes the right to send its process signals, or to connect to its QMP socket.
//!
//! Nothing of the pool is paged out. A page that reclaim takes from a mapping of the pool is a fault for the agent to serve.

use crate::hold::{self, Target};
use crate::ledger::Turn;
use anyhow::{Context, bail};
use cli::journal::{By, Journal, Line};
use cli::say;
use guest::{Guest, GuestKind, RegionMap, holds_folded_pages};
use host::{Mapping, MemoryCounters, ProcessId, Usage};
use page::Region;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fs::{self, DirBuilder, File};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Longest wait for others that have the notes: 10 s. A guest is stopped in less.
pub const NOTES_WITHIN: Duration = Duration::from_secs(10);
/// Pause between two tries to get the lock: 2 ms. A guest that is woken waits for it.
const PAUSE: Duration = Duration::from_millis(2);
/// Pause between two looks at what a guest holds while it is folded: 2 s. A round of an agent takes a second or so.
const LOOK: Duration = Duration::from_secs(2);
/// Number of looks in a row without a change after which folding is over.
const QUIET_LOOKS: u32 = 3;
/// Change that counts as none, as a part of what is held: 1/256.
const QUIET_PART: u64 = 256;
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
    /// The process that parks it, until that is done.
    parker: Option<ProcessId>,
}

/// Memory of a guest that was parked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shrunk {
    /// Private memory in frames before.
    pub private_before_bytes: u64,
    /// Private memory in frames afterwards.
    pub private_bytes: u64,
    /// Memory in the host's swap.
    pub swapped_bytes: u64,
    /// Why private memory stays in frames; `None` where it was written to swap.
    pub problem: Option<String>,
}

/// Notes of parked guests, which nobody else reads or changes meanwhile.
#[derive(Debug)]
pub struct Parking {
    service: PathBuf,
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

    /// Guests that are parked, and live. Those go on whose parker was killed before it was done.
    ///
    /// # Errors
    /// The notes cannot be read.
    pub fn list(&self) -> anyhow::Result<Vec<Parked>> {
        let mut all = Vec::new();
        for parked in read_all(&self.service)? {
            if !parked.is_alive() {
                self.forget(&parked);
            } else if parked.parker.is_some_and(|parker| !parker.is_alive()) {
                say!("pagefold: {} goes on: the process that parked it was killed", cli::printable(&parked.guest));
                if let Err(why) = self.wake(&parked) {
                    say!("pagefold: {why:#}");
                }
            } else {
                all.push(parked);
            }
        }
        Ok(all)
    }

    /// Has a guest stand still, for as long as this process lives, until [`Self::keep`]. The turn keeps a balancer from resuming it.
    ///
    /// # Errors
    /// It cannot be parked, or does not run. It goes on then.
    pub fn park(&self, guest: &Guest, _: &Turn) -> anyhow::Result<Parked> {
        let parked = Parked::of(guest)?;
        let noted = self.note(&parked).and_then(|()| self.write_down(&parked, "park"));
        match noted.and_then(|()| parked.stop().map_err(anyhow::Error::msg)) {
            Ok(()) => Ok(parked),
            // A stop that failed may have taken effect.
            Err(why) => Err(self.give_up(&parked, &why)),
        }
    }

    /// Notes that a guest is parked until somebody wakes it.
    ///
    /// # Errors
    /// That cannot be written, or it was woken meanwhile.
    pub fn keep(&self, parked: &Parked) -> anyhow::Result<()> {
        if read(&self.path(parked)).ok().as_ref() != Some(parked) {
            bail!("somebody has woken it");
        }
        self.note(&Parked { parker: None, ..parked.clone() })
    }

    /// Has a guest go on that could not be parked. Returns that, with the reason.
    pub fn give_up(&self, parked: &Parked, why: &anyhow::Error) -> anyhow::Error {
        let guest = cli::printable(&parked.guest);
        match self.let_go_on(parked) {
            Ok(()) => {
                // The first reason counts.
                let _ = self.write_down(parked, "wake");
                anyhow::anyhow!("{guest} is not parked, and goes on: {why:#}")
            }
            Err(more) => anyhow::anyhow!("{guest} may stand still: {why:#}; {more}. pagefold wake tries again"),
        }
    }

    /// Has a parked guest go on.
    ///
    /// # Errors
    /// It does not, and is still noted. Or it does, and the journal cannot be written.
    pub fn wake(&self, parked: &Parked) -> anyhow::Result<()> {
        let guest = cli::printable(&parked.guest);
        self.let_go_on(parked).map_err(|why| anyhow::anyhow!("{guest} does not go on: {why}"))?;
        self.write_down(parked, "wake").with_context(|| format!("{guest} goes on, and nothing tells of it"))
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

    /// Puts a note in place of an old one. All of it ends with this start of the host, so it need not be on the disk.
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
        // One that stays is of a guest that runs or has ended, and does no harm: it is woken once more.
        let _ = fs::remove_file(self.path(parked));
    }

    fn write_down(&self, parked: &Parked, entry: &str) -> anyhow::Result<()> {
        let more = json!({"entry": entry, "guest": parked.guest, "at_s": host::boot_clock_s()});
        let journal = Journal::of_service(&self.service);
        let written = journal.append(std::iter::once(Line::now(By::this_process(), "balance", more)));
        written.with_context(|| format!("cannot write {}", journal.path().display()))
    }
}

impl Parked {
    /// A guest that runs, and may be parked by this process.
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

/// The process of a program. One that somebody else has stopped is theirs to let go on, and one under a debugger would tell that.
fn running_process_of(guest: &Guest) -> anyhow::Result<ProcessId> {
    let pid = guest.pids.first().copied().context("a guest without a process")?;
    let process = ProcessId { pid, start_ticks: guest.facts.start_ticks };
    match process.stat().map(|stat| stat.state) {
        None => bail!("{} is not parked: it has ended", guest.id),
        Some(b'T' | b't') => bail!("{} is not parked: it is stopped already, or under a debugger", guest.id),
        Some(_) => Ok(process),
    }
}

fn dir_of(service: &Path) -> PathBuf {
    service.join("parked")
}

fn read(path: &Path) -> anyhow::Result<Parked> {
    let text = host::read_plain_file(path, MOST_BYTES)?;
    serde_json::from_slice(&text).with_context(|| format!("{} is damaged", path.display()))
}

/// All notes. One that cannot be read keeps nobody from the others.
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

/// Has guests go on that a process has left standing still that was killed while it parked them.
pub fn wake_left(service: &Path) {
    if dir_of(service).is_dir() {
        // Where another process has the notes, the next round does it.
        let _ = Parking::lock(service, Duration::ZERO).and_then(|parking| parking.list());
    }
}

/// Processes of guests that are parked.
pub(crate) fn processes(service: &Path) -> Vec<ProcessId> {
    if !dir_of(service).is_dir() {
        return Vec::new();
    }
    read_all(service).unwrap_or_default().into_iter().map(|parked| parked.process).collect()
}

/// Waits until folding takes nothing more of what members hold alone, or this process is interrupted.
pub fn until_folded(guests: &[Guest], patience: Duration) {
    let held = || {
        let pids = guests.iter().flat_map(|guest| &guest.pids);
        let counters = pids.filter_map(|pid| MemoryCounters::of(*pid).ok());
        counters.fold(0_u64, |sum, one| sum.saturating_add(one.resident_pages.saturating_sub(one.file_pages)))
    };
    let (end, mut before, mut quiet) = (Instant::now() + patience, held(), 0_u32);
    while quiet < QUIET_LOOKS && Instant::now() < end && host::interrupted().is_none() {
        std::thread::sleep(LOOK);
        let is = held();
        let is_quiet = before.abs_diff(is) <= before / QUIET_PART;
        quiet = if is_quiet { quiet.saturating_add(1) } else { 0 };
        before = is;
    }
}

/// Has private memory of a guest written to swap: of a VM its RAM, of a program all of it. `before_bytes` is what it held. Where the
/// kernel does not do that, the guest is parked nevertheless.
pub fn shrink(guest: &Guest, before_bytes: u64) -> Shrunk {
    let problem = if host::total_swap_bytes() > 0 {
        page_out(guest).err().map(|why| format!("its memory is not written to swap: {why:#}"))
    } else {
        let lacks =
            "this host has no swap (nor zram): what it holds alone stays in memory, and only what is equal is folded";
        Some(lacks.to_owned())
    };
    let (private_bytes, swapped_bytes) = private_and_swapped(guest);
    Shrunk { private_before_bytes: before_bytes, private_bytes, swapped_bytes, problem }
}

fn page_out(guest: &Guest) -> anyhow::Result<()> {
    for pid in &guest.pids {
        let mappings = Mapping::read_all(*pid)?;
        let regions = RegionMap::new(Some(guest), &mappings);
        let is_cold = |n: usize, mapping: &Mapping| {
            let is_ram = !guest.kind.is_vm() || regions.region_of(n) == Region::GuestRam;
            let is_plain = !mapping.shared && mapping.inode == 0 && !mapping.hugetlb && !mapping.has_flag(b"lo");
            is_ram && is_plain && !holds_folded_pages(mapping) && mapping.usage.anonymous_bytes > 0
        };
        let cold = mappings.iter().enumerate().filter(|(n, mapping)| is_cold(*n, mapping));
        let ranges: Vec<_> = cold.map(|(_, mapping)| mapping.start.0..mapping.end.0).collect();
        act::page_out(&ProcessId::of(*pid)?, &ranges)?;
    }
    Ok(())
}

/// Private memory of a guest's processes in frames, and in swap.
pub fn private_and_swapped(guest: &Guest) -> (u64, u64) {
    let all = guest.pids.iter().filter_map(|pid| Usage::of(*pid).ok());
    all.fold((0, 0), |(private, swapped), usage| {
        (usage.uss_bytes.saturating_add(private), usage.swap_bytes.saturating_add(swapped))
    })
}

#[cfg(test)]
#[path = "park_tests.rs"]
mod tests;
