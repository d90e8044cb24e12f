//! A group that there is not is what the user wrote: exit code 2, whatever the command.

mod common;

use common::not_root;
use common::service::Service;
use std::process::{Command, Stdio};

#[test]
fn unknown_group_has_one_exit_code_everywhere() {
    if not_root() {
        return;
    }
    let service = Service::start_with(Some("[[group]]\nname = 'acme-TOKEN'\n"));
    let mut sleeps = Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().expect("start sleep");
    let pid = sleeps.id().to_string();
    let commands = [
        &["group", "show", "nobodys"][..],
        &["group", "set", "nobodys", "--fold", "off"],
        &["group", "reset", "nobodys"],
        &["audit", "--group", "nobodys"],
        &["stop", "--group", "nobodys"],
        &["attach", &pid, "--group", "nobodys", "--all-anonymous"],
        &["attach", &pid, "--group", "nobodys", "--all-anonymous", "--dry-run"],
        &["attach", "--cgroup", "/*", "--group", "nobodys", "--at-least", "1T"],
    ];
    let mut others = Vec::new();
    for words in commands {
        let output = service.pagefold(words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("nobodys"), "{words:?}: {said}");
        others.extend((output.status.code() != Some(2)).then(|| format!("{words:?}: {:?}: {said}", output.status)));
    }
    let place = service.place();
    let run = Command::new(env!("CARGO_BIN_EXE_pagefold"))
        .args(["run", "--group", "nobodys", "--service"])
        .arg(&place)
        .args(["--", "true"])
        .output()
        .expect("run pagefold");
    others.extend((run.status.code() != Some(2)).then(|| format!("run: {run:?}")));
    sleeps.kill().expect("end it");
    sleeps.wait().expect("it ended");
    assert!(others.is_empty(), "{others:#?}");
}
