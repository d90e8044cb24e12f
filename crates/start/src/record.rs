//! The record of a clone: the file `clone.json` in its directory.
//!
//! ```text
//!   (no directory) -> starting -> running -> (process gone: the next command that looks removes the directory)
//!                        |  ^        ^
//!                        |  |        +-- warm: loaded and stopped, waits to be a clone
//!                        |  +-- rolled back
//!                        +-- starter has died: its machine, if there is one, is ended, and the directory removed
//!                  running, stopped while it is saved -- saver gone: goes on as soon as anybody looks
//! ```

use crate::identities::Identity;
use crate::machine::NAME;
use crate::memory::FileId;
use crate::place::replace;
use crate::template::Template;
use cli::exit::Stop;
use host::ProcessId;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Name of the file in a clone's directory.
const FILE: &str = "clone.json";

/// The state of a clone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// The process that starts it is still at work.
    Starting,
    /// Its machine is loaded and stopped, has no identity, and is kept ready for a later request.
    Warm,
    /// The helper inside has answered, and the clone has its identity.
    Running,
    /// The clone runs, and no helper inside has answered.
    Unconfirmed,
}

/// A clone.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// Its name, unique on the host.
    pub name: String,
    /// Its group.
    pub group: String,
    /// Name of its template.
    pub template: String,
    /// Digest of the memory that it began with.
    pub digest: String,
    /// How far it has come.
    pub state: State,
    /// Its QEMU.
    pub process: Option<ProcessId>,
    /// The process that starts it.
    pub starter: Option<ProcessId>,
    /// The memory file that it maps.
    pub memory: Option<FileId>,
    /// The directory of the service that folds it; `None` where none does.
    #[serde(default)]
    pub service: Option<PathBuf>,
    /// Whether another program (libvirt, Proxmox VE, a script) starts the clone's QEMU: see `clones/awaited.rs`.
    #[serde(default)]
    pub started_elsewhere: bool,
    /// The process that is saving it to a file, and has stopped it for that.
    #[serde(default)]
    pub saver: Option<ProcessId>,
    /// Names and numbers by which it differs from other clones of the template.
    pub identity: Option<Identity>,
}

impl Record {
    /// Whether it is a clone of this template.
    pub fn is_of(&self, template: &Template) -> bool {
        (&self.group, &self.template, &self.digest) == (&template.group, &template.name, &template.memory.digest)
    }

    /// Whether both are clones of one template, and the same service folds them, or none.
    pub(crate) fn is_sibling(&self, other: &Self) -> bool {
        let of =
            |clone: &Self| (clone.service.clone(), clone.group.clone(), clone.template.clone(), clone.digest.clone());
        of(self) == of(other)
    }

    /// The command line of its machine; if a service folds it, as a command of `pagefold run`, which executes QEMU in
    /// its own process.
    pub(crate) fn as_member(&self, words: &[String]) -> Vec<String> {
        let Some(service) = &self.service else { return words.to_vec() };
        let (pagefold, service) = (cli::pagefold().to_string_lossy(), service.to_string_lossy());
        let run: [&str; 9] = [&pagefold, "run", "--group", &self.group, "--name", NAME, "--service", &service, "--"];
        run.map(str::to_owned).into_iter().chain(words.iter().cloned()).collect()
    }

    /// Fails if somebody else has started the clone's machine, so that this program cannot start it again. `done` says
    /// for the error what was to be done.
    pub(crate) fn check_own_machine(&self, done: &str) -> anyhow::Result<()> {
        if !self.started_elsewhere {
            return Ok(());
        }
        let text =
            format!("{} cannot be {done}: its machine was started elsewhere, with options of its own", self.name);
        Err(Stop::Usage(format!("{text}; end it, and start it again there")).into())
    }

    /// Whether its QEMU runs.
    pub fn is_alive(&self) -> bool {
        self.process.is_some_and(|process| process.is_alive())
    }

    pub(crate) fn read(dir: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(dir.join(FILE)).ok()?).ok()
    }

    pub(crate) fn write(&self, dir: &Path) -> anyhow::Result<()> {
        replace(&dir.join(FILE), &serde_json::to_vec_pretty(self)?)
    }
}
