//! Commands of `pagefold` that are kept running beside the supervisor, as the configuration wants them. One balances
//! memory between guests (`[balance]`). Another one enrols running processes by rules (`[[enrol]]`). A third one parks guests that are
//! idle (`[park]`). A fourth one writes sketches of guests (`[sketch]`): it becomes `pagefold-place`.
//!
//! ```text
//!   not wanted --> none
//!   started --> running --it ends, or other arguments are wanted--> waits (backoff.rs) --> started again
//! ```
//!
//! Each command asks this service as any client does. Its standard input is a pipe of the supervisor's: the command
//! ends when the pipe closes. The balancing command may end at any point: each guest then has a size that a plan
//! allowed. Attached processes stay attached. Guests that were being parked go on, and parked guests stay parked.

use super::backoff::Backoff;
use super::helper::{self, Held};
use anyhow::Context;
use api::place::Place;
use cli::note;
use host::ProcessId;
use rustix::process::{Pid, WaitStatus};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// A command that is kept running, or that is not wanted at present.
pub struct Beside {
    place: Place,
    /// The program of its command.
    pagefold: Rc<Held>,
    /// Its work, in words.
    work: &'static str,
    /// Its arguments; `None`: it is not wanted.
    arguments: Option<Vec<String>>,
    process: Option<(ProcessId, ChildStdin)>,
    since: Instant,
    backoff: Backoff,
}

impl Beside {
    /// A command that is not started yet, for this work. It is not started while `arguments` are `None`.
    pub fn new(place: &Place, pagefold: &Rc<Held>, work: &'static str, arguments: Option<Vec<String>>) -> Self {
        let (since, backoff) = (Instant::now(), Backoff::default());
        Self { place: place.clone(), pagefold: Rc::clone(pagefold), work, arguments, process: None, since, backoff }
    }

    /// Takes over other arguments. A command that runs with the old arguments ends, and is started again.
    pub fn set(&mut self, arguments: Option<Vec<String>>) {
        if self.arguments != arguments {
            self.arguments = arguments;
            self.backoff.reset();
            self.end();
        }
    }

    /// Time at which the command should be started; `None`: it is not wanted, or runs.
    pub fn start_at(&self, now: Instant) -> Option<Instant> {
        (self.arguments.is_some() && self.process.is_none()).then(|| self.backoff.start_at(now))
    }

    /// Starts the command if it is due.
    pub fn start_if_due(&mut self, now: Instant) {
        if self.start_at(now).is_none_or(|at| at > now) {
            return;
        }
        self.since = now;
        match self.spawn() {
            Ok(process) => {
                note!("{}: process {}", self.work, process.0.pid);
                self.process = Some(process);
            }
            Err(e) => {
                note!("{}: {e:#}", self.work);
                self.backoff.failed(Duration::ZERO, now);
            }
        }
    }

    fn spawn(&self) -> anyhow::Result<(ProcessId, ChildStdin)> {
        let arguments = self.arguments.as_ref().context("it is not wanted")?;
        let mut command = self.pagefold.command();
        command.arg0("pagefold").args(arguments).arg("--service").arg(self.place.dir());
        // A process group of its own: an interrupt at a terminal ends the supervisor, whose end ends this process.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).env_clear().current_dir("/").process_group(0);
        let mut child = command.spawn().context("cannot be started")?;
        let word = child.stdin.take().context("it has no standard input")?;
        Ok((ProcessId::of(child.id())?, word))
    }

    /// Notes that a child of the supervisor has ended, which may be this command.
    pub fn child_ended(&mut self, pid: Pid, status: WaitStatus) {
        let is_it = |(p, _): &mut (ProcessId, ChildStdin)| i32::try_from(p.pid) == Ok(pid.as_raw_nonzero().get());
        if let Some((process, _)) = self.process.take_if(is_it) {
            note!("{}: process {}: {}", self.work, process.pid, helper::end_in_words(status));
            self.backoff.failed(self.since.elapsed(), Instant::now());
        }
    }

    /// Ends the command.
    pub fn end(&mut self) {
        if let Some((process, _)) = self.process.take() {
            process.terminate();
        }
    }
}
