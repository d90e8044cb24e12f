//! `pagefold ksm drive` on the real ksmd: merges by its rule, and leaves every knob as it was, however it ends.

mod common;

use common::formats::assert_documented;
use common::service::until;
use common::{Afterwards, KSM, Known, Stage, json_of, not_root, pagefold};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Lock of these tests: there is one ksmd.
static ALONE: Mutex<()> = Mutex::new(());

/// Knobs that may be set; the advisor first, since it keeps `pages_to_scan` from being set.
const KNOBS: [&str; 7] =
    ["advisor_mode", "pages_to_scan", "sleep_millisecs", "smart_scan", "use_zero_pages", "merge_across_nodes", "run"];
/// Pages that each program of this test holds, the same in both.
const PAGES: u64 = 10_000;

fn knob(name: &str) -> Option<String> {
    let text = fs::read_to_string(format!("{KSM}/{name}")).ok()?;
    let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    Some(chosen.map_or(text.trim(), |(chosen, _)| chosen).to_owned())
}

fn knobs() -> Vec<Option<String>> {
    KNOBS.iter().map(|name| knob(name)).collect()
}

/// Puts the knobs back if this test is killed.
fn put_back_at_last() -> Afterwards {
    let set = KNOBS.iter().filter_map(|name| Some(format!("echo {} > {KSM}/{name}", knob(name)?)));
    let set: Vec<String> = set.collect();
    Afterwards::run(&format!("echo none > {KSM}/advisor_mode; {}", set.join("; ")))
}

/// A place for a test alone, with knobs that are put back if it is killed. `None` where ksmd cannot be driven.
fn alone() -> Option<(MutexGuard<'static, ()>, Afterwards)> {
    if not_root() || knob("run").is_none() {
        return None;
    }
    Some((ALONE.lock().unwrap_or_else(PoisonError::into_inner), put_back_at_last()))
}

/// A running driver.
struct Driver {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Driver {
    fn start(words: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(["ksm", "drive", "--one-trust-domain", "--every", "1s", "--json"]).args(words);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("start pagefold");
        let lines = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, lines }
    }

    fn look(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("hear from the driver");
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"))
    }

    fn signal(&self, pid: u32, signal: &str) {
        let sent = Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).status();
        assert!(sent.expect("run kill").success());
    }

    /// The process that puts back.
    fn guard(&self) -> u32 {
        let pid = self.child.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("it runs");
        children.trim().parse().unwrap_or_else(|e| panic!("{e}: {children:?}"))
    }

    /// Waits for its end, and returns the rest of its output.
    fn end(mut self) -> String {
        let mut rest = String::new();
        self.lines.read_to_string(&mut rest).expect("its output");
        assert!(self.child.wait().expect("its end").success());
        rest
    }
}

fn status() -> Value {
    let status = json_of(&pagefold(&["ksm", "status", "--json"]));
    assert_documented(&["pagefold ksm status"], &status);
    status
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn programs(stage: &Stage) -> [Known; 2] {
    let (alloc, fill) = (format!("alloc a {PAGES}"), format!("fill a 0 {PAGES} 1"));
    [(); 2].map(|()| stage.start(&[alloc.as_str(), fill.as_str(), "mergeable a"]))
}

/// Arguments that have memory be short: all of RAM is wanted.
const SHORT: [&str; 2] = ["--pressure-below", "100%"];

#[test]
fn driver_merges_while_memory_is_short_and_leaves_knobs_as_before_when_it_is_told_to_end() {
    let Some((_alone, _last)) = alone() else { return };
    let before = knobs();
    let stage = Stage::new();
    let _programs = programs(&stage);
    let mut driver = Driver::start(&SHORT);
    let first = driver.look();
    assert_documented(&["pagefold ksm drive"], &first);
    assert_eq!((&first["runs"], &first["pages_to_scan"]), (&true.into(), &1024.into()), "{first}");
    until(60, "pages are merged", || status()["pages_sharing"].as_u64() >= Some(PAGES));
    let shown = status();
    let of_driver = &shown["driver"];
    assert_eq!((&of_driver["pid"], &of_driver["rule"]), (&driver.child.id().into(), &"need".into()), "{shown}");
    assert_eq!((&shown["knobs"]["run"], &shown["left_behind"]), (&1.into(), &false.into()), "{shown}");
    assert!(shown["net_bytes"].as_i64() > Some(30 << 20), "{shown}");
    assert!(of_driver["ksmd_cpu_s"].is_null() || of_driver["ksmd_cpu_s"].as_f64() > Some(0.0), "{shown}");
    let refused = pagefold(&["ksm", "drive", "--one-trust-domain"]);
    assert!(refused.status.code() == Some(1) && said(&refused).contains("another pagefold ksm drive"), "{refused:?}");

    driver.signal(driver.child.id(), "TERM");
    driver.end();
    assert_eq!(knobs(), before, "it was told to end");
    assert!(status()["pages_sharing"].as_u64() >= Some(PAGES), "what is merged stays merged");
    if let Some(across) = knob("merge_across_nodes") {
        let other = if across == "1" { "false" } else { "true" };
        let refused = pagefold(&["ksm", "drive", "--one-trust-domain", "--merge-across-nodes", other]);
        assert!(said(&refused).contains("can only be set while nothing is merged"), "{refused:?}");
        assert_eq!((refused.status.code(), knobs()), (Some(1), before));
    }
}

#[test]
fn every_knob_is_as_before_when_the_driver_is_killed_with_its_guard_or_without() {
    let Some((_alone, _last)) = alone() else { return };
    let before = knobs();
    let mut driver = Driver::start(&SHORT);
    assert_eq!(driver.look()["runs"], true);
    driver.child.kill().expect("kill the driver");
    driver.child.wait().expect("its end");
    until(60, "the guard puts back", || knobs() == before);
    until(10, "nothing is left behind", || status()["driver"].is_null() && status()["left_behind"] == false);

    let mut driver = Driver::start(&SHORT);
    assert_eq!(driver.look()["runs"], true);
    let guard = driver.guard();
    driver.signal(guard, "STOP");
    driver.child.kill().expect("kill the driver");
    driver.child.wait().expect("its end");
    driver.signal(guard, "KILL");
    until(10, "it is left behind", || status()["left_behind"] == true && knobs() != before);
    let restored = pagefold(&["ksm", "restore"]);
    assert!(restored.status.success(), "{restored:?}");
    assert_eq!((knobs(), status()["left_behind"].as_bool()), (before, Some(false)));
}

#[test]
fn each_rule_runs_on_this_kernel_and_nothing_is_merged_without_pressure() {
    let Some((_alone, _last)) = alone() else { return };
    let before = knobs();
    for rule in ["need", "ksmtuned", "mom", "advisor"] {
        let without = ["--rule", rule, "--off-until-pressure", "--pressure-below", "0%", "--for", "1s"];
        let mut driver = Driver::start(&without);
        let look = driver.look();
        let is_free = look["reason"] == "memory is not short";
        // A host that stalls or swaps says so.
        assert!(!is_free || look["runs"] == false, "{rule}: {look}");
        driver.end();
        assert_eq!(knobs(), before, "{rule}");
    }
    if knob("advisor_mode").is_some() {
        let mut driver = Driver::start(&["--rule", "advisor", "--for", "2s"]);
        assert_eq!(driver.look()["runs"], true);
        assert_eq!(knob("advisor_mode").as_deref(), Some("scan-time"));
        driver.end();
        assert_eq!(knobs(), before);
    }
    let refused = pagefold(&["ksm", "drive"]);
    assert!(refused.status.code() == Some(2) && said(&refused).contains("--one-trust-domain"), "{refused:?}");
    assert_eq!(knobs(), before);
}
