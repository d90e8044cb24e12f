//! State that outlives a command: targets of balloons, reservations, and the journal.
//!
//! ```text
//!   DIR/balance.json      targets by guest, and reservations
//!   DIR/balance.journal   an object a line: each action with its reason, its expected and its actual yield
//! ```
//!
//! QEMU does not tell a balloon's target. Without it, a driver that is on its way looks like one that is there.

use anyhow::Context;
use guest::Guest;
use host::ProcessId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Time after which a reservation lapses, in seconds: 10 minutes.
const RESERVED_FOR_S: u64 = 600;
/// Longest ledger that is read, in bytes: 4 MiB.
const MOST_BYTES: u64 = 4 << 20;

/// A reservation in the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserved {
    /// Its size.
    pub bytes: u64,
    /// When it lapses, in seconds since the host started.
    pub until_s: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Kept {
    /// By guest: its process, when that started, and the target.
    targets: BTreeMap<String, (u32, u64, u64)>,
    /// By name of the guest that is to start.
    reserved: BTreeMap<String, Reserved>,
}

/// The ledger of one directory.
#[derive(Debug)]
pub struct Ledger {
    dir: PathBuf,
    kept: Kept,
}

impl Ledger {
    /// Opens the ledger of a directory, which is made when something is written.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub fn open(dir: &Path) -> anyhow::Result<Self> {
        let path = dir.join("balance.json");
        let kept = if path.exists() {
            let bytes = host::read_plain_file(&path, MOST_BYTES)?;
            let hint = || format!("{} is damaged: remove it, and set balloons anew", path.display());
            serde_json::from_slice(&bytes).with_context(hint)?
        } else {
            Kept::default()
        };
        Ok(Self { dir: dir.to_owned(), kept })
    }

    /// The size that a guest was told to have.
    pub fn target_bytes(&self, guest: &Guest) -> Option<u64> {
        let (pid, started, target) = self.kept.targets.get(&guest.id)?;
        let process = ProcessId { pid: *pid, start_ticks: *started };
        (guest.pids.first() == Some(pid) && process.is_alive()).then_some(*target)
    }

    /// Notes the size that a guest is told to have. It is written before the guest is told.
    ///
    /// # Errors
    /// The guest has ended, or the ledger cannot be written.
    pub fn note_target(&mut self, guest: &Guest, size_bytes: u64) -> anyhow::Result<()> {
        let pid = guest.pids.first().copied().context("a guest without a process")?;
        let process = ProcessId::of(pid)?;
        self.kept
            .targets
            .retain(|_, (pid, start_ticks, _)| ProcessId { pid: *pid, start_ticks: *start_ticks }.is_alive());
        self.kept.targets.insert(guest.id.clone(), (pid, process.start_ticks, size_bytes));
        self.save()
    }

    /// Reservations of guests that have not started: names and bytes.
    pub fn reserved(&self, has_started: impl Fn(&str) -> bool) -> Vec<(String, u64)> {
        let holds = |name: &str, reserved: &Reserved| reserved.until_s > host::boot_clock_s() && !has_started(name);
        let all = self.kept.reserved.iter().filter(|(name, reserved)| holds(name, reserved));
        all.map(|(name, reserved)| (name.clone(), reserved.bytes)).collect()
    }

    /// Reserves memory for a guest that is to start, for 10 minutes. Zero bytes end a reservation.
    ///
    /// # Errors
    /// The ledger cannot be written.
    pub fn reserve(&mut self, name: &str, bytes: u64) -> anyhow::Result<()> {
        let at = host::boot_clock_s();
        self.kept.reserved.retain(|other, reserved| other != name && reserved.until_s > at);
        if bytes > 0 {
            self.kept.reserved.insert(name.to_owned(), Reserved { bytes, until_s: at + RESERVED_FOR_S });
        }
        self.save()
    }

    /// Adds a line to the journal.
    ///
    /// # Errors
    /// The journal cannot be written.
    pub fn write_down(&self, action: &impl Serialize) -> anyhow::Result<()> {
        self.make_dir()?;
        let path = self.dir.join("balance.journal");
        let mut line = serde_json::to_vec(action)?;
        line.push(b'\n');
        let file = File::options().create(true).append(true).mode(0o600).open(&path);
        file.and_then(|mut file| file.write_all(&line)).with_context(|| format!("cannot write {}", path.display()))
    }

    fn make_dir(&self) -> anyhow::Result<()> {
        fs::create_dir_all(&self.dir).with_context(|| format!("cannot make {}", self.dir.display()))
    }

    fn save(&self) -> anyhow::Result<()> {
        self.make_dir()?;
        let file = cli::OutputFile::create(&self.dir.join("balance.json"))?;
        file.handle()?.write_all(&serde_json::to_vec(&self.kept)?)?;
        file.commit()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own_guest() -> Guest {
        let survey = guest::Survey::take().unwrap();
        let own = std::process::id();
        survey.guests(&[own], &[]).into_iter().find(|guest| guest.pids.contains(&own)).expect("this process is a guest")
    }

    #[test]
    fn targets_and_reservations_outlive_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let mut own = own_guest();
        own.pids = vec![std::process::id()];
        let mut ledger = Ledger::open(dir.path()).unwrap();
        assert_eq!(ledger.target_bytes(&own), None);
        ledger.note_target(&own, 7).unwrap();
        ledger.reserve("next", 9).unwrap();
        let mut ledger = Ledger::open(dir.path()).unwrap();
        assert_eq!((ledger.target_bytes(&own), ledger.reserved(|_| false)), (Some(7), vec![("next".into(), 9)]));
        assert_eq!(ledger.reserved(|name| name == "next"), []);
        ledger.reserve("next", 0).unwrap();
        assert_eq!(Ledger::open(dir.path()).unwrap().reserved(|_| false), []);
        let other = Guest { pids: vec![1], ..own };
        assert_eq!(ledger.target_bytes(&other), None, "another process by the same name");
    }

    #[test]
    fn damaged_ledger_is_named() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("balance.json"), "{").unwrap();
        assert!(Ledger::open(dir.path()).unwrap_err().to_string().contains("balance.json is damaged"));
    }

    #[test]
    fn journal_has_a_line_for_each_action() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(dir.path()).unwrap();
        ledger.write_down(&1).unwrap();
        ledger.write_down(&"two").unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("balance.journal")).unwrap(), "1\n\"two\"\n");
    }
}
