//! Folded pages in `guests`, `census` and `doctor`, with members that really fold.

mod common;

use common::service::{Member, Service, cannot_fold, folded_pages, until};
use common::{guest, json_of, number};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::RowAccessor;
use serde_json::Value;
use std::collections::BTreeMap;

fn known_pages() -> String {
    let path = std::path::PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    path.to_str().expect("a plain path").to_owned()
}

fn region(found: &Value, name: &str, field: &str) -> u64 {
    let regions = found["regions"].as_array().expect("a list");
    regions.iter().find(|r| r["region"] == name).map_or(0, |r| number(&r[field]))
}

/// Number of rows of one process in a Parquet file, by kind.
fn rows_by_kind(path: &std::path::Path, pid: u32) -> BTreeMap<String, u64> {
    let reader = SerializedFileReader::new(std::fs::File::open(path).expect("the file")).expect("Parquet");
    let mut rows = BTreeMap::new();
    for row in reader.get_row_iter(None).expect("rows") {
        let row = row.expect("a row");
        if row.get_uint(2).expect("a pid") == pid {
            *rows.entry(row.get_string(6).expect("a kind").clone()).or_default() += 1;
        }
    }
    rows
}

/// Starts two members of `acme`, and waits until they are folded.
fn folded_members(service: &Service) -> [Member; 2] {
    let program = known_pages();
    let mut members = ["a", "b"].map(|name| service.run("acme", name, &[], &[&program]));
    for m in &mut members {
        ["alloc x 1500", "fill x 0 1000 1", "same x 1000 500 5000", "mergeable x"]
            .iter()
            .for_each(|line| _ = m.tell(line));
    }
    let folded = |name: &str| folded_pages(&service.show("acme"), name);
    until(60, "all is folded", || ["a", "b"].map(folded) == [1500, 1500]);
    members
}

#[test]
fn folded_pages_are_shown_as_such() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut members = folded_members(&service);
    let pids = [members[0].pid(), members[1].pid()];
    let words: Vec<String> = pids.iter().flat_map(|pid| ["--pid".to_owned(), pid.to_string()]).collect();
    let run = |command: &str, more: &[&str]| {
        let words: Vec<&str> =
            [command].into_iter().chain(more.iter().copied()).chain(words.iter().map(|w| &w[..])).collect();
        common::pagefold(&words)
    };
    // Folded pages take no memory of the member's own, whether it has touched them or not.
    for m in &mut members {
        m.tell("read x 0 700");
    }
    let guests = json_of(&run("guests", &["--json"]));
    for pid in pids {
        assert_eq!(number(&guest(&guests, pid)["folded_bytes"]), 1500 << 12);
    }
    members[0].tell("fill x 0 100 777777");
    let guests = json_of(&run("guests", &["--json"]));
    assert_eq!(pids.map(|pid| number(&guest(&guests, pid)["folded_bytes"])), [1400 << 12, 1500 << 12]);
    let table = String::from_utf8(run("guests", &[]).stdout).unwrap();
    assert!(table.lines().nth(1).unwrap().contains("  folded"), "{table}");

    // The census counts folded pages that are in the page tables: 600 pages of the first member, and 700 of the second.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("samples.parquet");
    let census = json_of(&run("census", &["--json", "--parquet", file.to_str().unwrap()]));
    let shown = pids.map(|pid| number(&guest(&census, pid)["folded_pages"]));
    assert!(shown[0] >= 600 && shown[0] <= 1001 && shown[1] >= 700 && shown[1] <= 1001, "{shown:?}");
    for (pid, shown) in pids.into_iter().zip(shown) {
        assert_eq!(rows_by_kind(&file, pid)["folded"], shown);
        let found = guest(&census, pid);
        assert!(region(found, "heap", "resident_pages") >= shown, "{found}");
    }
    let table = String::from_utf8(run("census", &[]).stdout).unwrap();
    assert!(table.contains("  folded  "), "{table}");
    // The worker's own mapping of its pool does not count as folded pages.
    let worker = service.worker_pid("acme").expect("a worker").to_string();
    let found = json_of(&common::pagefold(&["guests", "--json", "--pid", &worker]));
    assert_eq!(found["guests"][0]["folded_bytes"], 0);
    assert_members_are_guests(&service, pids);
}

/// Folded programs are guests without being named, in the groups that their service has.
fn assert_members_are_guests(service: &Service, pids: [u32; 2]) {
    let run = |args: &[&str], place: &std::path::Path| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(args).env("PAGEFOLD_DIR", place).output().expect("run pagefold")
    };
    // Other guests of this host may end meanwhile.
    let found = |args: &[&str]| -> Value {
        let output = run(args, &service.place());
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{args:?}: {e}: {output:?}"))
    };
    for args in [&["guests", "--json"][..], &["census", "--json", "--no-kinds"]] {
        let [grouped, plain] = [&["--group-by", "service"][..], &[]].map(|more| found(&[args, more].concat()));
        for pid in pids {
            assert_eq!(guest(&grouped, pid)["group"], service.group("acme"), "{args:?}");
            assert_eq!(guest(&plain, pid)["group"], format!("process:{pid}"), "{args:?}");
        }
    }
    let pid = pids[0].to_string();
    let silent = run(&["guests", "--group-by", "service", "--pid", &pid], "/nonexistent".as_ref());
    let said = String::from_utf8_lossy(&silent.stderr).into_owned();
    assert!(silent.status.code() == Some(1) && said.contains("cannot group guests by their service"), "{said}");
    assert_eq!(said.matches("No such file").count(), 1, "{said}");
    let doctor = run(&["doctor", "--pid", &pid, "--pid", &pids[1].to_string()], "/nonexistent".as_ref());
    let said = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert_eq!(said.matches("No such file").count(), 1, "{said}");
    // The service of nobody is no reason not to list the others.
    let left_out = run(&["guests", "--json"], "/nonexistent".as_ref());
    let said = String::from_utf8_lossy(&left_out.stderr).into_owned();
    assert!(said.contains("programs that are folded are left out: no service answers in /nonexistent"), "{said}");
    assert_eq!(said.matches("No such file").count(), 1, "{said}");
}

#[test]
fn doctor_names_members_and_reasons_of_others() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let program = known_pages();
    let mut member_that_folds = service.run("acme", "folds", &[], &[&program]);
    ["alloc x 100", "fill x 0 100 1", "mergeable x"].iter().for_each(|line| _ = member_that_folds.tell(line));
    let mut idle = service.run("acme", "idle", &[], &[&program]);
    idle.tell("alloc x 1");
    let check = |pid: u32| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(["doctor", "--json", "--pid", &pid.to_string()]).env("PAGEFOLD_DIR", service.place());
        let found: Value = serde_json::from_slice(&command.output().expect("run pagefold").stdout).expect("JSON");
        let checks = &found["checks"];
        let id = format!("guest:process:{pid}:folding");
        let found = checks.as_array().expect("a list").iter().find(|c| c["id"] == id).cloned();
        found.unwrap_or_else(|| panic!("no {id} in {checks}"))
    };
    let acme = service.group("acme");
    until(30, "it folds", || check(member_that_folds.pid())["status"] == "ok");
    let yes = check(member_that_folds.pid());
    assert!(yes["found"].as_str().unwrap().contains(&format!("yes: member folds of group {acme}")), "{yes}");
    until(30, "the other connects", || check(idle.pid())["found"].as_str().unwrap().contains("has advised no memory"));
    assert!(check(idle.pid())["fix"].as_str().unwrap().contains("--all-anonymous"));
    service.set("acme", &["--fold", "off"]);
    until(30, "it is off", || check(member_that_folds.pid())["found"].as_str().unwrap().contains("told not to fold"));
    let stranger = check(std::process::id());
    assert!(stranger["fix"].as_str().unwrap().contains("pagefold run --group"), "{stranger}");
}

#[test]
fn healthy_member_is_not_told_to_wait_for_migration() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let name = service.group("vm");
    let named = format!("guest={name},debug-threads=on");
    let qemu = ["qemu-system-x86_64", "-name", &named, "-m", "64", "-S", "-nodefaults", "-display", "none"];
    let filled = "loader,file=/bin/bash,addr=0x1000000,force-raw=on";
    let more = ["-accel", "tcg,tb-size=32", "-monitor", "stdio", "-device", filled];
    let mut vm = service.run("acme", "vm", &[], &[&qemu[..], &more].concat());
    until(30, "its RAM has a userfaultfd", || {
        vm.assert_is_well();
        let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", vm.pid())).unwrap_or_default();
        smaps.lines().any(|l| l.starts_with("VmFlags:") && (l.contains(" um") || l.contains(" uw")))
    });
    // The service says so, and so do the mappings where no service is asked.
    for place in [service.place(), "/nonexistent".into()] {
        let words = ["doctor", "--json", "--guest", &name, "--service", place.to_str().expect("a plain path")];
        let output = common::pagefold(&words);
        let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let checks = &found["checks"];
        let id = format!("guest:qemu:{name}:mergeable");
        let check = checks.as_array().expect("a list").iter().find(|c| c["id"] == id);
        let check = check.unwrap_or_else(|| panic!("no {id} in {checks}"));
        assert!(check["status"] == "ok" && check["found"].as_str().unwrap().starts_with("yes"), "{check}");
    }
}
