//! A user without the right to userfaultfds attaches a process of theirs.

use crate::common::supervised::{Installed, wait_for};
use crate::common::unprivileged;
use crate::rig::{Running, member, words};
use std::fs;
use std::process::{Command, Stdio};

/// The dry run said that it can be attached, attaching ended with 0, and the member's state was `no_move`.
#[test]
fn user_without_userfaultfd_is_refused_beforehand() {
    let Some(installed) = Installed::attaching() else { return };
    if fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|word| word.trim() != "0") {
        return eprintln!("skipped: anybody may use userfaultfd here");
    }
    let _supervisor = installed.serve("[[group]]\nname = 'acme'\nusers = [65534]\n", &[]);
    let mut command = unprivileged("/usr/bin/python3");
    let script = "kept = bytearray(8 << 20)\nprint(flush=True)\ninput()";
    let child = Running(command.args(["-c", script]).stdin(Stdio::piped()).spawn().expect("start it"));
    let pid = child.0.id().to_string();
    let comm = format!("/proc/{pid}/comm");
    wait_for("it is executed", || {
        fs::read_to_string(&comm).is_ok_and(|name| name.starts_with("python3")).then_some(())
    });
    let attach = |more: &[&str]| {
        installed.pagefold_unprivileged(&[&["attach", &pid, "--group", "acme", "--all-anonymous"], more].concat())
    };
    for more in [&["--dry-run"][..], &[]] {
        let output = attach(more);
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        assert!(words(&output).contains("vm.unprivileged_userfaultfd=1"), "{output:?}");
    }
    assert!(member(&installed, &pid).is_none());
    // The other remedy that is named. The directory of mounts is this test's own.
    let minors = fs::read_to_string("/proc/misc").expect("the list of devices");
    let Some(minor) = minors.lines().find_map(|line| line.trim().strip_suffix(" userfaultfd")) else { return };
    for words in [
        &["mknod", "-m", "666", "/run/userfaultfd", "c", "10", minor][..],
        &["mount", "--bind", "/run/userfaultfd", "/dev/userfaultfd"],
    ] {
        assert!(Command::new(words[0]).args(&words[1..]).status().expect("run it").success(), "{words:?}");
    }
    let output = attach(&["--dry-run"]);
    assert!(output.status.success(), "{output:?}");
}
