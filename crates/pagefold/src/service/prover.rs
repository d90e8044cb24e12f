//! The service's prover, kept running. Only root's service has one, and only where the kernel lets it see what it needs.
//!
//! ```text
//!   none --(not root's service, or not wanted)--> none
//!   started --> running --it ends--> waits (0.1 s, doubling to 10 s) --> started again, on the same socket
//!      |
//!      +-- the host lacks something --> none, and no socket: who connects is refused at once
//! ```

use super::log::note;
use super::place::{Place, own_uid};
use crate::exit;
use anyhow::Context;
use host::{ProcessId, SeqpacketListener};
use rustix::fd::AsFd;
use rustix::process::{Pid, WaitStatus};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// One that ran for so long was all right.
const ALL_RIGHT_AFTER: Duration = Duration::from_secs(60);
/// Times between one's end and the next one's start.
const WAIT: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// The prover.
pub struct Prover {
    /// Where members connect; `None` where there is no prover to be had.
    listener: Option<SeqpacketListener>,
    process: Option<ProcessId>,
    since: Instant,
    failures: u32,
    not_before: Option<Instant>,
}

impl Prover {
    /// None runs yet, and none ever will unless one is wanted.
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
            // An earlier one's: nobody would answer there.
            let _ = fs::remove_file(path);
        }
        Ok(Self { listener, process: None, since: Instant::now(), failures: 0, not_before: None })
    }

    /// When it should be started; `None`: not at all, or it runs.
    pub fn start_at(&self, now: Instant) -> Option<Instant> {
        (self.listener.is_some() && self.process.is_none()).then(|| self.not_before.unwrap_or(now))
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
            Err(e) => {
                note!("{e:#}");
                self.back_off();
            }
        }
    }

    /// A child of ours has ended.
    pub fn child_ended(&mut self, pid: Pid, status: WaitStatus) {
        let Some(process) = self.process.take_if(|p| i32::try_from(p.pid) == Ok(pid.as_raw_nonzero().get())) else {
            return;
        };
        if status.exit_status() == Some(i32::from(exit::HOST_LACKS)) {
            note!(
                "there is no prover on this host: members find out by themselves what is held, which costs them more"
            );
            self.give_up();
            return;
        }
        note!("the prover, process {}, has ended: {status:?}", process.pid);
        self.back_off();
    }

    fn back_off(&mut self) {
        self.failures = if self.since.elapsed() >= ALL_RIGHT_AFTER { 1 } else { self.failures.saturating_add(1) };
        let wait = WAIT.0.saturating_mul(1 << (self.failures - 1).min(10)).min(WAIT.1);
        self.not_before = Some(Instant::now() + wait);
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

fn spawn(listener: &SeqpacketListener, uid: Option<u32>) -> anyhow::Result<ProcessId> {
    let input = listener.as_fd().try_clone_to_owned().context("cannot pass a socket on")?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("pagefold").args(["prove", "--supervisor", &std::process::id().to_string()]);
    if let Some(uid) = uid {
        command.args(["--uid", &uid.to_string()]);
    }
    // A group of its own: who interrupts the supervisor at a terminal has the supervisor end it.
    command.stdin(Stdio::from(input)).stdout(Stdio::null()).env_clear().current_dir("/").process_group(0);
    let child = command.spawn().context("cannot start the prover")?;
    Ok(ProcessId::of(child.id())?)
}
