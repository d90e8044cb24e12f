//! `pagefold bench start` in small. Speed is not tested.

mod common;

use common::formats::assert_documented;
use common::service::until;
use common::{json_of, pagefold};
use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn figures_of_each_way_to_start_a_guest_are_there() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = |name: &str| dir.path().join(name).to_str().expect("a plain path").to_owned();
    let [drawn, again, saved, page] = ["drawn.svg", "again.svg", "saved.json", "page.html"].map(path);
    let words = ["bench", "start", "--rounds", "1", "--many", "2", "--idle", "0", "--json", "--report", &drawn];
    let output = pagefold(&words);
    if output.status.code() == Some(3) {
        eprintln!("skipped: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let found = json_of(&output);
    assert_documented(&["bench start --json"], &found);
    let one = &found["one"][0];
    let ms = |field: &str| one[field].as_f64().unwrap_or_else(|| panic!("no {field} in {found}"));
    for field in ["clone", "warm", "boot", "restore", "rollback", "stock"] {
        assert!(ms(&format!("{field}_p50_ms")) > 1.0, "{field}: {found}");
    }
    // Numbers in JSON have lost their last digits.
    assert!((ms("clone_to_boot") / (ms("clone_p50_ms") / ms("boot_p50_ms")) - 1.0).abs() < 1e-9, "{found}");
    for (list, field) in [("many", "all_answered_s"), ("density", "pss_mib_each")] {
        let arms: Vec<&str> =
            found[list].as_array().expect(list).iter().filter_map(|each| each["arm"].as_str()).collect();
        let all = ["copy", "stock", "clone", "clone+fold"];
        assert_eq!(arms, if list == "many" { &all[..] } else { &all[1..] });
        assert!(found[list].as_array().expect(list).iter().all(|each| each[field].as_f64() > Some(0.0)), "{found}");
    }
    // A dot for each way, and the same picture of what was saved.
    fs::write(&saved, &output.stdout).expect("save it");
    for report in [&again, &page] {
        assert!(pagefold(&["bench", "start", "--from", &saved, "--report", report]).status.success());
    }
    let [drawn, again, page] = [drawn, again, page].map(|file| fs::read_to_string(file).expect("a picture"));
    assert!(drawn.matches("<circle").count() == 6 && drawn.contains("clone+fold"), "{drawn}");
    assert!(drawn == again && page.contains(&drawn) && page.ends_with("</html>\n"), "{again}");
    for words in [&["--from", &saved][..], &["--report", "picture.png"], &["--from", "/dev/null", "--report", "x.svg"]]
    {
        assert_ne!(pagefold(&[&["bench", "start"], words].concat()).status.code(), Some(0));
    }
}

#[test]
fn sharing_that_a_restored_process_tree_lacks_is_brought_back() {
    let output = pagefold(&["bench", "start", "--rounds", "0", "--many", "0", "--containers", "2", "--json"]);
    if output.status.code() == Some(3) {
        eprintln!("skipped: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let found = json_of(&output);
    assert_documented(&["bench start --json"], &found);
    let of = |arm: &str| found["containers"].as_array().expect("a list").iter().find(|of| of["arm"] == arm);
    let [zygote, restored] = ["zygote", "restored"].map(|arm| of(arm).unwrap_or_else(|| panic!("no {arm} in {found}")));
    let bytes = |of: &serde_json::Value| of["bytes_each"].as_f64().expect("bytes");
    // Three processes share what one of them has, and then none shares anything.
    assert!(bytes(restored) > 2.5 * bytes(zygote) && bytes(zygote) > f64::from(32 << 20), "{found}");
    let last = restored["attached"].as_array().and_then(|all| all.last()).expect("a count");
    assert!(last["shared_again"].as_f64() > Some(0.1) && bytes(last) < bytes(restored), "{found}");
    if let Some(lxc) = of("lxc") {
        assert!(lxc["all_answered_s"].as_f64() > zygote["all_answered_s"].as_f64(), "{found}");
        assert!(bytes(lxc) > f64::from(64 << 20) && lxc["attached"][0]["shared_again"].is_null(), "{found}");
    } else {
        eprintln!("skipped: containers of LXC: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn killed_bench_leaves_no_guest() {
    let words = ["bench", "start", "--rounds", "0", "--many", "2", "--idle", "600"];
    let mut bench = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    let mut bench = bench.args(words).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("run pagefold");
    let dir = std::env::temp_dir().join(format!("pagefold-bench-{}", bench.id()));
    let socket = format!("path={}/", dir.display());
    // The template's own guest, and two that stock QEMU has cloned.
    let begin = Instant::now();
    while processes_with(&socket).len() < 3 {
        if let Some(status) = bench.try_wait().expect("look at it") {
            let mut said = String::new();
            bench.stderr.take().expect("its errors").read_to_string(&mut said).expect("read them");
            assert_eq!(status.code(), Some(3), "{said}");
            return eprintln!("skipped: {said}");
        }
        assert!(begin.elapsed() < Duration::from_secs(120), "no guests");
        std::thread::sleep(Duration::from_millis(20));
    }
    bench.kill().expect("kill it");
    bench.wait().expect("wait for it");
    until(60, "guests and directory are gone", || processes_with(&socket).is_empty() && !dir.exists());
}

/// Pids of all processes whose command line has this text.
fn processes_with(text: &str) -> Vec<u32> {
    let pids = std::fs::read_dir("/proc").expect("list /proc").flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let line = |pid: &u32| std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    pids.filter(|pid| String::from_utf8_lossy(&line(pid)).contains(text)).collect()
}

/// The work. `./x soak` runs it: ksmd would merge guests of other tests, and eleven minutes are too long beside them.
const WORK: [&str; 6] = ["--work", "600", "--workers", "12", "--image", "tiny,debian"];

#[test]
fn frames_of_guests_that_work_are_counted_in_each_arm() {
    if std::env::var_os("PAGEFOLD_SOAK_SECONDS").is_none() {
        eprintln!("skipped: ./x soak runs it");
        return;
    }
    let output = pagefold(&[&["bench", "start", "--rounds", "0", "--many", "0", "--json"], &WORK[..]].concat());
    if output.status.code() == Some(3) {
        eprintln!("skipped: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let found = json_of(&output);
    assert_documented(&["bench start --json"], &found);
    let counts = found["memory"].as_array().expect("memory");
    for arm in ["clone", "merge", "clone+fold", "clone+ksmd"] {
        let of: Vec<&serde_json::Value> = counts.iter().filter(|count| count["arm"] == arm).collect();
        assert!(of.len() >= 2 && of.iter().all(|count| count["bytes_each"].as_f64() > Some(1e6)), "{arm}: {found}");
        let last = of[of.len() - 1];
        assert_eq!(last["folded_of_possible"].is_null(), arm == "clone", "{found}");
        assert_eq!(last["merger_cpu_s"].as_f64() > Some(0.0), arm != "clone", "{found}");
        assert!(
            of.iter().all(|count| count["turns_each"].as_f64() >= Some(1.0)),
            "all steps of the work succeed: {found}"
        );
    }
}
