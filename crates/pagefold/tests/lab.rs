//! `pagefold lab` without rights, interrupted at any moment, called wrongly, and on a full disk.

mod common;

use common::formats::assert_documented;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::Duration;

/// A directory that every user can write, with a copy of the program that every user can run.
struct Place {
    dir: tempfile::TempDir,
    program: PathBuf,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("lab").tempdir_in("/tmp").expect("a temporary directory");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o1777)).expect("open it");
        let program = dir.path().join("pagefold");
        for name in ["pagefold", "pagefold-lab"] {
            let built = Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name(name);
            common::copy_program(&built, &dir.path().join(name));
        }
        Self { dir, program }
    }

    fn lab(&self) -> PathBuf {
        self.dir.path().join("lab")
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("lab").args(words).env("PAGEFOLD_LAB_DIR", self.lab());
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("run pagefold")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = self.run(&["down"]);
    }
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0)
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Processes in whose command line a path occurs.
fn processes_with(path: &Path) -> usize {
    let needle = path.to_str().expect("a plain path");
    let lines = fs::read_dir("/proc").expect("list /proc").filter_map(|entry| {
        let entry = entry.ok()?;
        entry.file_name().to_str()?.parse::<u32>().ok()?;
        fs::read(entry.path().join("cmdline")).ok()
    });
    lines.filter(|line| String::from_utf8_lossy(line).contains(needle)).count()
}

#[test]
fn unprivileged_user_can_have_process_guests() {
    let place = Place::new();
    let as_nobody = |words: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&place.program).arg("lab").args(words);
        command
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("HOME", "/nonexistent")
            .env("PAGEFOLD_LAB_DIR", place.lab());
        command.output().expect("run setpriv")
    };
    if !is_root() {
        return eprintln!("skipped: only root can be somebody else");
    }
    let up = as_nobody(&["up", "--image", "process", "--guests", "3", "--groups", "a,b", "--memory", "16M", "--json"]);
    let up = json(&up);
    assert_documented(&["lab --json"], &up);
    let guests = up["guests"].as_array().expect("a list");
    let names: Vec<&str> = guests.iter().filter_map(|guest| guest["name"].as_str()).collect();
    assert_eq!(names, ["a-1", "a-2", "b-1"]);
    for guest in guests {
        let status = fs::read_to_string(format!("/proc/{}/status", guest["pid"])).expect("it runs");
        assert!(status.contains("Uid:\t65534"), "{status}");
        assert!(status.starts_with(&format!("Name:\t{}\n", guest["name"].as_str().expect("a name"))), "{status}");
        let resident = |kind: &str| {
            let line = status.lines().find(|line| line.starts_with(kind)).expect("a line");
            line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).expect("a number")
        };
        assert!((11 << 10..14 << 10).contains(&resident("RssAnon:")), "three quarters of 16 MiB: {status}");
        assert!(resident("RssFile:") >= 3 << 10, "a quarter of 16 MiB: {status}");
    }
    let settled = json(&as_nobody(&["settle", "--json"]));
    assert_documented(&["lab --json"], &settled);
    assert_eq!(settled["idle"], true);
    let no_inside = as_nobody(&["exec", "--guest", "a-1", "--", "true"]);
    assert_eq!(no_inside.status.code(), Some(2), "{}", stderr(&no_inside));
    // Containers need root, and the message says so.
    let refused = as_nobody(&["up", "--image", "lxc-shared"]);
    assert_eq!(refused.status.code(), Some(3), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("root"));

    assert_eq!(json(&as_nobody(&["down", "--json"]))["ended"], serde_json::json!(["a-1", "a-2", "b-1"]));
    assert!(!place.lab().exists());
    assert!(guests.iter().all(|guest| fs::read_link(format!("/proc/{}/exe", guest["pid"])).is_err()));
}

#[test]
fn down_ends_what_an_interrupted_up_left() {
    let place = Place::new();
    let vms = Path::new("/usr/bin/qemu-system-x86_64").exists();
    let image = if vms { "tiny" } else { "process" };
    // The image is built and KVM probed first, so that the interruptions hit the start of the guests.
    assert!(place.run(&["up", "--image", image]).status.success());
    place.run(&["down"]);
    let marked = || {
        let processes = fs::read_dir("/proc").expect("list /proc").filter_map(|entry| Some(entry.ok()?.path()));
        let needle = place.lab().to_str().expect("a plain path").to_owned();
        let bears = |path: &PathBuf| {
            let environment = fs::read(path.join("environ")).unwrap_or_default();
            let environment = String::from_utf8_lossy(&environment).into_owned();
            environment.contains("PAGEFOLD_LAB=") && environment.contains(&needle)
        };
        processes.filter(bears).count()
    };
    let mut seen = 0;
    // The last ones are for a busy machine, which takes long to start all guests.
    for after_ms in [2, 5, 8, 12, 16, 20, 25, 30, 40, 60, 100, 400, 1600, 6400] {
        if after_ms > 400 && seen == 3 {
            break;
        }
        let words = ["up", "--image", image, "--guests", "3", "--groups", "a,b,c"];
        let mut up = place.command(&words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("start");
        thread::sleep(Duration::from_millis(after_ms));
        up.kill().expect("kill it");
        up.wait().expect("collect it");
        seen = seen.max(marked());
        let down = place.run(&["down"]);
        assert!(down.status.success(), "{}", stderr(&down));
        assert_eq!((marked(), processes_with(&place.lab())), (0, 0), "killed after {after_ms} ms");
        assert!(!place.lab().exists(), "killed after {after_ms} ms");
    }
    assert_eq!(seen, 3, "at least the latest interruption left guests to be ended");
}

#[test]
fn exec_passes_the_status_on() {
    if !Path::new("/usr/bin/qemu-system-x86_64").exists() {
        return eprintln!("skipped: no QEMU");
    }
    let place = Place::new();
    let up = place.run(&["up", "--image", "tiny", "--guests", "2", "--groups", "a,b", "--memory", "96M"]);
    assert!(up.status.success(), "{}", stderr(&up));
    let one = place.run(&["exec", "--guest", "b-1", "--", "sh", "-c", "hostname; echo err >&2; exit 42"]);
    assert_eq!((one.status.code(), &one.stdout[..], &one.stderr[..]), (Some(42), &b"b-1\n"[..], &b"err\n"[..]));
    let all = place.run(&["exec", "--", "hostname"]);
    assert_eq!((all.status.code(), &all.stdout[..]), (Some(0), &b"== a-1\na-1\n== b-1\nb-1\n"[..]));
    let some = place.run(&["exec", "--json", "--", "sh", "-c", "[ $(hostname) = a-1 ]"]);
    assert_eq!(some.status.code(), Some(1));
    let some: Value = serde_json::from_slice(&some.stdout).expect("JSON");
    assert_documented(&["lab --json"], &some);
    assert_eq!((&some[0]["status"], &some[1]["status"]), (&Value::from(0), &Value::from(1)));
    let listed = json(&place.run(&["list", "--json"]));
    assert_documented(&["lab --json"], &listed);
    assert_eq!(listed["guests"][0]["memory_bytes"], 96 << 20);
    assert!(Path::new(listed["guests"][1]["qmp"].as_str().expect("a socket")).exists());
    let groups = fs::read_to_string(listed["groups_file"].as_str().expect("a file")).expect("the mapping");
    assert!(groups.contains("a = [\"a-1\"]") && groups.contains("b = [\"b-1\"]"), "{groups}");
}

#[test]
fn wrong_calls_are_usage_errors_and_start_nothing() {
    let place = Place::new();
    let long = "x".repeat(90);
    for words in [
        &["up", "--image", "process", "--groups", "a/b"] as &[&str],
        &["up", "--image", "process", "--groups", "a,a"],
        &["up", "--image", "process", "--groups", "fourteen-bytes"],
        &["up", "--image", "process", "--guests", "0"],
        &["up", "--image", "process", "--guests", "1001"],
        &["up", "--image", "process", "--guests", "18446744073709551615"],
        &["up", "--image", "process", "--append", "quiet"],
        &["up", "--image", "process", "--dir", "/tmp"],
        &["up", "--image", "lxc-shared", "--memory", "64M"],
        &["up", "--image", "tiny", "--kernel", "/bin/sh"],
        &["up", "--image", "tiny", "--dir", &format!("{}/{long}", place.lab().display())],
        &["exec", "--guest", "nobody-1", "--", "true"],
        &["exec", "--", "true"],
    ] {
        let output = place.run(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", stderr(&output));
        // Before it, progress may tell that VMs are emulated.
        let says_why = stderr(&output).lines().any(|line| line.starts_with("pagefold: "));
        assert!(says_why, "{words:?}: {}", stderr(&output));
        assert_eq!(processes_with(&place.lab()), 0, "{words:?}");
    }
    assert!(place.run(&["list"]).status.success());
    assert!(place.run(&["down"]).status.success());
}

#[test]
fn memory_beyond_the_hosts_is_refused_before_any_start() {
    let place = Place::new();
    for image in ["process", "tiny"] {
        let refused = place.run(&["up", "--image", image, "--memory", "1000T"]);
        assert_eq!(refused.status.code(), Some(3), "{}", stderr(&refused));
        assert!(stderr(&refused).contains("does not fit"), "{}", stderr(&refused));
    }
    let refused = place.run(&["up", "--image", "tiny", "--kernel", "/dev/zero"]);
    assert_eq!(refused.status.code(), Some(1), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("/dev/zero: not a plain file"), "{}", stderr(&refused));
}

/// A small tmpfs. Dropping it unmounts it, also when the test fails.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: PathBuf) -> Self {
        fs::create_dir(&at).expect("make a directory");
        let status = Command::new("mount").args(["-t", "tmpfs", "-o", "size=64k", "none"]).arg(&at).status();
        assert!(status.expect("run mount").success());
        Self(at)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn down_works_on_a_full_disk() {
    if !is_root() {
        return eprintln!("skipped: only root can mount a small disk");
    }
    let place = Place::new();
    let disk = SmallDisk::mount(place.dir.path().join("disk"));
    let dir = disk.0.join("lab").to_str().expect("a plain path").to_owned();
    let up = place.run(&["up", "--image", "process", "--memory", "2M", "--dir", &dir]);
    let filled = fs::write(disk.0.join("fill"), vec![1; 1 << 20]);
    let down = place.run(&["down", "--dir", &dir]);
    fs::remove_file(disk.0.join("fill")).expect("make room");
    let again = place.run(&["down", "--dir", &dir]);
    assert!(up.status.success() && filled.is_err(), "{}", stderr(&up));
    assert!(down.status.success(), "{}", stderr(&down));
    assert!(String::from_utf8_lossy(&again.stdout).contains("no guests"), "nothing was left to be done");
}

/// Starts `lab up` for two VMs that never get ready, because they are paused, and waits until they run.
fn up_for_ever(place: &Place) -> Option<std::process::Child> {
    let words = ["up", "--image", "tiny", "--guests", "2", "--memory", "64M", "--qemu-arg", "-S"];
    let mut up = common::interruptible(&place.command(&words));
    let mut up = up.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("run pagefold");
    loop {
        let states = states(place);
        if states == ["starting", "starting"] {
            return Some(up);
        }
        if let Some(status) = up.try_wait().expect("ask for its state") {
            assert_eq!(status.code(), Some(3), "{}", stderr(&up.wait_with_output().expect("its output")));
            eprintln!("skipped: no VMs here");
            return None;
        }
        thread::sleep(Duration::from_millis(50));
    }
}

fn states(place: &Place) -> Vec<String> {
    let listed = json(&place.run(&["list", "--json"]));
    let guests = listed["guests"].as_array().expect("a list");
    guests.iter().map(|guest| guest["state"].as_str().expect("a state").to_owned()).collect()
}

#[test]
fn interrupted_up_ends_what_it_started_and_killed_one_is_told() {
    let place = Place::new();
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let Some(up) = up_for_ever(&place) else { return };
        assert!(Command::new("kill").args([&format!("-{signal}"), &up.id().to_string()]).status().unwrap().success());
        let output = up.wait_with_output().expect("its output");
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        assert!(stderr(&output).contains("interrupted: ended lab-1, lab-2"), "{}", stderr(&output));
        assert_eq!(states(&place), [""; 0]);
    }
    let Some(mut up) = up_for_ever(&place) else { return };
    up.kill().expect("kill our own child");
    up.wait().expect("wait for our own child");
    assert_eq!(states(&place), ["failed", "failed"]);
    let list = place.run(&["list"]);
    let table = String::from_utf8_lossy(&list.stdout).into_owned();
    assert!(table.contains("failed, ") && !table.contains("not yet"), "{table}");
    assert!(stderr(&list).contains("pagefold lab down --dir"), "{}", stderr(&list));
}

#[test]
fn doctor_and_lab_tell_the_same_about_kvm() {
    let place = Place::new();
    if fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        eprintln!("skipped: no KVM here");
        return;
    }
    // The answer of a trial boot that failed.
    let why = "a VM can be created, but no kernel boots in it within 6 s";
    let cache = place.dir.path().join("cache");
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("an id");
    fs::create_dir(&cache).expect("make a directory");
    fs::write(cache.join(format!("kvm-{}", boot.trim())), why).expect("write the answer");
    let run = |words: &[&str]| Command::new(&place.program).args(words).env("PAGEFOLD_CACHE", &cache).output().unwrap();
    let doctor = run(&["doctor", "--json", "--pid", &std::process::id().to_string()]);
    let found: Value = serde_json::from_slice(&doctor.stdout).expect("JSON");
    let checks = &found["checks"];
    let kvm = checks.as_array().expect("a list").iter().find(|check| check["id"] == "host:kvm").expect("a check");
    assert!(kvm["status"] == "warn" && kvm["found"].as_str().unwrap().contains(why), "{kvm}");
    assert!(kvm["fix"].as_str().unwrap().contains("TCG"), "{kvm}");
    let words = ["up", "--json", "--image", "tiny", "--memory", "64M", "--timeout", "1", "--qemu-arg", "-S"];
    let up = place.command(&words).env("PAGEFOLD_CACHE", &cache).output().expect("run pagefold");
    if up.status.code() == Some(3) {
        eprintln!("skipped: {}", stderr(&up));
        return;
    }
    assert!(stderr(&up).contains(&format!("VMs are emulated (TCG), which is slow: {why}")), "{}", stderr(&up));
}
