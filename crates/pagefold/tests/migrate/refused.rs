//! Guests that are not moved, each with its reason.

use crate::common::service::cannot_fold;
use crate::rig::{GROUP, Vm, hosts, migrate, said};
use serde_json::json;
use std::fs::{self, File};

#[test]
fn guest_that_cannot_be_moved_is_left_alone_with_the_reason() {
    if cannot_fold() {
        return;
    }
    let [a, _] = hosts(400);
    let Some(vm) = Vm::up(&a) else { return };
    let refused = |more: &[&str], code: i32, reason: &str| {
        let output = migrate(&vm, more);
        assert!(output.status.code() == Some(code) && said(&output).contains(reason), "{more:?}: {}", said(&output));
    };
    let exec = a.pagefold(&["migrate", &vm.name, "--to", "exec:touch /run/executed"]);
    assert!(
        exec.status.code() == Some(2) && said(&exec).contains("use tcp:HOST:PORT or unix:/PATH"),
        "{}",
        said(&exec)
    );
    assert_eq!(a.pagefold(&["migrate", "nobody", "--to", "tcp:10.77.0.2:1"]).status.code(), Some(2));

    refused(&["--postcopy"], 2, "postcopy is refused");
    vm.tell("stop", json!({})).expect("it stands still");
    refused(&[], 1, "it does not run: it is paused");
    vm.tell("cont", json!({})).expect("it goes on");
    assert!(a.pagefold(&["park", &vm.name, "--fold-for", "0"]).status.success());
    refused(&[], 1, "it is parked");
    assert!(a.pagefold(&["wake", &vm.name]).status.success());

    // As a record of clones has it.
    let record = a.path("/run/pagefold-clones/web-1");
    fs::create_dir_all(&record).expect("a directory");
    let process = json!({"pid": vm.pid, "start_ticks": vm.start_ticks()});
    let clone = json!({"name": "web-1", "group": GROUP, "template": "web", "digest": "", "state": "running", "process": process});
    fs::write(record.join("clone.json"), clone.to_string()).expect("a record");
    refused(&[], 1, "it is a clone");
    fs::remove_dir_all(&record).expect("no record");

    let disk = File::create(a.path("/run/disk")).expect("make a disk");
    disk.set_len(1 << 20).expect("a size");
    let add = |read_only: &str| format!("drive_add 0 if=none,id=d,file=/run/disk,format=raw{read_only}");
    vm.tell("human-monitor-command", json!({"command-line": add("")})).expect("a disk");
    refused(&["--dry-run"], 1, "it may write the disk /run/disk");
    refused(&[], 1, "it may write the disk /run/disk");
    // Nobody listens there, so with that word it is tried.
    refused(&["--shared-disks"], 1, "runs as before");
    vm.tell("human-monitor-command", json!({"command-line": "drive_del d"})).expect("no disk");
    vm.tell("human-monitor-command", json!({"command-line": add(",readonly=on")})).expect("a disk");
    assert!(migrate(&vm, &["--dry-run"]).status.success());
    assert_eq!((vm.status().as_str(), vm.ask("echo here").as_str()), ("running", "here"));
}
