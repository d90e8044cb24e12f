//! Memory is the same as without folding, after every operation.
//!
//! Two members of a group do everything to their memory that a program can, in every way to make a system call. A model
//! (`trials/oracle`) holds the right value of each byte.
//!
//! | variable | effect |
//! |---|---|
//! | `PAGEFOLD_ORACLE` | further arguments of the program, such as `--only raw-mapping`, to narrow a failure down |
//! | `PAGEFOLD_SOAK_SECONDS` | a hundred times as many steps, spread over that time, or longer if they take longer |

mod common;

use common::number;
use common::service::{Service, cannot_fold, seconds, until};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Threads of each member.
const THREADS: u64 = 2;
/// Time over which the steps are spread without `PAGEFOLD_SOAK_SECONDS`, in seconds.
const USUALLY: u64 = 30;
/// Least rate of both members together on the slowest machine, in steps a second.
const LEAST_A_SECOND: u64 = 400;
/// Time between two unfoldings of all pages: 4 s.
const FOLDING: Duration = Duration::from_secs(4);
/// Least number of folded, broken, refolded and unfolded pages, each: 1 for every 100 steps.
const SHARE: u64 = 100;

/// Variable by which forked children enrol after 0.2 s, so that many do.
const CHILDREN: (&str, &str) = ("PAGEFOLD_CHILDREN_AFTER", "0.2");

/// Path of the program `oracle`, which `./x test` builds.
fn oracle() -> String {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("oracle");
    assert!(path.exists(), "{} is not there: cargo build -p trials", path.display());
    path.to_str().expect("a plain path").to_owned()
}

/// Steps of both members together.
fn steps() -> u64 {
    if seconds(USUALLY) > USUALLY { 10_000_000 } else { 100_000 }
}

/// Longest time that the steps may take, in seconds.
fn limit() -> u64 {
    seconds(USUALLY) + steps() / LEAST_A_SECOND
}

/// Pages that members map from the pool.
fn folded(shown: &Value) -> u64 {
    shown["members"].as_array().map_or(0, |members| members.iter().map(|m| number(&m["folded_pages"])).sum())
}

/// Whether a process has not ended.
fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

/// Has all pages unfolded, and returns their number.
fn unfold(service: &Service) -> u64 {
    let before = folded(&service.show("acme"));
    service.set("acme", &["--fold", "unfold"]);
    let mut left = before;
    let end = Instant::now() + Duration::from_secs(2);
    while left > 0 && Instant::now() < end {
        // Pages that were folded at the last moment stay folded for a while.
        left = left.min(folded(&service.show("acme")));
        std::thread::sleep(Duration::from_millis(20));
    }
    service.set("acme", &["--fold", "on"]);
    before - left
}

/// Results of a run of two members.
struct Run {
    /// The last output of `group show`.
    shown: Value,
    /// Number of all unfolded pages.
    unfolds: u64,
    /// Counts that each member printed.
    counted: [Value; 2],
    /// All states in which members were seen, with their details.
    states: BTreeSet<String>,
    /// Number of forked children that were members.
    enrolled_children: usize,
}

impl Run {
    fn of(words: &[&str], steps: u64, seconds: u64) -> Self {
        let service = Service::start();
        let (steps, time, threads) = ((steps / 2).to_string(), seconds.to_string(), THREADS.to_string());
        let oracle = oracle();
        let plain = [&oracle[..], "--threads", &threads, "--steps", &steps, "--seconds", &time];
        let words = [&plain, words].concat();
        let start = |name| service.run_with("acme", name, &["--all-anonymous"], &words, &[CHILDREN]);
        let mut members = ["one", "other"].map(start);
        until(60, "both are members", || service.show("acme")["members"].as_array().is_some_and(|m| m.len() >= 2));
        service.set("acme", &["--scan-rate", "400000"]);
        let (mut unfolds, mut shown, mut states) = (0, Value::Null, BTreeSet::new());
        while members.iter().all(|m| runs(m.pid())) {
            unfolds += unfold(&service);
            service.assert_audit_is_clean();
            shown = service.show("acme");
            let of = shown["members"].as_array().into_iter().flatten();
            let is_child = |m: &&Value| m["family"] != m["name"];
            states
                .extend(of.filter(|m| !is_child(m)).map(|m| format!("{}: {}: {}", m["name"], m["state"], m["detail"])));
            let end = Instant::now() + FOLDING;
            while Instant::now() < end && members.iter().all(|m| runs(m.pid())) {
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        // The member that has ended first comes first: it may have found an error.
        members.sort_by_key(|m| runs(m.pid()));
        let counted = members.each_mut().map(|m| m.finish(limit()));
        let enrolled_children = service.log().matches("forked by").count();
        Self { shown, unfolds, counted, states, enrolled_children }
    }
}

/// Operations left out because they end the folding of the program. They change mappings or protection, or lock memory,
/// by the program's own system call instruction. The agent notices them past the C library and its `syscall`. Test
/// `exact` covers them.
const ENDS_FOLDING: &str = "raw-mapping,raw-protect,raw-lock,raw-brk";
/// Operations left out because the agent cannot notice them: the kernel reports them to nobody (`docs/security.md`).
const UNSEEN: &str = "raw-guard,raw-wipeonfork,raw-keeponfork,raw-dontfork,raw-dofork,raw-settle";

#[test]
fn memory_is_as_without_folding_after_every_operation() {
    if cannot_fold() {
        return;
    }
    let more = std::env::var("PAGEFOLD_ORACLE").unwrap_or_default();
    let mut more: Vec<&str> = more.split_whitespace().collect();
    let is_all = more.is_empty();
    let without = [ENDS_FOLDING, UNSEEN].join(",");
    if is_all {
        more = vec!["--without", &without];
    }
    let run = Run::of(&more, steps(), seconds(USUALLY));
    let Run { shown, unfolds, counted, states, enrolled_children } = &run;
    let sum = |what: &str| counted.iter().map(|counted| number(&counted[what])).sum::<u64>();
    let (made, breaks) = (sum("steps"), sum("breaks_seen"));
    let (folds, refolds) = (number(&shown["folds"]), number(&shown["refolds"]));
    eprintln!(
        "{made} steps: {folds} folds, {breaks} breaks, {refolds} refolds, {unfolds} unfolds; {enrolled_children} children \
         enrolled; {counted:?}"
    );
    // Broken pages rest before they are folded again, however many steps are made meanwhile. A witness has to answer in
    // time, too, which it may not on a busy machine. And unfolding has its moments. So a quarter is asked for.
    for (what, count) in [("folds", folds), ("breaks", breaks), ("refolds", 4 * refolds), ("unfolds", 4 * unfolds)] {
        assert!(count >= made / SHARE, "{count} {what} in {made} steps: {shown} {counted:?} {states:?}");
    }
    if is_all {
        assert!(!states.iter().any(|state| state.contains("lost_track")), "{states:?}");
        assert!(*enrolled_children > 0, "no forked child was a member: {states:?}");
        counted.iter().for_each(assert_nothing_was_left_out);
    }
}

fn assert_nothing_was_left_out(counted: &Value) {
    assert!(number(&counted["children"]) > 0, "{counted}");
    for (operation, row) in counted["operations"].as_object().expect("operations") {
        let times = ["libc", "function", "raw", "refused"].iter().map(|way| number(&row[way])).sum::<u64>();
        assert!(times > 0, "no {operation} in {counted}");
    }
}
