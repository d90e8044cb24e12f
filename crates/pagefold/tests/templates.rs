//! Members that were born folded: they map a template of their group.

mod common;

use api::template::Reply;
use common::number;
use common::service::{Member, Service, cannot_fold, find_member, folded_pages, member, until};
use common::template::{Template, loaded, unload};
use serde_json::Value;

/// Pages of a template, and those of them that hold something.
const PAGES: usize = 1500;
const FILLED: usize = 1000;
/// The seed of its pages.
const SEED: u64 = 70_000;

fn known_pages() -> String {
    let path = std::path::PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    path.to_str().expect("a plain path").to_owned()
}

/// A service with a template that is loaded for `acme`.
fn with_template() -> (Service, Template) {
    let service = Service::start();
    let group = service.group("acme");
    let template = Template::known(&group, PAGES, FILLED, SEED);
    assert_eq!(template.load(&service, &group, "debian"), Ok(()));
    assert_eq!(loaded(&service, &group), ["debian"]);
    (service, template)
}

/// A member of `acme` that maps the template. It need not be connected yet.
fn clone(service: &Service, template: &Template, name: &str) -> Member {
    let mut member = service.run("acme", name, &[], &[&known_pages()]);
    for line in [&format!("file x {}", template.path()), "dontfork x", "mergeable x"] {
        assert_eq!(member.tell(line), "ok");
    }
    member
}

/// Waits until a member has so many pages folded.
fn until_folded(service: &Service, name: &str, pages: usize) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(120);
    loop {
        let shown = service.show("acme");
        let folded = find_member(&shown, name).map(|member| number(&member["folded_pages"]));
        if folded == Some(pages as u64) {
            return;
        }
        assert!(std::time::Instant::now() < end, "{name} has not {pages} pages folded: {shown}");
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

/// Number of a process's mappings of pools.
fn pool_mappings(pid: u32) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("its mappings");
    maps.lines().filter(|line| line.contains("/memfd:pagefold-") && line.contains(" rw-p ")).count()
}

fn group_of<'a>(audit: &'a Value, name: &str) -> &'a Value {
    let groups = audit["by_group"].as_array().expect("groups");
    groups.iter().find(|group| group["name"] == name).expect("the group")
}

#[test]
fn members_are_born_folded_and_their_savings_are_those_of_the_frames() {
    if cannot_fold() {
        return;
    }
    let (service, template) = with_template();
    let mut clones = ["a", "b", "c"].map(|name| clone(&service, &template, name));
    for name in ["a", "b", "c"] {
        until_folded(&service, name, FILLED);
    }
    assert!(clones.iter().all(|clone| pool_mappings(clone.pid()) == 1));
    assert_eq!(clones[0].tell(&format!("check x 0 {FILLED} {SEED}")), "ok");
    let shown = service.show("acme");
    assert_eq!(number(&shown["sharing_pages"]), 3 * FILLED as u64);
    let audit = service.assert_audit_is_clean();
    let found = group_of(&audit, &service.group("acme"));
    assert_eq!(number(&found["pool_mappings"]), 3 * FILLED as u64, "{found}");
    for term in ["folded_bytes", "pool_bytes"] {
        assert_eq!(found["savings"][term], found["engine"][term], "{term}: {found}");
    }
    assert!(number(&found["savings"]["pool_bytes"]) < (2 * FILLED as u64) << 12);
}

#[test]
fn pages_that_were_written_fold_again_and_those_of_the_template_heal() {
    if cannot_fold() {
        return;
    }
    let (service, template) = with_template();
    let mut clones = ["a", "b"].map(|name| clone(&service, &template, name));
    ["a", "b"].iter().for_each(|name| until_folded(&service, name, FILLED));
    // Written, and what the template holds there again.
    clones[0].tell("fill x 100 60 500");
    until_folded(&service, "a", FILLED - 60);
    clones[0].tell(&format!("fill x 100 60 {}", SEED + 100));
    until_folded(&service, "a", FILLED);
    assert_eq!(pool_mappings(clones[0].pid()), 1, "its mapping has healed");
    // The same new contents in both.
    clones.iter_mut().for_each(|clone| _ = clone.tell("fill x 300 60 900"));
    until(120, "other slots are mapped", || clones.iter().all(|clone| pool_mappings(clone.pid()) > 1));
    ["a", "b"].iter().for_each(|name| until_folded(&service, name, FILLED));
    clones.iter_mut().for_each(|clone| assert_eq!(clone.tell("check x 300 60 900"), "ok"));
    // A discarded page of a private mapping of a file is the file's again, whatever lay there.
    clones[0].tell("fill x 330 5 8800");
    clones[0].tell("drop x 300 60");
    assert_eq!(clones[0].tell(&format!("check x 0 {FILLED} {SEED}")), "ok");
    assert_eq!(clones[1].tell("check x 300 60 900"), "ok");
    until(60, "the mapping is the template's again", || {
        service.show("acme");
        folded_pages(&service.show("acme"), "a") >= FILLED as u64 - 60
    });
    assert_eq!(clones[0].tell(&format!("check x 0 {FILLED} {SEED}")), "ok");
    service.assert_audit_is_clean();
}

#[test]
fn member_with_copies_folds_onto_the_template() {
    if cannot_fold() {
        return;
    }
    let (service, template) = with_template();
    let mut copy = service.run("acme", "copy", &[], &[&known_pages()]);
    ["alloc x 1000", &format!("fill x 0 1000 {SEED}"), "mergeable x"].iter().for_each(|line| _ = copy.tell(line));
    until_folded(&service, "copy", FILLED);
    assert_eq!(pool_mappings(copy.pid()), 1, "the template's slots lie in its order");
    let shown = service.show("acme");
    assert_eq!(number(&shown["slots"]), FILLED as u64, "none of its pages took another slot: {shown}");
    drop(template);
    assert_eq!(copy.tell(&format!("check x 0 {FILLED} {SEED}")), "ok");
}

#[test]
fn clones_go_on_while_workers_and_supervisors_are_killed() {
    if cannot_fold() {
        return;
    }
    let (mut service, template) = with_template();
    let mut first = clone(&service, &template, "a");
    until_folded(&service, "a", FILLED);
    first.tell("fill x 40 10 500");
    until_folded(&service, "a", FILLED - 10);
    let worker = service.worker_pid("acme").expect("a worker");
    assert!(std::process::Command::new("kill").args(["-9", &worker.to_string()]).status().unwrap().success());
    until(60, "there is another worker", || service.worker_pid("acme").is_some_and(|pid| pid != worker));
    until_folded(&service, "a", FILLED - 10);
    let _second = clone(&service, &template, "b");
    until_folded(&service, "b", FILLED);
    service.kill_supervisor();
    until_folded(&service, "a", FILLED - 10);
    until_folded(&service, "b", FILLED);
    first.tell(&format!("fill x 40 10 {}", SEED + 40));
    until_folded(&service, "a", FILLED);
    assert_eq!(first.tell(&format!("check x 0 {FILLED} {SEED}")), "ok");
    service.assert_audit_is_clean();
}

#[test]
fn template_is_of_one_group_and_stays_until_its_last_member_is_gone() {
    if cannot_fold() {
        return;
    }
    let (service, template) = with_template();
    let (acme, beta) = (service.group("acme"), service.group("beta"));
    let refused = template.load(&service, &beta, "debian").unwrap_err();
    assert!(refused.contains("a template is of one group"), "{refused}");
    let other = Template::known(&beta, PAGES, FILLED, SEED);
    assert_eq!(other.load(&service, &beta, "debian"), Ok(()));
    let mut clone = clone(&service, &template, "a");
    until_folded(&service, "a", FILLED);
    assert_eq!(unload(&service, &acme, "debian"), Reply::Unloaded);
    assert!(loaded(&service, &acme).is_empty());
    assert!(matches!(unload(&service, &acme, "debian"), Reply::Refused(_)));
    assert_eq!(number(&service.show("acme")["slots"]), FILLED as u64, "its member has it still");
    assert_eq!(clone.tell(&format!("check x 0 {FILLED} {SEED}")), "ok");
    // The same file may have a name again.
    assert_eq!(template.load(&service, &acme, "other"), Ok(()));
    assert_eq!(loaded(&service, &acme), ["other"]);
    service.assert_audit_is_clean();
}

#[test]
fn unfolded_clone_has_pages_of_its_own() {
    if cannot_fold() {
        return;
    }
    let (service, template) = with_template();
    let mut clone = clone(&service, &template, "a");
    until_folded(&service, "a", FILLED);
    service.set("acme", &["--fold", "unfold"]);
    until(120, "everything is private", || {
        let shown = service.show("acme");
        member(&shown, "a")["state"] == "unfolded" && number(&shown["sharing_pages"]) == 0
    });
    assert_eq!(clone.tell(&format!("check x 0 {FILLED} {SEED}")), "ok");
    service.set("acme", &["--fold", "on"]);
    until_folded(&service, "a", FILLED);
    assert_eq!(clone.tell(&format!("check x 0 {FILLED} {SEED}")), "ok");
}

/// The program has written zeros. Where the template holds something else, they must stay; where it is empty, the mapping heals.
#[test]
fn zeros_stay_unless_the_template_is_empty_there() {
    if cannot_fold() {
        return;
    }
    let (service, template) = with_template();
    let mut clone = clone(&service, &template, "a");
    until_folded(&service, "a", FILLED);
    clone.tell("zero x 100 60");
    clone.tell("zero x 1200 60");
    // Pages that are folded after them, so that it was their turn.
    clone.tell("fill x 500 60 900");
    let mut other = service.run("acme", "other", &[], &[&known_pages()]);
    ["alloc x 60", "fill x 0 60 900", "mergeable x"].iter().for_each(|line| _ = other.tell(line));
    let broken = || find_member(&service.show("acme"), "a").map(|member| number(&member["broken_pages"]));
    until(120, "all but the zeros over something are folded", || broken() == Some(60));
    for line in ["zeros x 100 60", "zeros x 1200 60", "check x 500 60 900"] {
        assert_eq!(clone.tell(line), "ok", "{line}");
    }
    assert_eq!(clone.tell(&format!("check x 0 100 {SEED}")), "ok");
    service.assert_audit_is_clean();
}

/// One template after another, each of which fits by itself.
#[test]
fn templates_of_a_group_take_no_more_than_its_pool_may() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut member = service.run("acme", "first", &[], &[&known_pages()]);
    member.tell("alloc x 1");
    service.set("acme", &["--pool", "8M"]);
    let group = service.group("acme");
    let empty = |pages| Template::empty(&group, pages);
    empty(1200).load(&service, &group, "one").expect("it fits");
    let refused = empty(1200).load(&service, &group, "two").expect_err("both do not fit");
    assert!(refused.contains("9.4 MiB") && refused.contains("raise it"), "{refused}");
    empty(800).load(&service, &group, "three").expect("it fits beside the first one");
    assert_eq!(loaded(&service, &group).len(), 2);
}
