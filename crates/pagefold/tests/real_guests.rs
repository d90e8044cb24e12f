//! The census of real VMs, compared with a count by hand, and the census inside a VM with the oldest supported kernel.

mod common;

use common::brute_force::Frames;
use common::lab::{self, Lab};
use common::{Stage, number};
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

/// Lock of these tests, for one at a time: VMs share the pages of QEMU and its libraries, and their owners are counted.
static ALONE: Mutex<()> = Mutex::new(());

fn signal(pids: &[u32], signal: &str) {
    for pid in pids {
        assert!(Command::new("kill").args([signal, &pid.to_string()]).status().expect("run kill").success());
    }
}

fn census(pids: &[u32], more: &[&str]) -> Value {
    common::census(pids, more)
}

/// Compares every figure of a census of stopped VMs with the count by hand.
fn assert_counted_as_by_hand(found: &Value, pids: &[u32], by_hand: &Frames) {
    for (guest, &pid) in found["guests"].as_array().unwrap().iter().zip(pids) {
        assert_eq!(guest["kind"], "qemu");
        assert_eq!(number(&guest["mapped_pages"]), by_hand.mapped(pid));
        assert_eq!(number(&guest["resident_pages"]), by_hand.resident(pid));
        assert_eq!(number(&guest["zero_pages"]), by_hand.zero(pid));
        assert_eq!(number(&guest["distinct_pages"]), by_hand.distinct(pid));
        let regions = guest["regions"].as_array().unwrap();
        let ram = regions.iter().find(|r| r["region"] == "guest_ram").expect("guest RAM");
        assert!((4 << 10..128 << 8).contains(&number(&ram["resident_pages"])), "{ram}");
        assert!(number(&guest["duplicates"]["other_groups"]) + number(&guest["duplicates"]["group"]) > 1000);
    }
    assert_eq!(number(&found["all_saved_pages"]), by_hand.superfluous());
    let (shared, saved) = by_hand.shared();
    let already = &found["already_shared"];
    assert_eq!((number(&already["frames"]), number(&already["saved_pages"])), (shared, saved));
    // Guests of one group match in long runs: the same kernel, loaded the same way.
    assert!(found["runs"]["share_in_runs_of_8"].as_f64().unwrap() > 0.3, "{}", found["runs"]);
}

/// Asserts that other numbers of threads, another index bound and `--no-trace` find the same.
fn assert_every_way_finds_the_same(found: &Value, pids: &[u32], groups: &str) {
    for more in [&["--threads", "2"][..], &["--index-memory", "128K"], &["--no-trace"]] {
        let mut other = census(pids, &[&["--groups", groups, "--no-kinds"], more].concat());
        assert_eq!(number(&other["host"]["passes"]) > 1, more.contains(&"--index-memory"));
        other["host"] = found["host"].clone();
        assert!(other == *found, "{more:?} finds something else");
    }
}

/// Asserts that a look inside the VMs adds the kinds and changes nothing else. They are stopped, and QEMU does not
/// answer.
fn assert_kinds_change_nothing_else(found: &Value, pids: &[u32], groups: &str) {
    let mut inside = census(pids, &["--groups", groups]);
    inside["host"] = found["host"].clone();
    for guest in inside["guests"].as_array_mut().expect("guests") {
        let kinds = guest.as_object_mut().and_then(|guest| guest.remove("kinds")).expect("kinds");
        assert!(kinds.as_array().is_some_and(|kinds| kinds.len() > 8), "{kinds}");
    }
    assert!(inside == *found, "looking inside changes something else");
}

#[test]
fn real_vms_are_counted_as_by_hand() {
    if common::not_root() {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    common::own_qemu();
    let lab = Lab::new(&[]);
    let words = ["--image", "tiny", "--guests", "3", "--groups", "acme,beta", "--memory", "128M", "--saved"];
    let Some(guests) = lab.up(&words) else { return };
    let pids: Vec<u32> = guests.iter().map(lab::pid).collect();
    // The VMs are stopped, so that nothing changes between the counts.
    pids.iter().for_each(|pid| common::stop(*pid));
    let groups = lab.groups();
    // Without kinds, because `--no-trace` finds none.
    let found = census(&pids, &["--groups", &groups, "--no-kinds"]);
    let by_hand = Frames::of(&pids);
    assert_counted_as_by_hand(&found, &pids, &by_hand);
    assert_every_way_finds_the_same(&found, &pids, &groups);
    assert_kinds_change_nothing_else(&found, &pids, &groups);

    // Without groups, each VM is a group of its own: only duplicates within each could be saved.
    let alone = census(&pids, &[]);
    assert_eq!(alone["all_saved_pages"], found["all_saved_pages"]);
    assert_eq!(
        number(&alone["isolation_price_pages"]),
        by_hand.superfluous() - by_hand.superfluous_isolated(),
        "the price of isolation"
    );
    assert!(number(&alone["isolation_price_pages"]) > number(&found["isolation_price_pages"]));
    signal(&pids, "-CONT");
}

/// Debian 12's own kernel (6.1) has no `PAGEMAP_SCAN`. There the census reads whole page tables, and knows zero pages
/// by their frames. The VM runs this kernel, and the census inside, from a disk with the program and its libraries.
#[test]
fn kernels_without_pagemap_scan_are_counted_too() {
    if common::not_root() {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (lab, stage) = (Lab::new(&[]), Stage::new());
    let disk: PathBuf = lab.dir().join("tools.img");
    let made = Command::new("mke2fs").args(["-q", "-t", "ext2", "-d", &stage.path("")]).arg(&disk).arg("256M").output();
    assert!(made.expect("run mke2fs").status.success());
    let drive = format!("--qemu-arg=file={},format=raw,if=virtio,readonly=on", disk.display());
    let up = lab.up(&["--image", "tiny", "--guests", "1", "--memory", "512M", "--qemu-arg=-drive", &drive]);
    if up.is_none() {
        return;
    }
    let script = r#"
        set -e
        mkdir -p /tools /tmp
        mount -t ext2 -o ro /dev/vda /tools
        run="/tools/ld-linux-x86-64.so.2 --library-path /tools"
        mkfifo /tmp/in
        $run /tools/known_pages < /tmp/in > /tmp/out & pid=$!
        exec 9> /tmp/in
        printf '%s\n' "alloc a 6000" "fill a 0 1000 1" "fill a 1000 500 1" "zero a 1500 300" "read a 2000 3000" >&9
        printf '%s\n' "huge h 1024" "read h 0 1024" "alloc terabyte 268435456" >&9
        while [ "$(grep -c ok /tmp/out)" -lt 8 ]; do sleep 0.1; done
        grep VmRSS /proc/$pid/status
        $run /tools/pagefold census --pid $pid --json"#;
    let output = lab.run(&["exec", "--guest", "lab-1", "--", "sh", "-c", script]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let (rss, json) = text.split_once('\n').expect("a line and JSON");
    let rss_kib: u64 = rss.split_ascii_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a size");
    let found: Value = serde_json::from_str(json).expect("JSON");
    let guest = &found["guests"][0];
    assert_eq!(number(&guest["mapped_pages"]) * 4, rss_kib);
    assert!(number(&found["host"]["pages_scanned"]) < 20_000, "what is only reserved is not looked at");
    assert_eq!(number(&guest["zero_pages"]), 300);
    // 500 copies, and 299 zero pages beyond the first; the C library holds some pages twice.
    assert!((799..810).contains(&number(&guest["duplicates"]["within"])), "{guest}");
}
