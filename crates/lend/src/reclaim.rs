//! Has the kernel reclaim page cache of control groups.
//!
//! | control groups | way |
//! |---|---|
//! | version 2 | `memory.reclaim`, as much as is wanted; with `swappiness=0` where the host has swap |
//! | version 1 | there is no `memory.reclaim`. `memory.force_empty` reclaims all that the kernel can get. It is used only on a control group that stands for the host, and only without swap |
//!
//! Memory of guests is never swapped out for this, and no process is killed.

use anyhow::{Context, bail};
use host::MemoryLimits;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Files of a control group by which the kernel is asked to reclaim memory, the better one first.
const WAYS: [&str; 2] = ["memory.reclaim", "memory.force_empty"];

/// The outcome of having page cache reclaimed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reclaimed {
    /// Control groups that were asked for it.
    pub groups: Vec<String>,
    /// The file by which they were asked; `None` if there is none.
    pub way: Option<&'static str>,
    /// Decrease of the memory that these groups use, in bytes.
    pub freed_bytes: u64,
    /// The first reason for which a group gave nothing.
    pub problem: Option<String>,
}

/// Makes control groups give back `bytes` of page cache in all. `may_empty`: they may lose all of their page cache, if
/// the kernel can only empty them.
pub fn reclaim(groups: &BTreeSet<String>, bytes: u64, may_empty: bool) -> Reclaimed {
    let mut done = Reclaimed::default();
    let Some(limits) = MemoryLimits::find() else {
        done.problem = Some("no controller of memory is mounted".into());
        return done;
    };
    for group in groups {
        let left = bytes.saturating_sub(done.freed_bytes);
        let Some(dir) = limits.dir_of(group).filter(|_| left > 0) else { continue };
        let before = limits.used_bytes(group).unwrap_or(0);
        match take_back(&dir, left, host::total_swap_bytes() > 0, may_empty) {
            Ok(way) => done.way = Some(way),
            Err(error) => _ = done.problem.get_or_insert(format!("{group}: {error:#}")),
        }
        let freed = before.saturating_sub(limits.used_bytes(group).unwrap_or(before));
        done.freed_bytes = done.freed_bytes.saturating_add(freed);
        done.groups.push(group.clone());
    }
    if done.groups.is_empty() {
        done.problem = Some("no guest has a control group of its own".into());
    }
    done
}

fn take_back(dir: &Path, bytes: u64, has_swap: bool, may_empty: bool) -> anyhow::Result<&'static str> {
    let way = WAYS.into_iter().find(|way| dir.join(way).exists());
    let way = way.with_context(|| format!("{} has neither of {}", dir.display(), WAYS.join(", ")))?;
    let words = match (way == WAYS[0], has_swap) {
        (true, false) => bytes.to_string(),
        (true, true) => format!("{bytes} swappiness=0"),
        (false, false) if may_empty => "0".into(),
        (false, false) => bail!(
            "version 1 of control groups has no memory.reclaim, and memory.force_empty would take all page cache of the group: \
             mount version 2"
        ),
        (false, true) => bail!(
            "version 1 of control groups has no memory.reclaim, and memory.force_empty would swap guests out: \
             end swapping, or mount version 2"
        ),
    };
    match fs::write(dir.join(way), words) {
        // The kernel got less than it was asked for.
        Err(error) if error.kind() != ErrorKind::WouldBlock => {
            Err(error).with_context(|| format!("cannot write {}", dir.join(way).display()))
        }
        _ => Ok(way),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_decides_the_way_and_swap_is_spared() {
        let dir = tempfile::tempdir().unwrap();
        let at = |words: &str| fs::read_to_string(dir.path().join(words)).unwrap();
        let none = take_back(dir.path(), 5, false, true).unwrap_err().to_string();
        assert!(none.contains("memory.reclaim"), "{none}");
        fs::write(dir.path().join("memory.force_empty"), "").unwrap();
        let error = take_back(dir.path(), 5, true, true).unwrap_err().to_string();
        assert!(error.contains("has no memory.reclaim") && at("memory.force_empty").is_empty(), "{error}");
        let error = take_back(dir.path(), 5, false, false).unwrap_err().to_string();
        assert!(error.contains("would take all") && at("memory.force_empty").is_empty(), "{error}");
        assert_eq!(take_back(dir.path(), 5, false, true).unwrap(), "memory.force_empty");
        assert_eq!(at("memory.force_empty"), "0");
        fs::write(dir.path().join("memory.reclaim"), "").unwrap();
        assert_eq!(take_back(dir.path(), 5, false, true).unwrap(), "memory.reclaim");
        assert_eq!(at("memory.reclaim"), "5");
        take_back(dir.path(), 7, true, false).unwrap();
        assert_eq!(at("memory.reclaim"), "7 swappiness=0");
    }
}
