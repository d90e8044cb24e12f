//! Swapped pages are counted as such, and a census brings none of them back.

mod common;

use common::service::{Service, cannot_fold, find_member, until};
use common::{Afterwards, Stage, census, guest, number};
use std::fs;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

fn swapped_pages(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let line = status.lines().find_map(|l| l.strip_prefix("VmSwap:")).expect("a kernel with swap");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a size") / 4
}

#[test]
fn swapped_pages_are_counted_and_stay_in_swap() {
    if common::not_root() {
        return;
    }
    let Some(swap) = Swap::on() else { return };
    let stage = Stage::new();
    let mut known = stage.start(&["alloc a 3000", "fill a 0 3000 1", "alloc b 500", "fill b 0 500 90000"]);
    let before = census(&[known.pid()], &[]);
    let begin = Instant::now();
    while swapped_pages(known.pid()) < 3000 {
        assert!(begin.elapsed() < Duration::from_secs(30), "{} pages swapped", swapped_pages(known.pid()));
        known.tell("pageout a");
    }
    for how in [&[][..], &["--no-trace"]] {
        let found = census(&[known.pid()], how);
        let (was, is) = (guest(&before, known.pid()), guest(&found, known.pid()));
        assert_eq!((number(&was["swapped_pages"]), number(&is["swapped_pages"])), (0, 3000), "{how:?}");
        let gone = number(&was["resident_pages"]) - number(&is["resident_pages"]);
        // The program's own stack and heap change by some pages with each command.
        assert!((2990..=3000).contains(&gone), "{gone} {how:?}");
        assert_eq!(swapped_pages(known.pid()), 3000, "looking {how:?} brought pages back");
    }
    drop(known);
    drop(swap);
}

#[test]
fn nothing_is_folded_with_swap_where_kernel_would_stop() {
    if cannot_fold() {
        return;
    }
    let Some(swap) = Swap::on() else { return };
    let service = Service::start();
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    let program = program.to_str().expect("a plain path");
    let mut member = service.run_with("acme", "a", &[], &[program], &[("PAGEFOLD_KERNEL", "6.12.5")]);
    ["alloc x 500", "same x 0 500 5000", "mergeable x"].iter().for_each(|line| _ = member.tell(line));
    let row = || find_member(&service.show("acme"), "a").cloned().unwrap_or_default();
    until(60, "it says why it is not folded", || row()["state"] == "no_move");
    let detail = row()["detail"].as_str().expect("text").to_owned();
    assert!(detail.contains("CVE-2025-21984") && detail.contains("swapoff"), "{detail}");
    assert_eq!(row()["folded_pages"], 0);
    drop(swap);
    if fs::read_to_string("/proc/swaps").is_ok_and(|swaps| swaps.lines().count() == 1) {
        until(90, "it folds without swap", || row()["folded_pages"] == 500);
    }
}

/// A swap file in use. One test has one at a time.
struct Swap {
    _afterwards: Afterwards,
    _dir: tempfile::TempDir,
    _turn: MutexGuard<'static, ()>,
}

impl Swap {
    /// `None`, with the reason printed, where there can be none.
    fn on() -> Option<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // Not in /tmp: the kernel does not swap to a tmpfs.
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let file = dir.path().join("swap").to_str().unwrap().to_owned();
        let make =
            format!("dd if=/dev/zero of={file} bs=1M count=64 status=none && chmod 600 {file} && mkswap -q {file}");
        assert!(Command::new("sh").args(["-c", &make]).status().unwrap().success());
        let afterwards = Afterwards::run(&format!("swapoff {file}"));
        let on = Command::new("swapon").arg(&file).output().unwrap();
        if !on.status.success() {
            eprintln!("skipped: no swap file here: {}", String::from_utf8_lossy(&on.stderr));
            return None;
        }
        Some(Self { _afterwards: afterwards, _dir: dir, _turn: turn })
    }
}
