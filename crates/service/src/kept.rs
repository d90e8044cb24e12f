//! A child process that the supervisor keeps running: the prover, the web side, and the commands of `beside.rs`.
//!
//! ```text
//!   started --> running --it ends--> waits (backoff.rs) --> started again
//! ```

use super::backoff::Backoff;
use super::helper;
use cli::note;
use host::ProcessId;
use rustix::process::{Pid, WaitStatus};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// A child process that is kept running. `L` is the supervisor's end of a pipe or socket to the child.
pub struct Kept<L> {
    /// The child's name in the log.
    name: &'static str,
    running: Option<(ProcessId, L)>,
    /// When the child was last started.
    since: Instant,
    backoff: Backoff,
}

impl<L> Kept<L> {
    /// A child that is not started yet.
    pub fn new(name: &'static str) -> Self {
        Self { name, running: None, since: Instant::now(), backoff: Backoff::default() }
    }

    /// The child's name in the log.
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// The child's process; `None` if it does not run.
    pub fn process(&self) -> Option<ProcessId> {
        self.running.as_ref().map(|(process, _)| *process)
    }

    /// The supervisor's end of the pipe or socket to the child; `None` if the child does not run.
    pub fn line(&self) -> Option<&L> {
        self.running.as_ref().map(|(_, line)| line)
    }

    /// The supervisor's end of the pipe or socket, to be changed.
    pub fn line_mut(&mut self) -> Option<&mut L> {
        self.running.as_mut().map(|(_, line)| line)
    }

    /// Time from which on the child may be started; `None`: it runs.
    pub fn start_at(&self, now: Instant) -> Option<Instant> {
        self.running.is_none().then(|| self.backoff.start_at(now))
    }

    /// Notes that the child was started, as this process.
    pub fn started(&mut self, process: ProcessId, line: L) {
        (self.since, self.running) = (Instant::now(), Some((process, line)));
    }

    /// Notes why the child could not be started. The next attempt waits.
    pub fn not_started(&mut self, why: &str) {
        note!("{}: {why}", self.name);
        self.backoff.failed(Duration::ZERO, Instant::now());
    }

    /// Notes that a child of the supervisor has ended. Returns whether it was this one.
    pub fn child_ended(&mut self, pid: Pid, status: WaitStatus) -> bool {
        let is_it = |(p, _): &mut (ProcessId, L)| i32::try_from(p.pid) == Ok(pid.as_raw_nonzero().get());
        let Some((process, _)) = self.running.take_if(is_it) else { return false };
        note!("{}: process {}: {}", self.name, process.pid, helper::end_in_words(status));
        self.backoff.failed(self.since.elapsed(), Instant::now());
        true
    }

    /// Forgets earlier failures, so that the child may be started at once.
    pub fn forget_failures(&mut self) {
        self.backoff.reset();
    }

    /// Asks the process to end. It counts as ended from here on.
    pub fn end(&mut self) {
        if let Some((process, _)) = self.running.take() {
            process.terminate();
        }
    }
}

/// Starts a program with an empty environment in the root directory. If `uid` is given, the program gets the option
/// `--uid`, and gives up root's rights for those of this user by itself. The program has a process group of its own, so
/// that an interrupt at a terminal ends the supervisor only, which then decides about its children.
///
/// # Errors
/// It cannot be started.
pub fn spawn(command: &mut Command, uid: Option<u32>) -> anyhow::Result<(ProcessId, Child)> {
    if let Some(uid) = uid {
        command.args(["--uid", &uid.to_string()]);
    }
    let child = command.env_clear().current_dir("/").process_group(0).spawn()?;
    Ok((ProcessId::of(child.id())?, child))
}

/// Whether a child could not be started because its program is not installed.
pub fn is_missing(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{WaitOptions, waitpid};

    #[test]
    fn child_that_ends_is_started_again_after_a_wait() {
        let (mut kept, now) = (Kept::new("child"), Instant::now());
        assert_eq!(kept.start_at(now), Some(now));
        let (process, child) = spawn(Command::new("sleep").arg("1000"), None).unwrap();
        kept.started(process, "line");
        assert_eq!((kept.start_at(now), kept.line()), (None, Some(&"line")));
        kept.process().unwrap().kill();
        let (pid, status) = waitpid(Some(Pid::from_child(&child)), WaitOptions::empty()).unwrap().unwrap();
        assert!(!kept.child_ended(Pid::INIT, status), "that is another process");
        assert!(kept.child_ended(pid, status));
        assert!(kept.line().is_none() && kept.start_at(now).unwrap() > now);
        kept.forget_failures();
        assert_eq!(kept.start_at(now), Some(now));
    }

    #[test]
    fn children_get_no_environment_and_their_user() {
        let command = &mut Command::new("/bin/sh");
        command.args(["-c", "echo $1 $2 $HOME.; pwd", "sh"]).env("HOME", "/x").stdout(std::process::Stdio::piped());
        let output = spawn(command, Some(7)).unwrap().1.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "--uid 7 .\n/\n");
    }
}
