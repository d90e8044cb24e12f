//! `pagefold explain`, `forecast` and the kinds of pages in `census`, on real VMs.

mod common;

use common::lab::{self, Lab};
use common::number;
use serde_json::Value;
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

/// Lock of these tests, for one at a time. Emulated guests need the processors, and guests of another test would share
/// pages with those that are counted.
static ALONE: Mutex<()> = Mutex::new(());

/// Runs a command on this lab's guests alone, since other tests may run guests.
fn of_ours(lab: &Lab, command: &str, more: &[&str]) -> Output {
    let mut call = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    call.arg(command).args(more).args(["--groups", &lab.groups()]);
    for guest in lab.guests() {
        call.args(["--pid", &lab::pid(&guest).to_string()]);
    }
    call.output().expect("run pagefold")
}

/// The JSON that a command printed. It may exit with 1: some pages of a running guest may vanish before they are read.
/// The command then reports them, and the rest is valid.
fn answer(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0 | 1)), "{text}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {text}"))
}

const KINDS: [&str; 13] = [
    "kernel_text",
    "kernel_rodata",
    "kernel_data",
    "page_tables",
    "slab",
    "kernel_stack",
    "page_cache",
    "shmem",
    "anonymous",
    "free",
    "balloon",
    "reserved",
    "unknown",
];

#[test]
fn two_guests_are_explained_by_kind_and_by_name() {
    if common::not_root() {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // A guest that has just booted would not be folded for some minutes.
    let lab = Lab::new(&[("PAGEFOLD_EAGER", "1")]);
    if lab.up(&["--image", "tiny", "--guests", "2", "--groups", "acme", "--memory", "128M", "--saved"]).is_none() {
        return;
    }
    let found = answer(&of_ours(&lab, "explain", &["acme-1", "--json", "--no-host"]));
    assert_eq!(found["guest"], "qemu:acme-1");
    assert!(found["kernel"]["release"].as_str().expect("a release").contains("-cloud-amd64"), "{}", found["kernel"]);
    assert_eq!(found["kernel"]["paging_levels"], 4);
    assert!(number(&found["kernel"]["kaslr_offset"]) > 0);
    let kinds = found["kinds"].as_array().expect("kinds");
    assert!(kinds.iter().all(|k| KINDS.contains(&k["kind"].as_str().unwrap())));
    let sum = |field: &str| kinds.iter().map(|k| number(&k[field])).sum::<u64>();
    assert_eq!(sum("pages"), 128 << 8, "all memory has a kind");
    // The census counts the RAM's frames without their kinds.
    let census = answer(&of_ours(&lab, "census", &["--json"]));
    let guest = census["guests"].as_array().unwrap().iter().find(|g| g["name"] == "acme-1").expect("the guest").clone();
    let ram = guest["regions"].as_array().unwrap().iter().find(|r| r["region"] == "guest_ram").expect("RAM").clone();
    let near = |a: u64, b: u64| assert!(a.abs_diff(b) < 300, "{a} {b}");
    near(sum("backed_pages"), number(&ram["resident_pages"]));
    near(sum("zero_pages"), number(&ram["zero_pages"]));
    let of_census = guest["kinds"].as_array().expect("kinds in the census");
    near(of_census.iter().map(|k| number(&k["backed_pages"])).sum(), number(&ram["resident_pages"]));
    // Both guests hold the same initramfs, so busybox is named.
    let busybox = found["things"].as_array().unwrap().iter().find(|t| t["name"] == "/bin/busybox").expect("busybox");
    let holders: Vec<&Value> = busybox["holders"].as_array().unwrap().iter().map(|h| &h["guest"]).collect();
    assert_eq!(holders, ["qemu:acme-1", "qemu:acme-2"]);
    assert!(number(&busybox["contents"]) > 300, "{busybox}");
    // Bloat and advice.
    let free = kinds.iter().find(|k| k["kind"] == "free").expect("free pages");
    assert_eq!(found["bloat"]["free_backed_pages"], free["backed_pages"]);
    assert_eq!(found["bloat"]["balloon"], false);
    let advice = found["advice"].as_array().unwrap();
    assert!(
        advice.iter().any(|a| a["action"] == "fold") && advice.iter().any(|a| a["action"] == "free_page_reporting")
    );
    assert!(advice.windows(2).all(|two| number(&two[0]["bytes"]) >= number(&two[1]["bytes"])), "in order of yield");
    // The text for people.
    let text = of_ours(&lab, "explain", &["acme-1", "--no-host"]);
    let text = String::from_utf8(text.stdout).expect("text");
    assert!(text.contains("kernel rodata") && text.contains("/bin/busybox of acme-1 and acme-2: 2 x"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
}

#[test]
fn explain_refuses_guest_that_is_no_vm_or_missing() {
    if common::not_root() {
        return;
    }
    let me = std::process::id().to_string();
    let refused = common::pagefold(&["explain", "process:*", "--pid", &me]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("is no VM"), "{refused:?}");
    let missing = common::pagefold(&["explain", "no-such-guest", "--pid", &me]);
    assert_eq!(missing.status.code(), Some(2));
}

/// Forecasts from two guests the memory of five, or of twelve with `PAGEFOLD_LONG_TESTS`.
#[test]
fn a_forecast_from_two_guests_holds_for_more() {
    if common::not_root() {
        return;
    }
    let more = if std::env::var_os("PAGEFOLD_LONG_TESTS").is_some() { 10 } else { 3 };
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // A guest that has just booted would not be folded for some minutes.
    let lab = Lab::new(&[("PAGEFOLD_EAGER", "1")]);
    if lab.up(&["--image", "tiny", "--guests", "2", "--groups", "acme", "--memory", "128M", "--saved"]).is_none() {
        return;
    }
    lab.run(&["settle"]);
    let ask = |how: &[&str]| answer(&of_ours(&lab, "forecast", &[&["--json", "--like", "acme-1"], how].concat()));
    let first = [ask(&[]), ask(&["--folded"])];
    lab.up(&["--image", "tiny", "--guests", &more.to_string(), "--groups", "acme", "--memory", "128M", "--saved"])
        .expect("more guests");
    lab.run(&["settle"]);
    let last = [ask(&[]), ask(&["--folded"])];
    for (first, last) in first.iter().zip(&last) {
        assert_eq!((number(&first["now"]["guests"]), number(&last["now"]["guests"])), (2, 2 + more));
        let (now, next) = (number(&first["now"]["average_bytes"]), number(&first["next_guest_bytes"]));
        let told = (2 * now + more * next) / (2 + more);
        let seen = number(&last["now"]["average_bytes"]);
        let off = told.abs_diff(seen) as f64 / seen as f64;
        eprintln!("folded {}: told {told}, seen {seen}, off by {:.1}%", first["folded"], off * 100.0);
        assert!(off <= 0.1, "told {told}, seen {seen}");
        assert!(number(&last["asymptote_bytes"]) <= number(&last["now"]["average_bytes"]));
        assert!(
            number(&last["fits_low"]) <= number(&last["fits"]) && number(&last["fits"]) <= number(&last["fits_high"])
        );
    }
    assert!(number(&last[1]["now"]["average_bytes"]) < number(&last[0]["now"]["average_bytes"]));
}

/// A service that ends with the test.
struct Service(std::process::Child);

impl Drop for Service {
    fn drop(&mut self) {
        let pid = self.0.id().to_string();
        let _ = Command::new("kill").arg(pid).status();
        let _ = self.0.wait();
    }
}

/// Folded pages that the guest has not touched since are in the pool alone. If `explain` read them as zeros, it would
/// find no kernel in such a guest.
#[test]
fn folded_guest_is_explained() {
    if common::not_root() {
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // A guest that has just booted would not be folded for some minutes.
    let lab = Lab::new(&[("PAGEFOLD_EAGER", "1")]);
    let dir = lab.dir().join("service");
    let config = lab.dir().join("service.toml");
    std::fs::write(&config, "[[group]]\nname = \"acme\"\nhuge-pages = 1\n").expect("write it");
    let mut serve = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    serve.args(["serve", "--stop-workers", "--config"]).arg(&config).arg("--dir").arg(&dir);
    let service = Service(serve.stderr(std::process::Stdio::null()).spawn().expect("start a service"));
    let a_minute = || std::time::Instant::now() + std::time::Duration::from_secs(60);
    let deadline = a_minute();
    let later = || std::thread::sleep(std::time::Duration::from_millis(200));
    while !dir.join("control.sock").exists() && std::time::Instant::now() < deadline {
        later();
    }
    let dir = dir.to_str().expect("a plain path").to_owned();
    let words = ["--image", "tiny", "--guests", "2", "--groups", "acme", "--memory", "128M", "--saved"];
    if lab.up(&[&words[..], &["--fold", "--service", &dir]].concat()).is_none() {
        return;
    }
    let deadline = a_minute();
    let folded = loop {
        let found = answer(&of_ours(&lab, "explain", &["acme-1", "--json", "--no-host"]));
        let kinds = found["kinds"].as_array().expect("kinds").clone();
        let folded: u64 = kinds.iter().map(|k| number(&k["folded_pages"])).sum();
        // Only folded pages that the guest has touched since are counted: some hundreds or thousands of 15,000.
        if folded > 100 || std::time::Instant::now() > deadline {
            assert!(found["kernel"]["release"].is_string(), "{}", found["problem"]);
            assert!(kinds.iter().any(|k| k["kind"] == "kernel_rodata" && number(&k["folded_pages"]) > 0), "{kinds:?}");
            assert_eq!(kinds.iter().map(|k| number(&k["pages"])).sum::<u64>(), 128 << 8);
            break folded;
        }
        later();
    };
    assert!(folded > 100, "{folded}");
    drop(lab);
    drop(service);
}
