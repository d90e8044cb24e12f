//! Commands of `pagefold` that are kept running beside the supervisor, as the configuration wants them. One balances
//! memory between guests (`[balance]`). Another one enrols running processes by rules (`[[enrol]]`). A third one parks guests that are
//! idle (`[park]`). A fourth one writes sketches of guests (`[sketch]`): it becomes `pagefold-place`. A fifth one keeps figures over
//! time (`[history]`): it becomes `pagefold-history`, and a user of its own.
//!
//! ```text
//!   not wanted --> none
//!   wanted --> kept running (kept.rs); ended and started again where other arguments are wanted
//! ```
//!
//! Each command asks this service as any client does. Its standard input is a pipe from the supervisor, and it ends
//! when the pipe closes. The command that balances may end at any point: each guest then has a size that a plan
//! allowed. When the command that enrols ends, attached processes stay attached. When the command that parks ends,
//! guests that were being parked run on, and parked guests stay parked.

use super::helper::Held;
use super::kept::{Kept, spawn};
use anyhow::Context;
use api::place::Place;
use cli::note;
use host::ProcessId;
use rustix::process::{Pid, WaitStatus};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Stdio};
use std::rc::Rc;
use std::time::Instant;

/// A command that is kept running, or that is not wanted at present.
pub struct Beside {
    place: Place,
    /// The file of `pagefold`, which is executed.
    pagefold: Rc<Held>,
    /// The command's arguments; `None`: the command is not wanted.
    arguments: Option<Vec<String>>,
    /// The command's process, with the supervisor's end of its standard input. Its name in the log says what it does.
    kept: Kept<ChildStdin>,
}

impl Beside {
    /// A command that is not started yet. `work` says in the log what it does. It is not started while `arguments` are
    /// `None`.
    pub fn new(place: &Place, pagefold: &Rc<Held>, work: &'static str, arguments: Option<Vec<String>>) -> Self {
        Self { place: place.clone(), pagefold: Rc::clone(pagefold), arguments, kept: Kept::new(work) }
    }

    /// Sets the command's arguments. If they differ from the present ones, a command that runs is ended, and is started
    /// with the new ones.
    pub fn set(&mut self, arguments: Option<Vec<String>>) {
        if self.arguments != arguments {
            self.arguments = arguments;
            self.kept.forget_failures();
            self.kept.end();
        }
    }

    /// Time at which the command should be started; `None`: it is not wanted, or runs.
    pub fn start_at(&self, now: Instant) -> Option<Instant> {
        self.arguments.as_ref().and_then(|_| self.kept.start_at(now))
    }

    /// Starts the command if it is wanted, does not run, and its wait after a failure is over.
    pub fn start_if_due(&mut self, now: Instant) {
        if self.start_at(now).is_none_or(|at| at > now) {
            return;
        }
        match self.started() {
            Ok((process, word)) => {
                note!("{}: process {}", self.kept.name(), process.pid);
                self.kept.started(process, word);
            }
            Err(e) => self.kept.not_started(&format!("{e:#}")),
        }
    }

    fn started(&self) -> anyhow::Result<(ProcessId, ChildStdin)> {
        let arguments = self.arguments.as_ref().context("it is not wanted")?;
        let mut command = self.pagefold.command();
        command.arg0("pagefold").args(arguments).arg("--service").arg(self.place.dir());
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let (process, mut child) = spawn(&mut command, None).context("cannot be started")?;
        Ok((process, child.stdin.take().context("it has no standard input")?))
    }

    /// Notes that a child of the supervisor has ended, which may be this command.
    pub fn child_ended(&mut self, pid: Pid, status: WaitStatus) {
        self.kept.child_ended(pid, status);
    }

    /// Ends the command.
    pub fn end(&mut self) {
        self.kept.end();
    }
}
