//! Puts back what a bench changes on the host, and ends what it started, however it ends: a process of its own session
//! that is told beforehand what there is to do, and does it when the bench's end of the pipe closes.
//!
//! Until then it keeps the lock that allows one bench at a time: a second one would take this one's settings of KSM for the
//! host's. The bench itself never cleans up in another way, so that what is done after `kill -9` is done every time.

use crate::exit::Outcome;
use crate::output::say;
use anyhow::{Context, bail};
use host::{KsmKnobs, ProcessId};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

/// Who has locked it may set ksmd.
const LOCK: &str = "/run/pagefold-bench-ksm.lock";
/// A process that was asked to end has this long.
const PATIENCE: Duration = Duration::from_secs(10);

/// Something to be done in the end; a line of JSON to the guardian.
#[derive(Debug, Serialize, Deserialize)]
enum Duty {
    /// End this process.
    Process(ProcessId),
    /// End the lab in this directory.
    Lab(PathBuf),
    /// Remove this directory.
    Dir(PathBuf),
    /// Undo all merging of ksmd's, and set it like this.
    Ksm(Vec<(String, String)>),
    /// The bench is through, so nothing needs to be said.
    Quietly,
}

/// The bench's side of it.
pub struct Guardian {
    child: Child,
    pipe: Option<ChildStdin>,
}

impl Guardian {
    /// Starts it.
    ///
    /// # Errors
    /// Another bench has one.
    pub fn start() -> anyhow::Result<Self> {
        let lock = File::options().create(true).truncate(false).write(true).mode(0o600).open(LOCK);
        let lock = lock.with_context(|| format!("cannot create {LOCK}"))?;
        if lock.try_lock().is_err() {
            bail!("another bench sets ksmd just now, or puts it back: wait until it has ended");
        }
        let program = std::env::current_exe().context("cannot find this program to start it again")?;
        let mut child = Command::new(program)
            .args(["bench-guest", "guard"])
            .stdin(Stdio::piped())
            // It has nothing to say there, but so it holds the lock as long as it lives.
            .stdout(lock)
            .spawn()
            .context("cannot start the process that puts everything back")?;
        let pipe = child.stdin.take();
        Ok(Self { child, pipe })
    }

    /// Puts ksmd's settings back as they are now.
    pub fn keep_ksm(&mut self, knobs: &KsmKnobs) -> anyhow::Result<()> {
        self.tell(&Duty::Ksm(knobs.0.clone()))
    }

    /// Ends a process, should it be there then.
    pub fn keep_process(&mut self, process: ProcessId) -> anyhow::Result<()> {
        self.tell(&Duty::Process(process))
    }

    /// Ends a lab, should it be there then.
    pub fn keep_lab(&mut self, dir: &Path) -> anyhow::Result<()> {
        self.tell(&Duty::Lab(dir.to_owned()))
    }

    /// Removes a directory.
    pub fn keep_dir(&mut self, dir: &Path) -> anyhow::Result<()> {
        self.tell(&Duty::Dir(dir.to_owned()))
    }

    fn tell(&mut self, duty: &Duty) -> anyhow::Result<()> {
        let pipe = self.pipe.as_mut().context("the process that puts everything back was told to do so")?;
        writeln!(pipe, "{}", serde_json::to_string(duty)?).context("the process that puts everything back has ended")
    }

    /// Has everything put back now.
    ///
    /// # Errors
    /// Something could not be; it has been said what.
    pub fn finish(mut self) -> anyhow::Result<()> {
        self.tell(&Duty::Quietly)?;
        self.pipe = None;
        if !self.child.wait().context("cannot wait until everything is put back")?.success() {
            bail!("not everything could be put back: see above");
        }
        Ok(())
    }
}

impl Drop for Guardian {
    fn drop(&mut self) {
        self.pipe = None;
        // Reaped already after `finish`.
        let _ = self.child.wait();
    }
}

/// The guardian itself.
pub fn guard() -> anyhow::Result<Outcome> {
    // Signals of the terminal are for the bench. It fails where we lead a session already.
    let _ = rustix::process::setsid();
    let mut duties = Vec::new();
    for line in std::io::stdin().lock().lines() {
        // A line cut off is the bench being killed in the middle of it.
        duties.extend(line.ok().and_then(|line| serde_json::from_str::<Duty>(&line).ok()));
    }
    let quietly = duties.pop_if(|last| matches!(last, Duty::Quietly)).is_some();
    let mut outcome = Outcome::Done;
    for duty in duties.iter().rev() {
        if let Err(e) = perform(duty) {
            say!("pagefold: after the bench: {e:#}");
            outcome = Outcome::Partial;
        }
    }
    if !quietly && !duties.is_empty() && outcome == Outcome::Done {
        say!("pagefold: the bench was cut off; its guests are ended, and KSM is set as it was");
    }
    Ok(outcome)
}

fn perform(duty: &Duty) -> anyhow::Result<()> {
    match duty {
        Duty::Process(process) => end(process),
        Duty::Lab(dir) => lab::Lab::open(dir)?.down().map(drop).context("cannot end the guests"),
        Duty::Dir(dir) => match std::fs::remove_dir_all(dir) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(e).with_context(|| format!("cannot remove {}", dir.display()))
            }
            _ => Ok(()),
        },
        Duty::Ksm(knobs) => KsmKnobs(knobs.clone()).put_back().context("cannot set KSM as it was"),
        Duty::Quietly => Ok(()),
    }
}

fn end(process: &ProcessId) -> anyhow::Result<()> {
    process.terminate();
    let begin = Instant::now();
    while process.is_alive() {
        if begin.elapsed() > PATIENCE {
            process.kill();
        }
        if begin.elapsed() > PATIENCE * 2 {
            bail!("process {} does not end", process.pid);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
