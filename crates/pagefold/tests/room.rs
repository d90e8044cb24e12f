//! Memory for pages that become private, and memory of pools: nothing is taken that is not there, or not a group's own.

mod common;

use common::formats::assert_documented;
use common::number;
use common::service::{Member, Service, cannot_fold, folded_pages, limit, small_memory, until};
use serde_json::Value;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// A reserve that no host has: 900 TiB.
const NO_ROOM: &str = "reserve = \"900T\"";
const ROOM: &str = "reserve = \"1M\"";

fn known_pages() -> String {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    path.to_str().expect("a plain path").to_owned()
}

/// Has a member allocate memory with the contents `seed` to `seed + pages`, each of them there twice.
fn hold_twice(member: &mut Member, memory: &str, pages: u64, seed: u64) {
    for line in [
        format!("alloc {memory} {}", 2 * pages),
        format!("dontfork {memory}"),
        format!("fill {memory} 0 {pages} {seed}"),
        format!("fill {memory} {pages} {pages} {seed}"),
        format!("mergeable {memory}"),
    ] {
        assert_eq!(member.tell(&line), "ok");
    }
}

/// Starts a member with the contents 1 to `pages`, each of them there twice.
fn member(service: &Service, name: &str, pages: u64) -> Member {
    let mut member = service.run("acme", name, &[], &[&known_pages()]);
    hold_twice(&mut member, "x", pages, 1);
    member
}

fn config(service: &str, group: &str) -> String {
    format!("[service]\n{service}\n[[group]]\nname = \"acme-TOKEN\"\n{group}\n")
}

/// Waits until the group says that it waits for room, and checks that `folded` pages of each member stay folded.
fn assert_waits(service: &Service, names: &[&str], folded: u64, purpose: &str) {
    let why = |shown: &Value| shown["waits_for_room"].as_str().unwrap_or_default().to_owned();
    let are_folded = |shown: &Value| names.iter().all(|name| folded_pages(shown, name) == folded);
    // The members' own figures may be a second older than the group's word.
    until(60, &format!("it waits: {purpose}"), || {
        let shown = service.show("acme");
        why(&shown).contains(purpose) && are_folded(&shown)
    });
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(3) {
        let shown = service.show("acme");
        assert!(are_folded(&shown), "{shown}");
    }
    // The reason has the memory of this moment. It is gone for a moment each time that the group asks again.
    until(60, "JSON and text have the reason", || {
        let why = why(&service.show("acme"));
        let text = service.pagefold(&["group", "show", &service.group("acme")]);
        let text = String::from_utf8(text.stdout).expect("text");
        let is_whole = why.contains("GiB are kept in reserve") && why.contains("free memory");
        is_whole && text.split_whitespace().collect::<Vec<_>>().join(" ").contains(&why)
    });
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
    until(120, "it is made anew", || service.log().contains("everything is private; folding begins again"));
    until(120, "what was shared is shared again", || folded_pages(&service.show("acme"), "a") == 2 * kept);
    assert!(service.show("acme")["waits_for_room"].is_null());
    assert_eq!(a.tell("read x 0 35000"), "ok");
}

/// Starts a member in this control group.
fn member_in(service: &Service, name: &str, cgroup: &str) -> Member {
    let script = format!("echo $$ > {cgroup}/cgroup.procs && exec {}", known_pages());
    service.run("acme", name, &[], &["sh", "-c", &script])
}

fn bound(service: &Service) -> (u64, String) {
    let limit = &service.show("acme")["pool_limit"];
    (number(&limit["bytes"]), limit["by"].as_str().expect("a limit").to_owned())
}

/// A tenant that writes everything twice again and again, in a control group of 64 MiB. Fails where only the group's
/// `pool` bounds the pool: it then holds all that the tenant has ever written twice. The first two parts leave the tenant 7 MiB below its
/// limit: nearer to it, folding is refused. With the third it would be beyond.
#[test]
fn pool_takes_no_more_than_half_of_its_members_memory_limits() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let Some((cgroup, _afterwards)) = small_memory(&format!("{}-a", service.mark().1), 64 << 20) else { return };
    let Some((beside, _too)) = small_memory(&format!("{}-b", service.mark().1), 16 << 20) else { return };
    let by_members = |bytes: u64| (bytes, "members_memory".to_owned());
    let mut tenant = member_in(&service, "tenant", &cgroup);
    let most = (32 << 20) / 4096;
    for (n, memory) in ["x", "y", "z"].into_iter().enumerate() {
        let folded = 2 * u64::min(3500 * (n as u64 + 1), most);
        hold_twice(&mut tenant, memory, 3500, 1 + 3500 * n as u64);
        until(60, &format!("{folded} pages are folded"), || folded_pages(&service.show("acme"), "tenant") >= folded);
    }
    assert_eq!(bound(&service), by_members(32 << 20));
    until(30, "it says so", || service.show("acme")["members"][0]["state"] == "no_room");
    let shown = service.show("acme");
    assert_documented(&["group show --json", "Savings of folding"], &shown);
    assert_eq!((number(&shown["slots"]), folded_pages(&shown, "tenant")), (most, 2 * most));
    let why = shown["no_room"].as_str().expect("a reason");
    assert!(why.contains("the pool is limited to 32.0 MiB by its members' memory limits"), "{why}");
    assert!(shown["members"][0]["fix"].as_str().is_some_and(|fix| fix.contains("raise the memory limits")), "{shown}");
    let text = service.pagefold(&["group", "show", &service.group("acme")]);
    assert!(String::from_utf8_lossy(&text.stdout).contains("by its members' memory limits"), "{text:?}");
    // Limits are the kernel's word, and looked at again and again. Two members of a control group count once.
    let same = member_in(&service, "same", &cgroup);
    let other = member_in(&service, "other", &beside);
    until(60, "the limit of another member counts", || bound(&service) == by_members(40 << 20));
    drop((same, other));
    until(60, "it counts no more", || bound(&service) == by_members(32 << 20));
    limit(&cgroup, 128 << 20);
    until(60, "a larger limit counts", || bound(&service) == by_members(64 << 20));
    until(120, "the rest is folded", || folded_pages(&service.show("acme"), "tenant") == 21_000);
    let free = PathBuf::from(&cgroup).parent().expect("a root").display().to_string();
    let _free = member_in(&service, "free", &free);
    until(60, "a member without a limit", || bound(&service).1 == "settings");
    tenant.assert_is_well();
}

/// A tenant of 256 MiB, whose limit is lowered when 62 MiB of its memory are folded. Without the look at control groups
/// it is killed.
#[test]
fn pages_become_private_only_within_memory_limits_of_members() {
    if cannot_fold() {
        return;
    }
    let mut service = Service::start_with(Some(&config(ROOM, "")));
    let Some((cgroup, _afterwards)) = small_memory(service.mark().1, 256 << 20) else { return };
    let mut tenant = member_in(&service, "tenant", &cgroup);
    hold_twice(&mut tenant, "x", 8000, 1);
    let folded = |service: &Service| folded_pages(&service.show("acme"), "tenant");
    until(60, "all is folded", || folded(&service) == 16_000);
    limit(&cgroup, 40 << 20);
    let refused = service.pagefold(&["group", "set", &service.group("acme"), "--fold", "unfold"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && said.contains("unfolding needs 62.5 MiB in control group"), "{said}");
    service.configure(&config(ROOM, "fold = \"unfold\""));
    until(60, "it waits for room", || {
        let waits = service.show("acme")["waits_for_room"].as_str().unwrap_or_default().to_owned();
        waits.contains("whose memory limit leaves")
    });
    until(60, "a part is private", || (6000..14_000).contains(&folded(&service)));
    tenant.assert_is_well();
    limit(&cgroup, 256 << 20);
    until(60, "all is private", || folded(&service) == 0);
    assert_eq!(tenant.tell("read x 0 16000"), "ok");
    assert!(service.show("acme")["waits_for_room"].is_null());
}
