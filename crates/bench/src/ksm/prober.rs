//! The bench's side of its conversation with the prober.

use super::merger::Merger;
use super::probe::{Answer, Stall};
use super::timings::Spread;
use anyhow::{Context, bail};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

/// A running prober; dropping it ends its process.
pub struct Prober {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Prober {
    /// Starts a prober as a process whose memory the merger can merge.
    ///
    /// # Errors
    /// The process does not start, or does not get ready.
    pub fn start(merger: &dyn Merger, name: &str, args: &[String]) -> anyhow::Result<Self> {
        let mut command = merger.command(name)?;
        // All memory of the prober has just been written. Unless the member is eager, the agent takes that for work
        // that goes on, and folds less.
        command.env("PAGEFOLD_EAGER", "1");
        let mut child = command
            .arg("bench-guest")
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the prober")?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("a prober without output")?);
        let mut prober = Self { child, input, output };
        match prober.hear()? {
            Answer::Ready => Ok(prober),
            other => bail!("the prober begins with {other:?}"),
        }
    }

    /// The prober's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    fn ask(&mut self, what: &str) -> anyhow::Result<Answer> {
        writeln!(self.input.as_mut().context("the prober was ended")?, "{what}").context("the prober has ended")?;
        self.hear()
    }

    fn hear(&mut self) -> anyhow::Result<Answer> {
        let mut line = String::new();
        self.output.read_line(&mut line).context("cannot hear from the prober")?;
        serde_json::from_str(&line).context("the prober has ended, or says nonsense")
    }

    /// Has the prober write new duplicates. Returns the seconds until each was merged, and the number of those that
    /// were not merged in time.
    pub fn react(&mut self, duplicates: u8) -> anyhow::Result<(Vec<f64>, u64)> {
        match self.ask(&format!("react {duplicates}"))? {
            Answer::Reaction { seconds, missed } => Ok((seconds, missed)),
            other => bail!("the prober answers {other:?}"),
        }
    }

    /// Times of first writes to pages that are merged.
    pub fn first_writes(&mut self) -> anyhow::Result<Spread> {
        match self.ask("break")? {
            Answer::Break(spread) => Ok(spread),
            other => bail!("the prober answers {other:?}"),
        }
    }

    /// Has a walker walk; returns nanoseconds per step.
    pub fn walk(&mut self) -> anyhow::Result<f64> {
        match self.ask("walk")? {
            Answer::Walk { step_ns } => Ok(step_ns),
            other => bail!("the walker answers {other:?}"),
        }
    }

    /// Has a walker make all of its pages differ from one another and from those of other walkers.
    pub fn differ(&mut self) -> anyhow::Result<()> {
        match self.ask("differ")? {
            Answer::Ready => Ok(()),
            other => bail!("the walker answers {other:?}"),
        }
    }

    /// Times of reads of pages while they are being merged.
    pub fn stalls(&mut self) -> anyhow::Result<Stall> {
        match self.ask("stall")? {
            Answer::Stall(stall) => Ok(stall),
            other => bail!("the prober answers {other:?}"),
        }
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        drop(self.input.take());
        // Fails only if the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
