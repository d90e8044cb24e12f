//! The journal: each change has a line, with who made it, and from what to what it was.

mod common;

use common::formats::assert_documented;
use common::http::Http;
use common::service::{Service, cannot_fold, until};
use common::supervised::wait_for;
use common::web::{CONTROLS_ALL, READS_ACME, READS_ALL, Web};
use common::{Ends, not_root};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Lines of a service's journal, as the command line prints them.
fn lines(service: &Service, words: &[&str]) -> Vec<Value> {
    let output = service.pagefold(&[&["journal", "--json"], words].concat());
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("text");
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

fn of<'a>(lines: &'a [Value], what: &str) -> Vec<&'a Value> {
    lines.iter().filter(|line| line["what"] == what).collect()
}

#[test]
fn each_change_of_settings_has_its_line_also_where_it_is_taken_back_at_once() {
    if not_root() {
        return;
    }
    let mut service = Service::start_with(Some("[[group]]\nname = 'acme-TOKEN'\n"));
    let group = service.group("acme");
    for fold in ["off", "on", "off"] {
        service.set("acme", &["--fold", fold]);
    }
    assert!(service.pagefold(&["group", "reset", &group]).status.success());
    let all = lines(&service, &[]);
    assert_documented(&["pagefold journal", "group show --json"], &all.clone().into());
    let changed = of(&all, "settings_changed");
    let changes: Vec<_> = changed.iter().map(|line| (&line["from"]["fold"], &line["to"]["fold"])).collect();
    let [on, off] = [json!("on"), json!("off")];
    assert_eq!(changes, [(&on, &off), (&off, &on), (&on, &off), (&off, &on)], "{all:?}");
    assert!(changed.iter().all(|line| line["group"] == group[..] && line["by"]["user"] == 0), "{all:?}");
    assert!(changed.iter().all(|line| line["by"]["pid"].is_u64() && line["by"]["web"].is_null()), "{all:?}");

    // The supervisor is killed: the lines stay, and others follow.
    service.kill_supervisor();
    until(60, "the next one answers", || service.pagefold(&["group", "list"]).status.success());
    let later = lines(&service, &[]);
    assert_eq!(later[..all.len()], all[..]);
    assert_eq!(of(&later, "service_started").len(), 2, "{later:?}");
    assert!(
        lines(&service, &["--since", "1h"]).len() == later.len()
            && lines(&service, &["--since", "2199-01-01T00:00:00Z"]).is_empty()
    );
    let text = service.pagefold(&["journal"]).stdout;
    assert!(String::from_utf8_lossy(&text).contains(&format!("settings_changed, group {group}: fold on -> off")));
    assert_eq!(service.pagefold(&["journal", "--since", "soon"]).status.code(), Some(2));
}

#[test]
fn attaching_detaching_and_rules_have_lines() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let group = service.group("acme");
    let (variable, token) = service.mark();
    let mut program = Command::new("sleep");
    let program = Ends(program.arg("600").env(variable, token).stdin(Stdio::null()).spawn().expect("start sleep"));
    let pid = program.0.id().to_string();
    let run = |words: &[&str]| {
        let output = service.pagefold(words);
        assert!(output.status.success(), "{words:?}: {output:?}");
    };
    run(&["attach", &pid, "--group", &group, "--all-anonymous"]);
    run(&["detach", &pid]);
    // A rule that no process fits: it is too large.
    run(&["attach", "--cgroup", "/*", "--group", &group, "--at-least", "1T"]);
    let _ = service.pagefold(&["detach", "--cgroup", "/*"]);
    let all = lines(&service, &[]);
    assert_documented(&["pagefold journal", "group show --json"], &all.clone().into());
    for what in ["attached", "detached"] {
        let [line] = of(&all, what)[..] else { panic!("one line of {what}: {all:?}") };
        assert_eq!((&line["group"], &line["process"]), (&json!(group), &json!(program.0.id())), "{line}");
        assert_eq!(
            (&line["of_user"], &line["by"]["user"], &line["via"]),
            (&json!(0), &json!(0), &json!("agent")),
            "{line}"
        );
    }
    for what in ["rule_added", "rule_dropped"] {
        let [line] = of(&all, what)[..] else { panic!("one line of {what}: {all:?}") };
        assert!(line["rule"] == "cgroup /*" && line["group"] == group[..], "{line}");
    }
}

/// Reads a stream of the journal until this is in it, and the whole line.
fn stream_until(http: &Http, path: &str, more: &str, wanted: &str) -> String {
    let mut stream = http.connect().expect("connect");
    stream.write_all(http.head("GET", path, &format!("{more}\r\n")).as_bytes()).expect("ask");
    let (mut text, mut bytes) = (String::new(), [0; 4096]);
    while !text.split_once(wanted).is_some_and(|(_, rest)| rest.contains("\n\n")) {
        let read = stream.read(&mut bytes).unwrap_or_else(|e| panic!("{e}: no {wanted} in {text}"));
        assert_ne!(read, 0, "the stream ended without {wanted}: {text}");
        text += &String::from_utf8_lossy(&bytes[..read]);
    }
    text
}

/// The objects of a stream.
fn data(text: &str) -> Vec<Value> {
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    data.filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[test]
fn web_side_streams_the_journal_and_its_callers_are_named_there() {
    if not_root() {
        return;
    }
    let web = Web::start("control = true");
    let change = r#"{"fold": "off"}"#;
    assert_eq!(web.tcp.with(CONTROLS_ALL).patch("/v1/groups/acme/settings", change).status, 200);
    assert_eq!(web.unix.patch("/v1/groups/beta/settings", change).status, 200);
    let text = stream_until(&web.tcp.with(READS_ALL), "/v1/journal", "", "\"group\":\"beta\"");
    let changed: Vec<Value> = data(&text).into_iter().filter(|line| line["what"] == "settings_changed").collect();
    let by = changed.iter().map(|line| line["by"].clone()).collect::<Vec<_>>();
    let far = json!({ "web": true, "token": "controls-all", "address": "127.0.0.1" });
    assert_eq!(by, [far, json!({ "web": true, "user": 0 })], "{text}");
    assert_documented(&["pagefold journal", "group show --json"], &changed.clone().into());
    assert!(!text.contains(CONTROLS_ALL), "{text}");

    // From a place on, what is behind it comes.
    let ids: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("id: ")).collect();
    let last = ids[ids.len() - 2];
    for (path, more) in [
        (format!("/v1/journal?after={last}"), String::new()),
        ("/v1/journal".into(), format!("Last-Event-ID: {last}\r\n")),
    ] {
        let behind = data(&stream_until(&web.unix, &path, &more, "\"group\":\"beta\""));
        assert_eq!(behind, changed[1..], "{path}");
    }
    // A configuration that was read again changes settings, too.
    web.reload(&format!("{}pool = '1G'\n", web.config));
    let text = stream_until(&web.unix, "/v1/journal", "", "\"pool\":1073741824");
    let is_it = |line: &&Value| line["what"] == "configured" && line["group"] == "acme";
    let lines = data(&text);
    let line = lines.iter().find(is_it).expect("a line");
    assert!(line["from"]["pool"].is_u64() && line["to"]["pool"] == 1 << 30, "{line}");
    // A caller that sees some groups would learn of others.
    assert_eq!(web.tcp.with(READS_ACME).get("/v1/journal").status, 403);
    assert_eq!(web.tcp.get("/v1/journal").status, 401);
    assert_eq!(web.unix.get("/v1/journal?after=x").status, 400);
}

#[test]
fn wrong_tokens_have_lines_and_are_slowed_and_nobody_else_is() {
    if not_root() {
        return;
    }
    let web = Web::start("");
    let began = Instant::now();
    let wrong = web.tcp.with("no-such-token");
    let tries = std::thread::spawn(move || (0..40).filter(|_| wrong.get("/v1/groups").status == 401).count());
    let asked = Instant::now();
    assert_eq!(web.tcp.with(READS_ALL).get("/v1/groups").status, 200);
    let took = asked.elapsed();
    assert_eq!(tries.join().expect("they are answered"), 40);
    // 200 ms each, but for those of the first half second.
    assert!(began.elapsed().as_secs() >= 5, "{:?}", began.elapsed());
    assert!(took < began.elapsed() / 4, "another caller was answered in {took:?}");
    let place = web.installed.path("s");
    let failed = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        let output = command.args(["journal", "--json", "--service"]).arg(&place).output().expect("run pagefold");
        let text = String::from_utf8(output.stdout).expect("text");
        let all = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        all.filter(|line| line["what"] == "login_failed").collect::<Vec<_>>()
    };
    let sum = |key: &dyn Fn(&Value) -> u64| failed().iter().map(key).sum::<u64>();
    wait_for("all are in the journal", || (sum(&|line| line["times"].as_u64().unwrap_or(0)) == 40).then_some(()));
    assert_eq!(sum(&|line| line["addresses"]["127.0.0.1"].as_u64().unwrap_or(0)), 40);
    assert!(failed().len() < 5, "a line for each 10 s: {:?}", failed());
}
