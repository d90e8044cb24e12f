//! Reasons why a member is not folded: each is caused, the remedy is carried out as it is printed, and the reason ends.

#[path = "../common/mod.rs"]
mod common;

mod again;
mod by_itself;
mod covered;
mod details;
mod without_agent;

use common::service::{Member, Service, cannot_fold, find_member, until};
use common::{Afterwards, json_of};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Path of `trials/known_pages.rs`, a program with pages of known content.
fn known_pages() -> String {
    let path = Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    path.to_str().expect("a plain path").to_owned()
}

/// A member with 400 pages, each of them there twice, that it has advised to be merged.
fn member(service: &Service, name: &str) -> Member {
    let mut member = service.run("acme", name, &[], &[&known_pages()]);
    for line in ["alloc x 400", "fill x 0 200 1", "fill x 200 200 1", "mergeable x"] {
        member.tell(line);
    }
    member
}

/// Waits until a member is in this state. Returns its row.
fn until_state(service: &Service, name: &str, state: &str) -> Value {
    let mut row = Value::Null;
    until(60, &format!("{name} is {state}"), || {
        row = find_member(&service.show("acme"), name).cloned().unwrap_or_default();
        row["state"] == state
    });
    row
}

fn fix(row: &Value) -> &str {
    row["fix"].as_str().unwrap_or_else(|| panic!("no remedy: {row}"))
}

/// Carries out a remedy that is a command, for this service.
fn carry_out(service: &Service, fix: &str) {
    let words: Vec<&str> = fix.split(' ').collect();
    if let ["pagefold", words @ ..] = words.as_slice() {
        let output = service.pagefold(words);
        assert!(output.status.success(), "{fix}: {output:?}");
    } else {
        assert!(Command::new(words[0]).args(&words[1..]).status().expect("run it").success(), "{fix}");
    }
}

#[test]
fn member_that_advised_nothing_is_folded_once_it_does() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut member = service.run("acme", "a", &[], &[&known_pages()]);
    for line in ["alloc x 400", "fill x 0 200 1", "fill x 200 200 1"] {
        member.tell(line);
    }
    let row = until_state(&service, "a", "nothing_enrolled");
    assert!(fix(&row).contains("madvise(MADV_MERGEABLE)") && fix(&row).contains("--all-anonymous"), "{row}");
    member.tell("mergeable x");
    until_state(&service, "a", "folding");
    // The other half of the remedy.
    let mut other = service.run("acme", "b", &["--all-anonymous"], &[&known_pages()]);
    other.tell("alloc x 400");
    until_state(&service, "b", "folding");
}

#[test]
fn settings_that_stop_folding_are_named_and_undone() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let _member = member(&service, "a");
    until_state(&service, "a", "folding");
    for (fold, state) in [("off", "off"), ("unfold", "unfolded")] {
        service.set("acme", &["--fold", fold]);
        let row = until_state(&service, "a", state);
        carry_out(&service, fix(&row));
        until_state(&service, "a", "folding");
    }
}

#[test]
fn full_pool_is_named_and_enlarged() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let _first = service.run("acme", "first", &[], &[&known_pages()]);
    until_state(&service, "first", "nothing_enrolled");
    service.set("acme", &["--pool", "400K"]);
    let _member = member(&service, "a");
    let row = until_state(&service, "a", "no_room");
    carry_out(&service, fix(&row));
    until_state(&service, "a", "folding");
}

#[test]
fn stopped_member_says_so_until_it_goes_on() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let member = member(&service, "a");
    until_state(&service, "a", "folding");
    let pid = member.pid().to_string();
    assert!(Command::new("kill").args(["-STOP", &pid]).status().expect("run kill").success());
    let row = until_state(&service, "a", "stopped");
    let doctor = json_of(&service.pagefold(&["doctor", "--pid", &pid, "--json"]));
    assert!(doctor.to_string().contains("a signal has stopped it"), "{doctor}");
    carry_out(&service, fix(&row));
    until_state(&service, "a", "folding");
}

#[test]
fn locked_memory_is_named_and_member_without_it_is_folded() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let locked = "
import ctypes, mmap, sys
memory = mmap.mmap(-1, 64 * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None)
if len(sys.argv) > 1: assert libc.mlock(ctypes.c_void_p(address), 64 * 4096) == 0
memory.madvise(mmap.MADV_MERGEABLE)
sys.stdin.read()
";
    let _locked = service.run("acme", "a", &[], &["python3", "-c", locked, "locked"]);
    let row = until_state(&service, "a", "not_foldable");
    assert!(row["detail"].as_str().is_some_and(|why| why.contains("lock")), "{row}");
    assert!(fix(&row).contains("start it again without what is named"), "{row}");
    let _again = service.run("acme", "b", &[], &["python3", "-c", locked]);
    until_state(&service, "b", "folding");
}

/// A control group of a test's own that may have `most` processes; `None`, with the reason printed, if it cannot be made.
fn few_processes(token: &str, most: u32) -> Option<(String, Afterwards)> {
    const V1: &str = "/sys/fs/cgroup/pids";
    let (tree, start) = if fs::metadata(V1).is_ok() { (V1, ":pids:") } else { ("/sys/fs/cgroup", "0::") };
    let all = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = all.lines().find_map(|line| line.split_once(start)).map_or("", |(_, path)| path);
    let dir = format!("{tree}{}/pagefold-test-{token}", own.trim_end_matches('/'));
    let made = fs::create_dir(&dir).and_then(|()| fs::write(format!("{dir}/pids.max"), most.to_string()));
    let patiently = format!("(for i in $(seq 300); do rmdir {dir} && break; sleep 0.1; done) > /dev/null 2>&1 &");
    let afterwards = Afterwards::run(&patiently);
    made.map_err(|e| eprintln!("skipped: cannot make a control group at {dir}: {e}")).ok().map(|()| (dir, afterwards))
}

#[test]
fn limit_of_processes_is_named_and_raised() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let Some((dir, _afterwards)) = few_processes(service.mark().1, 1) else { return };
    let start = |name: &str| {
        let (variable, token) = service.mark();
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > $0/cgroup.procs; exec \"$@\"", &dir, env!("CARGO_BIN_EXE_pagefold"), "run"]);
        command.args(["--group", &service.group("acme"), "--name", name, "--service"]).arg(service.place());
        command.args(["--", &known_pages()]).env(variable, token).env("PAGEFOLD_EAGER", "1");
        Member::spawn(command, name, &service.place())
    };
    let few = start("few");
    until(60, "it says why", || few.errors().contains("pids.max"));
    let row = until_state(&service, "few", "no_agent");
    assert!(row["detail"].as_str().is_some_and(|why| why.contains("pids.max")), "{row}");
    assert!(fix(&row).contains("raise the limit of its control group or user, and start it again"), "{row}");
    drop(few);
    fs::write(format!("{dir}/pids.max"), "max").expect("raise the limit");
    let mut again = start("again");
    for line in ["alloc x 400", "fill x 0 200 1", "fill x 200 200 1", "mergeable x"] {
        again.tell(line);
    }
    until_state(&service, "again", "folding");
}
