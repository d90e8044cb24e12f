//! `pagefold audit` counts a frame once, however many processes map it: children that inherit folded pages, and groups of two services
//! that have one name.

mod common;

use common::service::{Member, Service, cannot_fold, find_member, until};
use common::{json_of, number};
use serde_json::Value;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

/// Starts a member of a group of the service in `place`, which has 3,000 pages, each of them there twice.
fn member((variable, token): (&str, &str), place: &Path, group: &str, dir: &Path) -> Member {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.args(["run", "--group", group, "--name", "m", "--service"]).arg(place).arg("--");
    command.arg(Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages"));
    // Children become members after a second.
    command.env(variable, token).env("PAGEFOLD_EAGER", "1").env("PAGEFOLD_CHILDREN_AFTER", "1");
    let mut member = Member::spawn(command, "m", dir);
    for line in ["alloc x 6000", "fill x 0 3000 1", "fill x 3000 3000 1", "mergeable x"] {
        member.tell(line);
    }
    until(60, "all is folded", || {
        let shown = asked(place, &["group", "show", group, "--json"]);
        shown.status.success() && folded(&json_of(&shown)) == 6000
    });
    member
}

fn folded(shown: &Value) -> u64 {
    find_member(shown, "m").map_or(0, |m| number(&m["folded_pages"]))
}

/// Runs `pagefold` for the service in `place`.
fn asked(place: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.args(words).arg("--service").arg(place).output().expect("run pagefold")
}

/// A second service, which ends with the first one's test.
struct Second(Child);

impl Second {
    fn start((variable, token): (&str, &str), place: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(["serve", "--stop-workers", "--dir"]).arg(place).env(variable, token);
        let second = Self(command.stderr(Stdio::null()).spawn().expect("start pagefold serve"));
        until(60, "it answers", || asked(place, &["group", "list", "--json"]).status.success());
        second
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status();
        let _ = self.0.wait();
    }
}

fn groups<'a>(audit: &'a Value, name: &str) -> Vec<&'a Value> {
    audit["by_group"].as_array().expect("a list").iter().filter(|group| group["name"] == name).collect()
}

#[test]
fn inherited_folded_pages_are_saved_once() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let (name, dir) = (service.group("acme"), tempfile::tempdir().expect("a directory"));
    let mut parent = member(service.mark(), &service.place(), &name, dir.path());
    let before = service.assert_audit_is_clean();
    let before = groups(&before, &name)[0].clone();
    assert_eq!(["pool_mappings", "inherited_mappings"].map(|f| number(&before[f])), [6000, 0]);
    for _ in 0..4 {
        parent.tell("fork");
    }
    // Members or not yet, they are of one family.
    let mut counted = 0;
    until(60, "children are members", || {
        let audit = service.assert_audit_is_clean();
        let group = groups(&audit, &name)[0];
        let [members, others] = ["members", "other_processes"].map(|f| number(&group[f]));
        assert_eq!(members + others, 5, "{group}");
        assert_eq!(number(&group["savings"]["folded_bytes"]), 6000 << 12, "{group}");
        assert_eq!(number(&group["savings"]["folded_bytes"]), number(&group["engine"]["folded_bytes"]), "{group}");
        counted = number(&group["inherited_mappings"]);
        members > 1
    });
    assert!(counted >= 6000, "{counted}");

    // A page that the parent writes is still one frame's saving while a child has it folded.
    parent.tell("fill x 0 10 77777");
    let audit = service.assert_audit_is_clean();
    assert_eq!(number(&groups(&audit, &name)[0]["savings"]["folded_bytes"]) >> 12, 6000);
}

#[test]
fn groups_of_two_services_are_two() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let (name, dir) = (service.group("acme"), tempfile::tempdir().expect("a directory"));
    let places = [service.place(), dir.path().join("s")];
    let _second = Second::start(service.mark(), &places[1]);
    let _members = places.each_ref().map(|place| member(service.mark(), place, &name, dir.path()));
    for place in &places {
        let audit = json_of(&asked(place, &["audit", "--json"]));
        assert_eq!(audit["cross_group_frames"], 0, "{audit}");
        let is_asked = |group: &&Value| group["service"] == place.to_str().expect("a plain path");
        let (own, another): (Vec<_>, Vec<_>) = groups(&audit, &name).into_iter().partition(is_asked);
        assert_eq!((own.len(), another.len()), (1, 1), "{audit}");
        for (group, members) in [(own[0], [1, 0]), (another[0], [0, 1])] {
            assert_eq!(["members", "other_processes"].map(|f| number(&group[f])), members, "{group}");
            assert_eq!(number(&group["pool_frames"]), 3000, "{group}");
            assert_eq!(number(&group["savings"]["folded_bytes"]), 6000 << 12, "{group}");
        }
        assert_eq!(number(&own[0]["engine"]["folded_bytes"]), 6000 << 12);
        assert!(another[0]["service"].is_null() && another[0]["engine"].is_null(), "{audit}");
        assert_eq!(audit["saved_bytes"], own[0]["saved_bytes"], "the total has no other service's pool");
        let text = String::from_utf8(asked(place, &["audit"]).stdout).expect("text");
        assert!(!text.contains("DIFFERS") && text.contains(&format!("Saved in {name} of another service")), "{text}");
        let without = ", without 1 group of services that were not asked.\n";
        assert!(text.ends_with(without), "{text}");
        let audit = json_of(&asked(place, &["audit", "--json", "--group", &name]));
        assert!(groups(&audit, &name).iter().all(is_asked), "another service's group is another: {audit}");
    }
}

#[test]
fn groups_of_services_that_were_not_asked_are_apart() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let (name, dir) = (service.group("acme"), tempfile::tempdir().expect("a directory"));
    let places = ["second", "third"].map(|place| dir.path().join(place));
    let _others = places.each_ref().map(|place| Second::start(service.mark(), place));
    let _members = places.each_ref().map(|place| member(service.mark(), place, &name, dir.path()));
    let audit = service.assert_audit_is_clean();
    let found = groups(&audit, &name);
    assert_eq!(found.len(), 2, "{audit}");
    for group in found {
        assert!(group["service"].is_null(), "{group}");
        assert_eq!(["other_processes", "pool_frames"].map(|f| number(&group[f])), [1, 3000], "{group}");
        assert_eq!(number(&group["savings"]["folded_bytes"]), 6000 << 12, "{group}");
    }
}
