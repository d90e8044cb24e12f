//! The guardian puts back all that a bench changes on the host, and ends all that it started, however the bench ends.
//!
//! It is a process in a session of its own. The bench tells it each duty beforehand; it performs them when the bench's
//! end of the pipe closes. The bench itself never cleans up in another way, so the path taken after `kill -9` is taken
//! every time.
//!
//! Until then the guardian holds the lock that allows one bench at a time. A second bench would take this one's
//! settings of KSM for the host's.

use act::KsmKnobs;
use anyhow::{Context, bail};
use cli::exit::Outcome;
use cli::say;
use host::ProcessId;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

/// Lock file of the one bench that may run. A service whose balancer sets ksmd to work takes the same lock.
const LOCK: &str = lend::ksmd::LOCK;
/// Time limit for a process to end after it was asked to.
const PATIENCE: Duration = Duration::from_secs(10);

/// A duty to perform when the bench ends; sent to the guardian as a line of JSON.
#[derive(Debug, Serialize, Deserialize)]
enum Duty {
    /// End this process.
    Process(ProcessId),
    /// End the lab in this directory.
    Lab(PathBuf),
    /// End templates' guests that have sockets below this directory.
    Machines(PathBuf),
    /// Remove this directory.
    Dir(PathBuf),
    /// End swapping to this file, and remove it.
    Swap(PathBuf),
    /// End swapping to the zram device of this number, and remove it.
    Zram(u32),
    /// Remove this control group, once it is empty.
    Cgroup(PathBuf),
    /// Undo all of ksmd's merging, and set these knobs to these values.
    Ksm(Vec<(String, String)>),
    /// The bench has finished by itself: do the rest without messages.
    Quietly,
}

/// The bench's connection to the guardian.
pub struct Guardian {
    child: Child,
    pipe: Option<ChildStdin>,
}

impl Guardian {
    /// Starts the guardian's process.
    ///
    /// # Errors
    /// Another bench has a guardian.
    pub fn start() -> anyhow::Result<Self> {
        let lock = File::options().create(true).truncate(false).write(true).mode(0o600).open(LOCK);
        let lock = lock.with_context(|| format!("cannot create {LOCK}"))?;
        if lock.try_lock().is_err() {
            bail!(
                "another bench, or pagefold ksm drive, runs just now, or puts the host back as it was: wait until it has ended"
            );
        }
        let mut child = Command::new(cli::OWN_PROGRAM)
            .args(["bench-guest", "guard"])
            .stdin(Stdio::piped())
            // The guardian writes nothing to its output. As long as it lives it keeps this file open, and so the lock.
            .stdout(lock)
            .spawn()
            .context("cannot start the process that puts everything back")?;
        let pipe = child.stdin.take();
        Ok(Self { child, pipe })
    }

    /// At the end of the bench, also of one that is killed, puts ksmd's knobs back to these values.
    pub fn keep_ksm(&mut self, knobs: &KsmKnobs) -> anyhow::Result<()> {
        self.tell(&Duty::Ksm(knobs.0.clone()))
    }

    /// Has the guardian end a process, if it still runs when the bench ends.
    pub fn keep_process(&mut self, process: ProcessId) -> anyhow::Result<()> {
        self.tell(&Duty::Process(process))
    }

    /// Has the guardian end a lab, if it still exists when the bench ends.
    pub fn keep_lab(&mut self, dir: &Path) -> anyhow::Result<()> {
        self.tell(&Duty::Lab(dir.to_owned()))
    }

    /// Has the guardian end the virtual machines with sockets below a directory when the bench ends.
    pub fn keep_machines(&mut self, dir: &Path) -> anyhow::Result<()> {
        self.tell(&Duty::Machines(dir.to_owned()))
    }

    /// Has the guardian end swapping to a file, and remove the file, when the bench ends.
    pub fn keep_swap(&mut self, file: &Path) -> anyhow::Result<()> {
        self.tell(&Duty::Swap(file.to_owned()))
    }

    /// Has the guardian end swapping to a zram device, and remove the device, when the bench ends.
    pub fn keep_zram(&mut self, number: u32) -> anyhow::Result<()> {
        self.tell(&Duty::Zram(number))
    }

    /// Has the guardian remove a control group when the bench ends.
    pub fn keep_cgroup(&mut self, dir: &Path) -> anyhow::Result<()> {
        self.tell(&Duty::Cgroup(dir.to_owned()))
    }

    /// Has the guardian remove a directory when the bench ends.
    pub fn keep_dir(&mut self, dir: &Path) -> anyhow::Result<()> {
        self.tell(&Duty::Dir(dir.to_owned()))
    }

    fn tell(&mut self, duty: &Duty) -> anyhow::Result<()> {
        let pipe = self.pipe.as_mut().context("the process that puts everything back was told to do so")?;
        writeln!(pipe, "{}", serde_json::to_string(duty)?).context("the process that puts everything back has ended")
    }

    /// Has the guardian perform all duties, and waits for it.
    ///
    /// # Errors
    /// A duty failed; the guardian has printed which.
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
        // After `finish`, the guardian was waited for already.
        let _ = self.child.wait();
    }
}

/// What the guardian's process does: it collects duties until the bench's end of the pipe closes, then performs them,
/// the last one first.
pub fn guard() -> anyhow::Result<Outcome> {
    // Signals of the terminal are meant for the bench. `setsid` fails if this process leads a session already.
    let _ = rustix::process::setsid();
    let mut duties = Vec::new();
    for line in std::io::stdin().lock().lines() {
        // A line that is cut off means that the bench was killed while it wrote the line.
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
        say!("pagefold: the bench was cut off; its guests are ended, and the host is set as it was");
    }
    Ok(outcome)
}

fn perform(duty: &Duty) -> anyhow::Result<()> {
    match duty {
        Duty::Process(process) => end(process),
        Duty::Lab(dir) => lab::Lab::open(dir)?.down().map(drop).context("cannot end the guests"),
        Duty::Machines(dir) => {
            start::measure::end_all(dir);
            Ok(())
        }
        Duty::Dir(dir) => match std::fs::remove_dir_all(dir) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(e).with_context(|| format!("cannot remove {}", dir.display()))
            }
            _ => Ok(()),
        },
        Duty::Swap(file) => crate::swap::end(file),
        Duty::Zram(number) => crate::zram::end(*number),
        Duty::Cgroup(dir) => remove_cgroup(dir),
        Duty::Ksm(knobs) => KsmKnobs(knobs.clone()).put_back().context("cannot set KSM as it was"),
        Duty::Quietly => Ok(()),
    }
}

/// Removes a control group, and the groups below it that a service left there. Tries again for a while, because ending
/// processes keep a group busy.
pub(crate) fn remove_cgroup(dir: &Path) -> anyhow::Result<()> {
    let begin = Instant::now();
    while let Err(e) = remove_cgroups(dir) {
        // A group below this one may have gone while the tree was read. That is no success yet: this one has to be
        // gone.
        if !dir.exists() {
            break;
        }
        if begin.elapsed() > PATIENCE {
            return Err(e).with_context(|| format!("cannot remove the control group {}", dir.display()));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Removes a control group, after all groups below it.
fn remove_cgroups(dir: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_cgroups(&entry.path())?;
        }
    }
    std::fs::remove_dir(dir)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_group_is_removed_with_those_in_it() {
        let dir = std::env::temp_dir().join(format!("pagefold-guardian-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("pagefold/study")).unwrap();
        remove_cgroup(&dir).unwrap();
        assert!(!dir.exists());
        remove_cgroup(&dir).unwrap();
    }
}
