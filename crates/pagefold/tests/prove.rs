//! The prover: what is held is never said to be free, what was let go of is soon; and nobody learns about others, or can
//! keep the prover from its work.

mod common;

use common::service::{Service, until};
use common::{not_root, unprivileged};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A running `examples/held_pages`. Dropping it ends it.
struct Pages {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

fn program() -> PathBuf {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("examples").join("held_pages");
    assert!(path.exists(), "{} is not there: cargo build -p pagefold --examples", path.display());
    path
}

impl Pages {
    fn start(service: &Service) -> Self {
        Self::run(Command::new(program()), service)
    }

    fn run(mut command: Command, service: &Service) -> Self {
        let socket = service.place().join("prove.sock");
        until(20, "the prover's socket", || socket.exists());
        let (variable, token) = service.mark();
        command.arg(socket).env(variable, token).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("start held_pages");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, input, output }
    }

    fn tell(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").expect("tell held_pages");
        let mut answer = String::new();
        self.output.read_line(&mut answer).expect("hear from held_pages");
        assert!(!answer.is_empty(), "held_pages ended at: {command}");
        answer.trim().to_owned()
    }

    fn does(&mut self, commands: &[&str]) {
        for command in commands {
            assert_eq!(self.tell(command), "ok", "{command}");
        }
    }

    /// Holds page 3 in this way, then lets go of it.
    fn holds(&mut self, how: &str, let_go: &str) {
        self.does(&["admit", how, "protect"]);
        for _ in 0..100 {
            assert_eq!(self.tell("ask 3 1"), "1", "{how}");
        }
        self.does(&[let_go]);
        let free = self.tell("until-free 0 512");
        assert!(!free.contains("error"), "after {how}: {free}");
        eprintln!("{how}: free {free} (us, questions) after it was let go of");
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process of the service's prover.
fn prover_pid(service: &Service) -> Option<u32> {
    let supervisor = service.supervisor_pid();
    let children = std::fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).ok()?;
    let is_prover = |pid: &u32| {
        std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.split('\0').nth(1) == Some("prove"))
    };
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(is_prover)
}

#[test]
fn whoever_holds_a_page_is_seen_until_he_lets_go() {
    if not_root() {
        return;
    }
    let service = Service::start();
    let mut pages = Pages::start(&service);
    pages.does(&["protect"]);
    assert!(!pages.tell("until-free 0 512").contains("error"));
    pages.holds("lend 3", "release");
    pages.holds("register 3", "release");
    pages.holds("read 3", "arrive");
    pages.holds("fork", "release");
    // A page is held until the last one lets go.
    pages.does(&["admit", "lend 3", "read 3", "protect"]);
    assert_eq!(pages.tell("ask 0 8"), "00010000");
    pages.does(&["release"]);
    assert_eq!(pages.tell("ask 0 8"), "00010000");
    pages.does(&["arrive"]);
    assert!(!pages.tell("until-free 0 512").contains("error"));
}

/// With the prover made to say free of what is referenced (`Asker::look`), all 3,356 pages that are held are said to be free. With
/// the comparison of the count taken out of `host::ReferenceCounts`, there is no prover at all: it fails its own trial.
#[test]
fn in_many_tries_nothing_that_is_held_is_said_to_be_free() {
    if not_root() {
        return;
    }
    let service = Service::start();
    let mut pages = Pages::start(&service);
    let answer = pages.tell("mix 100000");
    eprintln!("pages asked about, of those held, of those said to be free; others said to be free: {answer}");
    let counts: Vec<u32> = answer.split_whitespace().map(|n| n.parse().expect("a count")).collect();
    let [asked, held, wrong, free] = counts[..] else { panic!("{answer}") };
    assert!(asked >= 100_000 && held > 1000, "{answer}");
    assert_eq!(wrong, 0, "{answer}");
    // The kernel itself may hold one for a moment.
    assert!(free > (asked - held) / 10 * 9, "{answer}");
}

#[test]
fn what_cannot_be_told_is_not_said_to_be_free() {
    if not_root() {
        return;
    }
    let service = Service::start();
    let (mut pages, mut other) = (Pages::start(&service), Pages::start(&service));
    // Not protected.
    assert_eq!(pages.tell("ask 0 4"), "2222");
    pages.does(&["protect"]);
    assert!(!pages.tell("until-free 0 512").contains("error"));
    // Part of a huge page.
    match pages.tell("huge").as_str() {
        "skipped" => eprintln!("skipped: no huge page was to be had"),
        huge => assert_eq!(huge, "2".repeat(512)),
    }
    // Absent, and beyond all memory.
    assert_eq!(pages.tell("ask-at 1000 3"), "222");
    assert_eq!(pages.tell("ask-at fffffffffff000 4"), "2222");
    // Another process's: the same address is looked up in the asker's own page table.
    let address = pages.tell("address");
    assert_eq!(pages.tell(&format!("ask-at {address} 4")), "0000");
    let at = other.tell("address");
    if at != address {
        assert_eq!(other.tell(&format!("ask-at {address} 4")).replace('1', "2"), "2222");
    }
}

#[test]
fn who_sends_rubbish_floods_or_crowds_harms_nobody() {
    if not_root() {
        return;
    }
    let service = Service::start();
    let (mut pages, mut bad) = (Pages::start(&service), Pages::start(&service));
    pages.does(&["protect"]);
    assert!(!pages.tell("until-free 0 512").contains("error"));
    let prover = prover_pid(&service).expect("a prover");
    assert_eq!(bad.tell("rubbish"), "10 of 10");
    assert_eq!(pages.tell("ask 0 4"), "0000");
    let flooded = bad.tell("flood 1000000");
    assert!(flooded.starts_with("cut after"), "{flooded}");
    let open: usize = bad.tell("many 1100").parse().expect("a count");
    assert!((900..1024).contains(&open), "{open} connections");
    assert_eq!(pages.tell("ask 0 4"), "0000");
    until(10, "places are free again", || bad.tell("many 10") == "10");
    // Without the rights it had, it is not one to be looked at.
    assert_eq!(bad.tell("ask-as 65534"), "hung up");
    assert_eq!(prover_pid(&service), Some(prover), "the prover has ended: {}", service.log());
}

#[test]
fn anybody_may_ask_about_himself() {
    if not_root() {
        return;
    }
    let service = Service::start();
    // Where nobody but root has a userfaultfd, it fails to start.
    let mut command = unprivileged(program().to_str().expect("a plain path"));
    command.stderr(Stdio::null());
    let device = std::fs::File::open("/dev/userfaultfd").is_ok();
    let allowed = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    if allowed.trim() != "1" {
        eprintln!("skipped: users have no userfaultfd here (device: {device})");
        return;
    }
    let mut pages = Pages::run(command, &service);
    pages.does(&["protect"]);
    assert!(!pages.tell("until-free 0 512").contains("error"));
}

#[test]
fn a_prover_that_dies_is_followed_by_another_and_ends_with_the_service() {
    if not_root() {
        return;
    }
    let mut service = Service::start();
    let mut pages = Pages::start(&service);
    pages.does(&["protect"]);
    assert!(!pages.tell("until-free 0 512").contains("error"));
    let first = prover_pid(&service).expect("a prover");
    let status = std::fs::read_to_string(format!("/proc/{first}/status")).expect("its status");
    let field = |key: &str| status.lines().find_map(|l| l.strip_prefix(key)).expect("a field").trim().to_owned();
    assert_eq!((field("CapEff:").as_str(), field("NoNewPrivs:").as_str()), ("0000000000280004", "1"));
    assert!(!field("Uid:").starts_with('0'), "{}", field("Uid:"));
    common::supervised::signal(first, "KILL");
    until(10, "another prover", || prover_pid(&service).is_some_and(|pid| pid != first));
    assert!(pages.tell("ask 0 4").starts_with("error"), "nobody answers for the one that died");
    assert_eq!(pages.tell("ask 0 4"), "0000");
    let second = prover_pid(&service).expect("a prover");
    service.kill_supervisor();
    until(10, "the prover ends with its supervisor", || !common::supervised::is_alive(second));
    until(10, "another one's prover", || prover_pid(&service).is_some());
}
