//! Sets ksmd's knobs (`/sys/kernel/mm/ksm`) by a rule of [`balance::ksm`], and puts every knob back afterwards.
//!
//! ```text
//!   driver                         guard                     note (NOTE)
//!     | former knobs --------------------------------------> written before a knob is changed
//!     | starts ------------------->| waits for the end of the driver
//!     | sets knobs by the rule     |
//!     X ends, or is killed         | puts back ------------> removed
//!                                  X killed, too             stays: the next driver, or restore(), puts back
//! ```
//!
//! A driver that ends does the same as one that is killed: its pipe closes, and the guard puts the knobs back. Driver
//! and guard hold the lock that benches use, because a bench takes the knobs that it finds for the host's own. Merged
//! pages stay merged: unmerging them takes memory. There is one exception. `merge_across_nodes` can only be put back
//! while nothing is merged. If it was changed, all pages are unmerged, if there is memory for it.

use act::{KsmKnobs, set_ksm};
use anyhow::{Context, bail};
use balance::ksm::{self, Bounds, Knobs, Rule};
use cli::exit::Stop;
use cli::size::bytes;
use host::{Ksm, Process, ProcessId};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

/// The lock of everything that sets ksmd's knobs for a while: a driver, or a bench.
pub const LOCK: &str = "/run/pagefold-bench.lock";
/// The note of a driver: the former knobs, and what it does.
const NOTE: &str = "/run/pagefold-ksm.json";
/// Longest wait for the lock: 5 s. A guard needs less to put the knobs back.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause between two tries to have the lock: 50 ms.
const PAUSE: Duration = Duration::from_millis(50);
/// Number of samples of free memory that are kept, for rule `mom`: 10.
const FREE_LOOKS: usize = 10;
/// Message of a driver to its guard: the driver ends by itself, and was not killed.
const ENDS: &[u8] = b"ends\n";
/// Other programs that set these knobs; no driver begins while one of them runs.
const OTHERS: [&str; 2] = ["ksmtuned", "momd"];

/// The note of a driver.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Note {
    /// Values of the knobs before the driver began.
    former: Vec<(String, String)>,
    driver: ProcessId,
    rule: Rule,
    /// Time at which the driver began, in seconds since the host started.
    began_s: u64,
    /// Processor time that ksmd had used when the driver began.
    cpu_s: Option<f64>,
    /// The reason of the knobs as they are.
    reason: String,
}

/// One look of a driver at the host, and the knobs for the next window.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Look {
    /// Seconds since the host started.
    pub at_s: u64,
    /// Whether ksmd runs from here on.
    pub runs: bool,
    /// Pages between two sleeps; `None` while ksmd does not run, or its advisor sets them.
    pub pages_to_scan: Option<u64>,
    /// Milliseconds of a sleep; `None` likewise.
    pub sleep_millisecs: Option<u64>,
    /// The reason.
    pub reason: String,
    /// See [`Ksm::net_bytes`].
    pub net_bytes: i64,
    /// Processor time of ksmd since the driver began; `None` in a PID namespace.
    pub ksmd_cpu_s: Option<f64>,
    /// Whether this look has changed a knob.
    #[serde(skip)]
    pub is_new: bool,
}

/// A driver, as shown in a status.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Driver {
    /// Its process.
    pub pid: u32,
    /// Its rule.
    pub rule: Rule,
    /// Seconds since it began.
    pub seconds: u64,
    /// The reason of the knobs as they are.
    pub reason: String,
    /// Processor time of ksmd since the driver began; `None` in a PID namespace.
    pub ksmd_cpu_s: Option<f64>,
}

/// The state of ksmd.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Status {
    /// The driver; `None` if there is none.
    pub driver: Option<Driver>,
    /// Whether a driver that was killed has left knobs behind: [`restore`] puts them back.
    pub left_behind: bool,
    /// Knobs: names and values.
    pub knobs: serde_json::Map<String, serde_json::Value>,
    /// Frames that hold merged pages.
    pub pages_shared: u64,
    /// Further mappings of these frames.
    pub pages_sharing: u64,
    /// Pages that were merged with the kernel's zero page; `None` before Linux 6.6.
    pub zero_pages: Option<u64>,
    /// Memory that merging saves, less ksmd's records.
    pub net_bytes: i64,
    /// Processor time of ksmd since the host started; `None` in a PID namespace.
    pub ksmd_cpu_s: Option<f64>,
}

/// Counters of the kernel at the time of a look.
#[derive(Clone, Copy, Debug)]
struct Counted {
    at: Instant,
    swapped: u64,
    scanned: Option<u64>,
    sharing: u64,
    full_scans: u64,
}

/// A driver at work. Dropping it puts the knobs back.
pub struct Driving {
    note: Note,
    bounds: Bounds,
    before: Counted,
    free: VecDeque<u64>,
    knobs: Option<Knobs>,
    driven_pages: Option<u64>,
    guard: Child,
    pipe: Option<ChildStdin>,
    _lock: File,
}

fn ksm_now() -> anyhow::Result<Ksm> {
    Ksm::read().ok_or_else(|| Stop::HostLacks("this kernel has no KSM (CONFIG_KSM)".into()).into())
}

fn ksmd_cpu_s() -> Option<f64> {
    host::ksmd_cpu_time().map(|time| time.as_secs_f64())
}

impl Counted {
    fn now(ksm: &Ksm) -> anyhow::Result<Self> {
        Ok(Self {
            at: Instant::now(),
            swapped: host::swapped_pages()?,
            scanned: ksm.pages_scanned,
            sharing: ksm.pages_sharing.saturating_add(ksm.ksm_zero_pages.unwrap_or(0)),
            full_scans: ksm.full_scans.unwrap_or(0),
        })
    }
}

impl Driving {
    /// Begins to drive ksmd. The first look sets its knobs.
    ///
    /// # Errors
    /// The host has no such ksmd, somebody else sets its knobs, or pages are merged that go with another policy for
    /// NUMA nodes.
    pub fn begin(rule: Rule, bounds: Bounds, across_nodes: Option<bool>) -> anyhow::Result<Self> {
        let ksm = ksm_now()?;
        if rule == Rule::Advisor && ksm.advisor_mode.is_none() {
            return Err(Stop::HostLacks("this kernel has no advisor for ksmd: use Linux 6.8 or newer".into()).into());
        }
        refuse_other_drivers()?;
        let lock = lock()?;
        put_back()?;
        let former = KsmKnobs::read().context("KSM cannot be read any more")?;
        let nodes = across_nodes.map(u64::from);
        check_nodes(&ksm, nodes)?;
        let driver = ProcessId::of(std::process::id())?;
        let (began_s, cpu_s) = (host::boot_clock_s(), ksmd_cpu_s());
        let note = Note { former: former.0, driver, rule, began_s, cpu_s, reason: "it begins".into() };
        let before = Counted::now(&ksm)?;
        write_note(&note)?;
        // Without a guard, no knob is set, and the note is removed.
        let mut guard = start_guard(&lock).inspect_err(|_| _ = fs::remove_file(NOTE))?;
        let pipe = guard.stdin.take();
        let driving = Self {
            note,
            bounds,
            before,
            free: VecDeque::new(),
            knobs: None,
            driven_pages: None,
            guard,
            pipe,
            _lock: lock,
        };
        if rule != Rule::Advisor && ksm.advisor_mode.is_some() {
            set_ksm("advisor_mode", "none")?;
        }
        if let Some(nodes) = nodes.filter(|nodes| ksm.merge_across_nodes != Some(*nodes)) {
            set_ksm("merge_across_nodes", &nodes.to_string())?;
        }
        Ok(driving)
    }

    /// Looks at the host, and sets the knobs for the next window.
    ///
    /// # Errors
    /// A knob cannot be set any more, or the guard is gone.
    pub fn look(&mut self) -> anyhow::Result<Look> {
        if self.guard.try_wait()?.is_some() {
            bail!("the process that puts ksmd's knobs back has ended");
        }
        let ksm = ksm_now()?;
        let seen = self.seen(&ksm)?;
        let (knobs, reason) = ksm::drive(self.note.rule, &self.bounds, &seen);
        let is_new = self.knobs != Some(knobs);
        if is_new {
            apply(knobs)?;
            self.knobs = Some(knobs);
        }
        if let Knobs::Scan(pages, _) = knobs {
            self.driven_pages = Some(pages);
        }
        if self.note.reason != reason {
            self.note.reason.clone_from(&reason);
            write_note(&self.note)?;
        }
        let (pages_to_scan, sleep_millisecs) = match knobs {
            Knobs::Scan(pages, sleep) => (Some(pages), Some(sleep)),
            Knobs::Off | Knobs::Advised => (None, None),
        };
        let ksmd_cpu_s = ksmd_cpu_s().zip(self.note.cpu_s).map(|(now, then)| now - then);
        let (at_s, runs, net_bytes) = (host::boot_clock_s(), knobs != Knobs::Off, ksm.net_bytes());
        Ok(Look { at_s, runs, pages_to_scan, sleep_millisecs, reason, net_bytes, ksmd_cpu_s, is_new })
    }

    /// Activity of the host since the last look.
    fn seen(&mut self, ksm: &Ksm) -> anyhow::Result<ksm::Host> {
        let now = Counted::now(ksm)?;
        let before = std::mem::replace(&mut self.before, now);
        self.free.push_back(host::free_and_cached_bytes()?);
        if self.free.len() > FREE_LOOKS {
            self.free.pop_front();
        }
        let scanned = now.scanned.zip(before.scanned).map(|(now, then)| now.saturating_sub(then));
        Ok(ksm::Host {
            total_bytes: host::ram_bytes(),
            available_bytes: host::available_bytes()?,
            free_bytes: self.free.iter().copied().collect(),
            vm_bytes: if matches!(self.note.rule, Rule::Ksmtuned | Rule::Mom) { vm_bytes()? } else { 0 },
            stalled_percent: host::memory_stalled_percent(),
            window: now.at.saturating_duration_since(before.at),
            swapped_pages: now.swapped.saturating_sub(before.swapped),
            scanned_pages: scanned,
            merged_pages: now.sharing.cast_signed().saturating_sub(before.sharing.cast_signed()),
            full_scans: now.full_scans.saturating_sub(before.full_scans),
            pages_to_scan: ksm.pages_to_scan.unwrap_or(0),
            ran: self.knobs.is_some_and(|knobs| knobs != Knobs::Off),
            driven_pages: self.driven_pages,
        })
    }

    /// Puts the knobs back.
    ///
    /// # Errors
    /// That cannot be; the note stays then.
    pub fn end(mut self) -> anyhow::Result<()> {
        self.leave()
    }

    /// Makes the guard put the knobs back, as when this process is killed. If the guard was killed, this process puts
    /// them back itself.
    fn leave(&mut self) -> anyhow::Result<()> {
        let Some(mut pipe) = self.pipe.take() else { return Ok(()) };
        let _ = pipe.write_all(ENDS);
        drop(pipe);
        let _ = self.guard.wait();
        put_back().map(drop)
    }
}

impl Drop for Driving {
    fn drop(&mut self) {
        if let Err(e) = self.leave() {
            cli::say!("pagefold: {e:#}");
        }
    }
}

/// The guard's process: waits for the end of its driver, and puts the knobs back.
///
/// # Errors
/// The knobs cannot be put back; the note stays then.
pub fn guard() -> anyhow::Result<()> {
    let mut said = Vec::new();
    // A driver that is killed closes the pipe, too.
    let _ = std::io::stdin().lock().read_to_end(&mut said);
    if put_back()? && said != ENDS {
        cli::say!("pagefold: the driver of ksmd was cut off; its knobs are as they were");
    }
    Ok(())
}

/// Puts back the knobs of a driver that was killed together with its guard. Returns whether there was such a driver.
///
/// # Errors
/// A driver or a bench is at work, or a knob cannot be put back.
pub fn restore() -> anyhow::Result<bool> {
    ksm_now()?;
    let _lock = lock()?;
    put_back()
}

/// The state of ksmd, and of its driver.
///
/// # Errors
/// The kernel has no KSM.
pub fn status() -> anyhow::Result<Status> {
    let ksm = ksm_now()?;
    let note = read_note()?;
    let cpu_s = ksmd_cpu_s();
    let driver = note.as_ref().filter(|note| note.driver.is_alive()).map(|note| Driver {
        pid: note.driver.pid,
        rule: note.rule,
        seconds: host::boot_clock_s().saturating_sub(note.began_s),
        reason: note.reason.clone(),
        ksmd_cpu_s: cpu_s.zip(note.cpu_s).map(|(now, then)| now - then),
    });
    let value = |text: String| text.parse::<u64>().map_or(serde_json::Value::String(text), Into::into);
    let knobs = KsmKnobs::read().unwrap_or_default();
    Ok(Status {
        left_behind: note.is_some() && driver.is_none(),
        driver,
        knobs: knobs.0.into_iter().map(|(name, text)| (name, value(text))).collect(),
        pages_shared: ksm.pages_shared,
        pages_sharing: ksm.pages_sharing,
        zero_pages: ksm.ksm_zero_pages,
        net_bytes: ksm.net_bytes(),
        ksmd_cpu_s: cpu_s,
    })
}

fn apply(knobs: Knobs) -> anyhow::Result<()> {
    match knobs {
        Knobs::Off => set_ksm("run", "0")?,
        Knobs::Scan(pages, sleep) => {
            set_ksm("pages_to_scan", &pages.to_string())?;
            set_ksm("sleep_millisecs", &sleep.to_string())?;
            set_ksm("run", "1")?;
        }
        Knobs::Advised => {
            set_ksm("advisor_mode", "scan-time")?;
            set_ksm("run", "1")?;
        }
    }
    Ok(())
}

fn lock() -> anyhow::Result<File> {
    if host::own_uid() != 0 {
        return Err(Stop::HostLacks("root alone sets ksmd's knobs".into()).into());
    }
    let lock = host::lock_file(Path::new(LOCK), PATIENCE, PAUSE).with_context(|| format!("cannot lock {LOCK}"))?;
    lock.context("another pagefold ksm drive, or a bench, has ksmd's knobs just now: wait until it has ended")
}

/// Starts the guard, which has the lock for as long as it lives.
fn start_guard(lock: &File) -> anyhow::Result<Child> {
    let mut command = Command::new(cli::pagefold());
    // Signals of the terminal are meant for the driver.
    command.args(["ksm", "guard"]).process_group(0).stdin(Stdio::piped());
    // The guard writes nothing to its standard output: that is the locked file, so that the guard holds the lock.
    command.stdout(lock.try_clone().context("cannot pass a lock on")?);
    command.spawn().context("cannot start the process that puts ksmd's knobs back")
}

/// Refuses a host on which another program sets the same knobs.
fn refuse_other_drivers() -> anyhow::Result<()> {
    let called = |pid: &u32| Process::read_without_arguments(*pid).map(|process| (process.comm, *pid)).ok();
    let other = host::pids()?.iter().filter_map(called).find(|(name, _)| OTHERS.contains(&name.as_str()));
    match other {
        Some((name, pid)) => bail!("{name} (process {pid}) sets ksmd's knobs, too: end it first"),
        None => Ok(()),
    }
}

/// Refuses another policy for NUMA nodes while pages are merged.
fn check_nodes(ksm: &Ksm, nodes: Option<u64>) -> anyhow::Result<()> {
    let Some(nodes) = nodes else { return Ok(()) };
    match ksm.merge_across_nodes {
        None => Err(Stop::HostLacks("this kernel has no merge_across_nodes: it knows no NUMA nodes".into()).into()),
        Some(now) if now != nodes && ksm.pages_shared > 0 => bail!(
            "merge_across_nodes can only be set while nothing is merged, and {} pages are: \
             echo 2 > /sys/kernel/mm/ksm/run unmerges them, and takes {}",
            ksm.pages_sharing,
            bytes(page::pages_to_bytes(ksm.pages_sharing))
        ),
        Some(_) => Ok(()),
    }
}

/// Address spaces of processes that are called qemu, as `ksmtuned` counts them.
fn vm_bytes() -> anyhow::Result<u64> {
    let size = |pid: u32| {
        let process = Process::read_without_arguments(pid).ok()?;
        process.comm.contains("qemu").then_some(process.stat.address_bytes)
    };
    Ok(host::pids()?.into_iter().filter_map(size).fold(0, u64::saturating_add))
}

/// Puts the knobs of the note back, and removes the note. Returns whether there was a note.
fn put_back() -> anyhow::Result<bool> {
    let Some(note) = read_note()? else { return Ok(false) };
    let knobs = KsmKnobs(note.former);
    let cannot = "cannot set ksmd's knobs as they were";
    if !knobs.put_back_merged().context(cannot)? {
        let (ksm, spare) = (ksm_now()?, host::spare_bytes());
        let needed = page::pages_to_bytes(ksm.pages_sharing);
        if needed > spare {
            set_ksm("run", "0").context(cannot)?;
            bail!(
                "{cannot}: merge_across_nodes can only be set while nothing is merged; unmerging takes {}, and {} are left: \
                 pagefold ksm restore does it later; ksmd is stopped",
                bytes(needed),
                bytes(spare)
            );
        }
        knobs.put_back().context(cannot)?;
    }
    fs::remove_file(NOTE).with_context(|| format!("cannot remove {NOTE}"))?;
    Ok(true)
}

fn read_note() -> anyhow::Result<Option<Note>> {
    match fs::read(NOTE) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        read => {
            let text = read.with_context(|| format!("cannot read {NOTE}"))?;
            serde_json::from_slice(&text).map(Some).with_context(|| format!("{NOTE} is no note of ours"))
        }
    }
}

/// Writes the note whole: a reader never sees half of it.
fn write_note(note: &Note) -> anyhow::Result<()> {
    let new = Path::new(NOTE).with_extension("new");
    let write = || {
        let mut file = File::options().create(true).truncate(true).write(true).mode(0o644).open(&new)?;
        file.write_all(&serde_json::to_vec(note)?)?;
        fs::rename(&new, NOTE)
    };
    write().with_context(|| format!("cannot write {NOTE}"))
}
