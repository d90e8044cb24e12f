//! A worker's report with each number at the ends of its range: a worker may have been taken over.

use super::*;
use api::ask::{GroupState, WorkerState};
use api::shown::{ShownGroup, complete};
use serde_json::{Value, json};

const EXTREMES: [u64; 6] = [0, 1, (1 << 52) - 1, 1 << 52, i64::MAX as u64, u64::MAX];

/// Pointers to all numbers.
fn numbers(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(at.to_owned()),
        Value::Array(all) => {
            all.iter().enumerate().for_each(|(n, one)| numbers(one, &format!("{at}/{n}"), found));
        }
        Value::Object(all) => all.iter().for_each(|(key, one)| numbers(one, &format!("{at}/{key}"), found)),
        _ => {}
    }
}

#[test]
fn numbers_at_their_ends_are_shown() {
    let settings = Settings::default();
    let member = |name: &str, pid| MemberReport {
        name: name.into(),
        family: "a".into(),
        pid,
        connected: true,
        state: "folding".into(),
        ..MemberReport::default()
    };
    let state = GroupState {
        name: "acme".into(),
        settings,
        configured: true,
        worker: WorkerState::Running,
        worker_pid: Some(9),
        pool_limit: PoolLimit::of(&settings, None),
        pressure_scan_rate: Some(1),
        segments: 1,
        not_attached: Vec::new(),
        report: GroupReport {
            members: vec![member("a", 1), member("b", 2)],
            pass_permille: Some(1),
            ..GroupReport::none()
        },
    };
    let (whole, mut places) = (serde_json::to_value(&state).unwrap(), Vec::new());
    numbers(&whole["report"], "/report", &mut places);
    assert!(places.len() > 40, "{places:?}");
    let mut shown = 0;
    for place in &places {
        for number in EXTREMES {
            let mut lie = whole.clone();
            *lie.pointer_mut(place).unwrap() = json!(number);
            // All members say the same: their sum must fit.
            lie["report"]["members"][1] = lie["report"]["members"][0].clone();
            let Ok(mut state) = serde_json::from_value::<GroupState>(lie) else { continue };
            complete(&mut state, &[], |_, _| None);
            let lines = text("acme", "", (&settings, &state.pool_limit), &state.report, None);
            assert!(lines.contains("acme") && serde_json::to_value(ShownGroup::from(state)).is_ok());
            shown += 1;
        }
    }
    assert!(shown > 2 * places.len(), "{shown}");
}
