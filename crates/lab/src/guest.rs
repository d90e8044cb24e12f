//! One guest of a lab: its public description, and the ways to use it.

use crate::agent::{self, Output};
use crate::error::{Error, Result};
use crate::family::Family;
use crate::lxc::Container;
use crate::qemu::Accelerator;
use crate::qemu::Sockets;
use crate::spec::Fold;
use crate::start::last_words;
use crate::state::{Entry, Image};
use guest::qmp::Qmp;
use host::ProcessId;
use serde::Serialize;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How far a guest has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestState {
    /// It has reported that it is ready.
    Ready,
    /// The process that started it waits for its report.
    Starting,
    /// It has not reported, and the process that started it is gone.
    Failed,
    /// Its first process is gone, or was never started.
    Ended,
}

/// A guest that a lab started. Serializes to what `pagefold lab list --json` prints.
#[derive(Clone, Debug, Serialize)]
pub struct Guest {
    /// Name of the guest, unique in its lab; QEMU and LXC use the same.
    pub name: String,
    /// The group it was put into.
    pub group: String,
    /// Image of the guest.
    pub image: Image,
    /// Its first process; absent if it was never started.
    pub pid: Option<u32>,
    /// Whether that process runs.
    pub running: bool,
    /// How far it has come.
    pub state: GuestState,
    /// Seconds since its start, while it runs.
    pub age_seconds: Option<u64>,
    /// Seconds from its start until it reported that it was ready; absent before.
    pub ready_seconds: Option<f64>,
    /// RAM of a VM, data of a process; absent for a container.
    pub memory_bytes: Option<u64>,
    /// Accelerator of a VM.
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
        let alive = |process: &Option<ProcessId>| process.is_some_and(|process| process.is_alive());
        let running = alive(&entry.process);
        let state = match entry.ready_ms {
            _ if !running => GuestState::Ended,
            Some(_) => GuestState::Ready,
            None if alive(&entry.starter) => GuestState::Starting,
            None => GuestState::Failed,
        };
        let sockets = entry.image.is_vm().then(|| Sockets::in_dir(&dir));
        Self {
            pid: entry.process.map(|process| process.pid),
            running,
            state,
            age_seconds: entry.process.filter(|_| running).map(|process| process.age_seconds()),
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

    /// Pids of its processes on the host, in ascending order: QEMU, or LXC's monitor and the container's processes.
    pub fn pids(&self) -> Vec<u32> {
        let tree = self.process.filter(ProcessId::is_alive).map(|process| Family::now().tree(&process));
        tree.unwrap_or_default().iter().map(|id| id.pid).collect()
    }

    /// Runs a command of exactly these words inside, and returns its output (1 MiB at most) and its status.
    /// Processes that the command leaves in the background may live on.
    ///
    /// # Errors
    /// The guest does not answer, or the command takes longer than `timeout` and was killed.
    /// [`Error::Stop`] for a process, which has no inside.
    pub fn exec(&self, argv: &[&str], timeout: Duration) -> Result<Output> {
        if !self.process.is_some_and(|process| process.is_alive()) {
            return Err(self.ended("it has ended, or was never started"));
        }
        if self.image.is_vm() {
            let socket = Sockets::in_dir(&self.dir).agent;
            return agent::exec(&socket, argv, timeout).map_err(|e| match e.kind() {
                ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionRefused => {
                    self.ended(&e.to_string())
                }
                _ => Error::guest(&self.name, e.to_string()),
            });
        }
        if self.image.is_container() {
            let container = Container { name: &self.name, dir: self.dir.clone() };
            return container.exec(argv, timeout).map_err(|e| Error::guest(&self.name, e.to_string()));
        }
        Err(Error::usage(format!("guest {} is a plain process and has no inside to run a command in", self.name)))
    }

    /// The error for a guest that has ended: how its process ended, and the end of its output.
    fn ended(&self, problem: &str) -> Error {
        /// Most checks, 10 ms apart, whether the guest's process has ended: a VM's sockets close a little earlier.
        const LOOKS: u32 = 200;
        let mut how = String::new();
        for _ in 0..LOOKS {
            let Some(process) = self.process.filter(ProcessId::has_pid) else { break };
            if let Some(ending) = process.ending() {
                how = format!(" ({ending})");
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Error::guest(&self.name, format!("{problem}{how}{}", last_words(&self.dir)))
    }

    /// Makes all processes of a container members, in the container's group.
    ///
    /// # Errors
    /// None of them can be a member.
    /// [`Error::Stop`] if it is no container: a VM or process is a member from its start or not at all.
    pub fn attach(&self, fold: &Fold) -> Result<()> {
        if !self.image.is_container() {
            return Err(Error::usage(format!("guest {} is no container: only those are attached to", self.name)));
        }
        Container { name: &self.name, dir: self.dir.clone() }.attach(fold, &self.group)
    }

    /// Connects to a VM's QMP socket. QEMU accepts one client at a time.
    ///
    /// # Errors
    /// The guest is no VM, or QEMU does not answer within `timeout`.
    pub fn qmp(&self, timeout: Duration) -> Result<Qmp> {
        let socket = self.qmp.as_ref().ok_or_else(|| Error::guest(&self.name, "only VMs speak QMP"))?;
        Qmp::connect(socket, timeout).map_err(|e| Error::guest(&self.name, e.to_string()))
    }
}
