//! A group whose scan rate follows its yield.

mod common;

use common::formats::assert_documented;
use common::number;
use common::service::{Member, Service, cannot_fold, until};
use serde_json::Value;

/// The rate with which a group begins, in pages a second.
const FIRST: u64 = 4096;
/// Pages of each member: seconds of work at that rate.
const PAGES: u64 = 60_000;

fn member(service: &Service, group: &str, name: &str) -> Member {
    let program = std::path::PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    service.run(group, name, &[], &[program.to_str().expect("a plain path")])
}

fn rate(shown: &Value) -> u64 {
    number(&shown["adaptive_rate"]["pages_per_s"])
}

fn reason(shown: &Value) -> &str {
    shown["adaptive_rate"]["reason"].as_str().expect("a reason")
}

/// Two members of one group hold the same contents; the member of the other group holds contents that nobody else has. On a host
/// whose processors are all taken, even the first group goes slower, and says so.
#[test]
fn rate_rises_where_pages_are_reclaimed_and_falls_where_none_are_with_the_reason() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let members = [("yields", "a"), ("yields", "b"), ("vain", "a")];
    let mut members = members.map(|(group, name)| (group, member(&service, group, name)));
    for group in ["yields", "vain"] {
        assert_eq!(service.show(group)["adaptive_rate"], Value::Null, "the default has none");
        service.set(group, &["--scan-rate", "adaptive:100%"]);
    }
    for (group, member) in &mut members {
        member.tell(&format!("alloc x {PAGES}"));
        let seed = if *group == "vain" { 7 } else { 1 };
        member.tell(&format!("fill x 0 {PAGES} {seed}"));
        member.tell("mergeable x");
    }
    for group in ["yields", "vain"] {
        until(120, "its rate is another one", || rate(&service.show(group)) != FIRST);
    }
    let shown = service.show("yields");
    assert_documented(&["group show --json", "Savings of folding"], &shown);
    let (now, why) = (rate(&shown), reason(&shown));
    let is_right =
        if now > FIRST { why.contains("pages were reclaimed for") } else { why.contains("waited for a pro") };
    assert!(is_right, "{now}: {why}");
    let shown = service.show("vain");
    assert!(rate(&shown) < FIRST, "{shown}");
    let why = reason(&shown);
    assert!(why.starts_with("0 pages were reclaimed for") || why.contains("waited for a pro"), "{why}");
    assert_eq!(shown["settings"]["scan_rate"], "adaptive:100%");
    let told = format!("group {}: fingerprints up to 2048 pages a second, 4096 before: ", service.group("vain"));
    until(10, "the log has the change", || service.log().contains(&told));
    let text = service.pagefold(&["group", "show", &service.group("vain")]);
    let text = String::from_utf8(text.stdout).expect("text");
    assert!(text.contains("for at most 100% of a processor") && text.contains("since "), "{text}");
    // A rate of the operator's ends it.
    service.set("vain", &["--scan-rate", "5000"]);
    until(10, "it ends", || service.show("vain")["adaptive_rate"].is_null());
}
