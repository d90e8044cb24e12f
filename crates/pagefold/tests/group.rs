//! `pagefold group`, on a service whose members really fold.

mod common;

use common::formats::assert_documented;
use common::service::{Service, cannot_fold, find_member, folded_pages, until};
use common::{json_of, number};
use serde_json::Value;
use std::time::{Duration, Instant};

const PROGRAM: &str = "known_pages";

/// Fields that `group show --json` must have.
const FIELDS: [&str; 18] = [
    "name",
    "members",
    "slots",
    "sharing_pages",
    "zero_pages",
    "saved_bytes",
    "broken_pages",
    "folds",
    "refolds",
    "short_folds",
    "pages_scanned",
    "pages_hashed",
    "fold_failures",
    "scan_rate",
    "worker_cpu_s",
    "agent_cpu_s",
    "vmas",
    "index_bytes",
];

/// Asserts that JSON and text of `group show` have the right content, for one member that folds.
fn assert_is_shown(service: &Service, shown: &Value) {
    for key in FIELDS {
        assert!(!shown[key].is_null(), "no {key} in {shown}");
    }
    assert_eq!(["slots", "sharing_pages", "zero_pages"].map(|key| number(&shown[key])), [1, 500, 100]);
    let group = service.group("acme");
    let text = service.pagefold(&["group", "show", &group]);
    let text = String::from_utf8(text.stdout).unwrap();
    for words in [&group[..], "= saved", "Members", "folding: it folds."] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

/// Pages that had been folded and were written were fingerprinted beside the rate.
#[test]
fn group_fingerprints_no_more_than_its_rate_also_of_written_pages() {
    const RATE: u64 = 40;
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let program = std::path::PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name(PROGRAM);
    let mut a = service.run("acme", "a", &[], &[program.to_str().expect("a plain path")]);
    ["alloc x 3000", "same x 0 3000 1", "mergeable x"].iter().for_each(|line| _ = a.tell(line));
    until(60, "all is folded", || folded_pages(&service.show("acme"), "a") == 3000);
    service.set("acme", &["--scan-rate", &RATE.to_string()]);
    until(60, "the member has its rate", || number(&service.show("acme")["scan_rate"]) <= RATE);
    let hashed = || number(&service.show("acme")["pages_hashed"]);
    let (before, began) = (hashed(), Instant::now());
    a.tell("same x 0 3000 1");
    until(60, "the pages are broken", || number(&service.show("acme")["broken_pages"]) > 0);
    std::thread::sleep(Duration::from_secs(12));
    until(120, "pages are fingerprinted", || hashed() - before >= RATE);
    // An unused rate is kept for 10 s, and reports may be of a moment ago.
    let (read, most) = (hashed() - before, RATE * (began.elapsed().as_secs() + 12));
    assert!(read <= most, "{read} pages were fingerprinted, at most {most} may be");
}

#[test]
fn folding_group_is_shown_and_changed() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let program = std::path::PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name(PROGRAM);
    let mut a = service.run("acme", "a", &[], &[program.to_str().expect("a plain path")]);
    for line in ["alloc x 600", "same x 0 500 1", "zero x 500 100", "mergeable x"] {
        a.tell(line);
    }
    let folded = || folded_pages(&service.show("acme"), "a");
    // The worker counts zero pages apart, and a moment later.
    let counts = |shown: &Value| ["slots", "sharing_pages", "zero_pages"].map(|key| number(&shown[key]));
    until(60, "all is folded", || folded() == 500 && counts(&service.show("acme")) == [1, 500, 100]);
    let shown = service.show("acme");
    assert_is_shown(&service, &shown);
    assert_documented(&["group show --json", "Savings of folding"], &shown);
    let group = service.group("acme");
    service.set("acme", &["--fold", "unfold", "--scan-rate", "1000", "--huge-pages", "30%"]);
    let settings = service.show("acme")["settings"].clone();
    assert_eq!((&settings["fold"], &settings["scan_rate"]), (&"unfold".into(), &1000.into()));
    assert_eq!(settings["huge_pages"], 30);
    until(60, "all is private again", || folded() == 0);
    until(30, "it says so", || find_member(&service.show("acme"), "a").is_some_and(|m| m["state"] == "unfolded"));
    service.set("acme", &["--fold", "on", "--scan-rate", "auto", "--huge-pages", "never"]);
    until(60, "all is folded again", || folded() == 500);
    let listed = json_of(&service.pagefold(&["group", "list", "--json"]));
    assert_documented(&["group list --json", "group show --json", "Savings of folding"], &listed);
    let line = listed.as_array().unwrap().iter().find(|g| g["name"] == group[..]).unwrap().clone();
    assert_eq!((&line["members"], &line["worker"]), (&1.into(), &"running".into()));
    let settings = &line["settings"];
    assert_eq!((&settings["huge_pages"], &settings["scan_rate"]), (&"never".into(), &"auto".into()), "{line}");
}

/// Policy of a thread by the kernel (`man 5 proc`, field 41 of `stat`).
fn policy(pid: u64, tid: &str) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat")).ok()?;
    Some(stat.rsplit_once(") ")?.1.split(' ').nth(38)?.to_owned())
}

/// Policies of a process's threads by their names.
fn policies(pid: u64) -> Vec<(String, String)> {
    let tids = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let of = |tid: &str| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm")).ok()?;
        Some((name.trim_end().to_owned(), policy(pid, tid)?))
    };
    tids.filter_map(|entry| of(entry.file_name().to_str()?)).collect()
}

#[test]
fn threads_that_fold_preempt_others_only_in_eager_group() {
    const USUAL: &str = "0";
    const BATCH: &str = "3";
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let program = std::path::PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name(PROGRAM);
    let mut a = service.run("acme", "a", &[], &[program.to_str().expect("a plain path")]);
    ["alloc x 600", "same x 0 500 1", "mergeable x"].iter().for_each(|line| _ = a.tell(line));
    until(60, "it is folded", || folded_pages(&service.show("acme"), "a") == 500);
    let shown = service.show("acme");
    let member = number(&find_member(&shown, "a").unwrap()["pid"]);
    let worker = number(&shown["worker_pid"]);
    let are = |expected: &str| {
        let (threads, of_worker) = (policies(member), policies(worker));
        let agents: Vec<_> = threads.iter().filter(|(name, _)| name == "pagefold").collect();
        let others = || threads.iter().filter(|(name, _)| name != "pagefold");
        let are_usual = others().all(|(_, policy)| policy == USUAL) && others().count() > 1;
        are_usual
            && agents.len() == 1
            && agents[0].1 == expected
            && of_worker.iter().all(|(_, policy)| policy == expected)
    };
    assert_eq!(shown["settings"]["latency"], "quiet");
    until(30, "the group is quiet", || are(BATCH));
    service.set("acme", &["--latency", "eager"]);
    until(30, "the group is eager", || are(USUAL));
    assert_eq!(service.show("acme")["settings"]["latency"], "eager");
    service.set("acme", &["--latency", "quiet"]);
    until(30, "the group is quiet again", || are(BATCH));
}

#[test]
fn invalid_settings_and_unknown_groups_are_refused() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    for (words, code, error) in [
        (&["set", "acme", "--fold", "maybe"][..], 2, "use on, off or unfold"),
        (&["set", "acme", "--scan-rate", "0"], 2, "use auto, or pages a second"),
        (&["set", "acme", "--huge-pages", "101%"], 2, "use never, or a percentage"),
        (&["set", "acme", "--zero-pages", "drop"], 2, "use share, ignore or when-idle"),
        (&["set", "acme", "--latency", "low"], 2, "use quiet or eager"),
        (&["set", "acme"], 2, "nothing to set"),
        (&["set", "../acme", "--fold", "on"], 2, "group name"),
        (&["show", "no-such"], 2, "there is no group no-such"),
        (&["set", "no-such", "--fold", "off"], 2, "there is no group no-such"),
    ] {
        let output = service.pagefold(&[&["group"], words].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(code) && said.contains(error), "{words:?}: {:?} {said}", output.status);
    }
}
