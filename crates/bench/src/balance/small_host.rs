//! A control group with a memory limit that stands for a host.

use crate::guardian::Guardian;
use anyhow::Context;
use host::MemoryLimits;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The control group. Its processes are killed when it has no memory left, and no other process is.
pub struct SmallHost {
    dir: PathBuf,
    /// Its name, as the kernel has it.
    group: String,
    /// Directory of the group in which this process is.
    own: PathBuf,
    limits: MemoryLimits,
}

impl SmallHost {
    /// Makes the group of this name, with a limit far above all that is used in it.
    ///
    /// # Errors
    /// There is no controller of memory, or it may not be used.
    pub fn make(name: &str, guardian: &mut Guardian) -> anyhow::Result<Self> {
        let v1 = Path::new("/sys/fs/cgroup/memory");
        let base = if v1.is_dir() { v1 } else { Path::new("/sys/fs/cgroup") };
        let limits = MemoryLimits::find().context("no controller of memory is mounted")?;
        let own = limits.group_of(std::process::id()).context("cannot tell the control group of this process")?;
        let group = format!("/pagefold-bench-{}-{name}", std::process::id());
        let dir = base.join(&group[1..]);
        guardian.keep_cgroup(&dir)?;
        fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let host = Self { own: base.join(own.trim_start_matches('/')), dir, group, limits };
        host.limit(host::ram_bytes() / 2)?;
        Ok(host)
    }

    /// Its name.
    pub fn group(&self) -> &str {
        &self.group
    }

    /// Does work with this process in the group: all that it starts stays there.
    ///
    /// # Errors
    /// The work's, or this process cannot be moved.
    pub fn inside<T>(&self, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
        self.enter(&self.dir)?;
        let result = work();
        self.enter(&self.own)?;
        result
    }

    fn enter(&self, dir: &Path) -> anyhow::Result<()> {
        let file = dir.join("cgroup.procs");
        fs::write(&file, std::process::id().to_string()).with_context(|| format!("cannot write {}", file.display()))
    }

    /// Sets its limit.
    ///
    /// # Errors
    /// It cannot be set.
    pub fn limit(&self, bytes: u64) -> anyhow::Result<()> {
        let (v1, v2) = (self.dir.join("memory.limit_in_bytes"), self.dir.join("memory.max"));
        let file = if v1.exists() { v1 } else { v2 };
        fs::write(&file, bytes.to_string()).with_context(|| format!("cannot write {}", file.display()))
    }

    /// Memory in use.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn used_bytes(&self) -> anyhow::Result<u64> {
        let read = |name| fs::read_to_string(self.dir.join(name));
        let text = read("memory.usage_in_bytes").or_else(|_| read("memory.current"))?;
        Ok(text.trim().parse()?)
    }

    /// Memory that is available, as `pagefold balance` counts it.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn available_bytes(&self) -> anyhow::Result<u64> {
        let (_, left) = self.limits.bound_and_left(&self.group).context("the control group has no limit")?;
        Ok(left)
    }

    /// Memory that its processes hold, without files' pages that the kernel can read again.
    ///
    /// # Errors
    /// It has no limit.
    pub fn held_bytes(&self) -> anyhow::Result<u64> {
        let room = self.limits.room_bytes(&self.group).context("the control group has no limit")?;
        Ok(self.limit_bytes()?.saturating_sub(room))
    }

    /// Its limit.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn limit_bytes(&self) -> anyhow::Result<u64> {
        let read = |name| fs::read_to_string(self.dir.join(name));
        let text = read("memory.limit_in_bytes").or_else(|_| read("memory.max"))?;
        Ok(text.trim().parse()?)
    }

    /// Has the kernel take memory back, as far as it can: by `memory.reclaim`. Version 1 of control groups has no such file.
    /// There the limit is lowered for a moment, and nobody is killed meanwhile.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn reclaim(&self, bytes: u64) -> anyhow::Result<()> {
        let write = |name: &str, words: &str| match fs::write(self.dir.join(name), words) {
            // The kernel got less than it was asked for.
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::ResourceBusy) => Ok(()),
            done => done.with_context(|| format!("cannot write {}", self.dir.join(name).display())),
        };
        if self.dir.join("memory.reclaim").exists() {
            return write("memory.reclaim", &bytes.to_string());
        }
        let limit = self.limit_bytes()?;
        write("memory.oom_control", "1")?;
        let lowered = write("memory.limit_in_bytes", &self.used_bytes()?.saturating_sub(bytes).to_string());
        self.limit(limit)?;
        write("memory.oom_control", "0")?;
        lowered
    }

    /// Has the kernel swap nothing of the group, or as usual.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn swap(&self, may_swap: bool) -> anyhow::Result<()> {
        let (v1, v2) = (self.dir.join("memory.swappiness"), self.dir.join("memory.swap.max"));
        let (file, words) = if v1.exists() {
            (v1, if may_swap { "100" } else { "0" })
        } else {
            (v2, if may_swap { "max" } else { "0" })
        };
        fs::write(&file, words).with_context(|| format!("cannot write {}", file.display()))
    }

    /// Processes that were killed for want of memory.
    pub fn kills(&self) -> u64 {
        let read = |name| fs::read_to_string(self.dir.join(name));
        let text = read("memory.oom_control").or_else(|_| read("memory.events")).unwrap_or_default();
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok()).unwrap_or(0)
    }
}

impl Drop for SmallHost {
    fn drop(&mut self) {
        // A study makes one in each turn, by the same name. The guardian tries again where this fails, and says so.
        let _ = crate::guardian::remove_cgroup(&self.dir);
    }
}
