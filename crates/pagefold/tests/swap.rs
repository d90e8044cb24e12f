//! Swapped pages are counted as such, and a census brings none of them back.

mod common;

use common::{Afterwards, Stage, census, guest, number};
use std::fs;
use std::process::Command;
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
    // Not in /tmp: the kernel does not swap to a tmpfs.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = dir.path().join("swap").to_str().unwrap().to_owned();
    let make = format!("dd if=/dev/zero of={file} bs=1M count=64 status=none && chmod 600 {file} && mkswap -q {file}");
    assert!(Command::new("sh").args(["-c", &make]).status().unwrap().success());
    let afterwards = Afterwards::run(&format!("swapoff {file}"));
    let on = Command::new("swapon").arg(&file).output().unwrap();
    if !on.status.success() {
        return eprintln!("skipped: no swap file here: {}", String::from_utf8_lossy(&on.stderr));
    }
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
    drop(afterwards);
}
