//! Folded programs behave as without folding. These programs make system calls without the C library, lock their
//! memory, or fork beside threads that allocate.
//!
//! Their sources are in `programs/`. Each test builds its own, so that each can also be built and tried by hand.

mod common;

use common::built::Built;
use common::number;
use common::service::{Member, Service, cannot_fold, find_member, until};
use guest::qmp::Qmp;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const GROUP: &str = "acme";
const ALL: &[&str] = &["--all-anonymous"];
/// Time-out of a program that locks its memory or forks, in seconds: at least twice its time without folding.
const PATIENCE: u64 = 20;

/// Two members of one group that run the same program and are folded fast.
fn two_members(service: &Service, words: &[&str]) -> [Member; 2] {
    let members = ["one", "other"].map(|name| service.run(GROUP, name, ALL, words));
    fold_fast(service);
    members
}

fn fold_fast(service: &Service) {
    service.show(GROUP);
    service.set(GROUP, &["--scan-rate", "400000"]);
}

/// Lines of JSON that a member has printed.
fn said(member: &Member) -> Vec<Value> {
    member.lines().iter().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Ways of discarding memory that some kernels and hosts lack: name, error numbers, and the reason.
const MAY_BE_REFUSED: [(&str, &[i32], &str); 2] = [
    (
        "process_madvise",
        &[libc::EPERM, libc::EINVAL, libc::ENOSYS],
        "Linux before 6.13 does not let a process discard by it",
    ),
    ("io_uring", &[libc::EPERM, libc::ENOSYS], "io_uring is disabled"),
];

/// Faults that a program found, in words.
fn faults_of_discards(found: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    for (way, result) in found["ways"].as_object().expect("ways") {
        let error = number(&result["error"]);
        let refused = MAY_BE_REFUSED
            .iter()
            .find(|(name, errors, _)| name == way && errors.iter().any(|&e| u64::try_from(e) == Ok(error)));
        match refused {
            Some((_, _, why)) => eprintln!("skipped: discarding by {way}: error {error}: {why}"),
            None if error != 0 || number(&result["wrong_pages"]) + number(&result["wrong_pages_later"]) != 0 => {
                faults.push(format!("by {way}: {result}"));
            }
            None => {}
        }
    }
    faults
}

#[test]
fn discards_by_any_way_read_as_zeros() {
    if cannot_fold() {
        return;
    }
    let Some(built) = Built::new("discards.c") else { return };
    let service = Service::start();
    let mut members = two_members(&service, &[built.program()]);
    let found = members.each_mut().map(|m| m.finish(150));
    let faults: Vec<String> = found.iter().flat_map(faults_of_discards).collect();
    assert!(faults.is_empty(), "discarded pages do not hold zeros, or others are wrong:\n{}", faults.join("\n"));
}

/// Faults that a program and its last child found, in words.
fn faults_in_children(found: &Value, survivor: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    for (child, result) in found["children"].as_object().expect("children") {
        if number(&result["has_ended"]) != 1 || number(&result["wrong_pages"]) != 0 {
            faults.push(format!("in {child}: {result}"));
        }
    }
    if number(&found["wrong_in_parent"]) != 0 {
        faults.push(format!("where only children discarded: {} wrong pages", found["wrong_in_parent"]));
    }
    if *survivor != json!({"survivor": {"error": 0, "wrong_pages": 0}}) {
        faults.push(format!("in a child whose parent has ended: {survivor}"));
    }
    faults
}

#[test]
fn discards_in_children_read_as_zeros() {
    if cannot_fold() {
        return;
    }
    let Some(built) = Built::new("children.c") else { return };
    let service = Service::start();
    let mut members = two_members(&service, &[built.program()]);
    let mut faults = Vec::new();
    for member in &mut members {
        let status = member.end(150);
        assert!(status.success(), "{} ended with {status}: {}", member.name, member.errors());
        // The last child prints its line when its parent has ended.
        until(10, "what a child says whose parent has ended", || said(member).len() == 2);
        let said = said(member);
        faults.extend(faults_in_children(&said[0], &said[1]));
    }
    assert!(faults.is_empty(), "discarded pages do not hold zeros, or others are wrong:\n{}", faults.join("\n"));
}

/// Changes of mappings of folded memory that `changes.c` can make.
const CHANGES: [&str; 6] = ["unmap", "map_over", "protect", "lock", "move", "leave"];

#[test]
fn changes_of_mappings_past_the_c_library_are_noticed_and_end_folding() {
    if cannot_fold() {
        return;
    }
    let Some(built) = Built::new("changes.c") else { return };
    let service = Service::start();
    let _others = service.run(GROUP, "refill", ALL, &[built.program(), "refill"]);
    let mut members = CHANGES.map(|way| service.run(GROUP, way, ALL, &[built.program(), way]));
    fold_fast(&service);
    until(180, "all have changed what was folded", || members.iter().all(|member| !said(member).is_empty()));
    service.set(GROUP, &["--fold", "unfold"]);
    let mut put_aside = BTreeSet::<&str>::new();
    let is_put_aside = |way: &&str, shown: &Value| find_member(shown, way).is_some_and(|m| m["state"] == "lost_track");
    until(60, "what is unfolded is seen not to be as it was", || {
        let shown = service.show(GROUP);
        put_aside.extend(CHANGES.iter().filter(|way| is_put_aside(way, &shown)));
        // Locking faults in private pages. No folded page is left there, so unfolding replaces nothing.
        CHANGES.iter().all(|way| *way == "lock" || put_aside.contains(way))
    });
    service.set(GROUP, &["--fold", "on"]);
    // The agents look at all of it again.
    std::thread::sleep(Duration::from_secs(6));
    members.iter_mut().for_each(Member::close_input);
    let found = members.each_mut().map(|m| m.finish(60));
    eprintln!("{found:?}");
    for (way, found) in CHANGES.iter().zip(&found) {
        let expected = json!({"way": way, "wrong_pages": 0, "wrong_pages_later": 0, "wrong_others": 0});
        assert_eq!(*found, expected, "{put_aside:?}");
    }
}

/// The kernel tells nobody of pages that are missing in a mapping of the pool, and moves none from there.
#[test]
fn programs_own_userfaultfd_works_on_folded_memory() {
    if cannot_fold() {
        return;
    }
    let Some(built) = Built::new("faults.c") else { return };
    let service = Service::start();
    let mut members = two_members(&service, &[built.program()]);
    for found in members.each_mut().map(|member| member.finish(150)) {
        assert!(number(&found["folded"]) > 700, "{found}");
        let wrong = ["wrong_moved", "wrong_left", "wrong_missing"].map(|what| number(&found[what]));
        assert_eq!((wrong, number(&found["told"])), ([0; 3], 1024), "{found}");
    }
}

#[test]
fn mlockall_returns() {
    if cannot_fold() {
        return;
    }
    let Some(built) = Built::new("locks.c") else { return };
    let service = Service::start();
    let mut members = two_members(&service, &[built.program()]);
    until(70, "both are folded", || {
        members.iter_mut().for_each(Member::assert_is_well);
        members.iter().all(|m| !m.lines().is_empty())
    });
    for member in &mut members {
        let found = member.finish(PATIENCE);
        eprintln!("{found}");
        assert_eq!(number(&found["wrong_pages"]), 0, "{found}");
    }
}

#[test]
fn qemu_with_locked_memory_answers() {
    if cannot_fold() {
        return;
    }
    if Command::new("qemu-system-x86_64").arg("--version").stdout(Stdio::null()).status().is_err() {
        return eprintln!("skipped: there is no qemu-system-x86_64 on this host");
    }
    let service = Service::start();
    let socket = service.place().join("qmp.sock");
    let qmp = format!("unix:{},server=on,wait=off", socket.display());
    let words = "qemu-system-x86_64 -overcommit mem-lock=on -m 64M -accel tcg,tb-size=32 -display none -S -monitor none \
                 -nodefaults -qmp";
    let words: Vec<&str> = words.split_whitespace().chain([&qmp[..]]).collect();
    let mut member = service.run(GROUP, "qemu", ALL, &words);
    let ask = |question: &str| {
        Qmp::connect(&socket, Duration::from_secs(2)).and_then(|mut qmp| qmp.execute(question, json!({})))
    };
    let (mut answer, end) = (ask("query-status"), Instant::now() + Duration::from_secs(PATIENCE));
    while let Err(why) = &answer {
        member.assert_is_well();
        assert!(Instant::now() < end, "no answer in {PATIENCE} s: {why}: {}", member.stacks());
        std::thread::sleep(Duration::from_millis(50));
        answer = ask("query-status");
    }
    let answer = answer.unwrap_or_default();
    assert_eq!(answer["running"], false, "{answer}");
    let quit = ask("quit");
    let status = member.end(PATIENCE);
    assert!(status.success(), "{status}, {quit:?}: {}", member.errors());
}

#[test]
fn forks_beside_allocating_threads_go_on() {
    if cannot_fold() {
        return;
    }
    let Some(built) = Built::new("forks.c") else { return };
    let service = Service::start();
    let mut member = service.run(GROUP, "forking", ALL, &[built.program()]);
    fold_fast(&service);
    let found = member.finish(2 * PATIENCE);
    eprintln!("{found}");
    assert!(number(&found["well"]) > 20, "{found}");
    assert_eq!((number(&found["failed"]), number(&found["hung"])), (0, 0), "{found}");
}
