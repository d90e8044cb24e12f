//! Guests that die, execute another program or free memory during a census. Such a guest is reported as partial, the
//! others are complete, and the census neither crashes nor hangs.

mod common;

use common::brute_force::Frames;
use common::{Known, Stage, census_args, guest, number};
use serde_json::Value;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Pages of the large guest: 256 MiB, enough for a census that can be hit in the middle.
const PAGES: u32 = 65536;

/// Takes a census of a large guest and a small one, and disturbs the large one in the middle of it. Repeats that with
/// other delays until the disturbance has hit: the census has found the process at first, and missed it later.
fn in_the_middle(how: &[&str], disturb: impl Fn(&mut Known), reason: &str) {
    let stage = Stage::new();
    let quiet = stage.start(&["alloc a 2000", "fill a 0 2000 1"]);
    let expected = Frames::of(&[quiet.pid()]).resident(quiet.pid());
    let mut delay = Duration::from_millis(40);
    // The two factors are no powers of each other, so no delay comes twice.
    for _ in 0..40 {
        let mut large = stage.start(&[&format!("alloc a {PAGES}"), &format!("fill a 0 {PAGES} 100000")]);
        let pid = large.pid();
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(census_args(&[pid, quiet.pid()], how)).stdout(Stdio::piped()).stderr(Stdio::piped());
        let begin = Instant::now();
        let running = command.spawn().unwrap();
        std::thread::sleep(delay);
        disturb(&mut large);
        let output = running.wait_with_output().unwrap();
        assert!(begin.elapsed() < Duration::from_secs(60), "waited for the guest");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        let found: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        if output.status.code() == Some(0) {
            // A census of all pages came before the disturbance, and one of few pages after it.
            let is_late = number(&guest(&found, pid)["resident_pages"]) >= u64::from(PAGES);
            delay = if is_late { delay * 2 / 3 } else { delay * 5 / 4 };
            continue;
        }
        assert_eq!(output.status.code(), Some(1), "{errors}");
        let partial = found["partial"].as_array().cloned().unwrap_or_default();
        let hit = partial.iter().find(|p| p["pid"] == pid && p["reason"].as_str().unwrap().contains(reason));
        if hit.is_none() {
            // The disturbance was too early: the census found nothing to count.
            delay = delay * 5 / 4;
            continue;
        }
        assert!(partial.iter().all(|p| p["pid"] == pid), "the other guest is complete: {partial:?}");
        assert_eq!(number(&guest(&found, quiet.pid())["resident_pages"]), expected);
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
fn a_guest_that_frees_memory_is_partial() {
    if common::not_root() {
        return;
    }
    for how in WAYS {
        in_the_middle(how, |known| known.send(&format!("drop a 0 {PAGES}")), "unmapped or discarded");
    }
}

/// A process that registers memory with a userfaultfd and discards it can block every process that faults on it, for
/// ever. When the census read such memory like any other, the third census of this test hung.
#[test]
fn memory_with_a_userfaultfd_does_not_block_the_census() {
    if common::not_root() {
        return;
    }
    let stage = Stage::new();
    let known = stage.start(&["alloc a 8192", "uffd a"]);
    for round in 0..25 {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "60", env!("CARGO_BIN_EXE_pagefold")]).args(census_args(&[known.pid()], &[]));
        let output = command.output().unwrap();
        assert!(matches!(output.status.code(), Some(0 | 1)), "round {round}: {output:?}");
    }
}
