//! Which process started which: a guest's processes are the first one and all below it.

use host::ProcessStat;
use std::collections::HashMap;
use std::fs;

/// All processes, as they were at one moment or near it.
#[derive(Debug)]
pub(crate) struct Family(HashMap<u32, ProcessStat>);

impl Family {
    /// Looks at all processes.
    pub(crate) fn now() -> Self {
        let entries = fs::read_dir("/proc").into_iter().flatten();
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        Self(pids.filter_map(|pid| Some((pid, ProcessStat::read(pid).ok()?))).collect())
    }

    /// What was seen of a process.
    pub(crate) fn stat(&self, pid: u32) -> Option<&ProcessStat> {
        self.0.get(&pid)
    }

    /// This process and all below it, in ascending order; none if it was not there.
    pub(crate) fn tree(&self, root: u32) -> Vec<u32> {
        let mut pids: Vec<u32> = self.0.get_key_value(&root).map(|(pid, _)| *pid).into_iter().collect();
        let mut next = 0;
        while let Some(parent) = pids.get(next).copied() {
            pids.extend(self.0.iter().filter(|(_, stat)| stat.parent == parent).map(|(pid, _)| *pid));
            next += 1;
        }
        pids.sort_unstable();
        pids
    }
}
