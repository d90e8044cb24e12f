//! Names and words that people read: members by the name that their program was called by, guests of one name apart, and ends of
//! processes.

mod common;

use common::service::{Service, cannot_fold, find_member, until};
use common::supervised::{signal, wait_for};
use common::web::Web;
use common::{Ends, not_root, pagefold};
use serde_json::Value;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

#[test]
fn attached_member_has_the_name_that_its_program_was_called_by() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let dir = tempfile::tempdir().expect("a directory");
    let link = dir.path().join("some-server");
    let sleep = std::fs::canonicalize("/usr/bin/sleep").expect("sleep");
    symlink(sleep, &link).expect("make a link");
    let (variable, token) = service.mark();
    let program = Ends(Command::new(&link).arg("600").env(variable, token).spawn().expect("start it"));
    let pid = program.0.id().to_string();
    until(10, "it is executed", || {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == "some-server")
    });
    let group = service.group("acme");
    assert!(service.pagefold(&["attach", &pid, "--group", &group, "--all-anonymous"]).status.success());
    let is_named = |shown: &Value| find_member(shown, &format!("some-server-{pid}")).is_some();
    until(30, "it is a member by that name", || is_named(&service.show("acme")));
    assert!(service.pagefold(&["detach", &pid]).status.success(), "{}", service.log());
}

#[test]
fn log_and_answers_have_no_words_of_the_programming_language() {
    if not_root() {
        return;
    }
    let web = Web::start("control = true");
    let (process, _) = web.process();
    signal(process, "KILL");
    wait_for("its end is in the log", || web.installed.log().contains(&format!("process {process}: ")).then_some(()));
    let log = web.installed.log();
    assert!(log.contains("signal 9 has ended it") && !log.contains("WaitStatus"), "{log}");
    assert!(!log.contains("1 groups") && !log.contains("1 members"), "{log}");
    web.wait_until_it_answers();
    let reply = web.unix.patch("/v1/groups/acme/settings", "nonsense");
    assert_eq!(reply.status, 400, "{}", reply.text);
    let error = reply.json()["error"].as_str().expect("a reason").to_owned();
    assert!(error.contains("is no JSON") && !error.contains("ident"), "{error}");
}

/// Two processes that look like QEMUs with one name.
#[test]
fn guests_of_one_name_are_told_apart_wherever_names_are_shown() {
    if not_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let mut qemus = Vec::new();
    for _ in 0..2 {
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-name", "twins", "-machine", "none", "-m", "16", "-nodefaults", "-display", "none", "-S"]);
        qemu.args(["-monitor", "stdio"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let Ok(qemu) = qemu.spawn() else {
            eprintln!("skipped: there is no QEMU");
            return;
        };
        qemus.push(Ends(qemu));
    }
    let pids: Vec<String> = qemus.iter().map(|qemu| qemu.0.id().to_string()).collect();
    until(30, "both are guests", || {
        let listed: Value = serde_json::from_slice(&pagefold(&["guests", "--json"]).stdout).unwrap_or_default();
        listed.to_string().matches("\"twins\"").count() >= 2
    });
    let html = dir.path().join("page.html");
    let words = ["census", "--pid", &pids[0], "--pid", &pids[1], "--html", html.to_str().expect("a plain path")];
    let text = String::from_utf8_lossy(&pagefold(&words).stdout).into_owned();
    let page = std::fs::read_to_string(&html).expect("a page");
    for shown in [&text, &page] {
        assert!(
            shown.contains(&format!("twins@{}", pids[1])) || shown.contains(&format!("twins@{}", pids[0])),
            "{text}"
        );
    }
}
