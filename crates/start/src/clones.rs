//! Makes clones, and keeps the directory of clones: `DIR/NAME/`, each with `clone.json` and QEMU's sockets.

mod awaited;
mod job;
mod saved;

pub(crate) use awaited::MEMORY;

use crate::ask::Helper;
use crate::folding::{Folding, release};
use crate::machine::QMP;
use crate::memory;
use crate::names;
use crate::place::{lock, private_dir, remove_dir};
use crate::record::{Record, State};
use crate::store::{entries, is_unwanted};
use crate::template::Template;
use crate::vmm;
use anyhow::Context;
use cli::exit::Stop;
use host::ProcessId;
use job::{Job, Slot};
use serde::Serialize;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The directory of clones.
#[derive(Clone, Debug)]
pub struct Clones {
    dir: PathBuf,
}

/// A request for clones.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// The template.
    pub template: &'a Template,
    /// Its directory.
    pub dir: &'a Path,
    /// How many.
    pub count: usize,
    /// Their names, with `%d` for a number.
    pub names: &'a str,
    /// Number of machines to keep ready for later requests: they are loaded and stopped, and become clones sooner.
    pub warm: usize,
    /// Whether clones are handed out although their helper does not answer.
    pub allow_unconfirmed: bool,
    /// Longest wait for the answer of a clone's helper.
    pub patience: Duration,
    /// The service that folds them; `None`: none does.
    pub folding: Option<&'a Folding>,
}

/// A clone that was handed out.
#[derive(Clone, Debug, Serialize)]
pub struct Cloned {
    /// Its name.
    pub name: String,
    /// Its group.
    pub group: String,
    /// Its template.
    pub template: String,
    /// `running` or `unconfirmed`.
    pub state: State,
    /// Its QEMU.
    pub pid: u32,
    /// Its machine-id; absent if nobody inside answers.
    pub machine_id: Option<String>,
    /// A number that the kernel inside drew after its random pool was seeded.
    pub random: Option<String>,
    /// Milliseconds from the beginning of its start to its answer.
    pub answered_ms: Option<f64>,
    /// Its QMP socket.
    pub qmp: PathBuf,
    /// The directory of the service that folds it; absent where none does.
    pub service: Option<PathBuf>,
}

impl Clones {
    /// The clones in this directory, which need not be there.
    pub fn open(dir: &Path) -> Self {
        Self { dir: dir.to_owned() }
    }

    /// The directory of a clone.
    pub fn dir_of(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// All clones that live, by name. Ends clones whose starter is gone, and removes directories of clones that have
    /// ended.
    ///
    /// # Errors
    /// The directory cannot be read, or something cannot be removed.
    pub fn list(&self) -> anyhow::Result<Vec<Record>> {
        if !self.dir.exists() {
            return Ok(Vec::new());
        }
        private_dir(&self.dir)?;
        let _lock = lock(&self.dir)?;
        self.tidy()
    }

    /// Records of living clones that can be read. Changes nothing.
    pub fn seen(&self) -> Vec<Record> {
        let dirs = entries(&self.dir).unwrap_or_default();
        dirs.iter().filter_map(|dir| Record::read(dir)).filter(Record::is_alive).collect()
    }

    /// Living clones of a template.
    ///
    /// # Errors
    /// As for [`Self::list`].
    pub fn of(&self, template: &Template) -> anyhow::Result<Vec<Record>> {
        Ok(self.list()?.into_iter().filter(|clone| clone.is_of(template)).collect())
    }

    /// Lists the living clones. Removes the directories of the others, and ends what is left of their machines. The
    /// caller holds the directory's lock.
    fn tidy(&self) -> anyhow::Result<Vec<Record>> {
        let (mut living, mut gone) = (Vec::new(), Vec::new());
        for dir in entries(&self.dir)? {
            match Record::read(&dir) {
                Some(clone) if clone.state == State::Starting && has_starter(&clone) => living.push(clone),
                Some(clone) if clone.state != State::Starting && clone.is_alive() => {
                    living.push(saved::let_go_on(clone, &dir))
                }
                found => {
                    vmm::end_those_of(&dir);
                    remove_dir(&dir)?;
                    gone.extend(found);
                }
            }
        }
        gone.iter().for_each(|clone| release(clone, &living));
        living.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(living)
    }

    /// Ends the machine of a clone, and removes its directory. After the last clone of a template, the service is told
    /// to unload the template.
    fn forget(&self, clone: &Record) -> anyhow::Result<()> {
        let _lock = lock(&self.dir)?;
        clone.process.as_ref().map_or(Ok(()), vmm::end)?;
        remove_dir(&self.dir_of(&clone.name))?;
        release(clone, &self.tidy()?);
        Ok(())
    }

    /// Makes clones, and returns when the helper inside each has answered. If one fails, all clones of this request are
    /// ended.
    ///
    /// # Errors
    /// The template is damaged or needs another host, a name is taken, QEMU fails, or a clone is not confirmed.
    pub fn make(&self, wanted: &Wanted) -> anyhow::Result<Vec<Cloned>> {
        let device = self.check(wanted)?;
        let (memory, slots) = self.reserve(wanted, true)?;
        let job = Job { clones: self, wanted, device: &device, memory: &memory };
        let made = job.run(slots);
        let made = made.and_then(|made| job.keep_warm().map(|()| made));
        made.with_context(|| format!("no clone of {} is handed out", wanted.template.name))
    }

    /// The device state for clones. An error if the template must not or cannot be cloned.
    fn check(&self, wanted: &Wanted) -> anyhow::Result<Vec<u8>> {
        let template = wanted.template;
        if is_unwanted(wanted.dir) {
            let text = format!("template {} is to be removed when its clones have ended", template.name);
            return Err(Stop::Usage(format!("{text}: no further clone is made of it")).into());
        }
        if !template.has_helper && !wanted.allow_unconfirmed {
            let text = format!(
                "nobody answers inside template {}: a clone would have its siblings' keys and names",
                template.name
            );
            return Err(
                Stop::Usage(format!("{text}; put pagefold-identity into it, or say --allow-unconfirmed")).into()
            );
        }
        template.check(wanted.dir)?;
        let device = template.device(wanted.dir)?;
        private_dir(&self.dir)?;
        Ok(device)
    }

    /// Reserves names for clones, and opens the memory that they will map. `may_wait`: machines that were kept ready
    /// (`warm`) may be used.
    fn reserve(&self, wanted: &Wanted, may_wait: bool) -> anyhow::Result<(fs::File, Vec<Slot>)> {
        let mut slots = self.take_names(wanted, may_wait)?;
        let memory = self.take_memory(wanted, &mut slots);
        if memory.is_err() {
            slots.iter().try_for_each(|slot| self.forget(&slot.record))?;
        }
        Ok((memory?, slots))
    }

    /// Reserves names by recording the clones, and assigns machines that were kept ready.
    fn take_names(&self, wanted: &Wanted, may_wait: bool) -> anyhow::Result<Vec<Slot>> {
        let _lock = lock(&self.dir)?;
        let living = self.tidy()?;
        let taken: BTreeSet<String> = living.iter().map(|clone| clone.name.clone()).collect();
        let names = names::deal(wanted.names, wanted.count, &taken)?;
        let service = wanted.folding.map(Folding::dir);
        let is_alike = |clone: &Record| clone.is_of(wanted.template) && clone.service.as_deref() == service;
        let mut warm = living.iter().filter(|clone| may_wait && clone.state == State::Warm && is_alike(clone));
        let mut slots = Vec::with_capacity(names.len());
        for name in names {
            let dir = self.dir_of(&name);
            let found = warm.next();
            match found.map(|found| self.dir_of(&found.name)) {
                Some(from) => fs::rename(&from, &dir).with_context(|| format!("cannot rename {}", from.display()))?,
                None => private_dir(&dir)?,
            }
            let (process, memory) = found.map_or((None, None), |found| (found.process, found.memory));
            let record = Record { process, memory, ..Record::starting(wanted, &name)? };
            record.write(&dir)?;
            slots.push(Slot { record, dir });
        }
        Ok(slots)
    }

    /// Opens the memory for clones. The clones are recorded before, so that the next command knows what a service may
    /// have loaded.
    fn take_memory(&self, wanted: &Wanted, slots: &mut [Slot]) -> anyhow::Result<fs::File> {
        let _lock = lock(&self.dir)?;
        let memory = memory::of(wanted.template, wanted.dir, &self.tidy()?, wanted.folding)?;
        let file = memory::id_of(&memory).context("cannot look at a memory file")?;
        for slot in slots.iter_mut().filter(|slot| slot.record.memory.is_none()) {
            slot.record.memory = Some(file);
            slot.record.write(&slot.dir)?;
        }
        Ok(memory)
    }

    /// The living clone of this name.
    ///
    /// # Errors
    /// There is none.
    pub fn find(&self, name: &str) -> anyhow::Result<Record> {
        let found = self.list()?.into_iter().find(|clone| clone.name == name);
        found.ok_or_else(|| Stop::Usage(format!("no clone {name}: pagefold clones lists those there are")).into())
    }

    /// Ends a clone.
    ///
    /// # Errors
    /// Its process does not end, or its directory cannot be removed.
    pub fn end(&self, clone: &Record) -> anyhow::Result<()> {
        self.forget(clone)
    }

    /// Asks the helper inside a clone to set the clone's clock. Returns whether the helper has answered that the clock
    /// is right.
    ///
    /// # Errors
    /// The connection to the helper is broken.
    pub fn set_clock(&self, clone: &Record, patience: Duration) -> anyhow::Result<bool> {
        let Some(process) = clone.process.as_ref().filter(|_| clone.state == State::Running) else { return Ok(false) };
        let deadline = Instant::now() + patience;
        Helper::connect(&self.dir_of(&clone.name), process, deadline)?.set_clock(deadline)
    }

    /// Puts a clone back to where its template stood, with its own name and addresses.
    ///
    /// # Errors
    /// As for [`Self::make`]. The clone is ended then.
    pub fn roll_back(&self, clone: &Record, wanted: &Wanted) -> anyhow::Result<Cloned> {
        clone.check_own_machine("put back")?;
        let device = wanted.template.device(wanted.dir)?;
        wanted.template.check(wanted.dir)?;
        let dir = self.dir_of(&clone.name);
        let (memory, record) = {
            let _lock = lock(&self.dir)?;
            let memory = memory::of(wanted.template, wanted.dir, std::slice::from_ref(clone), wanted.folding)?;
            let file = memory::id_of(&memory).context("cannot look at a memory file")?;
            let identity = clone.identity.as_ref().map(|identity| identity.again());
            let record = Record { memory: Some(file), identity, ..Record::starting(wanted, &clone.name)? };
            record.write(&dir)?;
            clone.process.as_ref().map_or(Ok(()), vmm::end)?;
            (memory, record)
        };
        let job = Job { clones: self, wanted, device: &device, memory: &memory };
        let made = job.run(vec![Slot { record, dir }]);
        let made = made.with_context(|| format!("{} cannot be put back, and is ended", clone.name))?;
        made.into_iter().next().context("no clone was made")
    }
}

impl Record {
    /// The record of a clone that this process begins to make.
    fn starting(wanted: &Wanted, name: &str) -> anyhow::Result<Self> {
        let template = wanted.template;
        Ok(Self {
            name: name.to_owned(),
            group: template.group.clone(),
            template: template.name.clone(),
            digest: template.memory.digest.clone(),
            state: State::Starting,
            process: None,
            starter: Some(ProcessId::of(std::process::id())?),
            memory: None,
            service: wanted.folding.map(|folding| folding.dir().to_owned()),
            started_elsewhere: false,
            saver: None,
            identity: None,
        })
    }
}

fn has_starter(clone: &Record) -> bool {
    clone.starter.is_some_and(|starter| starter.is_alive())
}

/// A clone that was handed out, without what its helper has answered.
fn shown(record: &Record, dir: &Path, pid: u32) -> Cloned {
    Cloned {
        name: record.name.clone(),
        group: record.group.clone(),
        template: record.template.clone(),
        state: record.state,
        pid,
        machine_id: None,
        random: None,
        answered_ms: None,
        qmp: dir.join(QMP),
        service: record.service.clone(),
    }
}
