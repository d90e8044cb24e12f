//! Programs that have reached a limit of theirs are refused with the reason, and are attached when it is raised.

use crate::common::supervised::{Installed, wait_for};
use crate::rig::{CONFIG, Waits, assert_same, attach, attach_eagerly, detach, words};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// Sets a limit of another process's (`prlimit`): soft, and as it was for the hard one.
fn set(pid: &str, limit: &str) {
    let done = Command::new("prlimit").args(["--pid", pid, limit]).status().expect("run prlimit");
    assert!(done.success(), "{limit}");
}

/// A control group without room for another thread. The process is moved out of it at the end.
struct Full(PathBuf);

impl Full {
    /// `None`, with the reason printed, if it cannot be made.
    fn of(pid: u32, threads: usize) -> Option<Self> {
        let v1 = PathBuf::from("/sys/fs/cgroup/pids");
        let tree = if v1.is_dir() { v1 } else { "/sys/fs/cgroup".into() };
        let dir = tree.join(format!("pagefold-full-{}", std::process::id()));
        let made = fs::create_dir(&dir).and_then(|()| fs::write(dir.join("cgroup.procs"), pid.to_string()));
        let this = Self(dir);
        let limited = made.and_then(|()| fs::write(this.0.join("pids.max"), threads.to_string()));
        limited
            .map_err(|e| eprintln!("skipped in part: no control group with a limit of processes: {e}"))
            .ok()
            .map(|()| this)
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        let parent = self.0.with_file_name("cgroup.procs");
        for pid in fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default().lines() {
            let _ = fs::write(&parent, pid);
        }
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn program_at_a_limit_is_refused_and_left_as_it_was() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut waits = Waits::start_filled(&installed);
    let pid = waits.pid();
    waits.tell("stop");
    // Its threads stand still: they would miss what they are refused.
    let before = waits.look();
    let refused = |waits: &Waits, why: &str| {
        let output = attach_eagerly(&installed, &[&pid]);
        assert!(!output.status.success() && words(&output).contains(why), "{why}: {output:?}");
        wait_for("its threads are its own", || (waits.look()["task"] == before["task"]).then_some(()));
        assert_same(&waits.look(), &before, 0);
    };
    set(&pid, "--nofile=1:");
    refused(&waits, "Too many open files");
    set(&pid, "--nofile=1024:");
    set(&pid, "--as=4096:");
    refused(&waits, "it has no room for the agent");
    set(&pid, "--as=unlimited:");
    if let Some(_full) = Full::of(waits.pid, before["task"].len()) {
        refused(&waits, "no thread can be made in it");
    }
    waits.tell("go");
    attach(&installed, &pid);
    detach(&installed, &pid);
    waits.tell("stop");
    assert_same(&waits.look(), &before, 1);
}
