//! Turns on disk: a run that was killed goes on after the last turn that it finished.
//!
//! ```text
//!   STATE/ID-FORM/identity         program and kernel that the turns belong to
//!                /REP-ARM.json     a finished turn, moved into place when it is complete
//! ```
//! Turns of another program or kernel are dropped, because their figures are of other code. The directory goes when the
//! run is complete, and no other study of the same command takes its turns.

use crate::plan::Planned;
use crate::record::Turn;
use anyhow::{Context, bail};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The turns of one run.
pub struct Store {
    dir: PathBuf,
    /// Held while the run lasts: two runs of the same study would mix their turns.
    _lock: File,
}

impl Store {
    /// Opens the turns of a study in a form, below `state`.
    ///
    /// # Errors
    /// Another run of it goes on, or the directory cannot be used.
    pub fn open(state: &Path, name: &str, identity: &str) -> anyhow::Result<Self> {
        fs::create_dir_all(state).with_context(|| format!("cannot create {}", state.display()))?;
        let (dir, path) = (state.join(name), state.join(format!("{name}.lock")));
        let lock = File::options().create(true).truncate(false).write(true).open(&path);
        let lock = lock.with_context(|| format!("cannot create {}", path.display()))?;
        if lock.try_lock().is_err() {
            bail!("another run of {name} goes on: wait until it has ended");
        }
        let written = dir.join("identity");
        if fs::read_to_string(&written).is_ok_and(|found| found != identity) {
            fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))?;
        }
        fs::create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        fs::write(&written, identity).with_context(|| format!("cannot write {}", written.display()))?;
        Ok(Self { dir, _lock: lock })
    }

    fn file(&self, planned: &Planned) -> PathBuf {
        let rep = planned.rep.map_or_else(|| "warm-up".to_owned(), |rep| rep.to_string());
        self.dir.join(format!("{rep}-{}.json", planned.arm))
    }

    /// The turn, if it was finished before.
    ///
    /// # Errors
    /// It is there and cannot be read.
    pub fn find(&self, planned: &Planned) -> anyhow::Result<Option<Turn>> {
        let path = self.file(planned);
        match fs::read_to_string(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            text => {
                let text = text.with_context(|| format!("cannot read {}", path.display()))?;
                let turn = serde_json::from_str(&text).with_context(|| format!("{} holds no turn", path.display()))?;
                Ok(Some(turn))
            }
        }
    }

    /// Keeps a finished turn.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn keep(&self, planned: &Planned, turn: &Turn) -> anyhow::Result<()> {
        let path = self.file(planned);
        let new = path.with_extension("new");
        let written = fs::write(&new, serde_json::to_string(turn)?).and_then(|()| fs::rename(&new, &path));
        written.with_context(|| format!("cannot write {}", path.display()))
    }

    /// Removes all turns: the run is complete.
    ///
    /// # Errors
    /// They cannot be removed.
    pub fn clear(self) -> anyhow::Result<()> {
        fs::remove_dir_all(&self.dir).with_context(|| format!("cannot remove {}", self.dir.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Length;
    use crate::record::{Measured, Sample};

    #[test]
    fn finished_turns_are_found_again_and_those_of_other_programs_are_not() {
        let state = tempfile::tempdir().unwrap();
        let planned = |rep| Planned { arm: "a".into(), rep, length: Length::Short };
        let samples = vec![Sample::new("m", 1.5), Sample::at("n", "4", 2.0)];
        let turn =
            Turn { arm: "a".into(), rep: 0, seconds: 2.0, measured: Measured { samples, ..Measured::default() } };
        let store = Store::open(state.path(), "x-short", "1").unwrap();
        assert_eq!(store.find(&planned(Some(0))).unwrap(), None);
        store.keep(&planned(Some(0)), &turn).unwrap();
        assert!(Store::open(state.path(), "x-short", "1").is_err(), "it is locked");
        drop(store);
        let store = Store::open(state.path(), "x-short", "1").unwrap();
        assert_eq!(store.find(&planned(Some(0))).unwrap(), Some(turn.clone()));
        assert_eq!(store.find(&planned(None)).unwrap(), None);
        drop(store);
        let store = Store::open(state.path(), "x-short", "2").unwrap();
        assert_eq!(store.find(&planned(Some(0))).unwrap(), None);
        store.keep(&planned(Some(0)), &turn).unwrap();
        store.clear().unwrap();
        assert!(!state.path().join("x-short").exists());
    }
}
