//! `pagefold study`: all studies are listed, verdict functions are right, runs have the documented shape. A run that was
//! killed goes on, and KSM is as it was. Figures are not tested, and neither is which verdict they yield.

mod common;

use common::formats::assert_documented;
use common::{json_of, number, pagefold};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

const KSM: &str = "/sys/kernel/mm/ksm";

/// Lock of these tests: there is one ksmd, and one run that sets it at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Whether this host cannot run studies; prints the reason for skipping.
fn cannot_run() -> bool {
    if common::not_root() {
        return true;
    }
    let none = !fs::exists(KSM).unwrap_or(false);
    if none {
        eprintln!("skipped: this kernel has no KSM");
    }
    none
}

fn knobs() -> Vec<String> {
    let knobs = ["run", "pages_to_scan", "sleep_millisecs", "smart_scan", "use_zero_pages", "advisor_mode"];
    let read = |knob| fs::read_to_string(format!("{KSM}/{knob}")).unwrap_or_default();
    knobs.iter().map(|knob| format!("{knob}: {}", read(knob).trim())).collect()
}

fn study(state: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.arg("study").arg("--yes").args(args).arg("--state").arg(state);
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn every_study_is_listed_and_can_be_made() {
    let listed = json_of(&pagefold(&["study", "--list", "--json"]));
    assert_documented(&["study --list --json"], &listed);
    let listed = listed.as_array().expect("a list");
    assert_eq!(listed.len(), 62);
    assert!(listed.iter().all(|study| study["available"] == true), "each has a recipe: {listed:?}");
}

#[test]
fn made_up_samples_get_the_verdicts_that_they_must() {
    let tried = json_of(&pagefold(&["study", "selftest", "--json"]));
    assert_documented(&["study selftest --json"], &tried);
    let tried = tried.as_array().expect("a list");
    assert!(tried.len() > 20 && tried.iter().all(|one| one["wrong"] == Value::Array(Vec::new())), "{tried:?}");
}

#[test]
fn names_that_mean_nothing_have_their_codes() {
    for (args, code, word) in [
        (&["study"][..], 2, "--list"),
        (&["study", "kim-nothing"], 2, "kim-nothing"),
        (&["study", "kim-bill", "--arm", "fald"], 2, "it has ksm, fold"),
    ] {
        let output = pagefold(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", said(&output));
        assert!(said(&output).contains(word), "{args:?}: {}", said(&output));
    }
}

/// Asserts that a verdict has all that belongs to it, and that nothing was decided by a single repetition.
fn assert_single_run_decides_nothing(verdict: &Value) {
    assert_eq!((verdict["verdict"].clone(), verdict["n"].clone()), ("undecided".into(), 1.into()), "{verdict}");
    assert!(verdict["value"].is_number() && verdict["interval"].is_null(), "{verdict}");
    assert!(number(&verdict["needs_n"]) >= 3 && verdict["why"].is_string(), "{verdict}");
}

/// Runs studies once, asserts the shape of their results, and returns these.
fn run_once(ids: &[&str], more: &[&str]) -> Vec<Value> {
    let state = tempfile::tempdir().expect("a temporary directory");
    let args = [ids, more, &["--reps", "1", "--json"]].concat();
    let results = json_of(&study(state.path(), &args).output().expect("run pagefold study"));
    assert_documented(&["study --json"], &results);
    let results = results.as_array().expect("a list").clone();
    assert!(results.iter().map(|result| result["id"].as_str()).eq(ids.iter().map(|id| Some(*id))), "{results:?}");
    for result in &results {
        let (id, verdicts) = (&result["id"], result["verdicts"].as_array().expect("a list"));
        assert!(verdicts.len() >= 4, "{id}: {verdicts:?}");
        assert!(result["seconds"].as_f64() > Some(0.0) && result["estimated_seconds"].as_f64() > Some(0.0), "{id}");
    }
    assert!(fs::read_dir(state.path()).expect("list it").flatten().all(|e| e.path().is_file()), "turns are left");
    results
}

/// The figure of a result in each arm that has it.
fn figures(result: &Value, metric: &str) -> Vec<f64> {
    let measured = result["measured"].as_array().expect("a list").iter();
    measured.filter(|r| r["metric"] == metric && r["x"].is_null()).filter_map(|r| r["mean"].as_f64()).collect()
}

/// Number of verdicts about arms that were left out. They have no samples, and say so.
fn without_samples(result: &Value) -> usize {
    let verdicts = result["verdicts"].as_array().expect("a list").iter();
    verdicts.filter(|v| v["n"] == 0 && v["verdict"] == "undecided").count()
}

#[test]
fn two_studies_run_and_put_ksm_back() {
    if cannot_run() {
        return;
    }
    let _alone = ONE_AT_A_TIME.lock();
    let before = knobs();
    let [duplicates] = &run_once(&["agarwal-t6.4"], &[])[..] else { panic!("one result") };
    assert_eq!(knobs(), before);
    duplicates["verdicts"].as_array().expect("a list").iter().for_each(assert_single_run_decides_nothing);
    let reported = duplicates["reported"].as_array().expect("a list");
    assert_eq!((reported.len(), reported[0]["values"][0].as_f64()), (4, Some(28.0)));
    let costs = &run_once(&["kloster-t8.3"], &["--arm", "fold"])[0];
    assert!(figures(costs, "merged_pages")[0] > 8000.0, "{costs}");
    assert_eq!(without_samples(costs), 2, "{costs}");
    assert_eq!(knobs(), before);
}

#[test]
fn study_of_real_guests_finds_no_page_that_crosses_a_group() {
    if cannot_run() {
        return;
    }
    if std::env::var_os("PAGEFOLD_LONG_TESTS").is_none() {
        return eprintln!("skipped: it takes a minute and a half with nothing beside: PAGEFOLD_LONG_TESTS=1");
    }
    let _alone = ONE_AT_A_TIME.lock();
    let before = knobs();
    let isolated = &run_once(&["kim-isolate"], &["--arm", "fold-across"])[0];
    assert_eq!(figures(isolated, "cross_group_frames"), [0.0]);
    // A look at all page frames takes three seconds where processors are slow.
    assert!(figures(isolated, "looks")[0] >= 3.0 && figures(isolated, "merged_pages")[0] > 100.0, "{isolated}");
    assert_eq!(without_samples(isolated), 3, "{isolated}");
    assert_eq!(knobs(), before);
}

#[test]
fn killed_run_goes_on_after_its_last_turn() {
    if cannot_run() {
        return;
    }
    let _alone = ONE_AT_A_TIME.lock();
    let before = knobs();
    let state = tempfile::tempdir().expect("a temporary directory");
    let args = ["kloster-t8.3", "--reps", "2", "--json"];
    let mut first = study(state.path(), &args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("start it");
    let dir = std::env::temp_dir().join(format!("pagefold-study-{}", first.id()));
    let wait = |what: &str, done: &dyn Fn() -> bool| {
        let begin = Instant::now();
        while !done() {
            assert!(begin.elapsed() < Duration::from_secs(120), "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let turn = state.path().join("kloster-t8.3-short/0-ksm.json");
    wait("no turn is kept", &|| turn.exists());
    first.kill().expect("kill our own child");
    first.wait().expect("wait for it");
    wait("KSM is not put back", &|| knobs() == before);
    wait("its directory is left", &|| !dir.exists());
    let kept = fs::read(&turn).expect("the turn that was kept");
    let second = study(state.path(), &args).output().expect("run pagefold study");
    assert!(!said(&second).contains("turn 1 of 4") && said(&second).contains("turn 4 of 4"), "{}", said(&second));
    let results = json_of(&second);
    let kept: Value = serde_json::from_slice(&kept).expect("a turn");
    let record = |of: &Value, key: &str| of.as_array().expect("a list").iter().find(|s| s["metric"] == key).cloned();
    let measured = results[0]["measured"].as_array().expect("a list");
    let merge = measured.iter().find(|r| r["metric"] == "merge_us" && r["arm"] == "ksm").expect("a record");
    assert_eq!(merge["samples"][0], record(&kept["samples"], "merge_us").expect("a sample")["value"]);
    assert_eq!(number(&merge["n"]), 2);
    let merged = figures(&results[0], "merged_pages");
    assert!(merged.len() == 2 && merged.iter().all(|pages| *pages > 8000.0), "{merged:?}");
    assert_eq!(knobs(), before);
}
