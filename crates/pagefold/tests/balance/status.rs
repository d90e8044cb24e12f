//! `pagefold balance status` tells what balloons do.

use crate::common::service::until;
use crate::common::{json_of, number};
use crate::rig::{Guests, KEPT, M, RAM, guests};
use serde_json::{Value, json};
use std::process::Command;

/// Both guests, by a command without rules.
fn without_rules(guests_of: &Guests) -> Value {
    let ledger = guests_of.lab.dir().join("other-ledger");
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.args(["balance", "--json", "--guest", &format!("{}-*", guests_of.group), "status", "--service"]);
    json_of(&command.arg(ledger).output().expect("run pagefold balance"))
}

#[test]
fn balloons_that_are_there_are_not_absent_and_one_that_took_memory_back_does_not_work() {
    let Some(guests_of) = Guests::start("status") else { return };
    let drivers = |status: &Value| guests(status).iter().map(|guest| guest["driver"].clone()).collect::<Vec<_>>();
    assert_eq!(drivers(&without_rules(&guests_of)), [json!("unused"), json!("unused")]);
    until(120, "all loans are back", || {
        guests_of.run(&["apply", "--floor", "100T"]);
        guests_of.sizes().iter().all(|size| size.abs_diff(KEPT) < M)
    });
    guests_of.run(&["apply", "--floor", "100T"]);
    assert_eq!(drivers(&guests_of.status()), [json!("works"), json!("works")]);
    // Somebody else lets the first one have all its RAM.
    guests_of.qmp(0, "balloon", json!({ "value": RAM }));
    until(60, "it has all its RAM", || guests_of.sizes()[0] == RAM);
    let status = guests_of.status();
    let (first, other): (Vec<&Value>, Vec<&Value>) =
        guests(&status).iter().partition(|guest| number(&guest["actual_bytes"]) == RAM);
    assert_eq!((&first[0]["driver"], &other[0]["driver"]), (&json!("deflated"), &json!("works")), "{status}");

    // A refusal has a sum that adds up: what is wanted is more than what is spare and what would be freed.
    let refused = guests_of.run(&["reserve", "100T", "--for", "next", "--floor", "100T", "--dry-run"]);
    let refused: Value = serde_json::from_slice(&refused.stdout).expect("JSON");
    let reason = refused["reason"].as_str().expect("a reason");
    let mib: Vec<i64> = reason.split(' ').filter_map(|word| word.parse().ok()).collect();
    assert!(mib.len() == 3 && mib[1] < 0 && mib[0] > mib[1] + mib[2], "{reason}");
}
