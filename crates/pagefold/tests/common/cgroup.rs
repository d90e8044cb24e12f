//! Memory control groups of a test's own.

use super::Afterwards;
use std::fs;
use std::path::PathBuf;

/// A memory control group of a test's own, in the v1 or v2 hierarchy; `None`, with the reason printed, if it cannot be
/// made.
pub fn small_memory(token: &str, bytes: u64) -> Option<(String, Afterwards)> {
    let (tree, own) = memory_tree();
    let limit = if tree == MEMORY_V1 { "memory.limit_in_bytes" } else { "memory.max" };
    let dir = format!("{tree}{own}/pagefold-test-{token}");
    let made = fs::create_dir(&dir).and_then(|()| fs::write(format!("{dir}/{limit}"), bytes.to_string()));
    // The control group can be removed when the worker has ended, which is later: so the script tries for 30 s.
    let patiently = format!("(for i in $(seq 300); do rmdir {dir} && break; sleep 0.1; done) > /dev/null 2>&1 &");
    let afterwards = Afterwards::run(&patiently);
    match made {
        Ok(()) => Some((dir, afterwards)),
        Err(e) => {
            eprintln!("skipped: cannot make a memory control group at {dir}: {e}");
            None
        }
    }
}

/// Writes the limit of a control group in either version.
pub fn limit(cgroup: &str, bytes: u64) {
    let of = |file| PathBuf::from(cgroup).join(file);
    let file = [of("memory.limit_in_bytes"), of("memory.max")].into_iter().find(|file| file.exists());
    fs::write(file.expect("a limit"), bytes.to_string()).expect("set the limit");
}

/// Path of the control group in this directory, as `/proc/PID/cgroup` has it.
pub fn cgroup_path(dir: &str) -> &str {
    dir.strip_prefix(memory_tree().0).expect("a directory of the tree")
}

/// The tree of version 1 that accounts memory.
const MEMORY_V1: &str = "/sys/fs/cgroup/memory";

/// The tree that accounts memory, and the path of this process's own control group in it, which is empty for the root.
fn memory_tree() -> (&'static str, String) {
    let (tree, start) =
        if fs::metadata(MEMORY_V1).is_ok() { (MEMORY_V1, ":memory:") } else { ("/sys/fs/cgroup", "0::") };
    let all = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = all.lines().find_map(|line| line.split_once(start)).map_or("", |(_, path)| path);
    (tree, own.trim_end_matches('/').to_owned())
}
