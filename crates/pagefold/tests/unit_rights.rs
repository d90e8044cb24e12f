//! The packaged units: rights that the work of the service takes, and bounds of what it may take of the host.

mod common;

use common::not_root;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
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
