//! The census of pages that the kernel's KSM has merged: it counts them once, and leaves them merged.

mod common;

use common::brute_force::Frames;
use common::{KSM, Stage, census, guest, number, start_merging};
use std::fs;
use std::time::{Duration, Instant};

fn merged(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/ksm_stat")).expect("a kernel that tells");
    let line = stat.lines().find_map(|l| l.strip_prefix("ksm_merging_pages ")).expect("the count");
    line.trim().parse().expect("a number")
}

#[test]
fn merged_pages_are_seen_and_stay_merged() {
    if common::not_root() {
        return;
    }
    let stage = Stage::new();
    let both = ["alloc a 1000", "fill a 0 400 1", "same a 400 100 9999999", "mergeable a"];
    let (one, two) = (stage.start(&both), stage.start(&both));
    let pids = [one.pid(), two.pid()];
    let plain = census(&pids, &[]);
    let merging = start_merging();
    let begin = Instant::now();
    while pids.iter().any(|&pid| merged(pid) < 500) {
        assert!(begin.elapsed() < Duration::from_secs(60), "ksmd does not merge: {:?}", pids.map(merged));
        std::thread::sleep(Duration::from_millis(50));
    }
    // Stop ksmd and keep the merged pages.
    fs::write(format!("{KSM}/run"), "0").unwrap();
    let expected = Frames::of(&pids);
    for how in [&[][..], &["--no-trace"]] {
        let found = census(&pids, how);
        for pid in pids {
            let guest = guest(&found, pid);
            assert_eq!(number(&guest["resident_pages"]), expected.resident(pid), "{how:?}");
            assert_eq!(number(&guest["mapped_pages"]), expected.mapped(pid), "{how:?}");
            assert_eq!(guest["ksm_pages"], 401, "{how:?}");
            assert_eq!(merged(pid), 500, "looking {how:?} ended the merging");
        }
        let shared = &found["already_shared"];
        assert_eq!((number(&shared["ksm_frames"]), number(&shared["ksm_saved_pages"])), (401, 2 * 500 - 401));
        // Of the superfluous copies of the 400 and the 100 pages, none is left.
        let saved = |found: &serde_json::Value| number(&found["opportunity"]["total"]["anon_anon"]);
        assert_eq!(saved(&plain) - saved(&found), 599, "{how:?}");
    }
    drop(merging);
}
