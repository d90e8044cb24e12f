//! A worker's report with each number at the ends of its range: a worker may have been taken over.

#[path = "../../api/tests/extremes.rs"]
mod extremes;

use super::*;
use api::ask::{GroupState, WorkerState};
use api::shown::{ShownGroup, complete};

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
        fit: None,
        segments: 1,
        not_attached: Vec::new(),
        report: GroupReport {
            members: vec![member("a", 1), member("b", 2)],
            pass_permille: Some(1),
            ..GroupReport::none()
        },
    };
    let whole = serde_json::to_value(&state).unwrap();
    let (mut tried, mut shown) = (0, 0);
    for (what, mut lie) in extremes::lies(&whole, "/report") {
        tried += 1;
        // All members say the same: their sum must fit.
        lie["report"]["members"][1] = lie["report"]["members"][0].clone();
        let Ok(mut state) = serde_json::from_value::<GroupState>(lie) else { continue };
        complete(&mut state, &[], |_, _| None);
        let lines = text("acme", "", (&settings, &state.pool_limit), &state.report, None);
        assert!(lines.contains("acme") && serde_json::to_value(ShownGroup::from(state)).is_ok(), "{what}");
        shown += 1;
    }
    assert!(tried > 240 && shown > tried / 3, "{shown} of {tried}");
}
