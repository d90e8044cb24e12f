//! Makes a template: boots a machine whose RAM is a memory file, and writes memory and device state to files when the
//! machine is idle.

use crate::ask::Helper;
use crate::digest;
use crate::identities::{Identity, now};
use crate::machine::{self, Places};
use crate::memory;
use crate::saving;
use crate::store::Store;
use crate::template::{Part, SCHEMA, Template, Vmm, cpu_model};
use crate::vmm;
use anyhow::{Context, bail};
use host::ProcessId;
use serde_json::json;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Longest time for the device state to be written, and for QEMU to end: 60 s.
const WRITING: Duration = Duration::from_secs(60);

/// How to boot the machine that is to become a template.
#[derive(Clone, Debug)]
pub struct Source {
    /// QEMU and its arguments, with the places of [`crate::DIR`], [`crate::NAME`] and [`crate::DISK`].
    pub words: Vec<String>,
    /// The image that its disk is copied from; `None` without a disk.
    pub disk: Option<PathBuf>,
    /// RAM.
    pub memory_bytes: u64,
    /// Whether the guest sees the host's own processor.
    pub sees_cpu: bool,
    /// Longest time until the helper inside answers.
    pub patience: Duration,
    /// Whether a guest whose helper does not answer becomes a template, too.
    pub allow_unconfirmed: bool,
}

impl Store {
    /// Boots a machine, and makes a template of it.
    ///
    /// # Errors
    /// There is such a template already, the machine does not come up, nobody inside answers, or the files cannot be
    /// written. Nothing is left then.
    pub fn create(&self, group: &str, name: &str, source: &Source) -> anyhow::Result<Template> {
        self.make(group, name, |dir| {
            let disk = dir.join("disk");
            if let Some(from) = &source.disk {
                copy_disk(from, &disk)?;
            }
            let memory = memory::writable(name, source.memory_bytes).context("cannot make a memory file")?;
            let words = machine::to_make(&source.words, source.memory_bytes);
            let process = vmm::start(&words, &Places { dir, name, disk: &disk }, Some(&memory))?;
            let booted = bring_to_rest(dir, name, &process, source);
            let ended = vmm::end(&process);
            let has_helper = booted.with_context(|| format!("cannot make template {name}"))?;
            ended?;
            let disk = source.disk.as_ref().map(|_| &*disk);
            let sees_cpu = source.sees_cpu;
            describe(dir, &Parts { group, name, words: &words, memory: &memory, disk, sees_cpu, has_helper })
        })
    }
}

/// What a template is made of: a machine whose device state is written.
pub(crate) struct Parts<'a> {
    pub(crate) group: &'a str,
    pub(crate) name: &'a str,
    /// Its command line.
    pub(crate) words: &'a [String],
    pub(crate) memory: &'a File,
    pub(crate) disk: Option<&'a Path>,
    pub(crate) sees_cpu: bool,
    pub(crate) has_helper: bool,
}

/// Writes the memory of a machine beside its device state, and `template.json`.
pub(crate) fn describe(dir: &Path, parts: &Parts) -> anyhow::Result<Template> {
    let template = Template {
        schema: SCHEMA,
        name: parts.name.into(),
        group: parts.group.into(),
        made_s: now().as_secs(),
        words: machine::to_clone(parts.words),
        vmm: Vmm::of(Path::new(&parts.words[0]))?,
        cpu: parts.sees_cpu.then(cpu_model).flatten(),
        memory: write_memory(parts.memory, dir)?,
        device: part(&dir.join("device"))?,
        disk: parts.disk.map(part).transpose()?,
        has_helper: parts.has_helper,
    };
    finish(&template, dir)?;
    Ok(template)
}

/// Waits until a machine answers and is idle, and writes its device state. Returns whether the helper has answered.
fn bring_to_rest(dir: &Path, name: &str, process: &ProcessId, source: &Source) -> anyhow::Result<bool> {
    let deadline = Instant::now() + source.patience;
    let mut qmp = vmm::connect(dir, process, deadline)?;
    // The helper gets the same request as in a clone, so that a guest in which it fails is found before there are
    // clones.
    let identity = Identity::new(name, None);
    let mut helper = Helper::connect(dir, process, deadline)?;
    helper.send(&identity)?;
    let answer =
        helper.confirm(&identity, deadline).with_context(|| format!("it is not up{}", vmm::last_words(dir)))?;
    if answer.is_none() && !source.allow_unconfirmed {
        let seconds = source.patience.as_secs();
        let way = "put pagefold-identity into the guest, or say --allow-unconfirmed";
        bail!("nobody inside has answered within {seconds} s: {way}{}", vmm::last_words(dir));
    }
    drop(helper);
    saving::wait_idle(process);
    saving::write_state(&mut qmp, &dir.join("device"), Instant::now() + WRITING)?;
    // The answer may be lost, because QEMU ends. Before that, QEMU writes its cached disk contents.
    let _ = qmp.execute("quit", json!({}));
    vmm::wait_end(process, Instant::now() + WRITING)?;
    Ok(answer.is_some())
}

fn copy_disk(from: &Path, to: &Path) -> anyhow::Result<()> {
    let copy = || digest::copy(&File::open(from)?, &File::create(to)?);
    copy().map(drop).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

fn write_memory(memory: &File, dir: &Path) -> anyhow::Result<Part> {
    let path = dir.join("memory");
    let write = || {
        let file = File::create(&path)?;
        let summary = digest::copy(memory, &file)?;
        file.sync_all()?;
        Ok::<_, std::io::Error>(summary)
    };
    Part::new(write().with_context(|| format!("cannot write {}", path.display()))?, &path)
}

/// Syncs a complete file to the disk, and describes it with its digest.
fn part(path: &Path) -> anyhow::Result<Part> {
    let read = || {
        let file = File::open(path)?;
        file.sync_all()?;
        digest::read(&file, |_, _| Ok(()))
    };
    Part::new(read().with_context(|| format!("cannot read {}", path.display()))?, path)
}

/// Writes `template.json`, and removes the other files that only the booted machine needed.
fn finish(template: &Template, dir: &Path) -> anyhow::Result<()> {
    let kept = ["memory", "device", "disk"];
    for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?.flatten() {
        if !kept.iter().any(|name| entry.file_name() == *name) {
            fs::remove_file(entry.path()).with_context(|| format!("cannot remove {}", entry.path().display()))?;
        }
    }
    let path = dir.join("template.json");
    let write = || {
        let file = File::create(&path)?;
        serde_json::to_writer_pretty(&file, template)?;
        file.sync_all()
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}
