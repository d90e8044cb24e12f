//! `pagefold bench overhead` runs a workload on both sides, and has a member folded before it is measured. Speed is not
//! tested.

mod common;

use common::formats::assert_documented;
use common::{json_of, number, pagefold};
use serde_json::Value;

#[test]
fn workloads_run_on_both_sides_and_members_are_folded() {
    if common::not_root() {
        return;
    }
    let found = json_of(&pagefold(&["bench", "overhead", "fork", "threads", "--rounds", "1", "--short", "--json"]));
    assert_documented(&["bench overhead --json"], &found);
    let all = found.as_array().expect("a list");
    assert_eq!(all.iter().map(|f| f["workload"].as_str()).collect::<Vec<_>>(), [Some("fork"), Some("threads")]);
    for figures in all {
        let only = |side: &str| match figures[side].as_array().map(Vec::as_slice) {
            Some([one]) => one.as_f64().expect("seconds"),
            other => panic!("{side}: {other:?}"),
        };
        let (plain, member, ratio) = (only("plain_s"), only("member_s"), figures["ratio"].as_f64().expect("a ratio"));
        assert!(plain > 0.0 && member > 0.0, "{figures}");
        assert!((ratio - member / plain).abs() < 1e-9, "{figures}");
        assert_eq!(
            (number(&figures["n"]), &figures["ci95"], &figures["verdict"]),
            (1, &Value::Null, &"undecided".into())
        );
        assert!(number(&figures["folded_pages"]) >= number(&figures["floor"]), "{figures}");
    }
    assert!(number(&all[0]["floor"]) > 0, "nothing had to be folded: {found}");
}

#[test]
fn unknown_workloads_are_named_with_those_there_are() {
    let output = pagefold(&["bench", "overhead", "firefox"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("\"firefox\"") && said.contains("redis"), "{said}");
}
