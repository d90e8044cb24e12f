//! `pagefold bench latency` times a load in members that are folded in one arm, and not in the other. Speed is not tested.

mod common;

use common::formats::assert_documented;
use common::{json_of, number, pagefold};
use serde_json::Value;

/// Pages that are folded at least in the short form.
const FLOOR: u64 = 200;

/// The only slice of a row.
fn slice(row: &Value) -> &Value {
    match row["slices"].as_array().map(Vec::as_slice) {
        Some([one]) => one,
        other => panic!("{other:?}"),
    }
}

fn float(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

#[test]
fn load_is_timed_folded_and_unfolded() {
    if common::not_root() {
        return;
    }
    let words = "bench latency ticker --members started,attached --hosts idle,saturated --eager --short --json";
    let found = json_of(&pagefold(&words.split(' ').collect::<Vec<_>>()));
    assert_documented(&["bench latency --json"], &found);
    let rows = found.as_array().expect("a list");
    let arms = |member: &str| -> Vec<[&str; 2]> {
        let rows = rows.iter().filter(|row| row["member"] == member);
        rows.map(|row| ["host", "arm"].map(|key| row[key].as_str().expect("a name"))).collect()
    };
    let expected = [["idle", "off"], ["saturated", "off"], ["idle", "folding"], ["idle", "on"], ["saturated", "on"]];
    assert_eq!((arms("started"), arms("attached")), (expected.to_vec(), expected.to_vec()));
    for row in rows {
        let slice = slice(row);
        // A tick is due each millisecond, however late those before it were.
        let due = float(&slice["seconds"]) * 1000.0;
        assert!((float(&slice["operations"]) - due).abs() < 5.0, "{row}");
        let times = ["p50", "p99", "p999", "max"].map(|key| float(&row[key]));
        assert!(times[0] > 0.0 && times.is_sorted(), "{row}");
        assert!(float(&row["cpu_us_per_op"]) > 0.0, "{row}");
        let folded = [0, 1].map(|n| number(&slice["folded_pages"][n]));
        match row["arm"].as_str() {
            Some("off") => assert_eq!((folded, &row["over_off"]), ([0, 0], &Value::Null), "{row}"),
            Some("folding") => assert!(folded[0] == 0 && folded[1] >= FLOOR, "{row}"),
            _ => {
                assert!(folded.iter().all(|pages| *pages >= FLOOR), "{row}");
                let off = rows
                    .iter()
                    .find(|off| off["arm"] == "off" && ["member", "host"].iter().all(|key| off[key] == row[key]));
                let (p99, off) = (&row["over_off"]["p99"], off.expect("the row of off"));
                assert!((float(&p99["ratio"]) - float(&row["p99"]) / float(&off["p99"])).abs() < 1e-9, "{row}");
                assert_eq!((number(&p99["n"]), &p99["verdict"]), (1, &"undecided".into()), "{row}");
            }
        }
    }
}

#[test]
fn load_that_runs_in_no_guest_is_refused_there() {
    let output = pagefold(&["bench", "latency", "redis", "--members", "guest"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("redis") && said.contains("guest"), "{said}");
}
