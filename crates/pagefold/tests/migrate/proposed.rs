//! A guest that is moved because its host is short of memory, and a rule says where it goes.

use crate::arrives::until_folded;
use crate::common::formats::assert_documented;
use crate::common::service::{cannot_fold, until};
use crate::common::{Ends, json_of, number};
use crate::rig::{PATIENCE, SERVICE, TO, Vm, hosts, migrate};
use serde_json::Value;
use std::fs;
use std::process::Stdio;

#[test]
fn proposed_guest_goes_where_a_rule_sends_it() {
    if cannot_fold() {
        return;
    }
    let [a, b] = hosts(1000);
    let Some(from) = Vm::up(&a) else { return };
    from.ask("echo kept > /tmp/kept");
    let to = from.waits_on(&b, &[]);
    until_folded(&from);
    let predicted = json_of(&migrate(&from, &["--dry-run", "--json"]));
    // More than half of the floor is available, so memory does not run out.
    let floor = (host::available_bytes().expect("the kernel tells") / 4 * 5).to_string();
    let rule = format!("{}={TO}", from.name);
    let words = ["balance", "apply", "--every", "1", "--hurry", "12", "--floor", &floor, "--service", SERVICE];
    let words = [&words[..], &["--move", &rule, "--move-within", "90s"]].concat();
    let mut balancer = a.command(env!("CARGO_BIN_EXE_pagefold"), &words);
    let _balancer = Ends(balancer.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("run pagefold balance"));
    to.assert_runs();
    until(PATIENCE, "its old QEMU has ended", || from.has_ended());
    assert_eq!(to.ask("cat /tmp/kept"), "kept");
    let lines = || -> Vec<Value> {
        let text = fs::read_to_string(a.path(&format!("{SERVICE}/journal/journal"))).expect("a journal");
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter(|line| ["proposal", "migrate", "migrated"].iter().any(|kind| line["entry"] == *kind)).collect()
    };
    until(PATIENCE, "the journal has its end", || lines().len() >= 3);
    let lines = lines();
    let entries: Vec<_> = lines.iter().map(|line| line["entry"].as_str().expect("a kind")).collect();
    assert_eq!(entries, ["proposal", "migrate", "migrated"]);
    assert_documented(&["pagefold balance", "pagefold journal"], &lines.clone().into());
    assert_eq!(
        (&lines[0]["to"], &lines[0]["command"]),
        (&TO.into(), &format!("pagefold migrate {} --to {TO}", from.pid).into())
    );
    assert!(lines[2]["problem"].is_null(), "{}", lines[2]);
    for figure in ["frees_bytes", "costs_bytes"] {
        let [proposed, predicted] = [&lines[0], &predicted].map(|one| number(&one[figure]));
        eprintln!("{figure}: {proposed} was proposed, {predicted} predicted");
        assert!(proposed.abs_diff(predicted) <= predicted / 10, "{figure}: {} and {predicted}", lines[0]);
    }
}
