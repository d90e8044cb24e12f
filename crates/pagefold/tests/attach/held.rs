//! Processes that the kernel holds (frozen, suspended) are refused with the reason, and can be attached when they go on.

use crate::common::supervised::{Installed, wait_for};
use crate::rig::{CONFIG, Waits, attach, attach_eagerly, detach, member, wait_for_folds, words};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A control group in each tree of this host that can freeze, and the file and the words by which it does.
fn groups() -> Vec<(Group, &'static str, [&'static str; 2])> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let tree = |is_it: fn(&str) -> bool| {
        let line = mounts.lines().find(|line| line.split_once(" - ").is_some_and(|(_, tree)| is_it(tree)))?;
        let dir = Path::new(line.split(' ').nth(4)?).join(format!("pagefold-held-{}", std::process::id()));
        fs::create_dir(&dir).ok().map(|()| Group(dir))
    };
    let v1 = tree(|tree| tree.starts_with("cgroup ") && tree.ends_with("freezer"));
    let v2 = tree(|tree| tree.starts_with("cgroup2 "));
    let v1 = v1.map(|group| (group, "freezer.state", ["THAWED", "FROZEN"]));
    v1.into_iter().chain(v2.map(|group| (group, "cgroup.freeze", ["0", "1"]))).collect()
}

struct Group(PathBuf);

impl Group {
    fn write(&self, file: &str, word: &str) {
        fs::write(self.0.join(file), word).expect("write to a control group");
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for (file, word) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
            let _ = fs::OpenOptions::new().write(true).open(self.0.join(file)).map(|_| self.write(file, word));
        }
        let procs = self.0.parent().unwrap_or(Path::new("/")).join("cgroup.procs");
        for pid in fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default().lines() {
            let _ = fs::write(&procs, pid);
        }
        let _ = fs::remove_dir(&self.0);
    }
}

/// A program that holds out being stopped: a freezer interrupts calls, as a stop of the whole process does (`man 7 signal`).
fn start(installed: &Installed) -> Waits {
    let mut waits = Waits::start_with(installed, &[], &["without-pipe", "count"]);
    waits.tell("stop");
    waits.tell("go");
    waits
}

/// By version 2 frozen, a program was killed by attaching; by version 1, attaching said nothing until it was thawed.
#[test]
fn process_that_is_held_is_refused_and_attached_when_it_goes_on() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut waits = start(&installed);
    let pid = waits.pid();
    let refused = || words(&attach_eagerly(&installed, &[&pid]));
    let untraced = || fs::read_to_string(format!("/proc/{pid}/status")).unwrap().contains("TracerPid:\t0\n");
    let groups = groups();
    if groups.is_empty() {
        eprintln!("skipped in part: no control group that freezes can be made here");
    }
    for (group, file, [thawed, frozen]) in &groups {
        group.write("cgroup.procs", &pid);
        group.write(file, frozen);
        let why = refused();
        assert!(why.contains("is frozen, and this process in it: thaw that first"), "{file}: {why}");
        assert!(untraced(), "{file}");
        group.write(file, thawed);
        waits.tell("stop");
        waits.tell("go");
    }
    let send = |name: &str| assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    send("-STOP");
    let why = refused();
    assert!(why.contains(&format!("it is suspended (SIGSTOP): let it go on first, by kill -CONT {pid}")), "{why}");
    assert!(untraced());
    send("-CONT");
    attach(&installed, &pid);
    detach(&installed, &pid);
    waits.tell("stop");
}

/// It can do nothing that it is told to, and nobody waits for that without a limit.
#[test]
fn attached_process_that_is_frozen_goes_on_and_leaves_when_it_is_thawed() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut waits = start(&installed);
    let pid = waits.pid();
    for (group, file, [thawed, frozen]) in &groups() {
        attach(&installed, &pid);
        wait_for_folds(&installed, &pid, 500);
        group.write("cgroup.procs", &pid);
        group.write(file, frozen);
        let refused = installed.pagefold(&["detach", &pid, "--wait", "2"]);
        assert!(!refused.status.success(), "{file}: {refused:?}");
        group.write(file, thawed);
        wait_for("it has left", || member(&installed, &pid).is_none().then_some(()));
        wait_for("nothing of the agent is left", || {
            let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs");
            (!maps.contains("pagefold")).then_some(())
        });
        waits.tell("stop");
        waits.tell("go");
    }
}
