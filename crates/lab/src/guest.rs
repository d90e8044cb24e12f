//! One guest of a lab, as others see and use it.

use crate::agent::{self, Output};
use crate::error::{Error, Result};
use crate::family::Family;
use crate::lxc::Container;
use crate::qemu::Accelerator;
use crate::qemu::Sockets;
use crate::state::{Entry, Image};
use guest::qmp::Qmp;
use host::ProcessId;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A guest that a lab started. Serializes to what `pagefold lab list --json` prints.
#[derive(Clone, Debug, Serialize)]
pub struct Guest {
    /// Unique in its lab, and what QEMU or LXC call it.
    pub name: String,
    /// The group it was put into.
    pub group: String,
    /// What it is made of.
    pub image: Image,
    /// Its first process; absent if it was never started.
    pub pid: Option<u32>,
    /// Whether that process runs.
    pub running: bool,
    /// From its start until it said that it was ready, in seconds; absent before.
    pub ready_seconds: Option<f64>,
    /// RAM of a VM, data of a process; absent for a container.
    pub memory_bytes: Option<u64>,
    /// What executes a VM.
    pub accelerator: Option<Accelerator>,
    /// A VM's QMP socket.
    pub qmp: Option<PathBuf>,
    /// A VM's console socket, with the kernel's messages and a shell.
    pub console: Option<PathBuf>,
    #[serde(skip)]
    process: Option<ProcessId>,
    #[serde(skip)]
    dir: PathBuf,
}

impl Guest {
    pub(crate) fn new(entry: Entry, lab: &Path) -> Self {
        let dir = lab.join(&entry.name);
        let sockets = entry.image.is_vm().then(|| Sockets::in_dir(&dir));
        Self {
            pid: entry.process.map(|process| process.pid),
            running: entry.process.is_some_and(|process| process.is_alive()),
            ready_seconds: entry.ready_ms.map(|ms| ms as f64 / 1000.0),
            memory_bytes: entry.memory_bytes,
            accelerator: entry.accelerator,
            qmp: sockets.as_ref().map(|sockets| sockets.qmp.clone()),
            console: sockets.map(|sockets| sockets.console),
            process: entry.process,
            name: entry.name,
            group: entry.group,
            image: entry.image,
            dir,
        }
    }

    pub(crate) fn process(&self) -> Option<ProcessId> {
        self.process
    }

    /// Its processes on the host, in ascending order: QEMU's, or LXC's monitor and what runs in the container.
    pub fn pids(&self) -> Vec<u32> {
        let tree = self.process.filter(ProcessId::is_alive).map(|process| Family::now().tree(&process));
        tree.unwrap_or_default().iter().map(|id| id.pid).collect()
    }

    /// Runs a command inside, exactly these words, and returns what it printed (1 MiB at most) and its status.
    /// What it starts in the background may live on.
    ///
    /// # Errors
    /// The guest does not answer, or the command takes longer than `timeout` and was killed.
    /// [`Error::Usage`] for a process, which has no inside.
    pub fn exec(&self, argv: &[&str], timeout: Duration) -> Result<Output> {
        if !self.process.is_some_and(|process| process.is_alive()) {
            return Err(Error::guest(&self.name, "it has ended, or was never started"));
        }
        if self.image.is_vm() {
            let socket = Sockets::in_dir(&self.dir).agent;
            return agent::exec(&socket, argv, timeout).map_err(|e| Error::guest(&self.name, e.to_string()));
        }
        if self.image.is_container() {
            let container = Container { name: &self.name, dir: self.dir.clone() };
            return container.exec(argv, timeout).map_err(|e| Error::guest(&self.name, e.to_string()));
        }
        Err(Error::Usage(format!("guest {} is a plain process and has no inside to run a command in", self.name)))
    }

    /// Talks QMP with a VM; QEMU lets one client in at a time.
    ///
    /// # Errors
    /// It is no VM, or does not answer within `timeout`.
    pub fn qmp(&self, timeout: Duration) -> Result<Qmp> {
        let socket = self.qmp.as_ref().ok_or_else(|| Error::guest(&self.name, "only VMs speak QMP"))?;
        Qmp::connect(socket, timeout).map_err(|e| Error::guest(&self.name, e.to_string()))
    }
}
