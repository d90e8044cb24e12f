//! Memory for pages that become private, and memory of pools: nothing is taken that is not there, or not a group's own.

mod common;

use common::number;
use common::service::{Member, Service, cannot_fold, folded_pages, until};
use serde_json::Value;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A reserve that no host has: 900 TiB.
const NO_ROOM: &str = "reserve = \"900T\"";
const ROOM: &str = "reserve = \"1M\"";

/// Starts a member with the contents 1 to `pages`, each of them there twice.
fn member(service: &Service, name: &str, pages: u64) -> Member {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    let mut member = service.run("acme", name, &[], &[path.to_str().expect("a plain path")]);
    for line in [
        format!("alloc x {}", 2 * pages),
        "dontfork x".to_owned(),
        format!("fill x 0 {pages} 1"),
        format!("fill x {pages} {pages} 1"),
        "mergeable x".to_owned(),
    ] {
        assert_eq!(member.tell(&line), "ok");
    }
    member
}

fn config(service: &str, group: &str) -> String {
    format!("[service]\n{service}\n[[group]]\nname = \"acme-TOKEN\"\n{group}\n")
}

/// Waits until the group says that it waits for room, and checks that `folded` pages of each member stay folded.
fn assert_waits(service: &Service, names: &[&str], folded: u64, purpose: &str) {
    let why = |shown: &Value| shown["waits_for_room"].as_str().unwrap_or_default().to_owned();
    until(30, &format!("it waits: {purpose}"), || why(&service.show("acme")).contains(purpose));
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(3) {
        let shown = service.show("acme");
        assert!(names.iter().all(|name| folded_pages(&shown, name) == folded), "{shown}");
    }
    let why = why(&service.show("acme"));
    assert!(why.contains("GiB are kept in reserve") && why.contains("free memory"), "{why}");
    let text = service.pagefold(&["group", "show", &service.group("acme")]);
    let text = String::from_utf8(text.stdout).expect("text");
    assert!(text.split_whitespace().collect::<Vec<_>>().join(" ").contains(&why), "{text}");
    assert!(service.log().contains("waits for room"), "{}", service.log());
}

/// Fails with a worker that takes over changed settings without asking for room.
#[test]
fn changed_configuration_makes_pages_private_only_as_there_is_room() {
    if cannot_fold() {
        return;
    }
    let mut service = Service::start_with(Some(&config(ROOM, "")));
    let _members = ["a", "b"].map(|name| member(&service, name, 300));
    let names = ["a", "b"];
    let is_folded = |service: &Service, slots: u64| {
        let shown = service.show("acme");
        names.iter().all(|name| folded_pages(&shown, name) == 600) && number(&shown["slots"]) == slots
    };
    until(60, "all is shared", || is_folded(&service, 300));
    service.configure(&config(NO_ROOM, "intra-member-only = true"));
    assert_waits(&service, &names, 600, "members are to share nothing, and nothing is folded meanwhile");
    service.configure(&config(ROOM, "intra-member-only = true"));
    until(90, "each member has slots of its own", || is_folded(&service, 600));
    assert!(service.show("acme")["waits_for_room"].is_null());
    service.configure(&config(NO_ROOM, "intra-member-only = true\nfold = \"unfold\""));
    assert_waits(&service, &names, 600, "everything is to be unfolded");
    let group = service.group("acme");
    let refused = service.pagefold(&["group", "set", &group, "--fold", "unfold"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && said.contains("unfolding needs 4.7 MiB"), "{said}");
    service.configure(&config(ROOM, "intra-member-only = true\nfold = \"unfold\""));
    until(60, "all is private", || names.iter().all(|name| folded_pages(&service.show("acme"), name) == 0));
    assert!(service.show("acme")["waits_for_room"].is_null());
}

/// Fails with a worker that makes its pool anew every ten minutes, whatever memory there is.
#[test]
fn pool_is_made_anew_only_when_there_is_room() {
    if cannot_fold() {
        return;
    }
    // Without a prover, slots that were mapped lie waste: more than 64 MiB of them, and the pool is made anew.
    let mut service = Service::start_with(Some(&config(&format!("prover = false\n{NO_ROOM}"), "")));
    let (pages, kept) = (17_500, 200);
    let mut a = member(&service, "a", pages);
    until(120, "all is folded", || folded_pages(&service.show("acme"), "a") == 2 * pages);
    // The first pages of each half are kept.
    for half in 0..2 {
        let (from, seed) = (half * pages + kept, (half + 1) * 1_000_000);
        assert_eq!(a.tell(&format!("fill x {from} {} {seed}", pages - kept)), "ok");
    }
    assert_waits(&service, &["a"], 2 * kept, "it is to be made anew");
    assert!(!service.log().contains("everything is private"), "{}", service.log());
    service.configure(&config(&format!("prover = false\n{ROOM}"), ""));
    until(60, "it is made anew", || service.log().contains("everything is private; folding begins again"));
    until(60, "what was shared is shared again", || folded_pages(&service.show("acme"), "a") == 2 * kept);
    assert!(service.show("acme")["waits_for_room"].is_null());
    assert_eq!(a.tell("read x 0 35000"), "ok");
}
