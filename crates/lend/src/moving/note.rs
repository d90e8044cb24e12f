//! The note of a migration under way, by which the next command can follow the migration if this command is killed.
//!
//! `DIR/moving/PID-TICKS` has the destination and QEMU's former settings. The process that follows the migration holds
//! the file's lock, and the kernel releases the lock with that process. The file is removed when the migration is over.

use super::settings::Settings;
use anyhow::{Context, bail};
use host::ProcessId;
use serde::{Deserialize, Serialize};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Most bytes of a note that are read.
const MOST_BYTES: u64 = 64 << 10;

/// The content of a note.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Told {
    /// The destination.
    pub to: String,
    /// QEMU's settings before the migration.
    pub before: Settings,
    /// Whether the guest was about to be paused, so as to cancel.
    pub pauses: bool,
}

/// The note of one guest's migration, locked by this process.
#[derive(Debug)]
pub(super) struct Note {
    path: PathBuf,
    file: File,
    told: Option<Told>,
}

impl Note {
    /// The note of the guest whose QEMU is `process`, empty if there was none.
    ///
    /// # Errors
    /// Another process follows its migration, or the file cannot be opened.
    pub(super) fn take(service: &Path, process: ProcessId) -> anyhow::Result<Self> {
        let dir = service.join("moving");
        match DirBuilder::new().mode(0o700).create(&dir) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                return Err(e).with_context(|| format!("cannot make {}", dir.display()));
            }
            _ => forget_ended(&dir),
        }
        let path = dir.join(format!("{}-{}", process.pid, process.start_ticks));
        let cannot = || format!("cannot open {}", path.display());
        loop {
            let mut options = File::options();
            options.create(true).truncate(false).read(true).write(true).mode(0o600);
            let file = options.open(&path).with_context(cannot)?;
            if file.try_lock().is_err() {
                bail!("another command is moving it");
            }
            // The former holder may have removed the file before the lock was taken.
            if fs::metadata(&path).map(|found| found.ino()).ok() != Some(file.metadata().with_context(cannot)?.ino()) {
                continue;
            }
            let mut text = Vec::new();
            (&file).take(MOST_BYTES).read_to_end(&mut text).with_context(cannot)?;
            let told = serde_json::Deserializer::from_slice(&text).into_iter().next().and_then(Result::ok);
            return Ok(Self { path, file, told });
        }
    }

    /// The content, which a process that was killed has left, or this one has written.
    pub(super) const fn told(&self) -> Option<&Told> {
        self.told.as_ref()
    }

    /// Writes the note down.
    pub(super) fn tell(&mut self, told: Told) -> anyhow::Result<()> {
        let text = serde_json::to_vec(&told)?;
        let written = self.file.write_all_at(&text, 0).and_then(|()| self.file.set_len(text.len() as u64));
        written.with_context(|| format!("cannot write {}", self.path.display()))?;
        self.told = Some(told);
        Ok(())
    }

    /// Adds to the note that the guest is about to be paused, to cancel the migration.
    pub(super) fn tell_pause(&mut self) -> anyhow::Result<()> {
        let told = self.told.clone().context("a note that was not written")?;
        self.tell(Told { pauses: true, ..told })
    }

    /// Removes the note: the migration is over.
    pub(super) fn over(mut self) {
        self.told = None;
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        if self.told.is_none() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes notes whose QEMU has ended.
fn forget_ended(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.split_once('-')).and_then(|(pid, start_ticks)| {
            Some(ProcessId { pid: pid.parse().ok()?, start_ticks: start_ticks.parse().ok()? })
        });
        if process.is_some_and(|process| !process.is_alive()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn told(pauses: bool) -> Told {
        let before = serde_json::from_value(json!({"capabilities": [], "bandwidth": 7})).unwrap();
        Told { to: "tcp:h:1".into(), before, pauses }
    }

    #[test]
    fn note_is_found_by_the_next_process_alone_and_is_gone_when_all_is_over() {
        let dir = tempfile::tempdir().unwrap();
        let own = ProcessId::of(std::process::id()).unwrap();
        let mut note = Note::take(dir.path(), own).unwrap();
        note.tell(told(false)).unwrap();
        note.tell_pause().unwrap();
        let busy = Note::take(dir.path(), own).unwrap_err().to_string();
        assert!(busy.contains("another command is moving it"), "{busy}");
        drop(note);
        let note = Note::take(dir.path(), own).unwrap();
        assert_eq!(note.told(), Some(&told(true)));
        note.over();
        assert_eq!(Note::take(dir.path(), own).unwrap().told(), None);
        assert_eq!(fs::read_dir(dir.path().join("moving")).unwrap().count(), 0);
    }

    #[test]
    fn note_of_a_process_that_has_ended_is_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let own = ProcessId::of(std::process::id()).unwrap();
        Note::take(dir.path(), ProcessId { start_ticks: own.start_ticks + 1, ..own })
            .unwrap()
            .tell(told(false))
            .unwrap();
        Note::take(dir.path(), own).unwrap().tell(told(false)).unwrap();
        assert_eq!(Note::take(dir.path(), own).unwrap().told(), Some(&told(false)));
        assert_eq!(fs::read_dir(dir.path().join("moving")).unwrap().count(), 1);
    }
}
