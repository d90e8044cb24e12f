//! The service's prover, kept running. Only root's service has one, and only where the kernel shows reference counts.
//!
//! ```text
//!   not root's service, or not wanted --> none
//!   started --> running --it ends--> waits (backoff.rs) --> started again, on the same socket
//!                  |
//!                  +-- the host lacks something --> none, and no socket: members' connections are refused at once
//! ```

use super::backoff::Backoff;
use anyhow::Context;
use api::place::{Place, own_uid};
use cli::exit;
use cli::note;
use host::{ProcessId, SeqpacketListener};
use rustix::fd::AsFd;
use rustix::process::{Pid, WaitStatus};
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Instant;

/// The prover's program.
const PROGRAM: &str = "pagefold-prove";

/// The prover.
pub struct Prover {
    /// The socket to which members connect; `None` where there is no prover.
    listener: Option<SeqpacketListener>,
    process: Option<ProcessId>,
    since: Instant,
    backoff: Backoff,
}

impl Prover {
    /// A prover that is not started. It never is unless it is wanted.
    ///
    /// # Errors
    /// Its socket cannot be made.
    pub fn new(place: &Place, wanted: bool) -> anyhow::Result<Self> {
        let path = place.prove_socket();
        let mut listener = None;
        if wanted && own_uid() == 0 {
            let made = SeqpacketListener::bind(&path)?;
            fs::set_permissions(&path, Permissions::from_mode(0o666))
                .with_context(|| format!("cannot set the rights of {}", path.display()))?;
            listener = Some(made);
        } else {
            // At the socket of an earlier prover nobody would answer.
            let _ = fs::remove_file(path);
        }
        Ok(Self { listener, process: None, since: Instant::now(), backoff: Backoff::default() })
    }

    /// When it should be started; `None`: not at all, or it runs.
    pub fn start_at(&self, now: Instant) -> Option<Instant> {
        (self.listener.is_some() && self.process.is_none()).then(|| self.backoff.start_at(now))
    }

    /// Starts it, as user `uid` if that is given.
    pub fn start(&mut self, uid: Option<u32>) {
        let Some(listener) = &self.listener else { return };
        self.since = Instant::now();
        match spawn(listener, uid) {
            Ok(process) => {
                note!("prover started: process {}", process.pid);
                self.process = Some(process);
            }
            // A socket that nobody answers would keep members waiting.
            Err(e) if is_missing(&e) => {
                note!("{e:#}; members find out by themselves what is held, which costs them more");
                self.give_up();
            }
            Err(e) => {
                note!("{e:#}");
                self.backoff.failed(self.since.elapsed(), Instant::now());
            }
        }
    }

    /// Notes that a child of this process has ended, which may be the prover.
    pub fn child_ended(&mut self, pid: Pid, status: WaitStatus) {
        let Some(process) = self.process.take_if(|p| i32::try_from(p.pid) == Ok(pid.as_raw_nonzero().get())) else {
            return;
        };
        if status.exit_status() == Some(i32::from(exit::Code::HostLacks as u8)) {
            note!(
                "there is no prover on this host: members find out by themselves what is held, which costs them more"
            );
            self.give_up();
            return;
        }
        note!("the prover, process {}, has ended: {status:?}", process.pid);
        self.backoff.failed(self.since.elapsed(), Instant::now());
    }

    /// Ends it for good.
    pub fn end(&mut self) {
        if let Some(process) = self.process.take() {
            process.terminate();
        }
        self.give_up();
    }

    fn give_up(&mut self) {
        if let Some(listener) = self.listener.take() {
            let _ = fs::remove_file(listener.path());
        }
    }
}

/// Whether the prover's program is not installed.
fn is_missing(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::NotFound)
}

fn spawn(listener: &SeqpacketListener, uid: Option<u32>) -> anyhow::Result<ProcessId> {
    let input = listener.as_fd().try_clone_to_owned().context("cannot pass a socket on")?;
    // Both programs are installed in one directory.
    let program = std::env::current_exe().context("cannot tell where this program lies")?.with_file_name(PROGRAM);
    let mut command = Command::new(&program);
    command.args(["--supervisor", &std::process::id().to_string()]);
    if let Some(uid) = uid {
        command.args(["--uid", &uid.to_string()]);
    }
    // A process group of its own: an interrupt at a terminal ends the supervisor, which ends the prover.
    command.stdin(Stdio::from(input)).stdout(Stdio::null()).env_clear().current_dir("/").process_group(0);
    let child = command.spawn().with_context(|| format!("cannot start the prover, {}", program.display()))?;
    Ok(ProcessId::of(child.id())?)
}
