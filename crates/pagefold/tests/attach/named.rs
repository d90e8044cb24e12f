//! Attaching by a name: a VM, and all processes of a control group.

use crate::common::qemu::{Qemu, RAM_BYTES};
use crate::common::service::{cgroup_path, small_memory};
use crate::common::supervised::{Installed, wait_for};
use crate::common::{Afterwards, json_of};
use crate::rig::{CONFIG, Waits, detach, mappings, member};
use host::Mapping;
use std::fs;
use std::time::Duration;

#[test]
fn of_vm_its_ram_is_folded_and_nothing_else() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let sandbox = ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"];
    for more in [&[][..], &sandbox] {
        attach_vm(&installed, more);
    }
}

/// The mappings of a QEMU whose guest is paused, once they have not changed for a second. It frees memory for a while after its start.
fn mappings_at_rest(pid: u32) -> Vec<String> {
    let mut last = Vec::new();
    wait_for("QEMU's mappings are at rest", || {
        std::thread::sleep(Duration::from_secs(1));
        let now = mappings(pid);
        let before = std::mem::replace(&mut last, now.clone());
        (before == now).then_some(now)
    })
}

/// Attaches a QEMU with these further arguments, and detaches it.
fn attach_vm(installed: &Installed, more: &[&str]) {
    let Some(qemu) = Qemu::start("attach", more) else { return };
    let status = fs::read_to_string(format!("/proc/{}/status", qemu.pid())).expect("its status");
    assert_eq!(status.contains("Seccomp:\t2"), !more.is_empty(), "{status}");
    let pid = qemu.pid().to_string();
    let before = mappings_at_rest(qemu.pid());
    let attached = installed.pagefold(&["attach", "--guest", &qemu.name, "--group", "acme", "--json"]);
    let said = json_of(&attached);
    assert_eq!(said[0]["pid"].to_string(), pid, "{said}");
    // QEMU advises its RAM, its firmware and the like to be mergeable.
    let is_ram = |bytes: u64| (RAM_BYTES..RAM_BYTES + (32 << 20)).contains(&bytes);
    assert!(said[0]["enrolled_bytes"].as_u64().is_some_and(is_ram), "{said}");
    let enrolled = || member(installed, &pid)?["enrolled_pages"].as_u64().filter(|pages| *pages > 0);
    assert!(is_ram(wait_for("it is enrolled", enrolled) * 4096));
    detach(installed, &pid);
    assert_eq!(mappings(qemu.pid()), before);
}

/// The file with the agent's code, and which parts of it are there to be executed. None of their pages may be the process's own.
fn agents_code(pid: &str) -> Vec<(u64, u64)> {
    let all = Mapping::read_all(pid.parse().expect("a pid")).expect("its mappings");
    let code = all.iter().filter(|mapping| mapping.execute && mapping.name.starts_with("/memfd:pagefold.agent"));
    code.map(|mapping| {
        assert!(!mapping.write, "{mapping:?}");
        assert_eq!(mapping.usage.anonymous_bytes, 0, "{mapping:?}");
        (mapping.inode, mapping.offset)
    })
    .collect()
}

#[test]
fn all_processes_of_control_group_are_attached() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let name = format!("attach-{}", std::process::id());
    let Some((dir, _afterwards)) = small_memory(&name, 1 << 30) else { return };
    let inner = format!("{dir}/inner");
    fs::create_dir(&inner).expect("make a control group");
    let patiently = format!("(for i in $(seq 300); do rmdir {inner} && break; sleep 0.1; done) > /dev/null 2>&1 &");
    let _inner = Afterwards::run(&patiently);
    // One with less memory would be left alone.
    let (one, other) = (Waits::start_filled(&installed), Waits::start_filled(&installed));
    let outside = Waits::start(&installed, &[]);
    fs::write(format!("{dir}/cgroup.procs"), one.pid()).expect("move a process");
    fs::write(format!("{inner}/cgroup.procs"), other.pid()).expect("move a process");
    let attach = ["attach", "--cgroup", cgroup_path(&dir), "--group", "acme", "--all-anonymous", "--json", "--once"];
    let said = json_of(&installed.pagefold(&attach));
    let mut pids: Vec<String> = said.as_array().unwrap().iter().map(|one| one["pid"].to_string()).collect();
    pids.sort();
    let mut expected = [one.pid(), other.pid()];
    expected.sort();
    assert_eq!(pids, expected);
    assert!(pids.iter().all(|pid| wait_for("it is a member", || member(&installed, pid)).is_object()));
    assert!(member(&installed, &outside.pid()).is_none());
    let [code, its] = [0, 1].map(|n| agents_code(&pids[n]));
    assert!(!code.is_empty() && code == its, "{code:?} {its:?}");
    json_of(&installed.pagefold(&["detach", &pids[0], &pids[1], "--json", "--wait", "120"]));
}
