//! The process that balances memory between guests, kept running. Only a service whose configuration has `[balance]` has
//! one.
//!
//! ```text
//!   no [balance] --> none
//!   started --> running --it ends, or its configuration changes--> waits (backoff.rs) --> started again
//! ```
//!
//! It is `pagefold balance apply --every`, and asks this service for savings as any client does. Its standard input is a
//! pipe of the supervisor's: when that closes, it ends. Wherever it ends, each guest has a size that a plan allowed.

use super::backoff::Backoff;
use super::balance_config::Balance;
use anyhow::Context;
use api::place::Place;
use cli::note;
use host::ProcessId;
use rustix::process::{Pid, WaitStatus};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

/// The process, or the wish to have one.
pub struct Balancer {
    place: Place,
    config: Option<Balance>,
    process: Option<(ProcessId, ChildStdin)>,
    since: Instant,
    backoff: Backoff,
}

impl Balancer {
    /// A balancer that is not started. It never is where the configuration has none.
    pub fn new(place: &Place, config: Option<&Balance>) -> Self {
        let (since, backoff) = (Instant::now(), Backoff::default());
        Self { place: place.clone(), config: config.cloned(), process: None, since, backoff }
    }

    /// Takes over another configuration. One that runs with the old one ends, and is started again.
    pub fn set(&mut self, config: Option<&Balance>) {
        if self.config.as_ref() != config {
            self.config = config.cloned();
            self.backoff.reset();
            self.end();
        }
    }

    /// When it should be started; `None`: not at all, or it runs.
    pub fn start_at(&self, now: Instant) -> Option<Instant> {
        (self.config.is_some() && self.process.is_none()).then(|| self.backoff.start_at(now))
    }

    /// Starts it, if it is time.
    pub fn start_if_due(&mut self, now: Instant) {
        if self.start_at(now).is_none_or(|at| at > now) {
            return;
        }
        self.since = now;
        match self.spawn() {
            Ok(process) => {
                note!("balancing memory between guests: process {}", process.0.pid);
                self.process = Some(process);
            }
            Err(e) => {
                note!("cannot balance memory between guests: {e:#}");
                self.backoff.failed(Duration::ZERO, now);
            }
        }
    }

    fn spawn(&self) -> anyhow::Result<(ProcessId, ChildStdin)> {
        let config = self.config.as_ref().context("there is no [balance]")?;
        let mut command = Command::new("/proc/self/exe");
        command.args(arguments(config)).arg("--service").arg(self.place.dir());
        // A process group of its own: an interrupt at a terminal ends the supervisor, whose end ends this process.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).env_clear().current_dir("/").process_group(0);
        let mut child = command.spawn().context("cannot start pagefold balance")?;
        let word = child.stdin.take().context("it has no standard input")?;
        Ok((ProcessId::of(child.id())?, word))
    }

    /// Notes that a child of this process has ended, which may be this one.
    pub fn child_ended(&mut self, pid: Pid, status: WaitStatus) {
        let is_it = |(p, _): &mut (ProcessId, ChildStdin)| i32::try_from(p.pid) == Ok(pid.as_raw_nonzero().get());
        if let Some((process, _)) = self.process.take_if(is_it) {
            note!("the process that balances memory, {}, has ended: {status:?}", process.pid);
            self.backoff.failed(self.since.elapsed(), Instant::now());
        }
    }

    /// Ends it.
    pub fn end(&mut self) {
        if let Some((process, _)) = self.process.take() {
            process.terminate();
        }
    }
}

/// The arguments of `pagefold` for a configuration.
fn arguments(config: &Balance) -> Vec<String> {
    let every = config.every_s.to_string();
    let mut words: Vec<String> =
        ["balance", "apply", "--until-hangup", "--every", &every, "--policy", &config.policy].map(str::to_owned).into();
    words.extend(config.floor_bytes.into_iter().flat_map(|floor| ["--floor".to_owned(), floor.to_string()]));
    words.extend(config.within.iter().flat_map(|group| ["--within".to_owned(), group.clone()]));
    let guarantee = |(glob, bytes): &(String, u64)| ["--guaranteed".to_owned(), format!("{glob}={bytes}")];
    words.extend(config.guaranteed.iter().flat_map(guarantee));
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_have_the_whole_configuration() {
        let guaranteed = vec![("acme-*".to_owned(), 7), ("b=c".to_owned(), 9)];
        let config =
            Balance { policy: "group".into(), every_s: 5, floor_bytes: Some(3), within: Some("/m".into()), guaranteed };
        assert_eq!(
            arguments(&config).join(" "),
            "balance apply --until-hangup --every 5 --policy group --floor 3 --within /m --guaranteed acme-*=7 --guaranteed b=c=9"
        );
    }
}
