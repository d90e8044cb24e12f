//! `pagefold bench ksm` measures both sides, on guests with a known number of mergeable pages, and leaves KSM as it
//! was. Speed is not tested.

mod common;

use common::formats::assert_documented;
use common::{json_of, number, pagefold};
use serde_json::Value;
use std::fs;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

const KSM: &str = "/sys/kernel/mm/ksm";

/// Lock of these tests: there is one ksmd, and one bench of it runs at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Whether this kernel has no KSM to compare with; prints the reason for skipping.
fn no_ksm() -> bool {
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

/// Asserts that a side reports as merged all copies of each content but one.
fn assert_merges_all_superfluous(side: &str, turn: &Value, superfluous: u64) {
    let near = |what: &str, found: u64, percent: u64| {
        let most_off = superfluous * percent / 100;
        assert!(found.abs_diff(superfluous) <= most_off, "{side}: {what} {found}, made {superfluous}");
    };
    near("merged", number(&turn["merged_pages"]), 1);
    // The agent's own memory is in its member.
    near("frames saved", number(&turn["frames_saved"]), 4);
}

#[test]
fn both_sides_merge_all_superfluous_pages_and_ksm_is_restored() {
    if common::not_root() || no_ksm() {
        return;
    }
    let _alone = ONE_AT_A_TIME.lock();
    let before = knobs();
    let words = "bench ksm --yes --image synthetic --guests 2 --memory 64M --rounds 1 --steady 1 --settle 8 --reactions 5 --json";
    let found = json_of(&pagefold(&words.split(' ').collect::<Vec<_>>()));
    assert_documented(&["bench ksm --json"], &found);
    assert_eq!(knobs(), before);
    let round = &found["rounds"][0];
    let superfluous = number(&found["superfluous_pages"]);
    for side in ["ksmd", "pagefold"] {
        let turn = &round[side];
        assert_merges_all_superfluous(side, turn, superfluous);
        assert!(turn["wall_s"].as_f64().unwrap() <= turn["total_wall_s"].as_f64().unwrap(), "{side}");
        assert!(turn["cpu_s"].as_f64().unwrap() <= turn["total_cpu_s"].as_f64().unwrap(), "{side}");
        for positive in
            ["total_cpu_s", "cpu_us_per_merged_page", "steady_cpu_s_per_s", "reaction_s", "metadata_bytes_per_page"]
        {
            assert!(turn[positive].as_f64().is_some_and(|found| found > 0.0), "{side}: {positive}: {turn}");
        }
        assert_eq!(number(&turn["reactions_missed"]), 0, "{side}");
        assert!(number(&turn["break"]["count"]) > 1900 && turn["break"]["p50_us"].as_f64().unwrap() > 0.0, "{side}");
        assert!(turn["stall"]["merged_share"].as_f64().unwrap() >= 0.99, "{side}");
        assert!(number(&turn["vmas_after"]) >= number(&turn["vmas_before"]), "{side}");
        assert!(turn["curve"].as_array().unwrap().len() > 10, "{side}");
        assert!(found[side]["merged_pages"].is_number() && found[side]["break"]["p99_us"].is_number(), "{side}");
    }
    // Folding costs a mapping for each run of pages; ksmd's merging does not.
    assert!(number(&round["pagefold"]["vmas_after"]) > number(&round["ksmd"]["vmas_after"]));
    for ratio in ["cpu", "wall", "merged", "steady_cpu", "break_p50"] {
        assert!(found["ratio"][ratio].as_f64().unwrap() > 0.0, "{ratio}: {}", found["ratio"]);
    }
}

/// Takes minutes, because it waits until each side merges nothing more.
#[test]
fn huge_pages_are_split_by_policy_and_collapsed_again() {
    if common::not_root() || no_ksm() || std::env::var_os("PAGEFOLD_LONG_TESTS").is_none() {
        return eprintln!("skipped: takes minutes; PAGEFOLD_LONG_TESTS=1 runs it");
    }
    let _alone = ONE_AT_A_TIME.lock();
    let before = knobs();
    let found = json_of(&pagefold(&["bench", "huge", "--yes", "--memory", "64M", "--json"]));
    assert_documented(&["bench huge --json"], &found);
    assert_eq!(knobs(), before);
    let [ksmd, never, half, any] = found["sides"].as_array().unwrap().as_slice() else { panic!("{found}") };
    let of = |side: &Value, what: &str| side[what].as_f64().unwrap();
    // Half of the second program's pages equal pages of the first one.
    for (side, saved, huge) in [(ksmd, 0.25, 0.25), (never, 0.0, 1.0), (half, 0.22, 0.5), (any, 0.25, 0.25)] {
        assert!((of(side, "saved_share") - saved).abs() < 0.02, "{side}");
        assert!(of(side, "huge_share_before") > 0.9, "{side}");
        assert!((of(side, "huge_share_merged") - huge).abs() < 0.1, "{side}");
    }
    for side in [never, half, any] {
        assert!(of(side, "huge_share_differing") > 0.9, "{side}");
    }
}

#[test]
fn killed_bench_restores_ksm_and_leaves_nothing() {
    if common::not_root() || no_ksm() {
        return;
    }
    let _alone = ONE_AT_A_TIME.lock();
    let before = knobs();
    let args = ["bench", "ksm", "--yes", "--image", "synthetic", "--guests", "2", "--memory", "16M", "--rounds", "1"];
    let mut bench = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    let mut bench = bench.args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let dir = std::env::temp_dir().join(format!("pagefold-bench-{}", bench.id()));
    let wait = |what: &str, done: &dyn Fn() -> bool| {
        let begin = Instant::now();
        while !done() {
            assert!(begin.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    wait("ksmd is not set to work", &|| fs::read_to_string(format!("{KSM}/run")).is_ok_and(|run| run.trim() == "1"));
    assert!(dir.exists());
    assert_ne!(knobs(), before);
    let second = pagefold(&args);
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(second.status.code() == Some(1) && said.contains("another bench"), "{said}");
    bench.kill().unwrap();
    bench.wait().unwrap();
    wait("KSM is not put back", &|| knobs() == before);
    wait("its directory is left", &|| !dir.exists());
}

#[test]
fn containers_are_merged_by_both_sides_and_ksm_is_restored() {
    if common::not_root() || no_ksm() {
        return;
    }
    if std::env::var_os("PAGEFOLD_LONG_TESTS").is_none() {
        return eprintln!("skipped: it takes minutes: PAGEFOLD_LONG_TESTS=1");
    }
    let _alone = ONE_AT_A_TIME.lock();
    let before = knobs();
    let found = json_of(&pagefold(&[
        "bench",
        "containers",
        "--containers",
        "2",
        "--load",
        "5",
        "--rest",
        "0",
        "--steady",
        "5",
        "--json",
    ]));
    assert_documented(&["bench containers --json", "bench ksm --json"], &found);
    assert_eq!(knobs(), before);
    let round = &found["rounds"][0];
    for side in ["ksmd", "pagefold"] {
        // Two MariaDBs have tens of megabytes in common.
        assert!(number(&round[side]["merged_pages"]) > 10_000, "{side}: {round}");
    }
    assert!(round["ratio"]["merged_idle"].as_f64() > Some(0.9), "{round}");
}
