//! Trees of processes: a guest's processes are its first one and all descendants of it.

use host::{ProcessId, ProcessStat};
use std::collections::HashMap;

/// All processes of the host, as read from `/proc` one after the other.
#[derive(Debug)]
pub(crate) struct Family(HashMap<u32, ProcessStat>);

impl Family {
    /// Reads all processes.
    pub(crate) fn now() -> Self {
        let pids = host::pids().unwrap_or_default().into_iter();
        Self(pids.filter_map(|pid| Some((pid, ProcessStat::read(pid).ok()?))).collect())
    }

    /// Processor time of this process and all its descendants, in clock ticks; 0 if it was not there.
    pub(crate) fn cpu_ticks(&self, root: &ProcessId) -> u64 {
        self.tree(root).iter().filter_map(|id| self.0.get(&id.pid)).map(|stat| stat.cpu_ticks).sum()
    }

    /// This process and all its descendants, in ascending order of pid; empty if it was not there.
    pub(crate) fn tree(&self, root: &ProcessId) -> Vec<ProcessId> {
        let id = |(pid, stat): (&u32, &ProcessStat)| ProcessId { pid: *pid, start_ticks: stat.start_ticks };
        let mut ids: Vec<ProcessId> =
            self.0.get_key_value(&root.pid).map(id).filter(|id| id == root).into_iter().collect();
        let mut next = 0;
        while let Some(parent) = ids.get(next).copied() {
            // A child never starts before its parent. A process that seems to have done so is the child of an earlier
            // process with the same pid.
            let is_below = |stat: &ProcessStat| stat.parent == parent.pid && stat.start_ticks >= parent.start_ticks;
            ids.extend(self.0.iter().filter(|(_, stat)| is_below(stat)).map(id));
            next += 1;
        }
        ids.sort_unstable_by_key(|id| id.pid);
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tree_holds_descendants_and_no_children_of_previous_owner_of_pid() {
        let process = |pid, parent, start_ticks| (pid, ProcessStat { parent, start_ticks, ..ProcessStat::default() });
        let family = Family(
            [process(1, 0, 1), process(10, 1, 50), process(12, 10, 50), process(11, 12, 70), process(13, 12, 20)]
                .into(),
        );
        let ids =
            |pairs: &[(u32, u64)]| pairs.iter().map(|&(pid, start_ticks)| ProcessId { pid, start_ticks }).collect();
        let expected: Vec<ProcessId> = ids(&[(10, 50), (11, 70), (12, 50)]);
        assert_eq!(family.tree(&ProcessId { pid: 10, start_ticks: 50 }), expected);
        assert_eq!(family.tree(&ProcessId { pid: 10, start_ticks: 49 }), []);
        assert_eq!(family.tree(&ProcessId { pid: 99, start_ticks: 1 }), []);
    }
}
