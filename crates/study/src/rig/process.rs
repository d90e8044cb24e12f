//! Processes of a study whose memory is merged, and that answer requests: each line of words is answered by a line of
//! JSON.

use super::{Merger, program};
use anyhow::{Context, bail};
use serde_json::Value;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A running process that answers requests. Dropping it ends it.
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
    /// The process does not start.
    pub fn start(merger: &mut Merger, (group, name): (&str, &str), args: &[&str]) -> anyhow::Result<Self> {
        let asked = Self::spawn(merger.command(group, name)?, name, args)?;
        merger.meet(&[(asked.pid(), group.to_owned())])?;
        Ok(asked)
    }

    /// Starts the process as no member, and waits until its memory is filled. Pagefold may attach to it later. Its
    /// program is a link in this directory.
    ///
    /// # Errors
    /// The process does not start.
    pub fn start_alone(dir: &Path, name: &str, args: &[&str]) -> anyhow::Result<Self> {
        Self::spawn(named(dir, name, &program()?)?, name, args)
    }

    fn spawn(mut command: Command, name: &str, args: &[&str]) -> anyhow::Result<Self> {
        command.arg("study-guest").args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("cannot start the process {name}"))?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("a process without output")?);
        let mut asked = Self { child, input, output };
        if asked.hear()? != "ready" {
            bail!("the process {name} is not ready");
        }
        Ok(asked)
    }

    /// Id of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a request, and returns the answer.
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

/// The beginning of a command for a program that runs under another name, by a link in a directory. Pagefold attaches
/// to no process with a thread named `pagefold`, because that is the name of its agent's thread.
fn named(dir: &Path, name: &str, program: &Path) -> anyhow::Result<Command> {
    let link = dir.join(name);
    match symlink(program, &link) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => {
            Err(e).with_context(|| format!("cannot make the link {}", link.display()))
        }
        _ => Ok(Command::new(link)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::time::{Duration, Instant};

    #[test]
    fn program_under_another_name_has_a_thread_of_that_name() {
        let dir = tempfile::tempdir().unwrap();
        for turn in 0..2 {
            let mut command = named(dir.path(), "doubles", Path::new("/bin/sleep")).unwrap();
            let mut child = command.arg("60").spawn().unwrap();
            // The name changes a moment after the process has executed the program.
            let name = || fs::read_to_string(format!("/proc/{}/comm", child.id())).unwrap();
            let until = Instant::now() + Duration::from_secs(10);
            while name() != "doubles\n" {
                assert!(Instant::now() < until, "turn {turn}: {}", name());
            }
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
