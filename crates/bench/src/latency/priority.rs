//! Changes the priority of the threads that fold, to find out how much they slow down the loads.

use crate::serving::{Serving, agents_of, prover_of};
use crate::side::GROUP;
use anyhow::{Context, ensure};
use host::ThreadCpu;
use std::process::Command;

/// A priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Priority {
    /// The engine's own.
    Same,
    /// Niceness 19.
    Nice,
    /// `SCHED_IDLE`
    Idle,
}

impl Priority {
    /// Gives this priority to all threads that fold for the group: the agents in these members, the group's worker, the
    /// prover and the supervisor.
    ///
    /// # Errors
    /// The service does not answer, or a thread cannot be changed.
    pub fn give(self, serving: &Serving, members: &[u32]) -> anyhow::Result<()> {
        let command: &[&str] = match self {
            Self::Same => return Ok(()),
            Self::Nice => &["renice", "-n", "19", "-p"],
            Self::Idle => &["chrt", "--idle", "--pid", "0"],
        };
        let worker = serving.show(GROUP)?.worker_pid;
        let programs = worker.into_iter().chain(prover_of(serving.pid())).chain([serving.pid()]);
        let threads = programs.flat_map(|pid| ThreadCpu::of_process(pid).unwrap_or_default());
        for thread in threads.chain(members.iter().flat_map(|pid| agents_of(*pid))) {
            let tid = thread.tid.to_string();
            let done = Command::new(command[0]).args(&command[1..]).arg(&tid).output();
            let done = done.with_context(|| format!("cannot run {}", command[0]))?;
            let is_there = std::path::Path::new("/proc").join(&tid).exists();
            ensure!(done.status.success() || !is_there, "{command:?} {tid}: {}", String::from_utf8_lossy(&done.stderr));
        }
        Ok(())
    }
}
