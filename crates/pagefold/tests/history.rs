//! `[history]` of a real service: what is kept, over a kill; to whom it is shown; and with which rights it is kept.

mod common;

use common::formats::assert_documented;
use common::http::Http;
use common::supervised::{is_alive, signal, wait_for, wait_for_within};
use common::web::{READS_ACME, READS_ALL, Web};
use common::{copy_program, json_of, not_root, unprivileged};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The process that keeps the figures, by the service's log.
fn keeper(web: &Web) -> Option<u32> {
    let log = web.installed.log();
    let line =
        log.lines().rfind(|line| line.contains("keeping figures over time: process") && !line.contains("ended"))?;
    line.rsplit(' ').next()?.parse().ok().filter(|pid| is_alive(*pid))
}

/// Points of a figure of acme, or of its member.
fn points(http: &Http, member: &str, figure: &str) -> Vec<Value> {
    let reply = http.get(&format!("/v1/history?group=acme&member={member}&figure={figure}"));
    let shown = reply.json();
    shown["series"][0]["points"].as_array().cloned().unwrap_or_default()
}

fn until_points(web: &Web, least: usize) -> Vec<Value> {
    // One comes every ten seconds.
    wait_for_within(Duration::from_secs(120), &format!("{least} points are kept"), || {
        let points = points(&web.unix, "web1", "mappings");
        (points.len() >= least).then_some(points)
    })
}

#[test]
fn figures_are_kept_over_a_kill_and_shown_to_those_who_see_the_group() {
    if not_root() {
        return;
    }
    let web = Web::start("");
    let built = Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("pagefold-history");
    copy_program(&built, &web.installed.path("pagefold-history"));
    assert_eq!(web.unix.get("/v1/history").status, 404);
    let dir = web.installed.path("history");
    let groups = format!("{}[[group]]\nname = 'beta'\n", web.config);
    web.reload(&format!("{groups}[history]\ndir = '{}'\n", dir.display()));
    let _members = [web.member("acme", "web1"), web.member("beta", "db")];
    let before = until_points(&web, 2);
    let first = keeper(&web).expect("it runs");
    assert_no_rights(&web, first);
    signal(first, "KILL");
    let second = wait_for("another process keeps figures", || keeper(&web).filter(|pid| *pid != first));
    let after = until_points(&web, before.len() + 2);
    assert_eq!(after[..before.len()], before);
    let at = |point: &Value| point[0].as_i64().expect("a time");
    // A busy machine may be late by some.
    assert!(at(&after[before.len()]) - at(&before[before.len() - 1]) <= 40, "{after:?}");
    assert_views(&web);
    assert_command(&web, dir.to_str().expect("a plain path"));
    web.reload(&groups);
    wait_for("nothing is kept any more", || (!is_alive(second)).then_some(()));
    assert_eq!(web.unix.get("/v1/history").status, 404);
}

/// It has a user of its own without rights, whose file no other user can read, and can ask for nothing else.
fn assert_no_rights(web: &Web, pid: u32) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
    let field = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).expect("a field").trim().to_owned();
    let uid: u32 = field("Uid:").split_whitespace().next().and_then(|uid| uid.parse().ok()).expect("a user");
    assert!(uid >= 61_184 && uid != web.process().1, "{uid}");
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        assert_eq!(field(set), "0000000000000000", "{set}");
    }
    let found = |name: &str| fs::metadata(web.installed.path(name)).expect("a file");
    let (dir, file) = (found("history"), found("history/history.db"));
    assert_eq!((dir.mode() & 0o7777, dir.uid(), file.uid()), (0o700, uid, uid));
    let socket = found("s/history.sock");
    assert_eq!((socket.mode() & 0o777, socket.uid()), (0o600, web.process().1));
    let own = uid.to_string();
    let ask = |words: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", &own, "--regid", &own, "--clear-groups", &web.installed.text("pagefold")]);
        let output = command.args(words).env("PAGEFOLD_DIR", web.installed.path("s")).output().expect("run pagefold");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (is_shown, said) = ask(&["group", "list"]);
    assert!(is_shown, "{said}");
    for words in [&["group", "set", "acme", "--fold", "off"][..], &["group", "set", "beta", "--fold", "off"]] {
        let (is_done, said) = ask(words);
        assert!(!is_done && said.contains("made of reports alone"), "{said}");
    }
}

/// Callers see their groups alone, within bounds.
fn assert_views(web: &Web) {
    let (all, acme) = (web.tcp.with(READS_ALL), web.tcp.with(READS_ACME));
    let answer = all.get("/v1/history");
    assert_eq!(answer.status, 200, "{}", answer.text);
    let shown = answer.json();
    assert_documented(&["pagefold-web", "pagefold history"], &shown);
    let has =
        |shown: &Value, wanted: &str| shown["series"].as_array().expect("a list").iter().any(|s| s["group"] == wanted);
    assert!(has(&shown, "acme") && has(&shown, "beta"));
    let answer = acme.get("/v1/history");
    assert_eq!(answer.status, 200, "{}", answer.text);
    let shown = answer.json();
    assert!(has(&shown, "acme") && !has(&shown, "beta") && shown["notes"].as_array().expect("a list").is_empty());
    let since = "since=1800000000&until=1800000600";
    let other = |group: &str| acme.get(&format!("/v1/history?group={group}&{since}")).text;
    assert_eq!(other("beta"), other("none"));
    assert_eq!(web.tcp.get("/v1/history").status, 401);
    for (query, status) in
        [("step=7", 422), ("since=0&until=99999999", 422), ("since=2&until=1", 422), ("since=x", 400), ("what=1", 400)]
    {
        assert_eq!(all.get(&format!("/v1/history?{query}")).status, status, "{query}");
    }
}

/// The command reads the file, also while no service runs; only root and the file's user can.
fn assert_command(web: &Web, dir: &str) {
    let csv = web.installed.pagefold(&["history", "--dir", dir, "--member", "web1", "--csv"]);
    let text = String::from_utf8_lossy(&csv.stdout).into_owned();
    assert!(csv.status.success() && text.starts_with("unix_s,group,member,figure,value\n"), "{csv:?}");
    assert!(text.lines().filter(|line| line.contains(",acme,web1,mappings,")).count() >= 4, "{text}");
    let shown = json_of(&web.installed.pagefold(&["history", "--dir", dir, "--since", "1h", "--json"]));
    assert_documented(&["pagefold history"], &shown);
    let mut command = unprivileged(&web.installed.text("pagefold"));
    let refused = command.args(["history", "--dir", dir]).output().expect("run pagefold");
    assert_eq!(refused.status.code(), Some(3), "{refused:?}");
    let owner = fs::metadata(format!("{dir}/history.db")).expect("a file").uid();
    let foreign =
        fs::read_dir(dir).expect("a directory").flatten().find(|file| file.metadata().unwrap().uid() != owner);
    assert!(foreign.is_none(), "a reader has left a file: {foreign:?}");
}
