//! Makes a template of a guest that runs, and goes on running.
//!
//! The guest's memory is in no file, so a second QEMU is started with the same devices, and with its memory in a file.
//! The guest is migrated into that QEMU while it runs, but the migration is never completed:
//!
//! ```text
//!   guest's QEMU -- stream --> this process -- stream --> second QEMU, which does not go on (-S)
//!        |                          |                          |
//!        | waits until the destination confirms that it has read all
//!        |                          | <-- all is read ---------|
//!        | <-- hangs up ------------|                          |--> memory and device state: the template
//!   goes on, as after each migration that fails
//! ```
//!
//! So QEMU lets the guest go on by itself, whether this process ends as planned, fails, or is killed at any moment.

mod words;

use crate::create::{Parts, describe};
use crate::machine::{self, Places};
use crate::memory;
use crate::saving;
use crate::store::Store;
use crate::template::Template;
use crate::vmm;
use anyhow::{Context, bail};
use guest::qmp::Qmp;
use host::ProcessId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::{Value, json};
use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Longest time for a guest's memory to be copied: 600 s.
const COPYING: Duration = Duration::from_secs(600);
/// Longest time for an answer of the guest's QEMU: 30 s.
const QMP_TIME: Duration = Duration::from_secs(30);
/// Names of the sockets for the migration stream: the one on which this process receives it, and the second QEMU's.
const RELAY: &str = "relay";
const INCOMING: &str = "in";

/// A running VM of which a template is to be made.
#[derive(Clone, Debug)]
pub struct Running {
    /// Its QEMU.
    pub process: ProcessId,
    /// QEMU's command line.
    pub words: Vec<String>,
    /// Its QMP socket.
    pub qmp: PathBuf,
    /// Its RAM, one block.
    pub memory_bytes: u64,
    /// Whether the guest sees the host's own processor.
    pub sees_cpu: bool,
}

impl Store {
    /// Makes a template of a guest that runs. The guest stands still for the last part of the copy only, as long as
    /// QEMU's `downtime-limit` says.
    ///
    /// # Errors
    /// Its machine cannot be started a second time (it has a disk, for example), or the copy fails. The guest goes on
    /// in any case, and nothing of the template is left.
    pub fn create_from(&self, group: &str, name: &str, running: &Running) -> anyhow::Result<Template> {
        let words = words::of_running(&running.words, running.memory_bytes)?;
        self.make(group, name, |dir| {
            let memory = memory::writable(name, running.memory_bytes).context("cannot make a memory file")?;
            let waits = words.iter().cloned().chain(["-S", "-incoming", "defer"].map(str::to_owned));
            let waits: Vec<String> = waits.collect();
            let process = vmm::start(&waits, &Places { dir, name, disk: Path::new("") }, Some(&memory))?;
            let copied = copy(running, dir, &process);
            let ended = vmm::end(&process);
            copied.with_context(|| format!("cannot make template {name}; the guest goes on"))?;
            ended?;
            let has_helper = words.iter().any(|word| word.contains(&format!("{}/{}", machine::DIR, machine::IDENTITY)));
            describe(
                dir,
                &Parts {
                    group,
                    name,
                    words: &words,
                    memory: &memory,
                    disk: None,
                    sees_cpu: running.sees_cpu,
                    has_helper,
                },
            )
        })
    }
}

/// Copies a guest into a second QEMU, and writes the device state of that one.
fn copy(running: &Running, dir: &Path, second: &ProcessId) -> anyhow::Result<()> {
    let deadline = Instant::now() + COPYING;
    let mut to = vmm::connect(dir, second, deadline)?;
    to.execute("migrate-set-capabilities", return_path(true))?;
    to.execute("migrate-incoming", json!({"uri": format!("unix:{}", dir.join(INCOMING).display())}))?;
    let listener = UnixListener::bind(dir.join(RELAY)).context("cannot listen for the guest's memory")?;
    // The first connection checks that the socket belongs to the guest's QEMU, and not to another process.
    drop(Qmp::of(running.process.pid, &running.qmp).context("the guest's QEMU does not answer")?);
    let mut from = Qmp::connect(&running.qmp, QMP_TIME).context("the guest's QEMU does not answer")?;
    let before = capability(&from.execute("query-migrate-capabilities", json!({}))?);
    from.execute("migrate-set-capabilities", return_path(true))?;
    from.execute("migrate", json!({"uri": format!("unix:{}", dir.join(RELAY).display())}))?;
    let read = relay(&listener, dir, &mut to, second, deadline);
    // From here on the guest goes on: its QEMU finds that the migration has failed.
    let resumed = vmm::wait_for(&mut from, "query-migrate", deadline, |status| Ok(status == "failed"));
    from.execute("migrate-set-capabilities", return_path(before))?;
    read?;
    resumed?;
    to.execute("migrate-set-capabilities", return_path(false))?;
    saving::write_state(&mut to, &dir.join("device"), deadline)?;
    // Its answer may be lost, because QEMU ends.
    let _ = to.execute("quit", json!({}));
    Ok(())
}

/// The capability by which the sender waits until the receiver confirms that it has read all.
fn return_path(state: bool) -> Value {
    json!({"capabilities": [{"capability": "return-path", "state": state}]})
}

fn capability(all: &Value) -> bool {
    let found = all.as_array().into_iter().flatten().find(|one| one["capability"] == "return-path");
    found.is_some_and(|one| one["state"] == true)
}

/// Passes the migration stream on until the second QEMU has read all of it. Then hangs up, before the guest's QEMU
/// learns that.
fn relay(
    listener: &UnixListener,
    dir: &Path,
    to: &mut Qmp,
    second: &ProcessId,
    deadline: Instant,
) -> anyhow::Result<()> {
    let from = accept(listener).context("the guest's QEMU sends nothing")?;
    let into = UnixStream::connect(dir.join(INCOMING)).context("the second QEMU takes nothing")?;
    thread::scope(|scope| {
        let passing = scope.spawn(|| io::copy(&mut &from, &mut &into));
        let read = vmm::wait_for(to, "query-status", deadline, |status| match status {
            "inmigrate" if second.is_alive() && !passing.is_finished() => Ok(false),
            "paused" => Ok(true),
            other => bail!("the copy is {other} and not whole{}", vmm::last_words(dir)),
        });
        // Both ends find the stream closed, and so does the thread that passes it on.
        let _ = from.shutdown(Shutdown::Both);
        let _ = into.shutdown(Shutdown::Both);
        read
    })
}

/// Waits for the guest's QEMU to connect, for [`QMP_TIME`] at most.
fn accept(listener: &UnixListener) -> io::Result<UnixStream> {
    let mut wanted = [PollFd::new(listener, PollFlags::IN)];
    let time = Timespec::try_from(QMP_TIME).map_err(io::Error::other)?;
    if poll(&mut wanted, Some(&time))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    Ok(listener.accept()?.0)
}
