//! The packaged units: rights that the work of the service takes, and bounds of what it may take of the host.

mod common;

use common::not_root;
use common::service::until;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;

fn unit(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd").join(name);
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Values of a key, in the order of the unit's lines.
fn values<'a>(unit: &'a str, key: &'a str) -> Vec<&'a str> {
    unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).collect()
}

/// The bounding set of a unit, in words of setpriv.
fn bounding_set(unit: &str) -> String {
    let capabilities = values(unit, "CapabilityBoundingSet").join(" ");
    let all = capabilities.split(' ').map(|name| format!(",+{}", name.to_lowercase().trim_start_matches("cap_")));
    format!("-all{}", all.collect::<String>())
}

/// A client of a socket.
const CONNECTS: &str = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])";

#[test]
fn unit_of_the_service_may_connect_to_the_monitor_of_another_users_vm() {
    if not_root() {
        return;
    }
    // As libvirt's QEMU has it: a socket of its user's, in a directory that is closed to others.
    let dir = tempfile::Builder::new().prefix("unit").tempdir_in("/tmp").expect("a directory");
    let monitor = dir.path().join("monitor.sock");
    let _listener = UnixListener::bind(&monitor).expect("listen");
    fs::set_permissions(&monitor, Permissions::from_mode(0o755)).expect("set its rights");
    for path in [dir.path(), &monitor] {
        chown(path, Some(65534), Some(65534)).expect("give it away");
    }
    let connected = |set: &str| {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", set, "--no-new-privs", "python3", "-c", CONNECTS]);
        command.arg(&monitor).output().expect("run setpriv")
    };
    let set = bounding_set(&unit("pagefold.service"));
    let (with, without) = (connected(&set), connected(&set.replace(",+dac_override", "")));
    assert!(with.status.success(), "{set}: {}", String::from_utf8_lossy(&with.stderr));
    let why = String::from_utf8_lossy(&without.stderr);
    assert!(why.contains("PermissionError"), "the right is not needed any more: take it away; {why}");
}

/// Has a process be scheduled as a batch.
const SCHEDULES: &str = "import os, sys; os.sched_setscheduler(int(sys.argv[1]), os.SCHED_BATCH, os.sched_param(0))";

#[test]
fn unit_of_the_service_may_schedule_threads_of_other_users() {
    if not_root() {
        return;
    }
    let mut other = Command::new("setpriv").args(["--reuid", "65534", "sleep", "600"]).spawn().expect("run setpriv");
    until(30, "it is another user's", || {
        fs::metadata(format!("/proc/{}", other.id())).is_ok_and(|process| process.uid() == 65534)
    });
    let scheduled = |set: &str| {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", set, "--no-new-privs", "python3", "-c", SCHEDULES]);
        command.arg(other.id().to_string()).output().expect("run setpriv")
    };
    let unit = unit("pagefold.service");
    let set = bounding_set(&unit);
    let (without, with) = (scheduled(&set.replace(",+sys_nice", "")), scheduled(&set));
    other.kill().and_then(|()| other.wait()).expect("it is ours");
    let why = String::from_utf8_lossy(&without.stderr);
    assert!(why.contains("PermissionError"), "the right is not needed any more: take it away; {why}");
    assert!(with.status.success(), "{set}: {}", String::from_utf8_lossy(&with.stderr));
    // Later lines change what earlier ones say, and @resources has this call.
    let filters = values(&unit, "SystemCallFilter");
    let place = |filter: &str| filters.iter().position(|there| *there == filter);
    assert!(place("sched_setscheduler") > place("~@resources"), "{filters:?}");
}

/// A number of tasks or of bytes bounds the unit, and the reason is beside it.
#[test]
fn units_bound_tasks_and_memory() {
    for name in ["pagefold.service", "pagefold-enrol.service"] {
        let unit = unit(name);
        for key in ["TasksMax", "MemoryMax"] {
            let found = values(&unit, key);
            assert!(
                matches!(found[..], [bound] if bound.starts_with(|c: char| c.is_ascii_digit())),
                "{name}: {key}: {found:?}"
            );
        }
        assert!(unit.contains("500 members"), "{name}: no reason for its bounds");
    }
}
