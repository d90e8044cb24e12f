//! Keeps guests from being parked while a program uses them.
//!
//! A note names the process of that program, and counts for as long as that process lives. So nobody has to remove it.
//!
//! ```text
//!   DIR/parked/GUEST.HOLDER.awake    the two processes
//! ```

use crate::park::{Parking, dir_of};
use anyhow::Context;
use host::ProcessId;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Longest note that is read, in bytes: 4 KiB.
const MOST_BYTES: u64 = 4 << 10;

#[derive(Serialize, Deserialize)]
struct Awake {
    guest: ProcessId,
    holder: ProcessId,
}

impl Parking {
    /// Keeps the guest whose process is `guest` from being parked for as long as process `holder` lives.
    ///
    /// # Errors
    /// The note cannot be written.
    pub fn keep_awake(&self, guest: ProcessId, holder: ProcessId) -> anyhow::Result<()> {
        // This call also drops notes of processes that have ended.
        self.holder_of(guest);
        let path = dir_of(&self.service).join(format!("{}.{}.awake", guest.pid, holder.pid));
        let next = path.with_extension("next");
        let write = || {
            let mut file = File::options().create(true).write(true).truncate(true).mode(0o600).open(&next)?;
            file.write_all(&serde_json::to_vec(&Awake { guest, holder })?)?;
            fs::rename(&next, &path)
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }

    /// A process that keeps the guest whose process is `guest` from being parked; `None` if there is none. Notes of
    /// processes that have ended are removed.
    pub fn holder_of(&self, guest: ProcessId) -> Option<ProcessId> {
        let mut found = None;
        for path in fs::read_dir(dir_of(&self.service)).ok()?.filter_map(|entry| Some(entry.ok()?.path())) {
            if path.extension().is_none_or(|ending| ending != "awake") {
                continue;
            }
            match read(&path) {
                Some(awake) if awake.holder.is_alive() && awake.guest.is_alive() => {
                    found = found.or((awake.guest == guest).then_some(awake.holder));
                }
                // Notes of processes that have ended, and damaged notes, are removed.
                _ => _ = fs::remove_file(&path),
            }
        }
        found
    }
}

fn read(path: &Path) -> Option<Awake> {
    serde_json::from_slice(&host::read_plain_file(path, MOST_BYTES).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_qemu::ended_pid;
    use crate::park::NOTES_WITHIN;

    #[test]
    fn guest_is_kept_awake_for_as_long_as_its_holder_lives() {
        let dir = tempfile::tempdir().unwrap();
        let parking = Parking::lock(dir.path(), NOTES_WITHIN).unwrap();
        let own = ProcessId::of(std::process::id()).unwrap();
        let first = ProcessId::of(1).unwrap();
        assert_eq!(parking.holder_of(own), None);
        parking.keep_awake(own, first).unwrap();
        assert_eq!([parking.holder_of(own), parking.holder_of(first)], [Some(first), None]);
        let ended = ProcessId { pid: ended_pid(), start_ticks: 1 };
        parking.keep_awake(first, ended).unwrap();
        assert_eq!(parking.holder_of(first), None);
        let notes = || fs::read_dir(dir_of(dir.path())).unwrap().count();
        assert_eq!(notes(), 2, "the lock, and one note");
        // Another process has the holder's pid.
        parking.keep_awake(own, ProcessId { start_ticks: 7, ..first }).unwrap();
        assert_eq!((parking.holder_of(own), notes()), (None, 1));
        fs::write(dir_of(dir.path()).join("x.awake"), "{").unwrap();
        assert_eq!((parking.holder_of(own), notes()), (None, 1));
    }
}
