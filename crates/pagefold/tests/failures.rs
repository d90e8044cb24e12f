//! Failures: members verify their own memory while workers, supervisors or other members are killed, memory or mappings
//! run out, or another member lies.

mod common;

use common::number;
use common::service::{Member, Service, cannot_fold, find_member, member, seconds, small_memory, until};
use serde_json::Value;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

const STABLE: [&str; 5] = ["stable", "--pages", "3000", "--classes", "80"];

fn kill(pid: u32) {
    // The process may have ended by itself, or not have started.
    let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
}

/// Factor for the number of failures: 1, or more with `PAGEFOLD_SOAK_SECONDS`.
fn times() -> u64 {
    seconds(60).div_ceil(60)
}

/// Numbers that differ from run to run.
fn random(below: u64) -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish() % below
}

/// Starts members that hold duplicates and check them, and waits until they fold.
fn folding(service: &Service, names: &[&str], more: &[&str]) -> Vec<Member> {
    let mut members: Vec<Member> =
        names.iter().map(|name| service.torture("acme", name, &[], &[&STABLE, more].concat())).collect();
    service.show("acme");
    service.set("acme", &["--scan-rate", "400000"]);
    until_folding(service, &mut members, 1000);
    members
}

fn until_folding(service: &Service, members: &mut [Member], pages: u64) {
    until(60, "the members fold", || {
        members.iter_mut().for_each(|m| m.assert_is_well());
        let shown = service.show("acme");
        members.iter().all(|m| has(&shown, &m.name, "folded_pages") >= pages)
    });
}

fn has(shown: &Value, name: &str, what: &str) -> u64 {
    let members = shown["members"].as_array().expect("a list");
    // A member may be missing while it connects again.
    members.iter().find(|m| m["name"] == name).map_or(0, |m| number(&m[what]))
}

/// Asserts that the group has recovered: a new member folds, all members go on checking without a fault, and the audit
/// is clean.
fn assert_recovers(service: &Service, members: &mut [Member]) {
    let mut fresh = vec![service.torture("acme", "fresh", &[], &STABLE)];
    until_folding(service, &mut fresh, 1000);
    members.iter_mut().for_each(|m| m.assert_is_well());
    let counts: Vec<usize> = members.iter().map(|m| m.lines().len()).collect();
    until(60, "all go on checking", || members.iter().zip(&counts).all(|(m, count)| m.lines().len() > *count));
    service.assert_audit_is_clean();
}

#[test]
fn workers_are_killed_60_times() {
    if cannot_fold() {
        return;
    }
    let mut service = Service::start();
    let mut members = folding(&service, &["one", "two", "three"], &["--children"]);
    let (mut killed, mut last) = (0, None);
    // After each third kill, members may wait 5 s before they connect again.
    let end = Instant::now() + Duration::from_secs(300 * times());
    while killed < 60 * times() {
        assert!(Instant::now() < end, "{killed} kills in time");
        std::thread::sleep(Duration::from_micros(random(500_000)));
        // Each worker is killed once, at some moment of its life.
        if let Some(pid) = service.worker_pid("acme").filter(|pid| last != Some(*pid)) {
            last = Some(pid);
            kill(pid);
            killed += 1;
            if killed % 3 == 0 {
                // The supervisor delays each restart of a dying worker longer; a new supervisor begins without delay.
                service.kill_supervisor();
            }
        }
        members.iter_mut().for_each(|m| m.assert_is_well());
    }
    eprintln!("{killed} workers killed");
    assert_recovers(&service, &mut members);
    // The living worker knows the pages that were folded under the dead ones.
    until(30, "members are known again", || {
        let shown = service.show("acme");
        ["one", "two", "three"].iter().all(|name| has(&shown, name, "folded_pages") > 0)
    });
}

/// Waits until the last of these is registered. It waits 3 s for a supervisor that lives for long enough to answer.
fn until_last_is_registered(service: &Service, joined: &mut [Member]) {
    let last = joined.last_mut().expect("one has joined");
    until(20, "it is registered", || {
        last.assert_is_well();
        find_member(&service.show("acme"), &last.name).is_some()
    });
}

#[test]
fn supervisors_are_killed_50_times() {
    if cannot_fold() {
        return;
    }
    let mut service = Service::start();
    let mut members = folding(&service, &["one", "two", "three"], &[]);
    let worker = service.worker_pid("acme").expect("a worker");
    let mut joined = Vec::new();
    for n in 0..50 * times() {
        std::thread::sleep(Duration::from_micros(random(300_000)));
        service.kill_supervisor();
        if n % 10 == 5 {
            // A process that joins meanwhile waits, and then becomes a member.
            joined.push(service.torture("acme", &format!("late-{n}"), &[], &STABLE));
        }
        if n % 10 == 7 {
            until_last_is_registered(&service, &mut joined);
        }
        members.iter_mut().for_each(|m| m.assert_is_well());
    }
    assert_eq!(service.worker_pid("acme"), Some(worker), "the worker has run on");
    until_folding(&service, &mut joined, 1000);
    assert_recovers(&service, &mut members);
}

#[test]
fn members_are_killed_60_times() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut members = folding(&service, &["one", "two"], &["--children"]);
    let mut victims: Vec<Member> = Vec::new();
    for n in 0..60 * times() {
        while victims.len() < 4 {
            victims.push(service.torture("acme", &format!("victim-{n}-{}", victims.len()), &[], &STABLE));
        }
        // The random time kills some before they fold, some while they fold, and some after.
        std::thread::sleep(Duration::from_micros(random(700_000)));
        let mut victim = victims.remove(0);
        victim.assert_is_well();
        victim.kill();
        members.iter_mut().for_each(|m| m.assert_is_well());
    }
    victims.clear();
    assert_recovers(&service, &mut members);
    // Slots that only dead members mapped are freed: their references end with their processes. Folding is off, because
    // living members also release slots while their broken pages are folded again.
    service.set("acme", &["--fold", "off"]);
    until(60, "nothing is held for the dead", || {
        let shown = service.show("acme");
        number(&shown["limbo_slots"]) == 0 && shown["members"].as_array().expect("a list").len() <= 3
    });
}

/// Kills worker and supervisor together, so that members have neither.
#[test]
fn everything_is_killed_at_once() {
    if cannot_fold() {
        return;
    }
    let mut service = Service::start();
    let mut members = folding(&service, &["one", "two"], &["--children"]);
    for _ in 0..10 * times() {
        std::thread::sleep(Duration::from_micros(random(1_000_000)));
        if let Some(worker) = service.worker_pid("acme") {
            kill(worker);
        }
        service.kill_supervisor();
        members.iter_mut().for_each(|m| m.assert_is_well());
    }
    assert_recovers(&service, &mut members);
}

#[test]
fn lying_agent_harms_no_other_member() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut members = folding(&service, &["honest", "other"], &[]);
    let worker = service.worker_pid("acme");
    let (socket, torture) = (service.agent_socket(), common::service::torture());
    let lies = [
        ("garbage", true),
        ("oversized", false),
        ("truncated", true),
        ("flood", false),
        ("deaf", false),
        ("fingerprints", false),
        ("foreign-slots", true),
        ("foreign-releases", true),
        ("unasked", true),
        ("window", false),
        ("silent", false),
        ("knocking", false),
    ];
    for (lie, is_cut_off) in lies {
        // Another member joins and must be folded while the liar lies.
        let words = ["env", "-u", "LD_PRELOAD", &torture, "hostile", "--socket", &socket, "--lie", lie];
        let mut liar = service.run("acme", &format!("liar-{lie}"), &[], &words);
        let mut fresh = vec![service.torture("acme", &format!("beside-{lie}"), &[], &STABLE)];
        until_folding(&service, &mut fresh, 1000);
        let said = liar.finish(30);
        eprintln!("{said}");
        assert!(!is_cut_off || number(&said["cut_off"]) > 0, "{lie}: {said}");
        members.iter_mut().for_each(|m| m.assert_is_well());
        assert_eq!(service.worker_pid("acme"), worker, "{lie} has ended the worker: {}", service.log());
        let shown = service.show("acme");
        assert!(number(&shown["index_bytes"]) < 256 << 20, "{lie}: {shown}");
    }
    assert_recovers(&service, &mut members);
}

#[test]
fn nobody_joins_another_group() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let _acme = folding(&service, &["one"], &[]);
    let beta = service.torture("beta", "target", &[], &STABLE);
    until(30, "beta folds", || number(&service.show("beta")["sharing_pages"]) > 0);
    // A process that was not admitted is refused, for any words in its environment or on the socket.
    let (variable, token) = service.mark();
    let mut stranger = Command::new(common::service::torture());
    stranger.args(["hostile", "--lie", "fingerprints", "--socket", &service.agent_socket()]).env(variable, token);
    stranger.env("PAGEFOLD_PID", "1").env("PAGEFOLD_SOCKET", service.agent_socket());
    let said = Member::spawn(stranger, "stranger", &service.place()).finish(30);
    let (connections, closed) = (number(&said["connections"]), number(&said["cut_off"]));
    // When its time is over, one connection may not have been closed yet.
    assert!(closed > 10 && connections - closed <= 1, "every connection was closed: {said}");
    // A member that executes `pagefold run` for another group brings no frame into that group.
    let run = env!("CARGO_BIN_EXE_pagefold");
    let (group, place) = (service.group("beta"), service.place());
    let place = place.to_str().expect("a plain path");
    let words =
        ["sh", "-c", "exec \"$0\" run --group \"$1\" --name turncoat --service \"$2\" -- sleep 1", run, &group, place];
    let mut turncoat = service.run("acme", "turncoat", &[], &words);
    let status = turncoat.end(30);
    assert_eq!(status.code(), Some(1));
    assert!(turncoat.errors().contains("is a member of group"), "{}", turncoat.errors());
    let shown = service.show("beta");
    assert_eq!(has(&shown, "target", "pid"), u64::from(beta.pid()));
    service.assert_audit_is_clean();
}

#[test]
fn full_pool_is_logged_and_harms_no_member() {
    if cannot_fold() {
        return;
    }
    let service = Service::start_with(Some("[[group]]\nname = \"acme-TOKEN\"\npool = \"256K\"\nscan-rate = 400000\n"));
    let mut members: Vec<Member> = ["one", "two"]
        .map(|name| service.torture("acme", name, &[], &[&STABLE[..3], &["--classes", "600"]].concat()))
        .into();
    until(60, "the pool is full", || number(&service.show("acme")["slots"]) >= 60);
    std::thread::sleep(Duration::from_secs(3));
    members.iter_mut().for_each(|m| m.assert_is_well());
    let shown = service.show("acme");
    assert!(number(&shown["slots"]) <= 64, "{shown}");
    assert!(number(&shown["sharing_pages"]) > 100, "what is in the pool is shared: {shown}");
    until(30, "it is said", || service.log().contains("all that the pool may hold is in use: 256 KiB"));
    service.assert_audit_is_clean();
}

#[test]
fn member_keeps_to_its_budget_of_mappings() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let program = common::service::torture();
    let words = [&[&program[..]][..], &STABLE].concat();
    let budget = [("PAGEFOLD_VMA_BUDGET", "300")];
    let mut frugal = service.run_with("acme", "frugal", &[], &words, &budget);
    let mut other = service.torture("acme", "other", &[], &STABLE);
    service.show("acme");
    service.set("acme", &["--scan-rate", "400000"]);
    until(60, "it has used up its mappings", || number(&service.show("acme")["fold_failures"]["no_vma"]) > 0);
    let mut most = 0;
    for _ in 0..60 {
        let maps = fs::read_to_string(format!("/proc/{}/maps", frugal.pid())).expect("its mappings");
        most = most.max(maps.lines().count());
        frugal.assert_is_well();
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!((150..=420).contains(&most), "{most} mappings with a budget of 300");
    // Whenever its mappings are counted anew, it folds until they are used up again.
    wait_for_state(&service, "frugal", "no_vma");
    let shown = service.show("acme");
    assert_eq!(member(&shown, "other")["state"], "folding", "{shown}");
    other.assert_is_well();
}

#[test]
fn worker_short_of_memory_harms_no_member() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut members = folding(&service, &["one", "two"], &[]);
    let Some((cgroup, _afterwards)) = small_memory(service.mark().1, 24 << 20) else { return };
    let worker = service.worker_pid("acme").expect("a worker");
    fs::write(format!("{cgroup}/cgroup.procs"), worker.to_string()).expect("move the worker");
    // 12,000 contents with several copies would fill more than 40 MiB of pool; 24 MiB are allowed.
    let words = ["stable", "--pages", "40000", "--classes", "12000"];
    let mut large = service.torture("acme", "large", &[], &words);
    for _ in 0..seconds(12) {
        std::thread::sleep(Duration::from_secs(1));
        members.iter_mut().for_each(|m| m.assert_is_well());
        large.assert_is_well();
    }
    // Two outcomes are right. The pool has stopped growing, and the log says so. Or the kernel has killed the worker,
    // and a successor outside that control group has taken over.
    until(30, "a bound, or an end", || {
        let (shown, log) = (service.show("acme"), service.log());
        eprintln!("slots {} failures {}", shown["slots"], shown["fold_failures"]);
        let was_killed = log.contains(&format!("worker, process {worker}, has ended"));
        was_killed || (log.contains("memory") && number(&shown["slots"]) < 6144)
    });
    drop(large);
    assert_recovers(&service, &mut members);
    if let Some(worker) = service.worker_pid("acme") {
        // The worker leaves the control group, so that it can be removed.
        let home = cgroup.rsplit_once('/').expect("a parent").0;
        let _ = fs::write(format!("{home}/cgroup.procs"), worker.to_string());
    }
}

#[test]
fn agent_yields_to_a_programs_own_userfaultfd() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut other = service.torture("acme", "other", &[], &["stable", "--pages", "3000", "--classes", "50"]);
    let mut yielding = service.torture("acme", "yielding", &[], &["yielding", "--pause", "2000"]);
    service.show("acme");
    service.set("acme", &["--scan-rate", "400000"]);
    let mut states = std::collections::BTreeSet::new();
    until(300, "it has ended", || {
        let shown = service.show("acme");
        states.extend(find_member(&shown, "yielding").map(|m| m["state"].as_str().unwrap_or_default().to_owned()));
        yielding.ended().is_some()
    });
    let counted = yielding.finish(60);
    let folded: Vec<u64> = yielding
        .lines()
        .iter()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok()?["folded"].as_u64())
        .collect();
    eprintln!("{states:?} {folded:?} {counted}");
    assert!(states.contains("yielded"), "{states:?}");
    assert!(folded.iter().any(|pages| *pages > 0), "it folds between: {folded:?}");
    assert!(number(&counted["done"]["faults_served"]) > 0);
    other.assert_is_well();
}

/// Starts a member that fills and holds pages on command.
fn obedient(service: &Service, name: &str, env: &[(&str, &str)]) -> Member {
    let program = common::service::torture();
    let mut member = service.run_with("acme", name, &[], &[&program, "refs"], env);
    assert_eq!(member.tell("fill 2000"), "ok");
    service.show("acme");
    service.set("acme", &["--scan-rate", "400000"]);
    member
}

fn wait_for_state(service: &Service, name: &str, state: &str) -> Value {
    until(30, &format!("{name} is {state}"), || {
        find_member(&service.show("acme"), name).is_some_and(|m| m["state"] == state)
    });
    member(&service.show("acme"), name).clone()
}

/// Asserts that no more pages of this member are folded, although it offers more.
fn assert_folds_nothing(service: &Service, holder: &mut Member) {
    let before: usize = holder.tell("folded").parse().expect("a number");
    assert_eq!(holder.tell("more 2000"), "ok");
    std::thread::sleep(Duration::from_secs(4));
    let after: usize = holder.tell("folded").parse().expect("a number");
    assert!(after <= before, "{before} pages were folded and now {after}: {}", service.show("acme"));
    assert_eq!(holder.tell("check"), "ok");
}

/// A pipe holds lent pages by references that a move does not see.
#[test]
fn member_that_lends_pages_to_a_pipe_is_not_folded() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut holder = obedient(&service, "holder", &[]);
    until(30, "it folds", || number(&service.show("acme")["sharing_pages"]) > 1000);
    assert_eq!(holder.tell("vmsplice"), "ok");
    let shown = wait_for_state(&service, "holder", "unpinned");
    let detail = shown["detail"].as_str().expect("text");
    assert!(detail.contains("vmsplice"), "{detail}");
    assert_folds_nothing(&service, &mut holder);
}

/// The agent also notices files that the program opens after it has become a member.
#[test]
fn member_with_direct_io_on_non_pinning_filesystem_is_not_folded() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let file = dir.join("known");
    fs::write(&file, vec![7; 1 << 20]).expect("write a file");
    let open = format!("direct {}", file.display());
    // Without the variable, the agent knows that this filesystem pins the pages it writes.
    let mut fine = obedient(&service, "fine", &[]);
    assert_eq!(fine.tell(&open), "ok");
    until(30, "it folds", || fine.tell("folded").parse::<usize>().expect("a number") > 1000);
    wait_for_state(&service, "fine", "folding");

    let mut distrusted = obedient(&service, "distrusted", &[("PAGEFOLD_NOT_PINNING", "ext4,xfs,btrfs,overlay,tmpfs")]);
    until(30, "it folds before", || distrusted.tell("folded").parse::<usize>().expect("a number") > 1000);
    assert_eq!(distrusted.tell(&open), "ok");
    let shown = wait_for_state(&service, "distrusted", "unpinned");
    let detail = shown["detail"].as_str().expect("text");
    assert!(!detail.is_empty(), "a reason");
    eprintln!("{detail}");
    assert_folds_nothing(&service, &mut distrusted);
}
