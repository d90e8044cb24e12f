//! A clone whose machine is started by somebody else: a person, libvirt, Proxmox VE. This process keeps the template's
//! memory open, waits for the machine, gives it an identity of its own, and lets it run.
//!
//! ```text
//!   name taken -> NAME/memory: a link to this process's descriptor of the sealed memory       snippet.rs: who starts QEMU with it
//!     -> a QEMU listens at NAME/qmp, maps that memory privately, and waits for a state
//!     -> state, identity: it stands still -> goes on -> answer from inside -> handed out
//!     -> anything else: it is ended, and an error
//! ```
//!
//! The link leads through `/proc/PID/fd` of this process. The kernel lets a process follow it that may trace this one:
//! one of the same user, with at least the same capabilities.

use super::job::{Job, Slot};
use super::{Cloned, Clones, Wanted};
use crate::machine::QMP;
use crate::memory;
use crate::vmm;
use anyhow::{Context, bail};
use host::{Mapping, Peer, ProcessId};
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Name of the link to the memory, in the clone's directory.
pub(crate) const MEMORY: &str = "memory";
/// File name of the library with the agent that `pagefold run` loads into a program.
const AGENT: &str = "libpagefold.so";
/// Interval between two attempts to connect to the machine's QMP socket: 20 ms.
const LOOK: Duration = Duration::from_millis(20);
/// Longest time that an attempt to connect may take: 5 s.
const ANSWER: Duration = Duration::from_secs(5);

impl Clones {
    /// Waits until somebody else has started the machine of one clone, and hands it out.
    ///
    /// # Errors
    /// As for [`Self::make`]. Or the machine is not a clone of the template, or has run before.
    pub fn wait_for(&self, wanted: &Wanted) -> anyhow::Result<Cloned> {
        let device = self.check(wanted)?;
        let (memory, slots) = self.reserve(wanted, false)?;
        let mut slot = slots.into_iter().next().context("no name")?;
        slot.record.started_elsewhere = true;
        let job = Job { clones: self, wanted, device: &device, memory: &memory };
        let made = slot.record.write(&slot.dir).and_then(|()| job.meet(&mut slot));
        if made.is_err() {
            self.forget(&slot.record)?;
        }
        made.with_context(|| format!("clone {} is not handed out", slot.record.name))
    }
}

impl Job<'_> {
    /// Waits until somebody has started the machine of a clone, and hands the clone out.
    fn meet(&self, slot: &mut Slot) -> anyhow::Result<Cloned> {
        let link = slot.dir.join(MEMORY);
        let held = format!("/proc/{}/fd/{}", std::process::id(), self.memory.as_raw_fd());
        symlink(held, &link).with_context(|| format!("cannot make {}", link.display()))?;
        let process = wait_for_machine(&slot.dir, self.wanted.patience)?;
        slot.record.process = Some(process);
        slot.record.write(&slot.dir)?;
        let dirs = [slot.dir.clone()];
        let (stop, done) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| self.end_if_interrupted(&dirs, &stop, &done));
            let made = self.take_in(slot, &process);
            done.store(true, Ordering::SeqCst);
            made
        })
    }

    fn take_in(&self, slot: &mut Slot, process: &ProcessId) -> anyhow::Result<Cloned> {
        let begin = Instant::now();
        let deadline = begin + self.wanted.patience;
        let mut qmp = vmm::connect(&slot.dir, process, deadline)?;
        self.check_machine(process)?;
        self.give_state(&mut qmp, &slot.dir, deadline)?;
        self.hand().out(slot, qmp, begin)
    }

    /// Checks that a machine maps the template's memory privately, so that its writes stay its own; and, if clones are
    /// folded, that it has an agent.
    fn check_machine(&self, process: &ProcessId) -> anyhow::Result<()> {
        let (file, pid) = (memory::id_of(self.memory)?, process.pid);
        let mappings = Mapping::list(pid).with_context(|| format!("cannot look at process {pid}"))?;
        let mut of_memory =
            mappings.iter().filter(|mapping| (mapping.device, mapping.inode) == (file.device, file.inode));
        if !of_memory.next().is_some_and(|first| !first.shared && !of_memory.any(|mapping| mapping.shared)) {
            bail!("process {pid} does not map the template's memory privately: start it with all options of --snippet");
        }
        if self.wanted.folding.is_some() && !mappings.iter().any(|mapping| mapping.name.ends_with(AGENT)) {
            bail!("process {pid} was not started by pagefold run, so nothing of it would be folded: say --no-fold");
        }
        Ok(())
    }
}

/// Waits for a process that listens at the QMP socket of a clone, for `patience` at most.
fn wait_for_machine(dir: &Path, patience: Duration) -> anyhow::Result<ProcessId> {
    let deadline = Instant::now() + patience;
    loop {
        if let Ok(stream) = host::connect_within(&dir.join(QMP), ANSWER) {
            let peer = Peer::of(&stream).context("cannot tell who listens at a QMP socket")?;
            return Ok(ProcessId::of(peer.pid)?);
        }
        if host::interrupted().is_some() || !dir.exists() {
            bail!("nobody has started its machine");
        }
        if Instant::now() > deadline {
            bail!("nobody has started its machine within {} s: see --timeout", patience.as_secs());
        }
        thread::sleep(LOOK);
    }
}
