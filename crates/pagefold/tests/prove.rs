//! The prover never calls a held page free, and soon calls a released page free. A client learns nothing about other
//! processes' pages, and cannot keep the prover from its work.

mod common;

use common::service::{Member, Service, cannot_fold, until};
use common::supervised::signal;
use common::{not_root, unprivileged};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// A running `trials/held_pages`. Dropping it ends it.
struct Pages {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

fn program() -> PathBuf {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("held_pages");
    assert!(path.exists(), "{} is not there: cargo build -p trials", path.display());
    path
}

impl Pages {
    fn start(service: &Service) -> Self {
        Self::run(Command::new(program()), service)
    }

    fn run(mut command: Command, service: &Service) -> Self {
        let socket = service.place().join("prove.sock");
        until(60, "the prover's socket", || socket.exists());
        let (variable, token) = service.mark();
        command.arg(socket).env(variable, token).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("start held_pages");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, input, output }
    }

    /// Starts one whose pages are free.
    fn all_free(service: &Service) -> Self {
        let mut pages = Self::start(service);
        pages.become_free();
        pages
    }

    /// Keeps writers out, and waits until nobody holds a page.
    fn become_free(&mut self) {
        self.does(&["protect"]);
        let free = self.tell("until-free 0 512");
        assert!(!free.contains("error"), "{free}");
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

    /// Asserts that page 3 is not free while it is held in the way `how`, and is free soon after its release.
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

    /// The kernel itself may hold one of the others for a moment, but page 3 is never said to be free.
    fn until_all_but_page_3_are_free(&mut self) {
        until(30, "the other pages are free", || {
            let answer = self.tell("ask 0 8");
            assert_eq!(answer.get(3..4), Some("1"), "{answer}");
            answer == "00010000"
        });
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Pid of the service's prover.
fn prover_pid(service: &Service) -> Option<u32> {
    let supervisor = service.supervisor_pid();
    let children = std::fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).ok()?;
    let is_prover = |pid: &u32| {
        std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.split("\0").next().is_some_and(|program| program.ends_with("/pagefold-prove")))
    };
    children.split_whitespace().filter_map(|pid| pid.parse().ok()).find(is_prover)
}

#[test]
fn held_page_is_not_free_until_last_holder_releases_it() {
    if not_root() {
        return;
    }
    let service = Service::start();
    let mut pages = Pages::all_free(&service);
    pages.holds("lend 3", "release");
    pages.holds("register 3", "release");
    pages.holds("read 3", "arrive");
    pages.holds("fork", "release");
    // A page is held until its last holder has released it.
    pages.does(&["admit", "lend 3", "read 3", "protect"]);
    pages.until_all_but_page_3_are_free();
    pages.does(&["release"]);
    pages.until_all_but_page_3_are_free();
    pages.does(&["arrive"]);
    assert!(!pages.tell("until-free 0 512").contains("error"));
}

/// Fails with a prover that answers by mappings alone: what is written or lent is not mapped any more.
#[test]
fn slot_is_not_free_while_somebody_reads_it() {
    if not_root() {
        return;
    }
    let service = Service::start();
    let mut pages = Pages::start(&service);
    let all_free = |pages: &mut Pages| {
        until(30, "all slots are free", || pages.tell("ask-slots 0 512") == "0".repeat(512));
    };
    all_free(&mut pages);
    for (how, let_go) in [("lend-slot 3", "release"), ("write-slot 3", "take")] {
        pages.does(&[how]);
        for _ in 0..100 {
            assert_eq!(pages.tell("ask-slots 3 1"), "1", "{how}");
        }
        // The kernel itself holds pages for a moment that were mapped.
        until(30, "the others are free", || pages.tell("ask-slots 0 512") == format!("0001{}", "0".repeat(508)));
        pages.does(&[let_go]);
        all_free(&mut pages);
    }
}

/// This test can fail. With a prover that calls referenced pages free (`Asker::look`), all 3,356 held pages were called
/// free. Without the comparison of the count in `prove::ReferenceCounts`, there is no prover: it fails its own trial.
#[test]
fn no_held_page_is_called_free_in_many_tries() {
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
    // The kernel itself may hold a page for a moment.
    assert!(free > (asked - held) / 10 * 9, "{answer}");
}

#[test]
fn undecidable_page_is_not_called_free() {
    if not_root() {
        return;
    }
    let service = Service::start();
    let (mut pages, mut other) = (Pages::start(&service), Pages::start(&service));
    // Pages that are not write-protected.
    assert_eq!(pages.tell("ask 0 4"), "2222");
    pages.become_free();
    // Parts of a huge page.
    match pages.tell("huge").as_str() {
        "skipped" => eprintln!("skipped: no huge page was to be had"),
        huge => assert_eq!(huge, "2".repeat(512)),
    }
    // Absent pages, and addresses beyond all memory.
    assert_eq!(pages.tell("ask-at 1000 3"), "222");
    assert_eq!(pages.tell("ask-at fffffffffff000 4"), "2222");
    // Another process's pages: the prover looks the address up in the asker's own page table.
    let address = pages.tell("address");
    assert_eq!(pages.tell(&format!("ask-at {address} 4")), "0000");
    let at = other.tell("address");
    if at != address {
        assert_eq!(other.tell(&format!("ask-at {address} 4")).replace('1', "2"), "2222");
    }
}

#[test]
fn clients_that_send_rubbish_or_flood_or_crowd_harm_nobody() {
    if not_root() {
        return;
    }
    let service = Service::start();
    let (mut pages, mut bad) = (Pages::all_free(&service), Pages::start(&service));
    let prover = prover_pid(&service).expect("a prover");
    assert_eq!(bad.tell("rubbish"), "10 of 10");
    assert_eq!(pages.tell("ask 0 4"), "0000");
    let flooded = bad.tell("flood 1000000");
    assert!(flooded.starts_with("cut after"), "{flooded}");
    let open: usize = bad.tell("many 2100").parse().expect("a count");
    assert!((1900..2048).contains(&open), "{open} connections");
    assert_eq!(pages.tell("ask 0 4"), "0000");
    until(30, "places are free again", || bad.tell("many 10") == "10");
    // The prover hangs up on a process whose rights have changed since it connected.
    assert_eq!(bad.tell("ask-as 65534"), "hung up");
    assert_eq!(prover_pid(&service), Some(prover), "the prover has ended: {}", service.log());
}

#[test]
fn unprivileged_process_may_ask_about_its_own_pages() {
    if not_root() {
        return;
    }
    let service = Service::start();
    // The program fails to start on hosts where only root has a userfaultfd.
    let mut command = unprivileged(program().to_str().expect("a plain path"));
    command.stderr(Stdio::null());
    let device = std::fs::File::open("/dev/userfaultfd").is_ok();
    let allowed = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").unwrap_or_default();
    if allowed.trim() != "1" {
        eprintln!("skipped: users have no userfaultfd here (device: {device})");
        return;
    }
    Pages::run(command, &service).become_free();
}

#[test]
fn killed_prover_is_replaced_and_ends_with_its_supervisor() {
    if not_root() {
        return;
    }
    let mut service = Service::start();
    let mut pages = Pages::all_free(&service);
    let first = prover_pid(&service).expect("a prover");
    let status = std::fs::read_to_string(format!("/proc/{first}/status")).expect("its status");
    let field = |key: &str| status.lines().find_map(|l| l.strip_prefix(key)).expect("a field").trim().to_owned();
    assert_eq!((field("CapEff:").as_str(), field("NoNewPrivs:").as_str()), ("0000000000280004", "1"));
    assert!(!field("Uid:").starts_with('0'), "{}", field("Uid:"));
    signal(first, "KILL");
    until(30, "another prover", || prover_pid(&service).is_some_and(|pid| pid != first));
    assert!(pages.tell("ask 0 4").starts_with("error"), "nobody answers for the one that died");
    assert_eq!(pages.tell("ask 0 4"), "0000");
    let second = prover_pid(&service).expect("a prover");
    service.kill_supervisor();
    until(30, "the prover ends with its supervisor", || !common::supervised::is_alive(second));
    until(30, "another one's prover", || prover_pid(&service).is_some());
}

/// Asks about pages of its own as fast as answers come, on one connection: `SOCKET`. Says how often it has asked.
const ASKER: &str = "
import ctypes, mmap, socket, struct, sys, time
memory = mmap.mmap(-1, 512 * 4096)
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
one.connect(sys.argv[1])
asked, end = 0, time.time() + 4
while time.time() < end:
    one.send(struct.pack('<IQI', asked, at, 512)); one.recv(1024); asked += 1
print(asked)
";

/// Processor time that a process has used.
fn cpu(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let (_, fields) = stat.rsplit_once(')').expect("its name");
    let ticks: u64 = fields.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>().expect("ticks")).sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

#[test]
fn connection_that_asks_all_the_time_has_half_a_processor() {
    if not_root() {
        return;
    }
    let service = Service::start();
    drop(Pages::all_free(&service));
    let prover = prover_pid(&service).expect("a prover");
    let (before, began) = (cpu(prover), Instant::now());
    let mut asker = Command::new("python3");
    let said = asker.args(["-c", ASKER]).arg(service.place().join("prove.sock")).output().expect("run python3");
    let (used, time) = (cpu(prover).saturating_sub(before), began.elapsed());
    let asked: u32 = String::from_utf8_lossy(&said.stdout).trim().parse().unwrap_or_else(|e| panic!("{e}: {said:?}"));
    eprintln!("{asked} questions took {used:?} of a processor in {time:?}");
    assert!(asked > 100, "{asked} questions");
    // A tenth is for beginning, and for what else the prover does.
    assert!(used < time * 6 / 10, "{asked} questions took {used:?} of a processor in {time:?}");
}

/// A stopped process still gets connections, and answers nothing.
#[test]
fn silent_prover_is_replaced() {
    if not_root() {
        return;
    }
    let service = Service::start();
    let mut pages = Pages::all_free(&service);
    let silent = prover_pid(&service).expect("a prover");
    signal(silent, "STOP");
    until(60, "another prover", || prover_pid(&service).is_some_and(|pid| pid != silent));
    assert!(service.log().contains("does not answer: it is killed"), "{}", service.log());
    assert!(pages.tell("ask 0 4").starts_with("error"), "nobody answers for the one that was killed");
    assert_eq!(pages.tell("ask 0 4"), "0000");
}

/// The supervisor is stopped, too, so that nobody replaces the prover. With one witness for a message, the pages of the
/// first message stayed private for three minutes.
#[test]
fn memory_that_children_do_not_get_is_folded_again_while_prover_is_silent() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut member = service.torture("acme", "one", &[], &["refs", "--dont-fork"]);
    // More than one message to fold.
    assert_eq!(member.tell("fill 2000"), "ok");
    service.show("acme");
    service.set("acme", &["--scan-rate", "400000"]);
    let is_folded = |member: &mut Member| member.tell("folded").parse::<u32>().expect("a number") > 1900;
    until(120, "it folds", || is_folded(&mut member));
    let (supervisor, prover) = (service.supervisor_pid(), prover_pid(&service).expect("a prover"));
    signal(supervisor, "STOP");
    signal(prover, "STOP");
    // The prover is at hand at first. Later it has been left alone for a while, and is tried again.
    for _ in 0..3 {
        assert_eq!(member.tell("again"), "ok");
        assert!(!is_folded(&mut member));
        until(120, "it folds again", || is_folded(&mut member));
    }
    assert_eq!(member.tell("check"), "ok");
    signal(supervisor, "CONT");
}
