//! One worker process, and the connection to it.

use super::place::{Place, own_uid};
use anyhow::Context;
use fold::control::{CONTROL_BYTES, News, Order};
use host::{CgroupHome, ProcessId, Received, Seqpacket, SeqpacketListener};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::VecDeque;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::time::Instant;

/// Orders that may wait for a worker that does not read.
const MOST_WAITING: usize = 4096;

/// A running worker.
pub struct Worker {
    /// Its process.
    pub process: ProcessId,
    /// Since when we know it.
    pub since: Instant,
    /// It has said what there is.
    pub heard: bool,
    /// Its own control group, where it has one.
    pub home: Option<CgroupHome>,
    socket: Seqpacket,
    waiting: VecDeque<(Vec<u8>, Vec<Rc<OwnedFd>>)>,
}

impl Worker {
    /// Starts a worker for `group`, as user `uid` if that is given, and connects to it. `no_home` gets why it has no
    /// control group of its own.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(place: &Place, group: &str, uid: Option<u32>, no_home: &mut Option<String>) -> anyhow::Result<Self> {
        // The name is there before the process is: whoever supervises next finds it, whatever happens to us now.
        let path = place.worker_socket(group);
        let listener = SeqpacketListener::bind(&path)?;
        let socket = Seqpacket::connect(&path)?;
        let input = listener.as_fd().try_clone_to_owned().context("cannot pass a socket on")?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("pagefold").args(["worker", "--group", group, "--supervisor-uid", &own_uid().to_string()]);
        if let Some(uid) = uid {
            command.args(["--uid", &uid.to_string()]);
        }
        // A group of its own: who interrupts the supervisor at a terminal does not interrupt the worker.
        command.stdin(Stdio::from(input)).stdout(Stdio::null()).env_clear().current_dir("/").process_group(0);
        let child = command.spawn().context("cannot start a worker")?;
        let process = ProcessId::of(child.id())?;
        let home = CgroupHome::make("pagefold", group).and_then(|home| {
            home.add(child.id()).inspect_err(|_| _ = home.remove())?;
            Ok(home)
        });
        let home = home.map_err(|e| *no_home = Some(e.to_string())).ok();
        Ok(Self { process, since: Instant::now(), heard: false, home, socket, waiting: VecDeque::new() })
    }

    /// Connects to the worker of `group` that an earlier supervisor started; `None` if there is none any more.
    ///
    /// # Errors
    /// The socket is there but cannot be used.
    pub fn adopt(place: &Place, group: &str) -> anyhow::Result<Option<Self>> {
        let path = place.worker_socket(group);
        let Ok(socket) = Seqpacket::connect(&path) else {
            let _ = std::fs::remove_file(&path);
            return Ok(None);
        };
        // Who listens is the worker; before it got so far, the supervisor that started it.
        let process = ProcessId::of(socket.peer()?.pid).unwrap_or(ProcessId { pid: 0, start_ticks: 0 });
        let home = CgroupHome::make("pagefold", group).ok();
        Ok(Some(Self { process, since: Instant::now(), heard: false, home, socket, waiting: VecDeque::new() }))
    }

    /// Sends an order and copies of `files`, now or when the worker has read what came before. `false` when it has too
    /// much to read already.
    pub fn send(&mut self, order: &Order, files: Vec<Rc<OwnedFd>>) -> bool {
        if self.waiting.len() >= MOST_WAITING {
            return false;
        }
        self.waiting.push_back((super::ask::encode(order), files));
        self.flush();
        true
    }

    /// Sends what waits. That the worker is gone is found out by reading.
    pub fn flush(&mut self) {
        while let Some((frame, files)) = self.waiting.front() {
            let fds: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
            match self.socket.send(frame, &fds) {
                Ok(true) => _ = self.waiting.pop_front(),
                Ok(false) | Err(_) => return,
            }
        }
    }

    /// Whether something waits to be sent.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// What it says next, with the files that came along.
    ///
    /// # Errors
    /// It has gone, or says what no worker says.
    pub fn receive(&self, buffer: &mut Vec<u8>) -> io::Result<Option<(News, Vec<OwnedFd>)>> {
        buffer.resize(CONTROL_BYTES, 0);
        let mut files = Vec::new();
        match self.socket.receive(buffer, &mut files)? {
            Received::Nothing => Ok(None),
            Received::Closed => Err(io::ErrorKind::UnexpectedEof.into()),
            Received::Frame(bytes) => {
                let news = serde_json::from_slice(&buffer[..bytes]).map_err(io::Error::other)?;
                Ok(Some((news, files)))
            }
        }
    }

    /// Asks the process to end.
    pub fn end(&self) {
        self.process.terminate();
    }
}

impl AsFd for Worker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
