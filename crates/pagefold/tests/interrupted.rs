//! Guests that die, execute another program or give memory back while they are counted: that guest is
//! reported as partial, the others are complete, and nothing crashes or waits.

mod common;

use common::brute_force::Frames;
use common::{Known, Stage, census_args, guest, number};
use serde_json::Value;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// 256 MiB: long enough to hit in the middle.
const PAGES: u32 = 65536;

/// Takes a census of a large guest and a small one, does something to the large one in the middle of it, and
/// goes on with other delays until that was in the middle: the process was there at first and not any more then.
fn in_the_middle(how: &[&str], disturb: impl Fn(&mut Known), reason: &str) {
    let stage = Stage::new();
    let calm = stage.start(&["alloc a 2000", "fill a 0 2000 1"]);
    let expected = Frames::of(&[calm.pid()]).resident(calm.pid());
    let mut delay = Duration::from_millis(40);
    for _ in 0..25 {
        let mut large = stage.start(&[&format!("alloc a {PAGES}"), &format!("fill a 0 {PAGES} 100000")]);
        let pid = large.pid();
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(census_args(&[pid, calm.pid()], how)).stdout(Stdio::piped()).stderr(Stdio::piped());
        let begin = Instant::now();
        let running = command.spawn().unwrap();
        std::thread::sleep(delay);
        disturb(&mut large);
        let output = running.wait_with_output().unwrap();
        assert!(begin.elapsed() < Duration::from_secs(60), "waited for the guest");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.code() == Some(0) {
            delay = delay * 2 / 3;
            continue;
        }
        assert_eq!(output.status.code(), Some(1), "{errors}");
        let found: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let partial = found["partial"].as_array().cloned().unwrap_or_default();
        let hit = partial.iter().find(|p| p["pid"] == pid && p["reason"].as_str().unwrap().contains(reason));
        if hit.is_none() {
            // Too early: there was nothing left to count.
            delay = delay * 3 / 2;
            continue;
        }
        assert!(partial.iter().all(|p| p["pid"] == pid), "the other guest is complete: {partial:?}");
        assert_eq!(number(&guest(&found, calm.pid())["resident_pages"]), expected);
        assert!(number(&guest(&found, pid)["resident_pages"]) < u64::from(PAGES) + 3000);
        assert!(errors.contains(reason), "said on stderr: {errors}");
        return;
    }
    panic!("never hit the middle of a census");
}

const WAYS: [&[&str]; 2] = [&[], &["--no-trace"]];

#[test]
fn a_guest_that_dies_is_partial() {
    if common::not_root() {
        return;
    }
    for how in WAYS {
        in_the_middle(how, Known::kill, "ended, or executed another program");
    }
}

#[test]
fn a_guest_that_executes_another_program_is_partial() {
    if common::not_root() {
        return;
    }
    for how in WAYS {
        in_the_middle(how, |known| known.send("exec"), "ended, or executed another program");
    }
}

#[test]
fn a_guest_that_gives_memory_back_is_partial() {
    if common::not_root() {
        return;
    }
    for how in WAYS {
        in_the_middle(how, |known| known.send(&format!("drop a 0 {PAGES}")), "unmapped or discarded");
    }
}

/// Who registers memory with a userfaultfd and discards it may keep whoever faults on it waiting for ever. Read like
/// other memory, it kept the third census of this test.
#[test]
fn nobody_can_keep_the_census_waiting() {
    if common::not_root() {
        return;
    }
    let stage = Stage::new();
    let known = stage.start(&["alloc a 8192", "uffd a"]);
    for round in 0..25 {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "20", env!("CARGO_BIN_EXE_pagefold")]).args(census_args(&[known.pid()], &[]));
        let output = command.stderr(Stdio::null()).output().unwrap();
        assert!(matches!(output.status.code(), Some(0 | 1)), "round {round}: {:?}", output.status);
    }
}
