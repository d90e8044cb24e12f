//! What the bench needs of a program that it attaches to again and again; and how it finds traces of the agent there.

use host::Mapping;
use std::fs;

/// A running program. It ends when it is dropped.
pub trait Subject {
    /// Process id of the program.
    fn pid(&self) -> u32;

    /// Whether all private anonymous memory of the program is folded. Otherwise, only the memory that the program
    /// advises as mergeable (`MADV_MERGEABLE`).
    fn is_whole(&self) -> bool {
        true
    }

    /// One line for each mapping, thread and file that must be the same after a cycle as before.
    ///
    /// # Errors
    /// The program has ended.
    fn look(&mut self) -> anyhow::Result<Vec<String>>;

    /// Has the program write pages that may be folded. Returns when they are written.
    ///
    /// # Errors
    /// The program has ended.
    fn break_folds(&mut self) -> anyhow::Result<()>;

    /// Checks that the program's memory holds what the program wrote, and that its clients were served.
    ///
    /// # Errors
    /// The memory holds something else, or the program has ended.
    fn check(&mut self) -> anyhow::Result<()>;

    /// Number of the program's system calls that were interrupted and must not have been; `None` if it does not count
    /// them.
    ///
    /// # Errors
    /// The program has ended.
    fn interrupted(&mut self) -> anyhow::Result<Option<u64>> {
        Ok(None)
    }
}

/// Number of anonymous pages of a process in mappings of the pool: they were folded, and written since.
///
/// # Errors
/// The process has ended.
pub fn broken_pages(pid: u32) -> anyhow::Result<u64> {
    let all = Mapping::read_all(pid)?;
    let pooled = all.iter().filter(|mapping| mapping.name.contains("pagefold"));
    Ok(pooled.map(|mapping| mapping.usage.anonymous_bytes / page::PAGE_BYTES as u64).sum())
}

/// Traces of the agent in a process: mappings, threads and files that are recognized by their names. For a process
/// whose own mappings, threads and files change.
///
/// # Errors
/// The process has ended.
pub fn traces(pid: u32) -> anyhow::Result<Vec<String>> {
    let dir = format!("/proc/{pid}");
    let maps = fs::read_to_string(format!("{dir}/maps"))?;
    let mut all: Vec<String> = maps.lines().filter(|line| line.contains("pagefold")).map(str::to_owned).collect();
    for entry in fs::read_dir(format!("{dir}/task"))? {
        let path = entry?.path();
        // The thread may have ended since it was listed.
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
