//! What dies or lies, row by row: members verify themselves while everything around them is killed, runs out or lies
//! to them.

mod common;

use common::service::{Member, Service, cannot_fold, find_member, member, seconds, until};
use common::{Afterwards, number};
use serde_json::Value;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

const STABLE: [&str; 5] = ["stable", "--pages", "3000", "--classes", "80"];

fn kill(pid: u32) {
    // It may have ended by itself, or not have started yet.
    let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
}

/// How often to go through it all: more often where tests are to go on for longer.
fn times() -> u64 {
    seconds(60).div_ceil(60)
}

/// Numbers that differ from run to run.
fn random(below: u64) -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish() % below
}

/// A group with members that hold duplicates and check them, folding.
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
    // While it connects again it may be missing.
    members.iter().find(|m| m["name"] == name).map_or(0, |m| number(&m[what]))
}

/// After all that: what is new folds, what was folded is right, and nobody has anything of another group's.
fn assert_recovers(service: &Service, members: &mut [Member]) {
    let mut fresh = vec![service.torture("acme", "fresh", &[], &STABLE)];
    until_folding(service, &mut fresh, 1000);
    members.iter_mut().for_each(|m| m.assert_is_well());
    let counts: Vec<usize> = members.iter().map(|m| m.lines().len()).collect();
    until(10, "all go on checking", || members.iter().zip(&counts).all(|(m, count)| m.lines().len() > *count));
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
    let end = Instant::now() + Duration::from_secs(120 * times());
    while killed < 60 * times() {
        assert!(Instant::now() < end, "{killed} kills in time");
        std::thread::sleep(Duration::from_micros(random(500_000)));
        // Each worker is killed once, at some moment of its life.
        if let Some(pid) = service.worker_pid("acme").filter(|pid| last != Some(*pid)) {
            last = Some(pid);
            kill(pid);
            killed += 1;
            if killed % 3 == 0 {
                // Workers that die one after the other are started ever later; a new supervisor begins anew.
                service.kill_supervisor();
            }
        }
        members.iter_mut().for_each(|m| m.assert_is_well());
    }
    eprintln!("{killed} workers killed");
    assert_recovers(&service, &mut members);
    // What was folded under the workers that died is known to the one that lives.
    until(30, "members are known again", || {
        let shown = service.show("acme");
        ["one", "two", "three"].iter().all(|name| has(&shown, name, "folded_pages") > 0)
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
            // A member that comes in the middle of it waits, and is a member then.
            joined.push(service.torture("acme", &format!("late-{n}"), &[], &STABLE));
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
        // Some are killed before they fold, some while they do, some after.
        std::thread::sleep(Duration::from_micros(random(700_000)));
        let mut victim = victims.remove(0);
        victim.assert_is_well();
        victim.kill();
        members.iter_mut().for_each(|m| m.assert_is_well());
    }
    victims.clear();
    assert_recovers(&service, &mut members);
    // What only the dead held is given back: their references go with their processes. The living let slots go, too, as long as
    // what they break is folded again.
    service.set("acme", &["--fold", "off"]);
    until(60, "nothing is held for the dead", || {
        let shown = service.show("acme");
        number(&shown["limbo_slots"]) == 0 && shown["members"].as_array().expect("a list").len() <= 3
    });
}

/// All of them together: a worker without a supervisor, members without either.
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
fn an_agent_that_lies_hurts_nobody_else() {
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
        // Another member comes and must be folded while the liar is at it.
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
    // Who was not admitted is turned away, whatever it says in its environment or on the socket.
    let (variable, token) = service.mark();
    let mut stranger = Command::new(common::service::torture());
    stranger.args(["hostile", "--lie", "fingerprints", "--socket", &service.agent_socket()]).env(variable, token);
    stranger.env("PAGEFOLD_PID", "1").env("PAGEFOLD_SOCKET", service.agent_socket());
    let said = Member::spawn(stranger, "stranger", &service.place()).finish(30);
    assert_eq!(said["connections"], said["cut_off"], "every connection was closed: {said}");
    // A member's child that joins another group brings its parent's pool along: refused.
    let run = env!("CARGO_BIN_EXE_pagefold");
    let (group, place) = (service.group("beta"), service.place());
    let place = place.to_str().expect("a plain path");
    let words =
        ["sh", "-c", "exec \"$0\" run --group \"$1\" --name turncoat --service \"$2\" -- sleep 1", run, &group, place];
    let mut turncoat = service.run("acme", "turncoat", &[], &words);
    let status = turncoat.end(30);
    eprintln!("who changes groups by executing: {status} {}", turncoat.errors());
    let shown = service.show("beta");
    assert_eq!(has(&shown, "target", "pid"), u64::from(beta.pid()));
    service.assert_audit_is_clean();
}

#[test]
fn a_full_pool_is_said_and_harms_nobody() {
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
    assert!(service.log().contains("the pool has reached its 64 slots"), "it is said: {}", service.log());
    service.assert_audit_is_clean();
}

#[test]
fn a_member_keeps_to_its_mappings() {
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
    let shown = service.show("acme");
    assert_eq!(member(&shown, "frugal")["state"], "no_vma", "{shown}");
    assert_eq!(member(&shown, "other")["state"], "folding", "{shown}");
    other.assert_is_well();
}

/// A memory control group of a test's own, in whichever of the two hierarchies there is; `None` with the reason said.
fn small_memory(token: &str, bytes: u64) -> Option<(String, Afterwards)> {
    let v1 = "/sys/fs/cgroup/memory";
    let (base, limit) =
        if fs::metadata(v1).is_ok() { (v1, "memory.limit_in_bytes") } else { ("/sys/fs/cgroup", "memory.max") };
    let dir = format!("{base}/pagefold-test-{token}");
    let made = fs::create_dir(&dir).and_then(|()| fs::write(format!("{dir}/{limit}"), bytes.to_string()));
    // It can go when the worker has gone, which is after this.
    let patiently = format!("(for i in $(seq 300); do rmdir {dir} && break; sleep 0.1; done) > /dev/null 2>&1 &");
    let afterwards = Afterwards::run(&patiently);
    match made {
        Ok(()) => Some((dir, afterwards)),
        Err(e) => {
            eprintln!("skipped: cannot make a memory control group at {dir}: {e}");
            None
        }
    }
}

#[test]
fn a_worker_short_of_memory_harms_nobody() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut members = folding(&service, &["one", "two"], &[]);
    let Some((cgroup, _afterwards)) = small_memory(service.mark().1, 24 << 20) else { return };
    let worker = service.worker_pid("acme").expect("a worker");
    fs::write(format!("{cgroup}/cgroup.procs"), worker.to_string()).expect("move the worker");
    // Some ten thousand contents that are there more than once: 40 MiB of pool, and 24 are allowed.
    let words = ["stable", "--pages", "40000", "--classes", "12000"];
    let mut large = service.torture("acme", "large", &[], &words);
    for _ in 0..seconds(12) {
        std::thread::sleep(Duration::from_secs(1));
        members.iter_mut().for_each(|m| m.assert_is_well());
        large.assert_is_well();
    }
    // Either the pool grew no further, which was said, or the kernel has killed the worker for it, and another one,
    // which is not in that control group, has taken over.
    until(30, "a bound, or an end", || {
        let (shown, log) = (service.show("acme"), service.log());
        eprintln!("slots {} failures {}", shown["slots"], shown["fold_failures"]);
        let was_killed = log.contains(&format!("worker, process {worker}, has ended"));
        was_killed || (log.contains("memory") && number(&shown["slots"]) < 6144)
    });
    drop(large);
    assert_recovers(&service, &mut members);
    if let Some(worker) = service.worker_pid("acme") {
        // Out again, so that the control group can go.
        let home = cgroup.rsplit_once('/').expect("a parent").0;
        let _ = fs::write(format!("{home}/cgroup.procs"), worker.to_string());
    }
}

#[test]
fn a_program_gets_its_own_userfaultfd() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut other = service.torture("acme", "other", &[], &["stable", "--pages", "3000", "--classes", "50"]);
    let mut yielding = service.torture("acme", "yielding", &[], &["yielding", "--pause", "1000"]);
    service.show("acme");
    service.set("acme", &["--scan-rate", "400000"]);
    let mut states = std::collections::BTreeSet::new();
    let end = Instant::now() + Duration::from_secs(12);
    while Instant::now() < end {
        let shown = service.show("acme");
        states.extend(
            shown["members"]
                .as_array()
                .expect("a list")
                .iter()
                .filter(|m| m["name"] == "yielding")
                .map(|m| m["state"].as_str().unwrap_or_default().to_owned()),
        );
        std::thread::sleep(Duration::from_millis(100));
    }
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

/// Starts a member that holds pages as it is told, and waits until it folds.
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

/// From now on nothing more is folded of it, though it asks for more.
fn assert_folds_nothing(service: &Service, holder: &mut Member) {
    let before: usize = holder.tell("folded").parse().expect("a number");
    assert_eq!(holder.tell("more 2000"), "ok");
    std::thread::sleep(Duration::from_secs(4));
    let after: usize = holder.tell("folded").parse().expect("a number");
    assert!(after <= before, "{before} pages were folded and now {after}: {}", service.show("acme"));
    assert_eq!(holder.tell("check"), "ok");
}

/// A pipe that pages were lent to holds them by references that a move does not see.
#[test]
fn who_lends_pages_to_a_pipe_is_not_folded() {
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

/// Files that are opened later are noticed, too.
#[test]
fn who_reads_directly_from_what_may_not_pin_is_not_folded() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let dir = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let file = dir.join("known");
    fs::write(&file, vec![7; 1 << 20]).expect("write a file");
    let open = format!("direct {}", file.display());
    // Without the variable, this filesystem is known to pin what it writes.
    let mut fine = obedient(&service, "fine", &[]);
    assert_eq!(fine.tell(&open), "ok");
    until(30, "it folds", || fine.tell("folded").parse::<usize>().expect("a number") > 1000);
    assert_eq!(member(&service.show("acme"), "fine")["state"], "folding");

    let mut distrusted = obedient(&service, "distrusted", &[("PAGEFOLD_NOT_PINNING", "ext4,xfs,btrfs,overlay,tmpfs")]);
    until(30, "it folds before", || distrusted.tell("folded").parse::<usize>().expect("a number") > 1000);
    assert_eq!(distrusted.tell(&open), "ok");
    let shown = wait_for_state(&service, "distrusted", "unpinned");
    let detail = shown["detail"].as_str().expect("text");
    assert!(!detail.is_empty(), "a reason");
    eprintln!("{detail}");
    assert_folds_nothing(&service, &mut distrusted);
}
