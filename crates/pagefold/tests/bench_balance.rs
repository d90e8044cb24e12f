//! `pagefold bench balance`: faults of real guests are flagged, and harm no other guest.

mod common;

use common::formats::assert_documented;
use common::pagefold;
use serde_json::Value;

/// Tolerated time until a fault is flagged, in seconds. The rule is 20 s; the rest is for a busy machine.
const FLAGGED_WITHIN_S: f64 = 40.0;

#[test]
fn faults_are_flagged_and_harm_no_other_guest() {
    if common::not_root() {
        return;
    }
    let output = pagefold(&["bench", "balance", "--only", "faults", "--json"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(3) {
        eprintln!("skipped: {errors}");
        return;
    }
    let found: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {errors}"));
    assert_documented(&["bench balance --json"], &found);
    let faults = found["faults"].as_array().expect("a list");
    assert_eq!(faults.len(), 6, "{found}");
    for fault in faults {
        assert!(fault["held"] == true && fault["flagged_s"].as_f64().is_some_and(|s| s <= FLAGGED_WITHIN_S), "{fault}");
    }
    eprintln!("{found}");
}
