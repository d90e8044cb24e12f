//! A template: the file `template.json` beside its parts.

use crate::digest::{self, Summary};
use anyhow::{Context, bail};
use cli::exit::Stop;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

/// Version of `template.json`.
pub(crate) const SCHEMA: u32 = 1;

/// A template.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Template {
    /// Version of this structure.
    pub schema: u32,
    /// Its name, unique in its group.
    pub name: String,
    /// The group whose guests it may become.
    pub group: String,
    /// When it was made, in seconds since 1970.
    pub made_s: u64,
    /// The command line of a clone, with places for what differs: see `machine.rs`.
    pub words: Vec<String>,
    /// The virtual machine monitor that understands the device state.
    pub vmm: Vmm,
    /// Model of the processor that the guest sees; `None` where it is emulated.
    pub cpu: Option<String>,
    /// The guest's memory.
    pub memory: Part,
    /// The device state.
    pub device: Part,
    /// The disk, if it has one.
    pub disk: Option<Part>,
    /// Whether the helper inside has answered when the template was made.
    pub has_helper: bool,
}

/// A program and its version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vmm {
    /// The first line that it prints about itself.
    pub version: String,
    /// Its file when that line was read.
    pub file: Stamp,
}

/// A file of the template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Its size.
    pub bytes: u64,
    /// Bytes of those of its pages that are not zero.
    pub stored_bytes: u64,
    /// Digest of its content.
    pub digest: String,
    /// Size, inode and time of change of the file when it was made.
    pub file: Stamp,
}

/// Properties of a file that show whether it was changed, without reading it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    bytes: u64,
    inode: u64,
    changed_s: i64,
    changed_ns: i64,
}

impl Stamp {
    pub(crate) fn of(path: &Path) -> anyhow::Result<Self> {
        let meta = fs::metadata(path).with_context(|| format!("cannot look at {}", path.display()))?;
        let (changed_s, changed_ns) = (meta.ctime(), meta.ctime_nsec());
        Ok(Self { bytes: meta.len(), inode: meta.ino(), changed_s, changed_ns })
    }
}

impl Part {
    pub(crate) fn new(summary: Summary, path: &Path) -> anyhow::Result<Self> {
        let Summary { bytes, stored_bytes, digest } = summary;
        Ok(Self { bytes, stored_bytes, digest, file: Stamp::of(path)? })
    }

    /// Reads the whole file, and fails if its size or content differs from what it was.
    fn verify(&self, path: &Path) -> anyhow::Result<()> {
        let found = File::open(path).and_then(|file| digest::read(&file, |_, _| Ok(())));
        let found = found.with_context(|| format!("cannot read {}", path.display()))?;
        if found.bytes != self.bytes {
            bail!("{} has {} bytes, and had {} when it was made", path.display(), found.bytes, self.bytes);
        }
        if found.digest != self.digest {
            bail!("{} is not what it was when it was made", path.display());
        }
        Ok(())
    }
}

impl Vmm {
    /// The version of a program, by its `--version`.
    pub(crate) fn of(program: &Path) -> anyhow::Result<Self> {
        let ran = Command::new(program).arg("--version").output();
        let ran = ran.with_context(|| format!("cannot run {}", program.display()))?;
        let text = String::from_utf8_lossy(&ran.stdout);
        Ok(Self { version: text.lines().next().unwrap_or_default().to_owned(), file: Stamp::of(program)? })
    }

    pub(crate) fn check(&self, program: &Path) -> anyhow::Result<()> {
        if Stamp::of(program)? == self.file {
            return Ok(());
        }
        let found = Self::of(program)?;
        if found.version == self.version {
            return Ok(());
        }
        let text = format!("the template needs {}, and {} is {}", self.version, program.display(), found.version);
        Err(Stop::HostLacks(format!("{text}: make the template anew with this version")).into())
    }
}

impl Template {
    pub(crate) fn read(dir: &Path) -> anyhow::Result<Self> {
        let path = dir.join("template.json");
        let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let template: Self =
            serde_json::from_slice(&text).with_context(|| format!("{} is no template's", path.display()))?;
        if template.schema != SCHEMA {
            bail!(
                "{} has version {}, and this program knows {SCHEMA}: make the template anew",
                path.display(),
                template.schema
            );
        }
        Ok(template)
    }

    /// All bytes that the template takes on the disk.
    pub fn stored_bytes(&self) -> u64 {
        self.memory.stored_bytes + self.device.stored_bytes + self.disk.as_ref().map_or(0, |disk| disk.stored_bytes)
    }

    /// Advice for the user of a damaged template.
    pub(crate) fn remedy(&self) -> String {
        let Self { name, group, .. } = self;
        format!("no clone is made of it; remove it (pagefold template remove {name} --group {group}), and make it anew")
    }

    /// Fails if the content of one of its files has changed since it was made.
    ///
    /// # Errors
    /// A file is missing, or its content has changed.
    pub fn verify(&self, dir: &Path) -> anyhow::Result<()> {
        let parts = [("memory", Some(&self.memory)), ("device", Some(&self.device)), ("disk", self.disk.as_ref())];
        let mut parts = parts.into_iter().filter_map(|(name, part)| Some((name, part?)));
        let verified = parts.try_for_each(|(name, part)| part.verify(&dir.join(name)));
        verified.with_context(|| format!("template {} is damaged: {}", self.name, self.remedy()))
    }

    /// Checks that a clone can be made on this host.
    pub(crate) fn check(&self, dir: &Path) -> anyhow::Result<()> {
        self.vmm.check(Path::new(&self.words[0]))?;
        if self.cpu.is_some() && self.cpu != cpu_model() {
            let (made, here) = (self.cpu.as_deref().unwrap_or_default(), cpu_model().unwrap_or_default());
            let text =
                format!("the template's guest has seen a processor of the model {made}, and this host has {here}");
            return Err(Stop::HostLacks(format!("{text}: make the template anew here")).into());
        }
        let Some(disk) = &self.disk else { return Ok(()) };
        let path = dir.join("disk");
        // Clones read the disk while they run. Its digest is computed again only if the file was touched.
        if Stamp::of(&path)? == disk.file { Ok(()) } else { disk.verify(&path).with_context(|| self.remedy()) }
    }

    /// Reads the device state. An error if it is not the one that was made.
    pub(crate) fn device(&self, dir: &Path) -> anyhow::Result<Vec<u8>> {
        let path = dir.join("device");
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        if digest::of(&bytes).digest != self.device.digest {
            bail!("{} is not what it was when it was made: {}", path.display(), self.remedy());
        }
        Ok(bytes)
    }
}

/// Model of the host's processor.
pub(crate) fn cpu_model() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}
