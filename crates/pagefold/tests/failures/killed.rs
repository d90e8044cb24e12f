//! Workers, supervisors and members are killed again and again, alone and together.

use crate::common::number;
use crate::common::service::{Member, Service, cannot_fold, find_member, seconds, until};
use crate::rig::{STABLE, assert_recovers, folding, has, until_folding};
use std::process::Command;
use std::time::{Duration, Instant};

fn kill(pid: u32) {
    // The process may have ended by itself, or not have started.
    let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).status();
}

/// Number of failures: `few`, or `many` for each minute of `PAGEFOLD_SOAK_SECONDS`.
fn times(few: u64, many: u64) -> u64 {
    if std::env::var_os("PAGEFOLD_SOAK_SECONDS").is_none() { few } else { many * seconds(60).div_ceil(60) }
}

/// Numbers that differ from run to run.
fn random(below: u64) -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish() % below
}

#[test]
fn workers_are_killed_again_and_again() {
    if cannot_fold() {
        return;
    }
    let mut service = Service::start();
    let mut members = folding(&service, &["one", "two", "three"], &["--children"]);
    let (mut killed, mut last, times) = (0, None, times(12, 60));
    // After each third kill, members may wait 5 s before they connect again.
    let end = Instant::now() + Duration::from_secs(60 + 5 * times);
    while killed < times {
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
fn supervisors_are_killed_again_and_again() {
    if cannot_fold() {
        return;
    }
    let mut service = Service::start();
    let mut members = folding(&service, &["one", "two", "three"], &[]);
    let worker = service.worker_pid("acme").expect("a worker");
    let mut joined = Vec::new();
    for n in 0..times(20, 50) {
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
fn members_are_killed_again_and_again() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut members = folding(&service, &["one", "two"], &["--children"]);
    let mut victims: Vec<Member> = Vec::new();
    for n in 0..times(16, 60) {
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
    for _ in 0..times(6, 10) {
        std::thread::sleep(Duration::from_micros(random(1_000_000)));
        if let Some(worker) = service.worker_pid("acme") {
            kill(worker);
        }
        service.kill_supervisor();
        members.iter_mut().for_each(|m| m.assert_is_well());
    }
    assert_recovers(&service, &mut members);
}
