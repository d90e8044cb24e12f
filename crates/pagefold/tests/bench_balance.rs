//! `pagefold bench balance`: faults of real guests are flagged, and harm no other guest. A break storm below the floor harms none.

mod common;

use common::formats::assert_documented;
use serde_json::Value;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// Tolerated time until a fault is flagged, in seconds. The rule is 20 s; the rest is for a busy machine.
const FLAGGED_WITHIN_S: f64 = 40.0;
/// Tolerated time until loans are back, in seconds. The rule is 10 s; the rest is for a busy machine.
const BACK_WITHIN_S: f64 = 60.0;
/// Tolerated pause of a guest, in milliseconds. The rule is 10 s; the rest is for a busy machine.
const LONGEST_PAUSE_MS: u64 = 20_000;

/// Lock that a test holds while its bench runs: on a host, one runs at a time.
static BENCH: Mutex<()> = Mutex::new(());

/// The bench's result; `None` if this host lacks something.
fn bench(words: &[&str]) -> Option<Value> {
    if common::not_root() {
        return None;
    }
    let _turn = BENCH.lock().unwrap_or_else(PoisonError::into_inner);
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    // Guests that only write memory are folded as soon as it has rested.
    command.args(["bench", "balance", "--json"]).args(words).env("PAGEFOLD_EAGER", "1");
    let output = command.output().expect("run pagefold bench");
    let errors = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(3) {
        eprintln!("skipped: {errors}");
        return None;
    }
    let found = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {errors}"));
    assert_documented(&["bench balance --json"], &found);
    eprintln!("{found}");
    Some(found)
}

/// Where the machine is busy, guests write slowly, and withdrawals keep up without a pause.
#[test]
fn storm_below_the_floor_hurts_no_guest() {
    let Some(found) = bench(&["--only", "storm", "--storm-guests", "2"]) else { return };
    let storm = &found["storm"];
    assert_eq!(
        (&storm["guaranteed_held"], &storm["host_swap_bytes"], &storm["kills"]),
        (&true.into(), &0.into(), &0.into())
    );
    let back_s = storm["back_s"].as_f64().expect("a number");
    assert!(back_s <= BACK_WITHIN_S, "{storm}");
    assert!(storm["paused_ms"].as_u64().is_some_and(|ms| ms <= LONGEST_PAUSE_MS), "{storm}");
}

#[test]
fn faults_are_flagged_and_harm_no_other_guest() {
    let Some(found) = bench(&["--only", "faults", "--hurry", "3"]) else { return };
    let faults = found["faults"].as_array().expect("a list");
    assert_eq!(faults.len(), 6, "{found}");
    for fault in faults {
        assert!(fault["held"] == true && fault["flagged_s"].as_f64().is_some_and(|s| s <= FLAGGED_WITHIN_S), "{fault}");
    }
}
