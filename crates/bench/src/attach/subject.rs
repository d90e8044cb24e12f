//! A program that is attached again and again, and traces of the agent in it.

use host::Mapping;
use std::fs;

/// A running program. It ends when it is dropped.
pub trait Subject {
    /// Its process.
    fn pid(&self) -> u32;

    /// Whether all of its private anonymous memory is folded. Otherwise, only what it advises.
    fn is_whole(&self) -> bool {
        true
    }

    /// All that must be the same after a cycle as before.
    ///
    /// # Errors
    /// It has ended.
    fn look(&mut self) -> anyhow::Result<Vec<String>>;

    /// Has it write pages that are folded. Returns when it has.
    ///
    /// # Errors
    /// It has ended.
    fn break_folds(&mut self) -> anyhow::Result<()>;

    /// Whether its memory is what it wrote, and nobody that it serves has noticed anything.
    ///
    /// # Errors
    /// It is not.
    fn check(&mut self) -> anyhow::Result<()>;

    /// How many of its system calls were interrupted that must not be; `None` if it does not count them.
    ///
    /// # Errors
    /// It has ended.
    fn interrupted(&mut self) -> anyhow::Result<Option<u64>> {
        Ok(None)
    }
}

/// Pages of a process that are its own, in mappings of the pool: they were folded, and written since.
///
/// # Errors
/// It has ended.
pub fn broken_pages(pid: u32) -> anyhow::Result<u64> {
    let all = Mapping::read_all(pid)?;
    let pooled = all.iter().filter(|mapping| mapping.name.contains("pagefold"));
    Ok(pooled.map(|mapping| mapping.usage.anonymous_bytes / page::PAGE_BYTES as u64).sum())
}

/// Mappings, threads and files of an agent's in a process that changes all of these by itself.
///
/// # Errors
/// It has ended.
pub fn traces(pid: u32) -> anyhow::Result<Vec<String>> {
    let dir = format!("/proc/{pid}");
    let maps = fs::read_to_string(format!("{dir}/maps"))?;
    let mut all: Vec<String> = maps.lines().filter(|line| line.contains("pagefold")).map(str::to_owned).collect();
    for entry in fs::read_dir(format!("{dir}/task"))? {
        let path = entry?.path();
        // A thread may have ended meanwhile.
        let name = fs::read_to_string(path.join("comm")).unwrap_or_default();
        all.extend(name.starts_with("pagefold").then(|| format!("task {}", path.display())));
    }
    for entry in fs::read_dir(format!("{dir}/fd"))? {
        let path = entry?.path();
        let is_ours = fs::read_link(&path).is_ok_and(|target| target.to_string_lossy().contains("userfaultfd"));
        all.extend(is_ours.then(|| format!("fd {}", path.display())));
    }
    Ok(all)
}
