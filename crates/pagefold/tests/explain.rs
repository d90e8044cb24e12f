//! `pagefold explain`, `forecast` and the kinds of pages in `census`, on real VMs.

mod common;

use common::formats::assert_documented;
use common::lab::{self, Lab};
use common::number;
use common::qemu::Qemu;
use common::service::Service;
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
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

/// Commands that a text for people advises, in quotes; `...` stands for a program with its arguments.
fn advised(text: &str) -> Vec<String> {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    text.split('\'').filter(|part| part.starts_with("pagefold ")).map(|part| part.replace("...", "true")).collect()
}

/// Runs every command that a text advises for the service in `dir`, and gives every device that it advises to a QEMU.
/// Returns the commands.
fn run_advised(text: &str, dir: &Path) -> Vec<String> {
    let commands = advised(text);
    for command in &commands {
        let mut call = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        let output = call.args(command.split(' ').skip(1)).env("PAGEFOLD_DIR", dir).output().expect("run it");
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let device = |rest: &str| rest.split([' ', ')']).next().unwrap_or_default().to_owned();
    for device in text.split("-device ").skip(1).map(device) {
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-machine", "pc", "-accel", "tcg", "-m", "16", "-S", "-nodefaults", "-display", "none"]);
        qemu.args(["-monitor", "stdio", "-device", &device]).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut qemu = qemu.stderr(Stdio::piped()).spawn().expect("start QEMU");
        qemu.stdin.take().expect("a pipe").write_all(b"quit\n").expect("tell QEMU");
        let output = qemu.wait_with_output().expect("wait for QEMU");
        assert!(output.status.success(), "{device}: {}", String::from_utf8_lossy(&output.stderr));
    }
    commands
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
    assert_documented(&["explain --json"], &found);
    assert!(found["kernel"]["release"].as_str().expect("a release").contains("-cloud-amd64"), "{}", found["kernel"]);
    assert_eq!(found["kernel"]["paging_levels"], 4);
    assert!(number(&found["kernel"]["kaslr_offset"]) > 0);
    let kinds = found["kinds"].as_array().expect("kinds");
    assert!(kinds.iter().all(|k| KINDS.contains(&k["kind"].as_str().unwrap())));
    let sum = |field: &str| kinds.iter().map(|k| number(&k[field])).sum::<u64>();
    assert_eq!(sum("pages"), 128 << 8, "all memory has a kind");
    // The census counts the RAM's frames without their kinds.
    let census = answer(&of_ours(&lab, "census", &["--json"]));
    assert_documented(&["census --json"], &census);
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
    // The census was taken later.
    assert_bloat_and_advice(&found, (number(&guest["incremental_pages"]) + 300) << 12);
    // The text for people.
    let text = of_ours(&lab, "explain", &["acme-1", "--no-host"]);
    let text = String::from_utf8(text.stdout).expect("text");
    assert!(text.contains("kernel rodata") && text.contains("/bin/busybox of acme-1 and acme-2: 2 x"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
    assert!(text.contains(", KASLR offset 0x") && text.contains("guest's files and tmpfs"), "{text}");
    // Without --no-host, the host is counted.
    assert!(text.contains("-: not counted (--no-host)") && found["kinds"][0]["duplicates"]["host"].is_null(), "{text}");
    assert_advice_is_accepted(&lab, &text);
}

fn assert_bloat_and_advice(found: &Value, own: u64) {
    let kinds = found["kinds"].as_array().expect("kinds");
    let free = kinds.iter().find(|k| k["kind"] == "free").expect("free pages");
    assert_eq!(found["bloat"]["free_backed_pages"], free["backed_pages"]);
    assert_eq!(found["bloat"]["balloon"], false);
    let advice = found["advice"].as_array().unwrap();
    assert!(
        advice.iter().any(|a| a["action"] == "fold") && advice.iter().any(|a| a["action"] == "free_page_reporting")
    );
    let of_guest = |a: &&Value| a["action"] != "drop_devices";
    assert!(advice.iter().filter(of_guest).all(|a| number(&a["bytes"]) <= own), "its own frames are {own}: {advice:?}");
    assert!(advice.windows(2).all(|two| number(&two[0]["bytes"]) >= number(&two[1]["bytes"])), "in order of yield");
}

/// Advice for guests that are not folded works as it is printed, also for guests in groups of their own.
fn assert_advice_is_accepted(lab: &Lab, grouped: &str) {
    let service = Service::start();
    let pids: Vec<String> = lab.guests().iter().map(|guest| lab::pid(guest).to_string()).collect();
    let assert_accepted = |text: &str, group: &str| {
        let attach = format!("pagefold attach {} --group {group}", pids[0]);
        let run = format!("pagefold run --group {group} -- true");
        assert_eq!(run_advised(text, &service.place()), [attach, run], "{text}");
        assert!(service.pagefold(&["detach", &pids[0]]).status.success(), "{}", service.log());
    };
    assert_accepted(grouped, "acme");
    let mut call = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    call.args(["explain", "acme-1", "--no-host", "--group-by", "all"]);
    let alone = |pid: &String| {
        let mut call = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        call.args(["explain", "acme-1", "--no-host", "--pid", pid]).output().expect("run pagefold")
    };
    call.args(pids.iter().flat_map(|pid| ["--pid", pid]));
    let texts = [call.output().expect("run pagefold"), alone(&pids[0])].map(|output| output.stdout);
    for (text, group) in texts.into_iter().zip(["all", "acme-1"]) {
        assert_accepted(&String::from_utf8(text).expect("text"), group);
    }
}

/// A socket that is not this VM's is refused, and not passed over in silence.
#[test]
fn qmp_socket_must_be_the_guests_own() {
    if common::not_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let socket = |name: &str| dir.path().join(name).to_str().expect("a plain path").to_owned();
    let start = |name: &str| Qemu::start(name, &["-qmp", &format!("unix:{},server=on,wait=off", socket(name))]);
    let (Some(one), Some(other)) = (start("own"), start("other")) else { return };
    let pid = one.pid().to_string();
    let explain = |qmp: &str| common::pagefold(&["explain", &one.name, "--pid", &pid, "--no-host", "--qmp", qmp]);
    let foreign = format!("is the socket of process {}, not of this guest, which is process {pid}", other.pid());
    for (path, words) in [
        ("/nonexistent".to_owned(), "cannot talk QMP over /nonexistent: No such file"),
        (dir.path().to_str().expect("a plain path").to_owned(), "Connection refused"),
        (socket("other"), &foreign),
    ] {
        let refused = explain(&path);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(2) && said.contains(words), "{path}: {:?} {said}", refused.status);
        assert_eq!(said.matches(words).count(), 1, "{said}");
    }
    // There is no kernel in its memory, but its memory is found.
    let own = explain(&socket("own"));
    assert_eq!(own.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&own.stdout).contains("Its memory by what it is inside"), "{own:?}");
}

/// Guests that were given more memory than they use fit only while they do not use it.
#[test]
fn forecast_warns_of_what_guests_may_grow_to() {
    if common::not_root() {
        return;
    }
    let Some(qemu) = Qemu::start("grown", &[]) else { return };
    let args = ["forecast", "--pid", &qemu.pid().to_string()];
    let found = answer(&common::pagefold(&[&args[..], &["--json"]].concat()));
    assert_documented(&["forecast --json"], &found);
    let grown = &found["grown"];
    let (fits, size) = (number(&grown["fits"]), number(&grown["guest_bytes"]));
    assert!((128 << 20..256 << 20).contains(&size), "{grown}");
    assert!(fits < number(&found["fits"]) && (fits + 1) * size <= number(&grown["room_bytes"]), "{found}");
    assert!((fits + 2) * size > number(&grown["room_bytes"]), "{found}");
    let missing = (number(&found["fits"]) + 1) * size - number(&grown["room_bytes"]);
    assert_eq!(number(&grown["short_bytes"]), missing);
    let text = String::from_utf8(common::pagefold(&args).stdout).expect("text");
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("WARNING: that is as they are now.") && text.contains("would be missing"), "{text}");
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
struct Configured(std::process::Child);

impl Drop for Configured {
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
    let service = Configured(serve.stderr(std::process::Stdio::null()).spawn().expect("start a service"));
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
        let kernel = kinds.iter().any(|k| k["kind"] == "kernel_rodata" && number(&k["folded_pages"]) > 0);
        // Only folded pages that the guest has touched since are counted: some hundreds or thousands of 15,000.
        if kernel && folded > 100 || std::time::Instant::now() > deadline {
            assert!(found["kernel"]["release"].is_string(), "{}", found["problem"]);
            assert!(kernel, "{kinds:?}");
            assert_eq!(kinds.iter().map(|k| number(&k["pages"])).sum::<u64>(), 128 << 8);
            break folded;
        }
        later();
    };
    assert!(folded > 100, "{folded}");
    let text = of_ours(&lab, "explain", &["acme-1", "--no-host"]);
    let text = String::from_utf8(text.stdout).expect("text");
    assert_eq!(run_advised(&text, Path::new(&dir)), ["pagefold group show acme"], "{text}");
    drop(lab);
    drop(service);
}
