//! Parts of an installation: one that is missing, or belongs to another version, is named, and not started.

mod common;

use common::not_root;
use common::supervised::{Installed, signal, wait_for};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

const CONFIG: &str = "[[group]]\nname = 'acme'\n";

/// The check of the installation's parts.
fn parts(installed: &Installed) -> Value {
    let found: Value = serde_json::from_slice(&installed.pagefold(&["doctor", "--json"]).stdout).expect("JSON");
    let checks = found["checks"].as_array().expect("checks");
    checks.iter().find(|check| check["id"] == "host:parts").expect("a check").clone()
}

#[test]
fn parts_that_are_missing_or_belong_elsewhere_are_named_and_not_started() {
    if not_root() {
        return;
    }
    let Some(installed) = Installed::attaching() else { return };
    assert_eq!(parts(&installed)["status"], "ok", "{}", parts(&installed));
    let others = installed.path("pagefold-prove");
    fs::remove_file(&others).expect("remove a program");
    fs::write(&others, "#!/bin/sh\necho 'pagefold-prove 0.0.9 (release build)'\n").expect("write a program");
    fs::set_permissions(&others, Permissions::from_mode(0o755)).expect("make it a program");
    fs::remove_file(installed.path("pagefold-attach")).expect("remove a program");
    let check = parts(&installed);
    let found = check["found"].as_str().expect("a finding");
    assert!(check["status"] == "warn" && check["fix"].is_string(), "{check}");
    assert!(found.contains("pagefold-attach is missing") && found.contains("pagefold-prove 0.0.9"), "{found}");

    let _supervisor = installed.serve(CONFIG, &[]);
    let refused = || installed.log().contains("does not belong to this Pagefold");
    wait_for("the reason is in the log", || refused().then_some(()));
    assert!(!installed.log().contains("prover started"), "{}", installed.log());
}

/// Puts a program of another version in the place of the worker's.
fn upgrade_worker(installed: &Installed) {
    let next = installed.path("next");
    fs::write(&next, "#!/bin/sh\necho 'pagefold-worker 9.9.9 (release build)'\n").expect("write a program");
    fs::set_permissions(&next, Permissions::from_mode(0o755)).expect("make it a program");
    fs::rename(next, installed.path("pagefold-worker")).expect("replace the program");
}

#[test]
fn worker_that_ends_after_an_upgrade_is_started_again_as_it_was() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let supervisor = installed.serve(CONFIG, &["--stop-workers"]);
    let mut member = installed.member("acme", "m1");
    assert!(member.connects(&installed));
    let first = installed.worker("acme");
    upgrade_worker(&installed);
    signal(first, "KILL");
    wait_for("another worker runs", || (installed.worker("acme") != first).then_some(()));
    assert!(!installed.log().contains("does not belong"), "{}", installed.log());
    drop(member);
    supervisor.terminate();
    // The next service is of the old version still, and does not start with the new worker.
    let serve = installed.pagefold(&["serve", "--dir", &installed.text("other")]);
    let said = String::from_utf8_lossy(&serve.stderr).into_owned();
    assert!(!serve.status.success() && said.contains("does not belong to this Pagefold"), "{said}");
}

#[test]
fn doctor_says_how_far_a_user_without_rights_sees() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let text = String::from_utf8(installed.pagefold_unprivileged(&["doctor"]).stdout).expect("text");
    let last = text.lines().last().expect("a sum");
    assert!(last.contains(" missing, as far as this user may look"), "{last}");
    let text = String::from_utf8(installed.pagefold(&["doctor"]).stdout).expect("text");
    assert!(text.lines().last().is_some_and(|last| last.ends_with(" missing")), "{text}");
}

#[test]
fn doctor_and_its_fix_want_as_many_mappings() {
    let fix = String::from_utf8(common::pagefold(&["doctor", "--fix", "--root", "/nonexistent"]).stdout).expect("text");
    let wanted = fix.split("vm.max_map_count = ").nth(1).and_then(|rest| rest.lines().next()).expect("a number");
    let wanted: u64 = wanted.trim().parse().expect("a number");
    let now: u64 = fs::read_to_string("/proc/sys/vm/max_map_count").expect("a limit").trim().parse().expect("a number");
    let found: Value = serde_json::from_slice(&common::pagefold(&["doctor", "--json"]).stdout).expect("JSON");
    let checks = found["checks"].as_array().expect("checks");
    let check = checks.iter().find(|check| check["id"] == "memory:max_map_count").expect("a check");
    assert_eq!(check["status"] == "ok", now >= wanted, "{check}");
    assert!(now >= wanted || check["fix"].to_string().contains(&format!("={wanted}")), "{check}");
}
