//! The state file of a lab. Because of it, `lab list`, `lab exec` and `lab down` work from any process, even if the
//! process that started the guests was killed.
//!
//! - The file is changed only under a lock, and replaced as a whole.
//! - A guest is in the file before its process is started.
//! - The process that starts guests holds the lock until the start is done. A started process inherits the lock's
//!   descriptor until it executes its own program. So the next holder of the lock finds all processes that were started
//!   under it, with their marks in place.

use crate::error::{Error, Result};
use crate::qemu::Accelerator;
use crate::{name, place, random};
use host::ProcessId;
use rustix::fs::{FlockOperation, flock, fstat};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Image of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Image {
    /// A VM with a kernel and busybox.
    Tiny,
    /// A VM with Debian, systemd, MariaDB and Apache.
    Debian,
    /// A container on a root directory that all of this kind share.
    LxcShared,
    /// A container on a copy of that directory.
    LxcCopied,
    /// A container with MariaDB, on a copy of a root directory.
    LxcMariadb,
    /// A container with Apache and its forked children, on a copy of the same directory.
    LxcApache,
    /// A plain process that holds files and data.
    Process,
}

impl Image {
    /// Whether it is a virtual machine.
    pub const fn is_vm(self) -> bool {
        matches!(self, Self::Tiny | Self::Debian)
    }

    /// Whether it is a container.
    pub const fn is_container(self) -> bool {
        self.is_copied() || matches!(self, Self::LxcShared)
    }

    /// Whether it is a container on a root directory of its own.
    pub const fn is_copied(self) -> bool {
        matches!(self, Self::LxcCopied | Self::LxcMariadb | Self::LxcApache)
    }

    /// Name of the server that the container's first program starts; `None` if it starts none of its own.
    pub(crate) const fn server(self) -> Option<&'static str> {
        match self {
            Self::LxcMariadb => Some("mariadb"),
            Self::LxcApache => Some("apache"),
            _ => None,
        }
    }
}

/// A guest in the state file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) group: String,
    pub(crate) image: Image,
    /// RAM of a VM, data of a process.
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) accelerator: Option<Accelerator>,
    /// A copied root directory outside the lab's own.
    pub(crate) copied_root: Option<PathBuf>,
    /// The guest's first process; absent until just after it was started.
    pub(crate) process: Option<ProcessId>,
    /// Milliseconds from its start until it reported that it was ready; absent before.
    pub(crate) ready_ms: Option<u64>,
    /// The process that started the guest and waits until it is ready.
    #[serde(default)]
    pub(crate) starter: Option<ProcessId>,
}

/// The state file's content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct State {
    /// Random number of the lab, which is part of its processes' marks.
    pub(crate) token: String,
    pub(crate) guests: Vec<Entry>,
}

/// The directory of a lab, its lock and its state file.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    dir: PathBuf,
}

/// Holds the lock of a lab until it is dropped.
#[derive(Debug)]
pub(crate) struct Locked {
    dir: PathBuf,
    _lock: File,
    pub(crate) state: State,
}

impl Store {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Path of the file that assigns guests to groups, for other commands.
    pub(crate) fn groups_file(&self) -> PathBuf {
        self.dir.join("groups.toml")
    }

    /// The guests in the state file; none if there is no lab.
    pub(crate) fn guests(&self) -> Result<Vec<Entry>> {
        Ok(read_state(&self.dir)?.map_or_else(Vec::new, |state| state.guests))
    }

    /// Takes the lock of an existing lab; `None` if there is none.
    pub(crate) fn lock(&self) -> Result<Option<Locked>> {
        if self.dir.exists() { self.lock_or_make().map(Some) } else { Ok(None) }
    }

    /// Takes the lock, and creates the lab if there is none. A directory with anything else in it is refused.
    pub(crate) fn lock_or_make(&self) -> Result<Locked> {
        let path = self.dir.join("lock");
        let (lock, is_new) = loop {
            place::private_dir(&self.dir)?;
            let is_new = !path.exists();
            let file = match File::options().create(true).append(true).open(&path) {
                // `lab down` has removed the directory in between.
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                file => file.map_err(|e| Error::file("open", &path, e))?,
            };
            flock(&file, FlockOperation::LockExclusive).map_err(|e| Error::file("lock", &path, e))?;
            // `lab down` may also have removed it while this process waited for the lock.
            if fstat(&file).map_err(|e| Error::file("stat", &path, e))?.st_nlink > 0 {
                break (file, is_new);
            }
        };
        let locked = |state| Locked { dir: self.dir.clone(), _lock: lock, state };
        match read_state(&self.dir)? {
            Some(state) => Ok(locked(state)),
            None => {
                if let Err(error) = check_is_new(&self.dir) {
                    // If this call has created the lock file, it removes the file.
                    let _ = if is_new { fs::remove_file(&path) } else { Ok(()) };
                    return Err(error);
                }
                let number = random::number().map_err(|e| Error::file("read", "/dev/urandom", e))?;
                let locked = locked(State { token: format!("{number:016x}"), guests: Vec::new() });
                locked.save()?;
                Ok(locked)
            }
        }
    }
}

impl Locked {
    /// Writes the state file, and the file that assigns guests to groups.
    pub(crate) fn save(&self) -> Result<()> {
        let text = serde_json::to_vec_pretty(&self.state).expect("the state holds text and numbers only");
        replace(&self.dir.join("state.json"), &text)?;
        let groups = self.state.guests.iter().map(|guest| (guest.group.as_str(), guest.name.as_str()));
        replace(&self.dir.join("groups.toml"), name::groups_toml(groups).as_bytes())
    }

    /// The guest of this name, unless another process has ended it.
    pub(crate) fn guest_mut(&mut self, name: &str) -> Option<&mut Entry> {
        self.state.guests.iter_mut().find(|guest| guest.name == name)
    }
}

/// Refuses a directory that holds other files: `lab down` would remove them.
fn check_is_new(dir: &Path) -> Result<()> {
    // Files that an interrupted `lab up` or `lab down` may leave.
    let ours = ["lock", "state.new", "groups.toml", "groups.new", ".kvm"].map(OsStr::new);
    for entry in fs::read_dir(dir).map_err(|e| Error::file("list", dir, e))? {
        let name = entry.map_err(|e| Error::file("list", dir, e))?.file_name();
        if !ours.contains(&name.as_os_str()) {
            let text = format!("{} is not a lab: it holds {}", dir.display(), name.display());
            return Err(Error::usage(format!("{text}; name a directory that is empty, or not there yet, with --dir")));
        }
    }
    Ok(())
}

fn replace(path: &Path, content: &[u8]) -> Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, content).map_err(|e| Error::file("write", &new, e))?;
    fs::rename(&new, path).map_err(|e| Error::file("rename", &new, e))
}

fn read_state(dir: &Path) -> Result<Option<State>> {
    let path = dir.join("state.json");
    let text = match fs::read_to_string(&path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        text => text.map_err(|e| Error::file("read", &path, e))?,
    };
    let state = serde_json::from_str(&text).map_err(|e| host::Error::Malformed {
        path,
        line: e.line(),
        problem: e.to_string(),
    })?;
    Ok(Some(state))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str) -> Entry {
        Entry {
            name: name.into(),
            group: "acme".into(),
            image: Image::LxcShared,
            memory_bytes: Some(1 << 20),
            accelerator: Some(Accelerator::Tcg),
            copied_root: Some("/somewhere".into()),
            process: Some(ProcessId { pid: 17, start_ticks: 4 }),
            starter: None,
            ready_ms: None,
        }
    }

    fn store() -> (tempfile::TempDir, Store) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let store = Store::new(dir.path().join("lab"));
        (dir, store)
    }

    #[test]
    fn saved_state_is_read_by_next_holder_of_lock() {
        let (_dir, store) = store();
        assert!(store.lock().expect("no lab").is_none());
        assert_eq!(store.guests().expect("no lab"), []);
        let mut locked = store.lock_or_make().expect("make a lab");
        let token = locked.state.token.clone();
        locked.state.guests.push(entry("acme-1"));
        locked.save().expect("save");
        drop(locked);
        let again = store.lock().expect("the lab").expect("it is there");
        assert_eq!(again.state, State { token, guests: vec![entry("acme-1")] });
        assert!(fs::read_to_string(store.groups_file()).expect("the mapping").contains("acme = [\"acme-1\"]"));
    }

    #[test]
    fn waiter_for_lock_of_removed_lab_creates_new_lab() {
        let (_dir, store) = store();
        let first = store.lock_or_make().expect("make a lab");
        let waiting = std::thread::spawn({
            let store = store.clone();
            move || store.lock_or_make().expect("make a lab").state.token
        });
        std::thread::sleep(std::time::Duration::from_millis(50));
        fs::remove_dir_all(store.dir()).expect("as lab down does");
        let old = first.state.token.clone();
        drop(first);
        assert_ne!(waiting.join().expect("no panic"), old);
        assert!(store.dir().join("state.json").exists());
    }

    /// It ended where the directory went between making it and looking at it.
    #[test]
    fn labs_are_made_while_others_remove_them() {
        let (_dir, store) = store();
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = fs::remove_dir(store.dir());
                }
            });
            let made = (0..10_000).try_for_each(|_| place::private_dir(store.dir()));
            over.store(true, std::sync::atomic::Ordering::Relaxed);
            made.expect("make a directory");
        });
    }

    #[test]
    fn directory_with_other_files_is_refused_and_unchanged() {
        let base = tempfile::tempdir().expect("a temporary directory");
        let dir = base.path().join("home");
        place::private_dir(&dir).expect("make it");
        fs::write(dir.join("letter"), "dear").expect("write a file");
        let lab = crate::Lab::open(&dir).expect("a path");
        let error = lab.down().expect_err("not a lab").to_string();
        assert!(error.contains("is not a lab: it holds letter"), "{error}");
        assert!(Store::new(dir.clone()).lock_or_make().is_err());
        let names = fs::read_dir(&dir).expect("list it").map(|entry| entry.expect("an entry").file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["letter"]);
        fs::remove_file(dir.join("letter")).expect("remove it");
        assert_eq!(lab.down().expect("an empty directory does"), [""; 0]);
    }

    #[test]
    fn damaged_state_file_is_named_with_its_line() {
        let (_dir, store) = store();
        drop(store.lock_or_make().expect("make a lab"));
        fs::write(store.dir().join("state.json"), "{\n\"token\": 1}").expect("damage it");
        let error = store.guests().expect_err("damaged").to_string();
        assert!(error.contains("state.json line 2"), "{error}");
    }
}
