//! A control group with a memory limit that stands for a host, so that other programs of the machine are not touched.

use crate::guardian::Guardian;
use anyhow::Context;
use host::MemoryLimits;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The control group. Where its limit leaves nothing, the kernel kills its processes, and no others.
pub struct SmallHost {
    dir: PathBuf,
    /// Path of the group below the root of control groups.
    group: String,
    /// Directory of the control group in which this process was before.
    own: PathBuf,
    limits: MemoryLimits,
}

impl SmallHost {
    /// Makes a control group of this name. Its limit is half of the machine's RAM, far above all that is used in it.
    ///
    /// # Errors
    /// The kernel has no memory controller, or this process may not use it.
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

    /// Path of the group, as the kernel names it in `/proc/PID/cgroup`.
    pub fn group(&self) -> &str {
        &self.group
    }

    /// Does the work while this process is in the group. Processes that the work starts stay in the group.
    ///
    /// # Errors
    /// The work fails, or this process cannot be moved.
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

    /// Sets the memory limit of the group.
    ///
    /// # Errors
    /// The limit cannot be written.
    pub fn limit(&self, bytes: u64) -> anyhow::Result<()> {
        let (v1, v2) = (self.dir.join("memory.limit_in_bytes"), self.dir.join("memory.max"));
        let file = if v1.exists() { v1 } else { v2 };
        fs::write(&file, bytes.to_string()).with_context(|| format!("cannot write {}", file.display()))
    }

    /// Memory that is charged to the group.
    ///
    /// # Errors
    /// The kernel's file cannot be read.
    pub fn used_bytes(&self) -> anyhow::Result<u64> {
        let read = |name| fs::read_to_string(self.dir.join(name));
        let text = read("memory.usage_in_bytes").or_else(|_| read("memory.current"))?;
        Ok(text.trim().parse()?)
    }

    /// Memory that is available below the limit, as `pagefold balance` counts it.
    ///
    /// # Errors
    /// The group has no limit.
    pub fn available_bytes(&self) -> anyhow::Result<u64> {
        let (_, left) = self.limits.bound_and_left(&self.group).context("the control group has no limit")?;
        Ok(left)
    }

    /// Memory that is charged to the group, without page cache that the kernel can read from files again.
    ///
    /// # Errors
    /// The group has no limit.
    pub fn held_bytes(&self) -> anyhow::Result<u64> {
        let room = self.limits.room_bytes(&self.group).context("the control group has no limit")?;
        Ok(self.limit_bytes()?.saturating_sub(room))
    }

    /// The memory limit of the group.
    ///
    /// # Errors
    /// The kernel's file cannot be read.
    pub fn limit_bytes(&self) -> anyhow::Result<u64> {
        let read = |name| fs::read_to_string(self.dir.join(name));
        let text = read("memory.limit_in_bytes").or_else(|_| read("memory.max"))?;
        Ok(text.trim().parse()?)
    }

    /// Has the kernel reclaim memory of the group, as far as it can, by `memory.reclaim`. Version 1 of control groups
    /// has no such file. There the limit is lowered for a moment, in which the kernel kills no process.
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

    /// Allows or forbids the kernel to swap memory of the group.
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

    /// Number of processes of the group that were killed for want of memory.
    pub fn kills(&self) -> u64 {
        let read = |name| fs::read_to_string(self.dir.join(name));
        let text = read("memory.oom_control").or_else(|_| read("memory.events")).unwrap_or_default();
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok()).unwrap_or(0)
    }
}

impl Drop for SmallHost {
    fn drop(&mut self) {
        // A study makes a group of the same name in each turn. Where removing fails here, the guardian tries again and
        // reports it.
        let _ = crate::guardian::remove_cgroup(&self.dir);
    }
}
