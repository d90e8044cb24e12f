//! The worker process of a group, and the supervisor's connection to it.

use super::helper::Held;
use super::kept::spawn;
use act::CgroupHome;
use anyhow::Context;
use api::control::{CONTROL_BYTES, News, Order};
use api::place::{Place, own_uid};
use host::{Files, ForeignFile, ProcessId, Received, Seqpacket, SeqpacketListener};
use rustix::fd::{AsFd, BorrowedFd};
use std::collections::VecDeque;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;
use std::rc::Rc;
use std::time::Instant;

/// Most orders that are kept for a worker that does not read. Further ones are not sent.
const MOST_WAITING: usize = 4096;

/// An order that was not sent yet, encoded, and the files that go with it.
type Waiting = (Vec<u8>, Vec<Rc<dyn AsFd>>);

/// A running worker.
pub struct Worker {
    /// The worker's process.
    pub process: ProcessId,
    /// When this supervisor started or adopted the worker.
    pub since: Instant,
    /// Whether an earlier supervisor started the worker.
    pub adopted: bool,
    /// Whether the worker has sent [`News::Adopted`], its first message. It is sent no orders before.
    pub heard: bool,
    /// The control group that holds the worker alone; `None` if it could not be made.
    pub home: Option<CgroupHome>,
    socket: Seqpacket,
    waiting: VecDeque<Waiting>,
}

/// The program of workers.
pub const PROGRAM: &str = "pagefold-worker";

impl Worker {
    /// Starts a worker for `group`, as user `uid` if that is given, and connects to it. `no_home` gets the reason why
    /// it has no control group of its own.
    ///
    /// # Errors
    /// The worker cannot be started.
    pub fn start(
        program: &Held,
        place: &Place,
        (group, uid): (&str, Option<u32>),
        no_home: &mut Option<String>,
    ) -> anyhow::Result<Self> {
        // The socket has its name before the process starts: if this supervisor dies, the next one finds the worker.
        let path = place.worker_socket(group);
        let listener = SeqpacketListener::bind(&path, Files::Taken)?;
        let socket = connect(&path)?;
        let input = listener.as_fd().try_clone_to_owned().context("cannot pass a socket on")?;
        let mut command = program.command();
        command.arg0(PROGRAM).args(["--group", group, "--supervisor-uid", &own_uid().to_string()]);
        command.arg("--prover").arg(place.prove_socket());
        command.stdin(Stdio::from(input)).stdout(Stdio::null());
        let process = spawn(&mut command, uid).context("cannot start a worker")?.0;
        let home = CgroupHome::make("pagefold", group).and_then(|home| {
            home.add(process.pid).inspect_err(|_| _ = home.remove())?;
            Ok(home)
        });
        let home = home.map_err(|e| *no_home = Some(e.to_string())).ok();
        Ok(Self {
            process,
            since: Instant::now(),
            adopted: false,
            heard: false,
            home,
            socket,
            waiting: VecDeque::new(),
        })
    }

    /// Connects to the worker of `group` that an earlier supervisor started; `None` if nobody listens at its socket any
    /// more.
    ///
    /// # Errors
    /// The kernel does not tell who listens at the socket.
    pub fn adopt(place: &Place, group: &str) -> anyhow::Result<Option<Self>> {
        let path = place.worker_socket(group);
        let Ok(socket) = connect(&path) else {
            let _ = std::fs::remove_file(&path);
            return Ok(None);
        };
        // The peer is the worker, or the supervisor that started it if the worker has not called `listen` itself yet.
        let process = ProcessId::of(socket.peer()?.pid).unwrap_or(ProcessId { pid: 0, start_ticks: 0 });
        let home = CgroupHome::make("pagefold", group).ok();
        Ok(Some(Self {
            process,
            since: Instant::now(),
            adopted: true,
            heard: false,
            home,
            socket,
            waiting: VecDeque::new(),
        }))
    }

    /// Sends an order and copies of `files`, at once or when the worker has read the orders before. Returns `false` if
    /// too many orders wait.
    pub fn send(&mut self, order: &Order, files: Vec<Rc<dyn AsFd>>) -> bool {
        if self.waiting.len() >= MOST_WAITING {
            return false;
        }
        self.waiting.push_back((api::ask::encode(order), files));
        self.flush();
        true
    }

    /// Sends waiting orders, as far as the worker reads them. An error is ignored here: [`Self::receive`] reports that
    /// the worker has gone.
    pub fn flush(&mut self) {
        while let Some((frame, files)) = self.waiting.front() {
            let fds: Vec<BorrowedFd<'_>> = files.iter().map(|file| file.as_fd()).collect();
            match self.socket.send(frame, &fds) {
                Ok(true) => _ = self.waiting.pop_front(),
                Ok(false) | Err(_) => return,
            }
        }
    }

    /// Whether orders wait to be sent.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The worker's next message, with the files that came along; `None` if none has come.
    ///
    /// # Errors
    /// The worker has gone, or has sent something that is no message.
    pub fn receive(&self, buffer: &mut Vec<u8>) -> io::Result<Option<(News, Vec<ForeignFile>)>> {
        buffer.resize(CONTROL_BYTES, 0);
        let mut files = Vec::new();
        let received = self.socket.receive(buffer, &mut files);
        let files = files.into_iter().map(ForeignFile::from).collect();
        match received? {
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

/// Connects to a worker. The worker may be compromised: closing this socket may block on files that the worker has
/// sent, so another thread closes it.
fn connect(path: &Path) -> host::Result<Seqpacket> {
    Ok(Seqpacket::from_stranger(Seqpacket::connect(path)?.into()))
}

impl AsFd for Worker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
