//! Guests that are parked and woken: they stand still, hold less, and lose nothing.

mod common;

use common::formats::assert_documented;
use common::lab::{Lab, name};
use common::service::{Member, Service, cannot_fold, folded_pages, until};
use common::supervised::signal;
use common::{json_of, not_root, number};
use guest::Qmp;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

fn state(pid: u32) -> char {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
    stat.rsplit(") ").next().and_then(|rest| rest.chars().next()).expect("a state")
}

fn status(socket: &str) -> Value {
    let mut qmp = Qmp::connect(Path::new(socket), Duration::from_secs(10)).expect("QEMU answers");
    qmp.execute("query-status", json!({})).expect("QEMU tells")["status"].clone()
}

/// A program that does what it is told, as a member.
fn known_pages(service: &Service, name: &str) -> Member {
    let program = Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    service.run("acme", name, &[], &[program.to_str().expect("a plain path")])
}

/// Entries of the journal about a guest.
fn entries(service: &Service, guest: &Value) -> Vec<Value> {
    let journal = fs::read_to_string(service.place().join("journal/journal")).expect("a journal");
    let lines = journal.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["guest"] == *guest).collect()
}

#[test]
fn parked_program_is_folded_stands_still_and_goes_on_with_all_it_had() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut member = known_pages(&service, "a");
    for line in [
        "alloc x 600",
        "dontfork x",
        "fill x 0 300 1",
        "fill x 300 300 1",
        "mergeable x",
        "alloc y 200",
        "fill y 0 200 9000",
    ] {
        assert_eq!(member.tell(line), "ok");
    }
    let pid = member.pid().to_string();
    let parked = json_of(&service.pagefold(&["park", &pid, "--json"]));
    assert_documented(&["pagefold park"], &parked);
    // A thread that is running when the signal is sent stops when it next enters the kernel.
    until(10, "it stands still", || state(member.pid()) == 'T');
    // It was written just before, and its agent stands still with it.
    let folded = folded_pages(&service.show("acme"), "a");
    assert!((600 - 64..=600).contains(&folded), "{folded} pages: {parked}");
    let (guest, memory) = (&parked["parked"][0]["guest"], &parked["parked"][0]["memory"]);
    // Without swap it keeps what it holds alone, and is told so.
    let is_less = number(&memory["private_bytes"]) < number(&memory["private_before_bytes"]);
    assert!(memory["problem"].as_str().map_or(is_less, |why| why.contains("no swap")), "{parked}");
    assert!(memory["not_folded"].is_null(), "{parked}");
    let listed = json_of(&service.pagefold(&["park", "--list", "--json"]));
    assert_documented(&["pagefold park"], &listed);
    assert_eq!(listed["parked"][0]["guest"], *guest);
    let again = service.pagefold(&["park", &pid]);
    let said = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(again.status.code() == Some(1) && said.contains("it is stopped already"), "{said}");
    let woken = json_of(&service.pagefold(&["wake", &pid, "--json"]));
    assert_documented(&["pagefold park"], &woken);
    assert_eq!((&woken["clock"], &woken["woken"]), (&"hosts".into(), guest));
    for line in ["check x 0 300 1", "check x 300 300 1", "check y 0 200 9000", "fill x 0 100 77", "check x 0 100 77"] {
        assert_eq!(member.tell(line), "ok", "{line}");
    }
    assert_eq!(json_of(&service.pagefold(&["park", "--list", "--json"]))["parked"], json!([]));
    let again = service.pagefold(&["wake", &pid]);
    assert!(again.status.code() == Some(2) && String::from_utf8_lossy(&again.stderr).contains("is not parked"));
    let entries = entries(&service, guest);
    assert_eq!(entries.iter().map(|line| &line["entry"]).collect::<Vec<_>>(), ["park", "wake"]);
    assert_documented(&["pagefold balance", "pagefold journal"], &json!(entries));
}

#[test]
fn only_idle_guests_of_the_group_are_parked_and_all_are_woken() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut idle = known_pages(&service, "idle");
    let busy = service.run("acme", "busy", &[], &["sh", "-c", "while :; do :; done"]);
    let ticks = |pid: u32| host::ProcessStat::read(pid).map_or(0, |stat| stat.cpu_ticks);
    until(60, "both have begun", || ticks(busy.pid()) > 100 && idle.tell("alloc w 1") == "ok");
    let acme = service.group("acme");
    let park = |group: &str| {
        let words = ["park", "--idle", "2s", "--group", group, "--fold-for", "1", "--json"];
        json_of(&service.pagefold(&words))["parked"].as_array().expect("a list").len()
    };
    assert_eq!(park("other"), 0);
    until(120, "the guest that does nothing is parked", || park(&acme) == 1);
    until(10, "it stands still", || state(idle.pid()) == 'T');
    assert!(state(busy.pid()) != 'T');
    let woken = json_of(&service.pagefold(&["wake", "--all", "--json"]));
    assert!(woken["woken"].as_str().is_some_and(|id| id.ends_with(&idle.pid().to_string())), "{woken}");
    assert_eq!(idle.tell("alloc x 1"), "ok");
    assert!(service.pagefold(&["wake", "--all"]).stdout.is_empty());
}

/// `pagefold park` that gets a signal while the guest stands still and is folded.
fn park_that_gets(service: &Service, guest: &str, socket: &str, name: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.args(["park", guest, "--fold-for", "600", "--service"]).arg(service.place());
    let parker = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("run pagefold park");
    until(60, "the guest stands still", || status(socket) == "paused");
    signal(parker.id(), name);
    parker.wait_with_output().expect("its end")
}

#[test]
fn parked_vm_stands_still_and_keeps_what_it_wrote_and_goes_on_if_its_parker_is_ended() {
    if not_root() {
        return;
    }
    let (service, lab) = (Service::start(), Lab::new(&[]));
    let (group, place) = (format!("pk{}", common::world()), service.place());
    let place = place.to_str().expect("a plain path");
    let up = ["--image", "tiny", "--groups", &group, "--memory", "128M", "--saved", "--fold", "--service", place];
    let Some(listed) = lab.up(&up) else { return };
    let (names, socket) = ([name(&listed[0])], listed[0]["qmp"].as_str().expect("a socket").to_owned());
    lab.everywhere(&names, "echo kept > /tmp/kept");
    let interrupted = park_that_gets(&service, &names[0], &socket, "TERM");
    let said = String::from_utf8_lossy(&interrupted.stderr).into_owned();
    assert!(said.contains("is not parked, and goes on") && status(&socket) == "running", "{said}");
    park_that_gets(&service, &names[0], &socket, "KILL");
    assert_eq!(json_of(&service.pagefold(&["park", "--list", "--json"]))["parked"], json!([]));
    assert_eq!(status(&socket), "running");
    let parked = json_of(&service.pagefold(&["park", &names[0], "--json"]));
    assert_documented(&["pagefold park"], &parked);
    assert_eq!(status(&socket), "paused", "{parked}");
    let again = service.pagefold(&["park", &names[0]]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("it does not run: it is paused"), "{again:?}");
    let woken = json_of(&service.pagefold(&["wake", &names[0], "--json"]));
    // Nobody inside is asked to set its clock.
    assert_eq!((status(&socket), &woken["clock"]), ("running".into(), &"behind".into()), "{woken}");
    assert_eq!(lab.everywhere(&names, "cat /tmp/kept"), ["kept"]);
    let told = entries(&service, &parked["parked"][0]["guest"]);
    let told: Vec<_> = told.iter().map(|line| &line["entry"]).filter(|entry| **entry != "pause").collect();
    assert_eq!(told, ["park", "wake", "park", "wake", "park", "wake"]);
}

#[test]
fn guest_that_ended_is_not_parked_any_more() {
    if not_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    fs::create_dir(dir.path().join("parked")).expect("a directory");
    let process = json!({"pid": 4_000_000, "start_ticks": 1});
    let note = json!({"guest": "process:x", "name": "x", "at_s": 1, "process": process, "qmp": null, "parker": null});
    let path = dir.path().join("parked/4000000.json");
    fs::write(&path, note.to_string()).expect("a note");
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.args(["park", "--list", "--json", "--service"]).arg(dir.path());
    assert_eq!(json_of(&command.output().expect("run pagefold"))["parked"], json!([]));
    assert!(!path.exists());
}

/// By such notes, root would stop and wake whatever their owner wants.
#[test]
fn notes_in_a_directory_of_another_user_are_not_read() {
    if not_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    fs::create_dir(dir.path().join("parked")).expect("a directory");
    std::os::unix::fs::chown(dir.path(), Some(65_534), None).expect("another owner");
    for words in [&["park", "--list"][..], &["wake", "--all"], &["park", "x"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        let refused = command.args(words).arg("--service").arg(dir.path()).output().expect("run pagefold");
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("belongs to user 65534"), "{words:?}: {said}");
    }
}
