//! Failures: members verify their own memory while workers, supervisors or other members are killed, memory or mappings
//! run out, or another member lies.

#[path = "../common/mod.rs"]
mod common;

mod killed;
mod rig;
mod unfit;

use common::number;
use common::service::{Member, Service, cannot_fold, member, seconds, small_memory, until};
use rig::{STABLE, assert_recovers, folding, has, until_folding, wait_for_state};
use std::fs;
use std::process::Command;
use std::time::Duration;

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
        ("statistics", true),
        ("silent", false),
        ("knocking", false),
    ];
    for (lie, is_cut_off) in lies {
        // Another member joins and must be folded while the liar lies.
        let words = ["env", "-u", "LD_PRELOAD", &torture, "hostile", "--socket", &socket, "--lie", lie];
        let words = [&words[..], &["--seconds", "1", "--until-hangup"]].concat();
        let mut liar = service.run("acme", &format!("liar-{lie}"), &[], &words);
        let mut fresh = vec![service.torture("acme", &format!("beside-{lie}"), &[], &STABLE)];
        until_folding(&service, &mut fresh, 1000);
        liar.close_input();
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
    // Two outcomes are right. The pool has stopped growing, and the log says so. Or the kernel has killed the worker,
    // and a successor outside that control group has taken over.
    until(60, "a bound, or an end", || {
        members.iter_mut().for_each(|m| m.assert_is_well());
        large.assert_is_well();
        let (shown, log) = (service.show("acme"), service.log());
        eprintln!("slots {} failures {}", shown["slots"], shown["fold_failures"]);
        let was_killed = log.contains(&format!("worker, process {worker}, has ended"));
        was_killed || (log.contains("memory") && number(&shown["slots"]) < 6144)
    });
    for _ in 0..seconds(3) {
        std::thread::sleep(Duration::from_secs(1));
        members.iter_mut().for_each(|m| m.assert_is_well());
        large.assert_is_well();
    }
    drop(large);
    assert_recovers(&service, &mut members);
    if let Some(worker) = service.worker_pid("acme") {
        // The worker leaves the control group, so that it can be removed.
        let home = cgroup.rsplit_once('/').expect("a parent").0;
        let _ = fs::write(format!("{home}/cgroup.procs"), worker.to_string());
    }
}
