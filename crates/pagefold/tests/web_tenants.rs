//! A token that is bound to groups: its answers and events are the same, byte by byte, whatever other groups hold.

mod common;

use common::http::{Events, Http, Reply};
use common::not_root;
use common::supervised::{signal, wait_for};
use common::web::{CONTROLS_ACME, READS_ACME, READS_ALL, Web};
use std::time::Duration;

/// Answers to one and the same set of requests, byte by byte.
fn all_answers(http: &Http) -> Vec<String> {
    let json = "Content-Type: application/json\r\n";
    let open = "Accept: application/openmetrics-text\r\n";
    let (long_path, long_body) = (format!("/{}", "x".repeat(600)), format!("{{\"pool\":\"{}\"}}", "9".repeat(20_000)));
    [
        ("GET", "/v1/groups", "", ""),
        ("HEAD", "/v1/groups", "", ""),
        ("GET", "/v1/groups/acme", "", ""),
        ("GET", "/v1/groups/beta", "", ""),
        ("HEAD", "/v1/groups/beta", "", ""),
        ("GET", "/v1/groups/gamma", "", ""),
        ("GET", "/v1/groups/be%74a", "", ""),
        ("GET", "/v1/groups/%ff", "", ""),
        ("GET", "/v1/members", "", ""),
        ("GET", "/v1/members?group=beta", "", ""),
        ("GET", "/v1/groups/acme/members", "", ""),
        ("GET", "/v1/groups/beta/members", "", ""),
        ("GET", "/metrics", "", ""),
        ("GET", "/metrics", open, ""),
        ("HEAD", "/metrics", "", ""),
        ("GET", "/openapi.json", "", ""),
        ("GET", "/nothing", "", ""),
        ("GET", &long_path, "", ""),
        ("DELETE", "/v1/groups", "", ""),
        ("DELETE", "/v1/groups/beta", "", ""),
        ("PATCH", "/v1/groups/acme/settings", json, r#"{"huge_pages": 40}"#),
        ("PATCH", "/v1/groups/acme/settings", json, r#"{"fold": "unfold"}"#),
        ("PATCH", "/v1/groups/acme/settings", json, r#"{"fold": "on"}"#),
        ("PATCH", "/v1/groups/acme/settings", json, "{"),
        ("PATCH", "/v1/groups/acme/settings", json, r#"{"beta": 1}"#),
        ("PATCH", "/v1/groups/acme/settings", json, &long_body),
        ("PATCH", "/v1/groups/acme/settings", "", "{}"),
        ("PATCH", "/v1/groups/beta/settings", json, r#"{"fold": "off"}"#),
        ("PATCH", "/v1/groups/beta/settings", json, "{"),
        ("PATCH", "/v1/groups/gamma/settings", json, r#"{"fold": "off"}"#),
    ]
    .iter()
    .map(|(method, path, more, body)| {
        let reply = http.try_request(method, path, more, body);
        let Reply { text, .. } = reply.unwrap_or_else(|e| panic!("{method} {path}: {e}"));
        format!("{method} {path} {more}{body}\n{text}")
    })
    .collect()
}

const OTHERS: &str = "[[group]]\nname = 'beta'\npool = '4M'\n[[group]]\nname = 'gamma'\nusers = [7]\n";

#[test]
fn token_sees_nothing_of_other_groups() {
    if not_root() {
        return;
    }
    let web = Web::start("control = true");
    // A member that has yet to connect: its group has something to tell, and nothing that changes by itself.
    let _member = web.installed.member("acme", "web1");
    web.reload(&web.config);
    let bound = [web.tcp.with(READS_ACME), web.tcp.with(CONTROLS_ACME), web.unix.with(CONTROLS_ACME)];
    let settled = |http: &Http| {
        // Answers are kept for two seconds.
        std::thread::sleep(Duration::from_millis(2100));
        all_answers(http)
    };
    settled(&bound[1]);
    let alone: Vec<_> = bound.iter().map(settled).collect();
    assert!(alone.iter().flatten().any(|answer| answer.contains("web1")));
    let many: String = (0..30).map(|n| format!("[[group]]\nname = 'other{n}'\n")).collect();
    web.reload(&format!("{}{OTHERS}{many}", web.config));
    let _others = [web.member("beta", "web1"), web.member("beta", "db"), web.member("gamma", "secret")];
    assert!(web.installed.pagefold(&["group", "set", "beta", "--fold", "off"]).status.success());
    wait_for("others are there", || web.unix.get("/metrics").text.contains("secret").then_some(()));
    for (http, before) in bound.iter().zip(&alone) {
        let after = settled(http);
        for (before, after) in before.iter().zip(&after) {
            assert_eq!(before, after);
        }
    }
    let all = all_answers(&web.tcp.with(READS_ALL)).concat();
    assert!(all.contains("secret") && all.contains("gamma"));
}

/// Events without the comments that come from time to time, each in a chunk of its own.
fn without_comments(events: &str) -> String {
    events.replace("3\r\n:\n\n\r\n", "")
}

#[test]
fn events_of_other_groups_leave_no_trace_in_a_bound_stream() {
    if not_root() {
        return;
    }
    let web = Web::start("control = true");
    let _member = web.installed.member("acme", "web1");
    web.reload(&web.config);
    let mut streams = [web.tcp.with(READS_ACME), web.unix.with(CONTROLS_ACME)].map(|http| Events::open(&http));
    let mut all = Events::open(&web.unix);
    let mut toggle = |separate: bool| {
        let wanted = format!("intra_member_only: {} -> {separate}", !separate);
        let body = format!("{{\"intra_member_only\": {separate}}}");
        assert_eq!(web.unix.patch("/v1/groups/acme/settings", &body).status, 200);
        streams.each_mut().map(|stream| {
            stream.read_until(&wanted);
            without_comments(&std::mem::take(&mut stream.text))
        })
    };
    // The first look at the groups is what later ones are compared with. Each is of the same group, and seen before the next.
    std::thread::sleep(Duration::from_millis(2500));
    toggle(true);
    toggle(false);
    let alone = toggle(true);
    toggle(false);
    web.reload(&format!("{}{OTHERS}", web.config));
    let mut beta = web.member("beta", "b1");
    let worker = web.installed.worker("beta");
    all.read_until(r#""event":"member_joined","group":"beta""#);
    signal(worker, "KILL");
    beta.kill();
    assert!(web.installed.pagefold(&["group", "set", "gamma", "--fold", "off"]).status.success());
    all.read_until(r#""event":"member_ended","group":"beta""#);
    web.reload(&web.config);
    all.read_until(r#""event":"group_ended","group":"gamma""#);
    // The streams have gone on all the while, also over both changes of the configuration.
    assert_eq!(toggle(true), alone);
}
