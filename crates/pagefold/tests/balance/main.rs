//! `pagefold balance`, on real guests with real balloons.

#[path = "../common/mod.rs"]
mod common;

mod liar;
mod loans;
mod pressure;
mod rig;
mod status;
mod storm;

use common::json_of;
use common::lab::Lab;
use common::service::{Service, until};
use rig::{Applying, Guests, KEPT, M};
use serde_json::{Value, json};
use std::process::{Command, Stdio};

/// A service that has no memory to lend refuses guests of a lab before they start; one that has makes room for them.
#[test]
fn lab_brings_up_only_guests_that_fit() {
    // Names of processes are short.
    let group = format!("f{}", std::process::id());
    let config = |floor: &str| format!("[balance]\nevery = 1\n{floor}\n[[group]]\nname = '{group}'\n");
    let mut service = Service::start_with(Some(&config("floor = '100T'")));
    let (lab, service_place) = (Lab::new(&[]), service.place());
    let place = service.place().to_str().expect("a plain path").to_owned();
    let up = ["up", "--image", "process", "--memory", "64M", "--groups", &group, "--fold", "--service", &place];
    let read = |name: &str| -> Value {
        let text = std::fs::read_to_string(service_place.join(name)).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    };
    let (ledger, promises) = (|| read("balance.json"), || read("promises.json")["promises"].take());
    until(60, "the balancer has its rules in the ledger", || ledger()["rules"].is_array());
    let refused = lab.run(&up);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && said.contains("no room for lab-up-"), "{said}");
    assert!(said.contains("do not fit") && lab.guests().is_empty(), "{said}");
    service.configure(&config(""));
    until(60, "the next balancer has its own", || {
        ledger()["rules"][1].is_object() && ledger()["rules"][1]["floor_bytes"].is_null()
    });
    let running = lab.command(&up).stdout(Stdio::null()).spawn().expect("run pagefold lab");
    until(60, "memory is reserved for it", || {
        promises().as_object().is_some_and(|names| names.values().any(|one| one["bytes"] == 64 * M))
    });
    assert!(running.wait_with_output().expect("wait for a command").status.success());
    assert_eq!(lab.guests().len(), 1);
    until(60, "it has started, and a look has seen that: nothing is promised", || promises() == json!({}));
}

/// The next balancer starts while the one before is about to end. It once took over that one's rules, for good.
#[test]
fn balancer_without_rules_does_not_take_those_of_another_one() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let own = std::process::id().to_string();
    let balance = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(["balance", "--pid", &own, "apply", "--every", "1"]).args(words);
        command.arg("--service").arg(dir.path()).stdout(Stdio::null());
        Applying(command.spawn().expect("run pagefold balance"))
    };
    let rules = || -> Value {
        let text = std::fs::read_to_string(dir.path().join("balance.json")).unwrap_or_default();
        let ledger: Value = serde_json::from_str(&text).unwrap_or_default();
        ledger.pointer("/rules/1").cloned().unwrap_or_default()
    };
    let _before = balance(&["--floor", "100T"]);
    until(60, "the first one's rules", || rules()["floor_bytes"].is_u64());
    let _next = balance(&[]);
    until(60, "the next one's", || rules().is_object() && rules()["floor_bytes"].is_null());
}

#[test]
fn service_balances_continuously_and_its_balancer_ends_with_it() {
    let Some(guests_of) = Guests::start("serve") else { return };
    let config = format!(
        "[balance]\npolicy = 'equal'\nevery = 1\nfloor = '100T'\n[[guest]]\nname = '{}-*'\nguaranteed = '{KEPT}'\n",
        guests_of.group
    );
    let mut service = Service::start_with(Some(&config));
    // A command waits for its turn, and the balancer keeps what it promises.
    json_of(&service.pagefold(&["balance", "reserve", "1M", "--for", "next", "--floor", "1G", "--json"]));
    until(180, "all loans are back", || guests_of.sizes().iter().all(|size| size.abs_diff(KEPT) < 4 * M));
    let promises = std::fs::read_to_string(service.place().join("promises.json")).expect("promises");
    assert!(promises.contains("\"next\""), "{promises}");
    let log = service.log();
    let pid = log.split("balancing memory between guests: process ").nth(1).and_then(|rest| rest.lines().next());
    let pid: u32 = pid.expect("it is in the log").trim().parse().expect("a pid");
    let runs = || std::path::Path::new(&format!("/proc/{pid}")).exists();
    assert!(runs());
    service.configure("");
    until(30, "the balancer has ended with its supervisor", || !runs());
}
