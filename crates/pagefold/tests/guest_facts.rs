//! A guest is one by facts of the kernel's, and not by a name or a size that any process may give itself.

mod common;

use common::{json_of, not_root, pagefold, unprivileged};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A process that is killed in the end.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a program as a user without rights.
fn as_stranger(program: &str, args: &[&str]) -> Ended {
    let mut command = unprivileged(program);
    Ended(command.args(args).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("setpriv"))
}

/// A QEMU that waits; `None` if it is not installed.
fn qemu(name: &str) -> Option<Ended> {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(QEMU).args(["-name", name]).stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().map(Ended).map_err(|e| eprintln!("skipped: cannot run QEMU: {e}")).ok()
}

const QEMU: [&str; 9] =
    ["-m", "64", "-S", "-nodefaults", "-display", "none", "-accel", "tcg,tb-size=32", "-no-user-config"];

fn found() -> Value {
    json_of(&pagefold(&["guests", "--json"]))["guests"].take()
}

/// The guest that is this process.
fn guest_of(guests: &Value, pid: u32) -> Option<&Value> {
    guests.as_array().expect("a list").iter().find(|guest| guest["pids"][0] == pid)
}

fn id_of(guests: &Value, pid: u32) -> Option<&str> {
    guest_of(guests, pid)?["id"].as_str()
}

/// Waits until a process has its memory: by then it runs its program.
fn until_guest(pid: u32) -> Value {
    let began = Instant::now();
    loop {
        let guests = found();
        if guest_of(&guests, pid).is_some_and(|guest| guest["ram_bytes"] == 64 << 20) {
            return guests;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{guests}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn program_with_a_vmms_name_is_no_guest_and_its_size_moves_nothing() {
    if not_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).expect("open it");
    let shell = dir.path().join("qemu-system-x86_64");
    let shell = shell.to_str().expect("a plain path");
    assert!(as_stranger("cp", &["/bin/sh", shell]).0.wait().expect("cp").success());
    let mut fake = as_stranger(shell, &["-c", "read line; exit", "sh", "-m", "64T", "-name", "acme-7"]);
    let pid = fake.0.id();
    let began = Instant::now();
    while host::Process::read(pid).is_ok_and(|p| p.program() != "qemu-system-x86_64") {
        assert!(began.elapsed() < Duration::from_secs(60), "it does not start");
    }
    assert_eq!(id_of(&found(), pid), None);
    let status = json_of(&pagefold(&["balance", "status", "--json"]));
    let spare = status["budget"]["spare_bytes"].as_i64();
    assert!(spare.is_some_and(|spare| spare > -(1 << 40)), "{status}");
    assert!(fake.0.try_wait().expect("its state").is_none(), "it was there all the time");
}

#[test]
fn stranger_with_a_guests_name_leaves_its_id_alone_and_is_promised_nothing() {
    if not_root() || !Path::new("/usr/bin/qemu-system-x86_64").exists() {
        return;
    }
    let name = format!("acme-{}", std::process::id());
    let mut words = QEMU.to_vec();
    words.extend(["-name", &name]);
    let early = as_stranger("qemu-system-x86_64", &words);
    until_guest(early.0.id());
    let Some(real) = qemu(&name) else { return };
    let later = qemu(&name).expect("QEMU");
    until_guest(real.0.id());
    let guests = until_guest(later.0.id());
    let (id, with_pid) = (format!("qemu:{name}"), |pid: u32| format!("qemu:{name}@{pid}"));
    assert_eq!(id_of(&guests, real.0.id()), Some(id.as_str()));
    for other in [&early, &later] {
        assert_eq!(id_of(&guests, other.0.id()), Some(with_pid(other.0.id()).as_str()));
    }
    let status = json_of(&pagefold(&["balance", "status", "--json"])).to_string();
    assert!(status.contains(&format!("\"{id}\"")) && !status.contains(&with_pid(early.0.id())), "{status}");
}
