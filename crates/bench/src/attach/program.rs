//! A program in C that `pagefold bench attach` attaches to, and that checks its own memory and system calls.

use super::subject::Subject;
use crate::compiled::compiled;
use crate::guardian::Guardian;
use anyhow::{Context, bail};
use host::ProcessId;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

/// Source of the program.
const SOURCE: &str = include_str!("waits.c");

/// The running program.
pub struct Program {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Program {
    /// Compiles and starts the program.
    ///
    /// # Errors
    /// There is no C compiler, or the program does not start.
    pub fn start(dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Self> {
        let program = compiled(dir, "waits", SOURCE, &["-pthread"])?;
        let mut child = Command::new(&program)
            .arg("count")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        guardian.keep_process(ProcessId::of(child.id())?)?;
        let output = BufReader::new(child.stdout.take().context("no output")?);
        Ok(Self { child, output })
    }

    fn tell(&mut self, command: &str) -> anyhow::Result<String> {
        let mut line = String::new();
        let told = writeln!(self.child.stdin.as_mut().context("no input")?, "{command}");
        let heard = told.and_then(|()| self.output.read_line(&mut line));
        if heard.is_err() || line.is_empty() {
            bail!("the program found something wrong, and has ended: {}", self.child.wait()?);
        }
        Ok(line)
    }

    /// Has all threads of the program stand still. Returns how many of its system calls were interrupted that must not
    /// be.
    ///
    /// # Errors
    /// The program has ended.
    fn stop(&mut self) -> anyhow::Result<u64> {
        let line = self.tell("stop")?;
        line.split_whitespace().last().and_then(|word| word.parse().ok()).context("it says something else")
    }

    /// Has the threads go on after `Self::stop`.
    ///
    /// # Errors
    /// The program has ended.
    fn go(&mut self) -> anyhow::Result<()> {
        self.tell("go").map(drop)
    }
}

impl Subject for Program {
    fn pid(&self) -> u32 {
        self.child.id()
    }

    /// All mappings, threads and files of the program, listed while its threads stand still.
    fn look(&mut self) -> anyhow::Result<Vec<String>> {
        self.stop()?;
        let dir = format!("/proc/{}", self.pid());
        let mut all: Vec<String> = fs::read_to_string(format!("{dir}/maps"))?.lines().map(str::to_owned).collect();
        for kind in ["task", "fd"] {
            for entry in fs::read_dir(format!("{dir}/{kind}"))? {
                all.push(format!("{kind} {}", entry?.file_name().display()));
            }
        }
        self.go()?;
        Ok(all)
    }

    /// Has the program write its folded pages, and fork.
    fn break_folds(&mut self) -> anyhow::Result<()> {
        self.tell("break").map(drop)
    }

    /// Nothing is left to check here: the program ends as soon as it finds anything wrong, and later calls fail.
    fn check(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    fn interrupted(&mut self) -> anyhow::Result<Option<u64>> {
        let interrupted = self.stop()?;
        self.go()?;
        Ok(Some(interrupted))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
