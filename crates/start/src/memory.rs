//! The memory file that all clones of a template map.
//!
//! It is a `memfd`, and sealed (`F_SEAL_WRITE`, `F_SEAL_SHRINK`, `F_SEAL_GROW`): no process can change it, through any
//! descriptor. A clone has it as its standard input, so that QEMU's command line can name it: `/proc/self/fd/0`.
//!
//! If clones are folded, the file is a segment of their group's pool, which the service seals and keeps (`folding.rs`).
//! Clones that are not folded map another file.

use crate::digest;
use crate::folding::Folding;
use crate::record::Record;
use crate::template::Template;
use anyhow::{Context, bail};
use rustix::fs::{MemfdFlags, Mode, SealFlags, fchmod, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Seals of a template's memory: its content and size stay as they are.
pub(crate) const SEALS: SealFlags = SealFlags::WRITE
    .union(SealFlags::FUTURE_WRITE)
    .union(SealFlags::SHRINK)
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Identity of a memory file, by device and inode. No two files have the same while both are open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileId {
    /// Device number of its file system.
    pub device: u64,
    /// Number of its inode.
    pub inode: u64,
}

impl FileId {
    fn of(meta: &std::fs::Metadata) -> Self {
        Self { device: meta.dev(), inode: meta.ino() }
    }
}

/// A new memory file of this size that is not sealed, for a guest that is to become a template.
pub(crate) fn writable(name: &str, bytes: u64) -> io::Result<File> {
    let file = new_file(&own_name(name), bytes)?;
    fchmod(&file, Mode::RUSR | Mode::WUSR)?;
    Ok(file)
}

/// Name of the memory file for clones that are not folded.
fn own_name(name: &str) -> String {
    format!("pagefold.template-{name}")
}

fn new_file(name: &str, bytes: u64) -> io::Result<File> {
    let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.set_len(bytes)?;
    Ok(file)
}

pub(crate) fn id_of(file: impl AsFd) -> io::Result<FileId> {
    let stat = fstat(file)?;
    Ok(FileId { device: stat.st_dev, inode: stat.st_ino })
}

/// The sealed memory of a template. With `folding`, it is a segment of the pool. Else it is taken from a living clone
/// of `clones` that no service folds, or loaded from `dir`.
pub(crate) fn of(
    template: &Template,
    dir: &Path,
    clones: &[Record],
    folding: Option<&Folding>,
) -> anyhow::Result<File> {
    let service = folding.map(Folding::dir);
    let same = clones.iter().filter(|clone| clone.is_of(template) && clone.service.as_deref() == service);
    let same: Vec<&Record> = same.collect();
    if let Some(folding) = folding {
        return folding.memory(template, dir, &same);
    }
    if let Some(file) = same.into_iter().find_map(borrow) {
        return Ok(file);
    }
    let file = load(template, dir, &own_name(&template.name))?;
    fchmod(&file, Mode::RUSR | Mode::WUSR).context("cannot keep a memory file from others")?;
    fcntl_add_seals(&file, SEALS).context("cannot seal a memory file")?;
    Ok(file)
}

/// Opens the memory file of a living clone, through a descriptor of its machine, or of the process that waits for its
/// machine. The file must be sealed, and be the one in the clone's record: a process that has put another file in its
/// place gets `None`.
pub(crate) fn borrow(clone: &Record) -> Option<File> {
    let holder = clone.process.or(clone.starter.filter(|_| clone.started_elsewhere));
    let process = holder.filter(host::ProcessId::is_alive)?;
    let files = std::fs::read_dir(format!("/proc/{}/fd", process.pid)).ok()?.flatten().map(|entry| entry.path());
    // The file must be a memory file: asking about another file may wait for its server, and opening a pipe for its
    // writer.
    let is_memory =
        |path: &PathBuf| std::fs::read_link(path).is_ok_and(|name| name.to_string_lossy().starts_with("/memfd:"));
    let is_named = |path: &PathBuf| std::fs::metadata(path).is_ok_and(|meta| Some(FileId::of(&meta)) == clone.memory);
    let file = File::open(files.filter(is_memory).find(is_named)?).ok()?;
    let is_it = id_of(&file).ok() == clone.memory && fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS));
    is_it.then_some(file)
}

/// Loads a template's memory into a new memory file of this name, which is not sealed yet.
pub(crate) fn load(template: &Template, dir: &Path, name: &str) -> anyhow::Result<File> {
    let path = dir.join("memory");
    let stored = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
    let length = stored.metadata().map_or(0, |meta| meta.len());
    if length != template.memory.bytes {
        bail!(
            "{} has {length} bytes, and had {} when it was made: {}",
            path.display(),
            template.memory.bytes,
            template.remedy()
        );
    }
    let file = new_file(name, template.memory.bytes).context("cannot make a memory file")?;
    let summary = digest::copy(&stored, &file).with_context(|| {
        format!("cannot load {} into memory, where it takes {} bytes", path.display(), template.memory.stored_bytes)
    })?;
    if summary.digest != template.memory.digest {
        bail!("{} is not what it was when it was made: {}", path.display(), template.remedy());
    }
    Ok(file)
}
