//! Programs that keep secrets in memory are not attached, whether root or a user runs them.

mod common;

use common::Ends;
use common::service::{Service, cannot_fold, until};
use std::fs;
use std::process::{Command, Stdio};

#[test]
fn agent_with_roots_keys_is_not_attached() {
    if cannot_fold() {
        return;
    }
    let service = Service::start_with(Some("[[group]]\nname = 'acme-TOKEN'\n"));
    let group = service.group("acme");
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("agent");
    let (variable, token) = service.mark();
    let mut command = Command::new("ssh-agent");
    command.arg("-D").arg("-a").arg(&socket).env(variable, token).stdout(Stdio::null());
    let Ok(agent) = command.spawn() else {
        eprintln!("skipped: there is no ssh-agent");
        return;
    };
    let agent = Ends(agent);
    until(30, "it listens", || socket.exists());
    let pid = agent.0.id().to_string();
    for more in [&["--dry-run"][..], &[]] {
        let words = [&["attach", &pid, "--group", &group, "--all-anonymous"], more].concat();
        let output = service.pagefold(&words);
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(!output.status.success() && said.contains("PR_SET_DUMPABLE"), "{more:?}: {said}");
    }
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs");
    assert!(!maps.contains("pagefold"), "nothing of Pagefold's is left in it: {maps}");
}

/// The service's process that attaches has few of root's capabilities, as under its unit.
#[test]
fn hidden_program_is_left_alone_also_where_capabilities_do_not_tell() {
    if cannot_fold() {
        return;
    }
    let hides = "import ctypes, sys; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); print(flush=True); sys.stdin.read()";
    let service = Service::start_with(Some("[[group]]\nname = 'acme-TOKEN'\n"));
    let group = service.group("acme");
    // Its group is another one: the kernel's answer would be about that.
    let mut command = Command::new("setpriv");
    command.args(["--regid=65534", "--clear-groups", "python3", "-c", hides]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut program = Ends(command.spawn().expect("start python3"));
    std::io::Read::read_exact(program.0.stdout.as_mut().expect("a pipe"), &mut [0]).expect("it is there");
    let pid = program.0.id();
    let output = service.pagefold(&["attach", &pid.to_string(), "--group", &group, "--all-anonymous"]);
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(!output.status.success() && said.contains("PR_SET_DUMPABLE"), "{said}");
    until(30, "nothing is left in it", || {
        !fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs").contains("pagefold")
    });
}
