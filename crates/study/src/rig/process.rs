//! Processes of ours whose memory is merged: they do what they are asked, a line of JSON for each line of words.

use super::Merger;
use anyhow::{Context, bail};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

/// A running process. Dropping it ends it.
pub struct Asked {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Asked {
    /// Starts `study-guest` with these arguments for a merger, as a member of a group, and waits until its memory is
    /// there.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(merger: &mut Merger, (group, name): (&str, &str), args: &[&str]) -> anyhow::Result<Self> {
        let mut command = merger.command(group, name)?;
        command.arg("study-guest").args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("cannot start the process {name}"))?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("a process without output")?);
        let mut asked = Self { child, input, output };
        if asked.hear()? != "ready" {
            bail!("the process {name} is not ready");
        }
        merger.meet(&[(asked.pid(), group.to_owned())])?;
        Ok(asked)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Asks, and returns the answer.
    ///
    /// # Errors
    /// The process has ended.
    pub fn ask(&mut self, what: &str) -> anyhow::Result<Value> {
        writeln!(self.input.as_mut().context("the process was ended")?, "{what}").context("the process has ended")?;
        self.hear()
    }

    fn hear(&mut self) -> anyhow::Result<Value> {
        let mut line = String::new();
        self.output.read_line(&mut line).context("cannot hear from the process")?;
        serde_json::from_str(&line).context("the process has ended, or says nonsense")
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        drop(self.input.take());
        // Fails only if the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
