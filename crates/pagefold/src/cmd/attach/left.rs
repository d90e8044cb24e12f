//! Memory of a process that still maps a pool, and its mappings afterwards.

use host::Mapping;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::{Duration, Instant};

/// Least time between two reads of the process's mappings: 250 ms.
const LOOK: Duration = Duration::from_millis(250);

/// Bytes of a process's private mappings of pools.
fn pooled_bytes(pid: u32) -> u64 {
    let all = Mapping::list(pid).unwrap_or_default();
    let pooled = all.iter().filter(|mapping| !mapping.shared && mapping.name.starts_with(act::POOL_NAMES));
    pooled.map(|mapping| mapping.end.0 - mapping.start.0).sum()
}

/// Whether a thread of an agent runs in a process.
pub fn has_agent(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads
        .into_iter()
        .any(|thread| std::fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name == "pagefold\n"))
}

/// A bar on stderr: how much of a process is private again. Nothing is drawn where stderr is no terminal.
pub struct Progress(ProgressBar, u32, Instant);

impl Progress {
    /// A bar for a process that is being detached.
    pub fn new(pid: u32) -> Self {
        let bar = ProgressBar::with_draw_target(Some(pooled_bytes(pid)), ProgressDrawTarget::stderr_with_hz(4));
        let style = ProgressStyle::with_template("{bar:30} {bytes} of {total_bytes} are as they were, {eta} left");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self(bar, pid, Instant::now())
    }

    /// Updates the bar, if [`LOOK`] has passed since the last update.
    pub fn look(&mut self) {
        if !self.0.is_hidden() && self.2.elapsed() > LOOK {
            self.2 = Instant::now();
            self.0.set_position(self.0.length().unwrap_or(0).saturating_sub(pooled_bytes(self.1)));
        }
    }

    /// Bytes of the process's private mappings of pools at the moment.
    pub fn left_bytes(&self) -> u64 {
        pooled_bytes(self.1)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Number of places where the kernel keeps two neighbouring mappings (VMAs) of private anonymous memory apart although
/// they are alike. It does so with memory that a process has moved (`mremap`), or has from its parent.
pub fn seams(pid: u32) -> usize {
    let all = Mapping::read_all(pid).unwrap_or_default();
    all.iter().zip(all.iter().skip(1)).filter(|(one, next)| are_alike(one, next)).count()
}

fn are_alike(one: &Mapping, next: &Mapping) -> bool {
    let is_anonymous = |mapping: &Mapping| !mapping.shared && mapping.inode == 0 && mapping.write;
    let about = |mapping: &Mapping| (mapping.read, mapping.write, mapping.name.clone(), mapping.vm_flags.clone());
    one.end == next.start && is_anonymous(one) && is_anonymous(next) && about(one) == about(next)
}
