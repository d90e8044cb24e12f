//! A service whose parts are killed all the time: members never wait for it, counters go on, and nothing is unfolded.
//!
//! ```text
//!   every 3 s:  the supervisor is killed, and the next one started
//!   1.5 s later, in turns:  the worker is killed | the prover | the web side | a program is attached, and its helper killed
//! ```
//!
//! `PAGEFOLD_SOAK_SECONDS` says for how long. Meanwhile members work, and the web side is asked all the time.

mod common;

use common::http::{Http, Target};
use common::service::{Member, Service, cannot_fold, seconds, until};
use common::{copy_program, number};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Time between two ends of the supervisor: 3 s.
const EVERY: Duration = Duration::from_secs(3);
/// Time that a member may be kept waiting, by whatever runs on this machine: 3 s. A member that waits for a part that has
/// ended would wait for ever.
const PATIENCE_S: f64 = 3.0;
/// Pages that programs may write by themselves in the meantime.
const FEW: u64 = 128;

/// Holds 16 MiB, in which every content is there twice. Every 5 ms it looks at a page of that, and writes one of another
/// mapping. It answers each line with the longest time that this has ever taken.
const HOLDER: &str = "
import mmap, os, select, sys, time
half = os.urandom(8 << 20)
both, own, at, worst = bytearray(half + half), mmap.mmap(-1, 1 << 20), 0, 0.0
assert bytes(both[: 1 << 20]) == half[: 1 << 20]
while True:
    if select.select([sys.stdin], [], [], 0.005)[0]:
        if not sys.stdin.readline():
            assert both[: len(half)] == half and both[len(half) :] == half
            break
        print(worst, flush=True)
    began = time.monotonic()
    at = (at + 4096) % len(both)
    both[at]
    own[at % len(own)] = 1
    mmap.mmap(-1, 8192).close()
    worst = max(worst, time.monotonic() - began)
";

fn kill(pid: u32) {
    assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().expect("run kill").success(), "process {pid}");
}

/// The process of the last line of the log that says that this part was started.
fn started(service: &Service, part: &str) -> Option<u32> {
    let log = service.log();
    let line = log.lines().rfind(|line| line.contains(&format!("{part} started: process ")))?;
    line.split(|c: char| !c.is_ascii_digit()).find_map(|n| n.parse().ok())
}

/// Kills a part, and waits until there is another one.
fn replace(service: &Service, part: &str, group: &str) {
    if part == "worker" {
        let before = service.worker_pid(group).expect("a worker");
        kill(before);
        until(30, "another worker", || service.worker_pid(group).is_some_and(|pid| pid != before));
        return;
    }
    let before = started(service, part).unwrap_or_else(|| panic!("no {part} in {}", service.log()));
    kill(before);
    until(30, &format!("another {part}"), || started(service, part).is_some_and(|pid| pid != before));
}

/// Counters of a group's bill, which may only grow.
fn counters(shown: &Value) -> Vec<f64> {
    let names = ["folds", "pages_scanned", "pages_hashed", "worker_cpu_s", "agent_cpu_s"];
    names.iter().map(|name| shown[name].as_f64().unwrap_or_else(|| panic!("no {name} in {shown}"))).collect()
}

/// Folded pages of members that are connected, and pages that were broken.
fn held(shown: &Value) -> (usize, u64, u64) {
    let members = shown["members"].as_array().expect("members");
    let own = |member: &&Value| !member["name"].as_str().is_some_and(|name| name.starts_with("attached"));
    let connected = members.iter().filter(|member| member["connected"] == true).filter(own);
    let folded = connected.clone().map(|member| number(&member["folded_pages"])).sum();
    (connected.count(), folded, number(&shown["broken_pages"]))
}

/// Starts three members, and waits until nothing more of them is folded.
fn members_that_are_folded(service: &Service) -> Vec<Member> {
    let run = |name: &str| service.run("acme", name, &["--all-anonymous"], &["python3", "-c", HOLDER]);
    let members: Vec<Member> = ["a", "b", "c"].map(run).into();
    let mut most = 0;
    until(120, "nothing more is folded", || {
        std::thread::sleep(Duration::from_secs(2));
        let (count, folded, _) = held(&service.show("acme"));
        std::mem::replace(&mut most, folded) == folded && folded > 3 * 3000 && count == members.len()
    });
    members
}

/// Copies of the programs that attach others; `None` if they are not built, which was said then.
fn attachers() -> Option<TempDir> {
    let pagefold = Path::new(env!("CARGO_BIN_EXE_pagefold"));
    let agent = pagefold.with_file_name("../x86_64-unknown-linux-musl/debug/pagefold-agent");
    if !agent.exists() {
        eprintln!("skipped in part: nothing is built for x86_64-unknown-linux-musl: ./x build");
        return None;
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    for from in [pagefold, &pagefold.with_file_name("pagefold-attach"), &agent] {
        copy_program(from, &dir.path().join(from.file_name().expect("a name")));
    }
    Some(dir)
}

/// Starts a program, attaches it, and kills the process that `pagefold attach` leaves beside it. It may be folding.
fn attach_and_kill(service: &Service, attachers: &TempDir, number: usize) -> Member {
    let (mut command, name) = (Command::new("python3"), format!("attached-{number}"));
    let mark = service.mark();
    command.args(["-c", HOLDER]).env(mark.0, mark.1);
    let mut member = Member::spawn(command, &name, attachers.path());
    member.tell("begin");
    let pid = member.pid().to_string();
    let mut attach = Command::new(attachers.path().join("pagefold"));
    attach.args(["attach", &pid, "--group", &service.group("acme"), "--name", &name, "--all-anonymous", "--service"]);
    attach.arg(service.place()).env("PAGEFOLD_EAGER", "1").env(mark.0, mark.1);
    until(60, "a program is attached", || attach.output().expect("run pagefold attach").status.success());
    std::thread::sleep(Duration::from_millis(700 * (number as u64 % 4)));
    let pattern = format!("^{}/pagefold-attach --pid {pid} ", attachers.path().display());
    let found = Command::new("pgrep").args(["-f", &pattern]).output().expect("run pgrep");
    let helper = String::from_utf8_lossy(&found.stdout).trim().parse().expect("the helper's process");
    kill(helper);
    member
}

/// Asks the web side all the time, until `over`. Returns how many answers there were.
fn ask_all_the_time(place: &Path, over: &AtomicBool) -> u64 {
    let web = Http::at(Target::Unix(place.join("api.sock")));
    let mut answers = 0;
    while !over.load(Ordering::Relaxed) {
        let answered = web.try_request("GET", "/metrics", "", "").is_ok_and(|answer| answer.status == 200);
        answers += u64::from(answered);
        std::thread::sleep(Duration::from_millis(20));
    }
    answers
}

fn assert_nobody_waited(members: &mut [Member]) {
    for member in members {
        let worst: f64 = member.tell("worst").parse().expect("seconds");
        eprintln!("{} waited for {worst} s at most", member.name);
        assert!(worst < PATIENCE_S, "{} waited for {worst} s", member.name);
    }
}

/// Waits until the members are all there and folded as `before`, and counters have not gone back since `last`.
fn until_as_before(service: &Service, before: (usize, u64, u64), last: &mut Vec<f64>) {
    let (count, folded, broken) = before;
    until(120, "all members are back, and as they were", || {
        let shown = service.show("acme");
        let counted = counters(&shown);
        assert!(last.iter().zip(&counted).all(|(before, after)| before <= after), "{last:?}, then {counted:?}");
        *last = counted;
        let (now, now_folded, now_broken) = held(&shown);
        now == count && now_folded + FEW >= folded && now_broken <= broken + FEW
    });
}

#[test]
fn members_never_wait_for_parts_that_end_and_nothing_is_unfolded() {
    if cannot_fold() {
        return;
    }
    let mut service = Service::start_with(Some("[api]\n[[group]]\nname = 'acme-TOKEN'\n"));
    let mut members = members_that_are_folded(&service);
    let (attachers, over) = (attachers(), Arc::new(AtomicBool::new(false)));
    let asking = {
        let (place, over) = (service.place(), Arc::clone(&over));
        std::thread::spawn(move || ask_all_the_time(&place, &over))
    };
    let shown = service.show("acme");
    let before = held(&shown);
    assert_eq!(before.0, members.len());
    let (end, mut last, mut rounds) = (Instant::now() + Duration::from_secs(seconds(20)), counters(&shown), 0);
    for part in ["worker", "prover", "web side", "attach"].iter().cycle() {
        let began = Instant::now();
        if began > end {
            break;
        }
        rounds += 1;
        service.kill_supervisor();
        until(30, "the service answers", || service.pagefold(&["group", "list"]).status.success());
        std::thread::sleep((EVERY / 2).saturating_sub(began.elapsed()));
        match (*part, &attachers) {
            ("attach", Some(attachers)) => members.push(attach_and_kill(&service, attachers, rounds)),
            ("attach", None) => {}
            _ => replace(&service, part, "acme"),
        }
        until_as_before(&service, before, &mut last);
        std::thread::sleep(EVERY.saturating_sub(began.elapsed()));
    }
    let web = Http::at(Target::Unix(service.place().join("api.sock")));
    until(30, "the web side answers", || web.try_request("GET", "/v1/groups", "", "").is_ok_and(|r| r.status == 200));
    over.store(true, Ordering::Relaxed);
    let answers = asking.join().expect("a thread that asks");
    eprintln!("{rounds} rounds, {answers} answers of the web side");
    assert!(answers > 10, "{answers} answers");
    assert_nobody_waited(&mut members);
    service.assert_audit_is_clean();
    for mut member in members {
        member.close_input();
        assert!(member.end(60).success(), "{}: {}", member.name, member.errors());
    }
}

#[test]
fn pool_outlives_supervisor_and_worker_that_end_together() {
    if cannot_fold() {
        return;
    }
    let mut service = Service::start_kept("[[group]]\nname = 'acme-TOKEN'\n");
    let mut members = members_that_are_folded(&service);
    let before = service.show("acme");
    let (count, folded, broken) = held(&before);
    for round in 0..3 {
        until(30, "each segment of the pool is kept, and nothing else", || {
            service.kept().len() as u64 == number(&service.show("acme")["segments"])
        });
        service.kill_supervisor_and_worker("acme");
        until(30, "the service answers", || service.pagefold(&["group", "list"]).status.success());
        until(60, "all members are back, and the pool is as it was", || {
            let shown = service.show("acme");
            let (now_count, now_folded, now_broken) = held(&shown);
            let has_pool = number(&shown["slots"]) >= number(&before["slots"]);
            now_count == count && now_folded + FEW >= folded && now_broken <= broken + FEW && has_pool
        });
        eprintln!("round {round}: {:?}", service.kept());
    }
    assert_nobody_waited(&mut members);
    service.assert_audit_is_clean();
    service.end();
    until(30, "nothing is kept for a pool that has ended", || service.kept().is_empty());
}
