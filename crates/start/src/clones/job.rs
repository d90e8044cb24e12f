//! Makes the clones of one request, a few at a time: at most two for each processor. If more were made at once, each
//! would be slower, and none would be ready sooner.

use super::{Cloned, Clones, Wanted, shown};
use crate::ask::Helper;
use crate::folding::Folding;
use crate::identities::{Identity, uuid};
use crate::machine::Places;
use crate::memory;
use crate::place::{lock, private_dir};
use crate::record::{Record, State};
use crate::saving;
use crate::vmm;
use anyhow::{Context, bail};
use guest::qmp::Qmp;
use serde_json::json;
use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Clones that are made at the same time, for each processor.
const EACH_PROCESSOR: usize = 2;
/// Name of the socket through which QEMU gets the device state.
const STATE_SOCKET: &str = "state";
/// Interval in which this process checks whether it was interrupted: 20 ms.
const LOOK: Duration = Duration::from_millis(20);

/// A clone that is to be made. If a machine was kept ready for it, the record names that machine's process.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) record: Record,
    pub(super) dir: PathBuf,
}

/// All that the clones of a request have in common.
pub(super) struct Job<'a> {
    pub(super) clones: &'a Clones,
    pub(super) wanted: &'a Wanted<'a>,
    pub(super) device: &'a [u8],
    pub(super) memory: &'a File,
}

impl Job<'_> {
    /// Makes all clones of the request; if one fails, ends all.
    pub(super) fn run(&self, slots: Vec<Slot>) -> anyhow::Result<Vec<Cloned>> {
        let dirs: Vec<PathBuf> = slots.iter().map(|slot| slot.dir.clone()).collect();
        let slots: Vec<Mutex<Slot>> = slots.into_iter().map(Mutex::new).collect();
        let (next, stop, done) = (AtomicUsize::new(0), AtomicBool::new(false), AtomicBool::new(false));
        let threads = thread::available_parallelism().map_or(1, usize::from) * EACH_PROCESSOR;
        let work = || -> anyhow::Result<Vec<(usize, Cloned)>> {
            let mut made = Vec::new();
            while !stop.load(Ordering::SeqCst) {
                let number = next.fetch_add(1, Ordering::SeqCst);
                let Some(slot) = slots.get(number) else { break };
                let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
                let one = self.one(&mut slot).with_context(|| format!("clone {}", slot.record.name));
                stop.fetch_or(one.is_err(), Ordering::SeqCst);
                made.push((number, one?));
            }
            Ok(made)
        };
        let made: anyhow::Result<Vec<_>> = thread::scope(|scope| {
            scope.spawn(|| self.end_if_interrupted(&dirs, &stop, &done));
            let working: Vec<_> = (0..threads.min(slots.len())).map(|_| scope.spawn(work)).collect();
            let made = working
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            let made = made.collect();
            done.store(true, Ordering::SeqCst);
            made
        });
        let interrupted = host::interrupted().is_some();
        if made.is_err() || interrupted {
            self.end_all(slots)?;
            made?;
            bail!("interrupted: all clones of this request are ended");
        }
        let mut made: Vec<(usize, Cloned)> = made?.into_iter().flatten().collect();
        made.sort_by_key(|(number, _)| *number);
        Ok(made.into_iter().map(|(_, cloned)| cloned).collect())
    }

    /// Makes one clone.
    fn one(&self, slot: &mut Slot) -> anyhow::Result<Cloned> {
        let begin = Instant::now();
        let deadline = begin + self.wanted.patience;
        let qmp = match slot.record.process {
            Some(process) => vmm::connect(&slot.dir, &process, deadline)?,
            None => self.load(slot, deadline)?,
        };
        self.hand().out(slot, qmp, begin)
    }

    /// The settings of the request that concern handing machines out.
    pub(super) const fn hand(&self) -> Hand {
        Hand {
            has_helper: self.wanted.template.has_helper,
            allow_unconfirmed: self.wanted.allow_unconfirmed,
            patience: self.wanted.patience,
        }
    }

    /// Starts a machine, and has it read the template's device state. The machine is stopped afterwards.
    fn load(&self, slot: &mut Slot, deadline: Instant) -> anyhow::Result<Qmp> {
        let disk = self.wanted.dir.join("disk");
        let mut qmp = start(self.clones, slot, &self.wanted.template.words, &disk, Some(self.memory), deadline)?;
        self.give_state(&mut qmp, &slot.dir, deadline)?;
        Ok(qmp)
    }

    /// Has a machine read the template's device state. The machine is stopped afterwards, because it was stopped when
    /// that state was written.
    pub(super) fn give_state(&self, qmp: &mut Qmp, dir: &Path, deadline: Instant) -> anyhow::Result<()> {
        vmm::leave_out_memory(qmp, true)?;
        let socket = dir.join(STATE_SOCKET);
        qmp.execute("migrate-incoming", json!({"uri": format!("unix:{}", socket.display())}))?;
        let give = || UnixStream::connect(&socket)?.write_all(self.device);
        give().context("QEMU does not take the device state")?;
        wait_loaded(qmp, dir, deadline)
    }

    /// Loads machines and keeps them ready for later requests, until there are as many as this request wants.
    pub(super) fn keep_warm(&self) -> anyhow::Result<()> {
        if self.wanted.warm == 0 {
            return Ok(());
        }
        let template = self.wanted.template;
        let service = self.wanted.folding.map(Folding::dir);
        let is_there = |clone: &&Record| clone.state == State::Warm && clone.service.as_deref() == service;
        let there = self.clones.of(template)?.iter().filter(is_there).count();
        for _ in there..self.wanted.warm {
            let name = format!("warm-{}", &uuid()[..8]);
            let dir = self.clones.dir_of(&name);
            private_dir(&dir)?;
            let begun = Record::starting(self.wanted, &name)?;
            let record = Record { memory: Some(memory::id_of(self.memory)?), ..begun };
            let mut slot = Slot { record, dir };
            slot.record.write(&slot.dir)?;
            let deadline = Instant::now() + self.wanted.patience;
            let loaded = self.load(&mut slot, deadline).and_then(|qmp| self.rehearse(&slot, qmp, deadline));
            if let Err(why) = loaded {
                self.clones.forget(&slot.record)?;
                return Err(why);
            }
            slot.record.state = State::Warm;
            slot.record.write(&slot.dir)?;
        }
        Ok(())
    }

    /// Lets a loaded machine run until its helper has answered once, with an identity that no clone gets, and stops it
    /// again. The code that answers is then in memory, and translated by an emulator. So the machine answers much
    /// sooner when it is handed out.
    fn rehearse(&self, slot: &Slot, mut qmp: Qmp, deadline: Instant) -> anyhow::Result<()> {
        if !self.wanted.template.has_helper {
            return Ok(());
        }
        let process = slot.record.process.context("a machine that was started has a process")?;
        let identity = Identity::new(&slot.record.name, None);
        let mut helper = Helper::connect(&slot.dir, &process, deadline)?;
        helper.send(&identity)?;
        qmp.execute("cont", json!({}))?;
        let answer = helper.confirm(&identity, deadline)?;
        qmp.execute("stop", json!({}))?;
        answer.map(drop).context("nobody inside answers")
    }

    /// Loads a machine, appends its state and its memory to the file `to`, and ends it. The machine never runs.
    pub(super) fn write_whole(&self, mut slot: Slot, to: &Path) -> anyhow::Result<()> {
        let deadline = Instant::now() + self.wanted.patience;
        let written = self.load(&mut slot, deadline).and_then(|mut qmp| {
            vmm::leave_out_memory(&mut qmp, false)?;
            saving::append_state(&mut qmp, to, deadline)
        });
        let ended = self.clones.forget(&slot.record);
        written.and(ended)
    }

    fn end_all(&self, slots: Vec<Mutex<Slot>>) -> anyhow::Result<()> {
        let slots = slots.into_iter().map(|slot| slot.into_inner().unwrap_or_else(PoisonError::into_inner));
        // Each clone is ended, even if ending another one fails.
        let ended: Vec<anyhow::Result<()>> = slots.map(|slot| self.clones.forget(&slot.record)).collect();
        ended.into_iter().collect()
    }

    /// Kills the machines' processes when this process is told to end, so that threads which wait for them see that
    /// they are gone. Returns once `done` is set.
    pub(super) fn end_if_interrupted(&self, dirs: &[PathBuf], stop: &AtomicBool, done: &AtomicBool) {
        while !done.load(Ordering::SeqCst) {
            if host::interrupted().is_some() {
                stop.store(true, Ordering::SeqCst);
                let processes = dirs.iter().filter_map(|dir| Record::read(dir)?.process);
                processes.for_each(|process| _ = process.kill());
            }
            thread::sleep(LOOK);
        }
    }
}

/// Starts a machine that waits for a device state (`-incoming`), and records its process.
pub(super) fn start(
    clones: &Clones,
    slot: &mut Slot,
    words: &[String],
    disk: &Path,
    memory: Option<&File>,
    deadline: Instant,
) -> anyhow::Result<Qmp> {
    let process = {
        let _lock = lock(&clones.dir)?;
        let words = slot.record.as_member(words);
        vmm::start(&words, &Places { dir: &slot.dir, name: &slot.record.name, disk }, memory)?
    };
    slot.record.process = Some(process);
    slot.record.write(&slot.dir)?;
    vmm::connect(&slot.dir, &process, deadline)
}

/// Waits until a machine has read its device state.
pub(super) fn wait_loaded(qmp: &mut Qmp, dir: &Path, deadline: Instant) -> anyhow::Result<()> {
    let loaded = vmm::wait_for(qmp, "query-status", deadline, |status| Ok(status != "inmigrate"));
    loaded.with_context(|| format!("QEMU does not take the state{}", vmm::last_words(dir)))
}

/// Settings for handing out a machine.
pub(super) struct Hand {
    pub(super) has_helper: bool,
    pub(super) allow_unconfirmed: bool,
    pub(super) patience: Duration,
}

impl Hand {
    /// Gives a loaded machine its identity, lets it run, and waits for its helper's answer.
    pub(super) fn out(&self, slot: &mut Slot, mut qmp: Qmp, begin: Instant) -> anyhow::Result<Cloned> {
        let deadline = begin + self.patience;
        let process = slot.record.process.context("a machine that was started has a process")?;
        let identity = slot.record.identity.take().unwrap_or_else(|| Identity::new(&slot.record.name, None));
        slot.record.identity = Some(identity.clone());
        let mut helper = Helper::connect(&slot.dir, &process, deadline)?;
        // The request is sent before the guest goes on, so that its helper finds the request at once.
        helper.send(&identity)?;
        if slot.record.started_elsewhere && vmm::is_running(&mut qmp)? {
            bail!("somebody has let it go on before it was another than its siblings: start it paused");
        }
        qmp.execute("cont", json!({}))?;
        drop(qmp);
        let answer = if self.has_helper { helper.confirm(&identity, deadline)? } else { None };
        if answer.is_none() && !self.allow_unconfirmed {
            let seconds = self.patience.as_secs();
            bail!("nobody inside has answered within {seconds} s{}", vmm::last_words(&slot.dir));
        }
        slot.record.state = if answer.is_some() { State::Running } else { State::Unconfirmed };
        slot.record.write(&slot.dir)?;
        let mut cloned = shown(&slot.record, &slot.dir, process.pid);
        cloned.answered_ms = answer.as_ref().map(|_| begin.elapsed().as_secs_f64() * 1e3);
        cloned.random = answer.as_ref().map(|answer| answer.random.clone());
        cloned.machine_id = answer.map(|answer| answer.machine_id);
        Ok(cloned)
    }
}
