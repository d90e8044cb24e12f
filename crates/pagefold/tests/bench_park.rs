//! `pagefold bench park` in small, and what is left of it when it is killed. Speed is not tested.

mod common;

use common::formats::assert_documented;
use common::service::until;
use common::{Ends, json_of, not_root, pagefold};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn clones_are_parked_and_woken_alone_and_at_once() {
    if not_root() {
        return;
    }
    let output = pagefold(&["bench", "park", "--only", "guests", "--count", "3", "--at-once", "1", "--json"]);
    if output.status.code() == Some(3) {
        eprintln!("skipped: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let found = json_of(&output);
    assert_documented(&["bench park --json"], &found);
    let guests = &found["guests"][0];
    let figure = |name: &str| guests[name].as_f64().unwrap_or_else(|| panic!("no {name} in {found}"));
    assert_eq!((guests["n"].as_u64(), guests["cloned"].as_bool()), (Some(3), Some(true)), "{found}");
    // Each has 128 MiB, and holds few pages of them alone.
    assert!((0.1..32.0).contains(&figure("mib_each")), "{found}");
    assert!(
        figure("resume_p50_ms") <= figure("wake_p50_ms") && figure("wake_p50_ms") <= figure("wake_p99_ms"),
        "{found}"
    );
    let at_once = &guests["at_once"];
    assert_eq!(
        [&at_once["n"], &at_once["answered"], &at_once["kills"]].map(|n| n.as_u64()),
        [Some(1), Some(1), Some(0)]
    );
    let [host, spare] = ["host_mib", "spare_mib"].map(|name| at_once[name].as_f64().expect("a size"));
    assert!((0.045..0.055).contains(&(spare / host)), "{found}");
}

#[test]
fn build_is_refused_with_the_reason() {
    let refused = pagefold(&["bench", "park", "--only", "arms", "--loads", "build"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(3), "{said}");
    assert!(said.contains("no compiler"), "{said}");
}

fn swaps() -> String {
    fs::read_to_string("/proc/swaps").expect("a kernel with swap")
}

/// Fails if the guardian is not told of the device before the host swaps to it.
#[test]
fn killed_bench_leaves_no_swap_on() {
    if not_root() {
        return;
    }
    if !Path::new("/sys/class/zram-control").exists() {
        eprintln!("skipped: this kernel has no zram");
        return;
    }
    let before = swaps();
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.args(["bench", "park", "--only", "guests", "--count", "1", "--zram"]).stdout(Stdio::null());
    let mut bench = Ends(command.spawn().expect("run pagefold"));
    let new_device = || {
        let swaps = swaps();
        let mut devices = swaps.lines().filter_map(|line| line.split_whitespace().next());
        devices.find(|device| device.starts_with("/dev/zram") && !before.contains(device)).map(str::to_owned)
    };
    let mut device = None;
    until(60, "the host swaps to a device of the bench's", || {
        device = new_device();
        device.is_some()
    });
    let device = device.expect("a zram device");
    bench.0.kill().expect("kill it");
    bench.0.wait().expect("its end");
    until(60, "it swaps there no more", || !swaps().contains(&device));
    until(60, "the device is removed", || !Path::new(&device.replace("/dev", "/sys/block")).exists());
}
