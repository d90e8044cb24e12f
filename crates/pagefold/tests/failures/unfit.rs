//! Members that cannot be folded for a time, or at all: they use userfaultfd themselves, or references that a move does not see.

use crate::common;
use crate::common::number;
use crate::common::service::{Member, Service, cannot_fold, find_member, until};
use crate::rig::wait_for_state;
use serde_json::Value;
use std::fs;
use std::time::Duration;

#[test]
fn agent_yields_to_a_programs_own_userfaultfd() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut other = service.torture("acme", "other", &[], &["stable", "--pages", "3000", "--classes", "50"]);
    let rounds = if std::env::var_os("PAGEFOLD_SOAK_SECONDS").is_some() { "6" } else { "2" };
    let words = ["yielding", "--pause", "1500", "--rounds", rounds, "--await-folded"];
    let mut yielding = service.torture("acme", "yielding", &[], &words);
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
