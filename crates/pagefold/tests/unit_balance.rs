//! The service with exactly the rights of its unit. It balances the VM of another user, as libvirt has them. It pauses
//! that when memory runs out, also if the service's program was replaced meanwhile.

mod common;

use common::cgroup::{cgroup_path, small_memory};
use common::supervised::wait_for_within;
use common::{Afterwards, copy_program, not_root};
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// User and group of the VM.
const OWNER: u32 = 65534;
/// Longest time for each thing that the service does: 120 s, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// Memory limit of the control group that stands for the host, of which half is never lent: 64 MiB.
const HOST_BYTES: u64 = 64 << 20;

/// The bounding set of the service's unit, in words of setpriv.
fn bounding_set() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd/pagefold.service");
    let unit = fs::read_to_string(path).expect("the unit");
    let names =
        unit.lines().filter_map(|line| line.strip_prefix("CapabilityBoundingSet=")).flat_map(str::split_whitespace);
    names.fold("-all".to_owned(), |set, name| format!("{set},+{}", name.to_lowercase().trim_start_matches("cap_")))
}

/// A process that is ended with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A VM of 64 MiB with a balloon, without a system on it. Its monitor is its user's alone.
fn vm(name: &str, dir: &Path) -> Option<Running> {
    fs::create_dir(dir).expect("make a directory");
    chown(dir, Some(OWNER), Some(OWNER)).expect("give it away");
    fs::set_permissions(dir, Permissions::from_mode(0o700)).expect("close it");
    let monitor = dir.join("monitor.sock");
    let mut command = common::unprivileged("qemu-system-x86_64");
    command.args(["-accel", "tcg,tb-size=32", "-m", "64", "-nodefaults", "-display", "none", "-name", name]);
    command
        .args(["-device", "virtio-balloon-pci"])
        .arg("-qmp")
        .arg(format!("unix:{},server=on,wait=off", monitor.display()));
    let running = match command.spawn() {
        Ok(child) => Running(child),
        Err(e) => {
            eprintln!("skipped: cannot run QEMU: {e}");
            return None;
        }
    };
    wait_for_within(PATIENCE, "the VM has a monitor", || monitor.exists().then_some(()));
    Some(running)
}

/// Starts a program as the unit does.
fn serve(program: &Path, dir: &Path, config: &str) -> Running {
    let (file, log) = (dir.join("pagefold.toml"), fs::File::create(dir.join("log")).expect("a log"));
    fs::write(&file, config).expect("write the configuration");
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", &bounding_set(), "--no-new-privs", "--"]).arg(program);
    command.args(["serve", "--stop-workers", "--config"]).arg(&file).arg("--dir").arg(dir.join("s"));
    Running(command.stderr(log).stdout(Stdio::null()).spawn().expect("run setpriv"))
}

/// Waits for an entry of the journal about this VM.
fn until_entry(dir: &Path, entry: &str, name: &str) -> Value {
    wait_for_within(PATIENCE, &format!("{entry} of {name}"), || {
        let text = fs::read_to_string(dir.join("s/journal/journal")).ok()?;
        let mut lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.find(|line| line["entry"] == entry && line.to_string().contains(name))
    })
}

#[test]
fn service_with_the_rights_of_its_unit_balances_and_pauses_another_users_vm() {
    if not_root() {
        return;
    }
    let dir = tempfile::Builder::new().prefix("unit").tempdir_in("/tmp").expect("a directory");
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("let others in");
    let name = format!("unit{}", common::world());
    let Some((group, _afterwards)) = small_memory(&name, HOST_BYTES) else { return };
    let Some(vm) = vm(&name, &dir.path().join("vm")) else { return };
    fs::write(format!("{group}/cgroup.procs"), vm.0.id().to_string()).expect("move the VM to the control group");
    let (program, next) = (dir.path().join("pagefold"), dir.path().join("next"));
    let built = PathBuf::from(env!("CARGO_BIN_EXE_pagefold"));
    copy_program(&built, &program);
    for name in ["pagefoldd", "pagefold-worker"] {
        copy_program(&built.with_file_name(name), &dir.path().join(name));
    }
    let config = format!(
        "[balance]\nevery = 1\nfloor = '32M'\nwithin = '{}'\nowners = [{OWNER}]\n[[guest]]\nname = '{name}'\nguaranteed = '48M'\n",
        cgroup_path(&group)
    );
    let _service = serve(&program, dir.path(), &config);
    let log = || fs::read_to_string(dir.path().join("log")).expect("the log");
    wait_for_within(PATIENCE, "the balancer runs", || log().contains("balancing memory between guests").then_some(()));
    // An upgrade: programs of the service have no name any more.
    for name in ["pagefold", "pagefoldd"] {
        copy_program(&built.with_file_name(name), &next);
        fs::rename(&next, dir.path().join(name)).expect("replace the program");
    }
    // Somebody takes most of the memory.
    let taken = format!("/dev/shm/pagefold-test-{name}");
    let _remove = Afterwards::run(&format!("rm -f {taken}"));
    let take = format!(
        "echo $$ > {group}/cgroup.procs && exec head -c {} /dev/zero > {taken}",
        HOST_BYTES / 4 * 3 + (4 << 20)
    );
    assert!(Command::new("sh").args(["-c", &take]).status().expect("run a shell").success());
    let [outcome, resume] = ["outcome", "resume"].map(|entry| until_entry(dir.path(), entry, &name));
    assert_eq!(outcome["is_told"], true, "{outcome}: {}", log());
    assert!(
        resume["problem"].is_null() && resume["paused_ms"].as_u64().is_some_and(|ms| ms > 0),
        "{resume}: {}",
        log()
    );
}
