//! An operator's first day: the programs are installed, and two VMs are run in a group, folded, and looked at. The service is stopped, its
//! parts are killed, and it is upgraded. At last everything is private again. The VMs live through all of it.
//!
//! `./x soak` kills parts for as long as it is told.

mod common;

use common::service::{cannot_fold, seconds, until};
use common::{Afterwards, copy_program, json_of, number};
use serde_json::Value;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const CONFIG: &str = "[api]\ngroup = 'nogroup'\n[balance]\nevery = 1\n[[group]]\nname = 'acme'\n";
/// Programs, and the place of each in the package.
const PROGRAMS: [(&str, &str); 9] = [
    ("pagefold", "usr/bin"),
    ("pagefold-lab", "usr/bin"),
    ("pagefoldd", "usr/lib/pagefold"),
    ("pagefold-worker", "usr/lib/pagefold"),
    ("pagefold-prove", "usr/lib/pagefold"),
    ("pagefold-web", "usr/lib/pagefold"),
    ("pagefold-attach", "usr/lib/pagefold"),
    ("libpagefold.so", "usr/lib/pagefold"),
    ("../x86_64-unknown-linux-musl/debug/pagefold-agent", "usr/lib/pagefold"),
];

/// A host with Pagefold on it.
struct Host {
    dir: tempfile::TempDir,
    service: Option<Child>,
    _afterwards: Afterwards,
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("day").tempdir_in("/tmp").expect("a temporary directory");
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("open the directory");
        let script = format!(
            "for p in /proc/[0-9]*; do case $(readlink $p/exe) in {}/*) kill -9 ${{p#/proc/}};; esac; done 2>/dev/null",
            dir.path().display()
        );
        let host = Self { _afterwards: Afterwards::run(&script), dir, service: None };
        host.install();
        fs::write(host.path("config.toml"), CONFIG).expect("write the configuration");
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Puts the programs where they belong, as a package manager does: what runs goes on with the files that it had.
    fn install(&self) {
        let built = Path::new(env!("CARGO_BIN_EXE_pagefold")).parent().expect("a directory");
        for (name, place) in PROGRAMS {
            let place = self.path(place);
            fs::create_dir_all(&place).expect("make a directory");
            let (from, file) = (built.join(name), Path::new(name).file_name().expect("a name"));
            assert!(from.is_file(), "{} is not there: ./x build", from.display());
            let new = place.join("new");
            copy_program(&from, &new);
            fs::rename(new, place.join(file)).expect("put it in its place");
        }
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(self.path("usr/bin/pagefold"));
        command.args(words).env("PAGEFOLD_DIR", self.path("run")).env("PAGEFOLD_LAB_DIR", self.path("lab"));
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("run pagefold")
    }

    fn json(&self, words: &[&str]) -> Value {
        json_of(&self.run(&[words, &["--json"]].concat()))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    fn serve(&mut self) {
        let log = File::options().append(true).create(true).open(self.path("log")).expect("open the log");
        let mut command = self.command(&["serve", "--config"]);
        command.arg(self.path("config.toml")).arg("--dir").arg(self.path("run"));
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
        self.service = Some(child.expect("start the service"));
        until(60, "the service answers", || self.run(&["group", "list"]).status.success());
    }

    /// Ends the service with a signal, and waits for its end.
    fn end(&mut self, signal: &str) {
        let mut service = self.service.take().expect("it runs");
        kill(service.id(), signal);
        service.wait().expect("wait for it");
    }

    /// Waits until both VMs are members that have much in common.
    fn until_folded(&self, when: &str) {
        let mut last = Value::Null;
        let end = Instant::now() + Duration::from_secs(120);
        loop {
            let output = self.run(&["group", "show", "acme", "--json"]);
            if output.status.success() {
                last = json_of(&output);
                let members = last["members"].as_array().expect("a list");
                let connected = members.iter().filter(|m| m["connected"] == true).count();
                if connected == 2 && number(&last["sharing_pages"]) > 1000 {
                    return;
                }
            }
            assert!(Instant::now() < end, "{when}: {last}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// The process of a part of the service.
    fn part(&self, part: &str) -> Option<u32> {
        match part {
            "worker" => u32::try_from(self.json(&["group", "show", "acme"])["worker_pid"].as_u64()?).ok(),
            "service" => self.service.as_ref().map(Child::id),
            program => self.pid_of(program),
        }
    }

    fn pid_of(&self, program: &str) -> Option<u32> {
        let path = self.path("usr/lib/pagefold").join(program);
        let pids =
            fs::read_dir("/proc").expect("list /proc").filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
        let is_it = |pid: &u32| {
            let exe = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
            exe.to_str().is_some_and(|exe| exe.trim_end_matches(" (deleted)") == path.to_str().expect("plain"))
        };
        pids.into_iter().find(is_it)
    }

    /// Kills a part with `SIGKILL`, and waits until there is another one.
    fn kill_part(&mut self, part: &str) {
        let before = self.part(part).unwrap_or_else(|| panic!("no {part}: {}", self.log()));
        if part == "service" {
            self.end("KILL");
            self.serve();
        } else {
            kill(before, "KILL");
            until(60, &format!("another {part}"), || self.part(part).is_some_and(|pid| pid != before));
        }
        self.until_folded(&format!("{part} was killed"));
    }

    /// Runs two VMs in a group; says on stderr why there can be none.
    fn has_two_vms(&self) -> bool {
        let up = ["lab", "up", "--image", "tiny", "--guests", "2", "--groups", "acme", "--memory", "128M", "--saved"];
        let more = ["--fold", "--qemu-arg", "-device", "--qemu-arg", "virtio-balloon-pci", "--service"];
        let place = self.path("run");
        let up = self.run(&[&up[..], &more, &[place.to_str().expect("a plain path")]].concat());
        if up.status.code() == Some(3) {
            eprintln!("skipped: {}", String::from_utf8_lossy(&up.stderr));
            return false;
        }
        assert!(up.status.success(), "{up:?}");
        self.until_folded("two VMs were started");
        true
    }

    fn assert_vms_answer(&self) {
        let answer = self.run(&["lab", "exec", "--timeout", "120", "--", "echo", "alive"]);
        let said = String::from_utf8_lossy(&answer.stdout).into_owned();
        assert!(answer.status.success() && said.matches("alive").count() >= 2, "{answer:?}");
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.run(&["lab", "down"]);
        if self.service.is_some() {
            self.end("TERM");
        }
    }
}

fn kill(pid: u32, signal: &str) {
    assert!(Command::new("kill").arg(format!("-{signal}")).arg(pid.to_string()).status().expect("run kill").success());
}

#[test]
fn vms_live_through_an_operators_first_day() {
    if cannot_fold() {
        return;
    }
    let mut host = Host::new();
    let doctor: Value = serde_json::from_slice(&host.run(&["doctor", "--json"]).stdout).expect("JSON");
    let parts = doctor["checks"].as_array().expect("checks").iter().find(|check| check["id"] == "host:parts");
    assert_eq!(parts.expect("a check")["status"], "ok", "{parts:?}");
    host.serve();
    if !host.has_two_vms() {
        return;
    }
    assert_looks_agree(&host);
    host.end("TERM");
    host.serve();
    host.until_folded("the service was stopped and started");
    let end = Instant::now() + Duration::from_secs(seconds(0));
    let all = ["worker", "service", "pagefold-prove", "pagefold-web"];
    let parts = if seconds(0) > 0 { &all[..] } else { &all[..2] };
    loop {
        parts.iter().for_each(|part| host.kill_part(part));
        if Instant::now() >= end {
            break;
        }
    }
    host.install();
    host.end("TERM");
    host.serve();
    host.until_folded("it was upgraded");
    host.assert_vms_answer();
    assert_all_is_private_again(&host);
}

/// Asserts on the first looks of an operator.
fn assert_looks_agree(host: &Host) {
    let audit = host.json(&["audit"]);
    assert_eq!((number(&audit["cross_group_frames"]), &audit["partial"]), (0, &serde_json::json!([])), "{audit}");
    let status = host.json(&["balance", "status"]);
    let guests = status["facts"]["guests"].as_array().expect("guests");
    assert!(guests.len() == 2 && guests.iter().all(|guest| guest["driver"] == "unused"), "{status}");
    assert!(host.run(&["group", "list"]).status.success());
}

fn assert_all_is_private_again(host: &Host) {
    let stopped = host.json(&["stop", "--everything"]);
    assert_eq!(stopped[0]["left_bytes"], 0, "{stopped}");
    assert_eq!(number(&host.json(&["group", "show", "acme"])["sharing_pages"]), 0);
    host.assert_vms_answer();
    let journal = String::from_utf8(host.run(&["journal", "--json"]).stdout).expect("text");
    let unfolds = |line: &&str| line.contains("settings_changed") && line.contains("\"to\":{\"fold\":\"unfold\"}");
    assert_eq!(journal.lines().filter(unfolds).count(), 1, "{journal}");
    assert!(journal.matches("\"service_started\"").count() >= 4, "{journal}");
}
