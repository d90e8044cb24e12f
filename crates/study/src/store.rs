//! Turns on disk: if a command is cut off, the same command goes on after the last turn that was finished.
//!
//! ```text
//!   STATE/ID-FORM/identity         program, kernel and host that the turns belong to
//!                /REP-ARM.json     a finished turn, moved into place when it is complete
//! ```
//! Turns of another program, kernel or host are removed, because their figures cannot be compared. The directories are
//! removed when the command has written all results.

use crate::plan::Planned;
use crate::record::Turn;
use anyhow::{Context, bail};
use cli::{printable, say};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// The stores of all studies that a command runs.
pub struct Stores {
    state: PathBuf,
    identity: String,
    open: BTreeMap<String, Store>,
}

impl Stores {
    /// Stores in directories below `state`. `identity` names the program, the kernel and the host.
    pub fn new(state: &Path, identity: String) -> Self {
        Self { state: state.to_owned(), identity, open: BTreeMap::new() }
    }

    /// The store of this name, which is opened the first time. It stays open: studies with the same turns use it, too.
    ///
    /// # Errors
    /// See [`Store::open`].
    pub fn of(&mut self, name: &str) -> anyhow::Result<&Store> {
        if !self.open.contains_key(name) {
            self.open.insert(name.to_owned(), Store::open(&self.state, name, &self.identity)?);
        }
        Ok(&self.open[name])
    }

    /// Removes all turns, after the results were written.
    ///
    /// # Errors
    /// A turn cannot be removed.
    pub fn clear(self) -> anyhow::Result<()> {
        self.open.into_values().try_for_each(Store::clear)
    }
}

/// The directory with the turns of one study in one form.
pub struct Store {
    dir: PathBuf,
    /// Lock of the directory: two runs of the same study at once would mix their turns.
    _lock: File,
}

impl Store {
    /// Opens the directory of this name below `state`. Turns in it of another `identity` are removed.
    ///
    /// # Errors
    /// Another run of the study holds the directory, or it cannot be used.
    pub fn open(state: &Path, name: &str, identity: &str) -> anyhow::Result<Self> {
        fs::create_dir_all(state).with_context(|| format!("cannot create {}", state.display()))?;
        let (dir, path) = (state.join(name), state.join(format!("{name}.lock")));
        let lock = File::options().create(true).truncate(false).write(true).open(&path);
        let lock = lock.with_context(|| format!("cannot create {}", path.display()))?;
        if lock.try_lock().is_err() {
            bail!("another run of {name} goes on: wait until it has ended");
        }
        let written = dir.join("identity");
        if let Some(of) = fs::read_to_string(&written).ok().filter(|found| found != identity) {
            let turns = turns_in(&dir);
            if turns > 0 {
                say!("pagefold: {name}: turns of another program or host are dropped: {turns}, of {}", printable(&of));
            }
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

    /// The planned turn, if it was finished and kept. A file that cannot be parsed counts as missing.
    ///
    /// # Errors
    /// A file is there and cannot be read.
    pub fn find(&self, planned: &Planned) -> anyhow::Result<Option<Turn>> {
        let path = self.file(planned);
        let bytes = match fs::read(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            read => read.with_context(|| format!("cannot read {}", path.display()))?,
        };
        match serde_json::from_slice(&bytes) {
            Ok(turn) => Ok(Some(turn)),
            Err(why) => {
                say!("pagefold: {} holds no turn, which is measured again: {why}", path.display());
                Ok(None)
            }
        }
    }

    /// Writes a finished turn to the directory.
    ///
    /// # Errors
    /// The turn cannot be written.
    pub fn keep(&self, planned: &Planned, turn: &Turn) -> anyhow::Result<()> {
        let path = self.file(planned);
        let new = path.with_extension("new");
        let text = serde_json::to_string(turn)?;
        let written = File::create(&new).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            // Otherwise the file's new name could reach the disk before its content.
            file.sync_all()?;
            fs::rename(&new, &path)
        });
        written.with_context(|| format!("cannot write {}", path.display()))
    }

    fn clear(self) -> anyhow::Result<()> {
        fs::remove_dir_all(&self.dir).with_context(|| format!("cannot remove {}", self.dir.display()))
    }
}

/// Number of the turns in a directory.
fn turns_in(dir: &Path) -> usize {
    let is_turn = |entry: &fs::DirEntry| entry.path().extension().is_some_and(|ending| ending == "json");
    fs::read_dir(dir).map_or(0, |entries| entries.flatten().filter(is_turn).count())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Length;
    use crate::record::{Measured, Sample};

    fn planned(rep: Option<u32>) -> Planned {
        Planned { arm: "a".into(), rep, length: Length::Short }
    }

    fn turn() -> Turn {
        let samples = vec![Sample::new("m", 1.5), Sample::at("n", "4", 2.0)];
        let measured = Measured { samples, ..Measured::default() };
        Turn { arm: "a".into(), rep: 0, seconds: 2.0, ksm: None, measured }
    }

    #[test]
    fn finished_turns_are_found_again_and_those_of_other_programs_are_not() {
        let state = tempfile::tempdir().unwrap();
        let turn = turn();
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
        assert_eq!(turns_in(&state.path().join("x-short")), 1);
        store.clear().unwrap();
        assert!(!state.path().join("x-short").exists());
    }

    #[test]
    fn file_that_holds_no_turn_counts_for_nothing() {
        let state = tempfile::tempdir().unwrap();
        let store = Store::open(state.path(), "x-short", "1").unwrap();
        let whole = serde_json::to_string(&turn()).unwrap();
        let without_number = whole.replace("1.5", "null");
        for text in ["", &whole[..20], &without_number, "\u{fffd}"] {
            fs::write(store.file(&planned(Some(0))), text).unwrap();
            assert_eq!(store.find(&planned(Some(0))).unwrap(), None, "{text}");
        }
        fs::write(store.file(&planned(Some(0))), [0xff]).unwrap();
        assert_eq!(store.find(&planned(Some(0))).unwrap(), None);
        store.keep(&planned(Some(0)), &turn()).unwrap();
        assert_eq!(store.find(&planned(Some(0))).unwrap(), Some(turn()));
    }

    #[test]
    fn stores_stay_open_until_all_are_cleared() {
        let state = tempfile::tempdir().unwrap();
        let mut stores = Stores::new(state.path(), "1".into());
        stores.of("x-short").unwrap().keep(&planned(Some(0)), &turn()).unwrap();
        stores.of("y-short").unwrap();
        assert_eq!(stores.of("x-short").unwrap().find(&planned(Some(0))).unwrap(), Some(turn()));
        assert!(Store::open(state.path(), "x-short", "1").is_err(), "it is locked");
        stores.clear().unwrap();
        assert!(!state.path().join("x-short").exists() && !state.path().join("y-short").exists());
    }
}
