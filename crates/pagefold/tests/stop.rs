//! `pagefold stop` and `pagefold group reset`: everything private again, and groups as they are configured.

mod common;

use common::service::{Service, cannot_fold, find_member, until};
use common::{json_of, number};
use serde_json::json;
use std::time::{Duration, Instant};

#[test]
fn everything_is_private_again_and_group_folds_when_it_is_reset() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let words = ["stable", "--pages", "3000", "--classes", "500", "--writes", "2000"];
    let members = ["one", "other"].map(|name| service.torture("acme", name, &[], &words));
    let sharing = || number(&service.show("acme")["sharing_pages"]);
    until(60, "much is folded", || sharing() > 2000);
    let group = service.group("acme");
    let stopped = json_of(&service.pagefold(&["stop", "--group", &group, "--json"]));
    let pids: Vec<u32> = members.iter().map(|member| member.pid()).collect();
    let [stopped] = stopped.as_array().expect("a list").as_slice() else { panic!("{stopped}") };
    assert!(number(&stopped["folded_bytes"]) > 2000 * 4096, "{stopped}");
    assert_eq!((&stopped["left_bytes"], &stopped["detached"]), (&json!(0), &json!([])), "{stopped}");
    let mut stay: Vec<u32> =
        stopped["members"].as_array().expect("a list").iter().map(|pid| number(pid) as u32).collect();
    stay.sort_unstable();
    assert_eq!(stay, pids, "they were started by pagefold run");
    assert_eq!((sharing(), &service.show("acme")["settings"]["fold"]), (0, &json!("unfold")));
    let reset = json_of(&service.pagefold(&["group", "reset", &group, "--json"]));
    assert_eq!(reset["fold"], "on");
    assert_eq!(service.show("acme")["settings"]["fold"], "on");
    // At each time of a fold that has begun, and of which nobody has heard yet.
    for turn in 0..3 {
        let began = Instant::now();
        let all = json_of(&service.pagefold(&["stop", "--everything", "--json"]));
        assert_eq!(
            (&all[0]["group"], &all[0]["left_bytes"], sharing()),
            (&json!(group), &json!(0), 0),
            "{turn}: {all}"
        );
        // Longer than that, a promise of memory had to be over before there was another one.
        assert!(began.elapsed() < Duration::from_secs(20), "{turn}: {:?}", began.elapsed());
        assert!(service.pagefold(&["group", "reset", &group]).status.success());
        let folds = |name: &str| find_member(&service.show("acme"), name).is_some_and(|m| m["state"] == "folding");
        until(60, "both have heard of it", || folds("one") && folds("other"));
        std::thread::sleep(Duration::from_millis(turn * 40));
    }
    let unknown = service.pagefold(&["stop", "--group", "nobody"]);
    assert_eq!(unknown.status.code(), Some(2));
}
