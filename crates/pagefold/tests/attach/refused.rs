//! Processes that cannot be attached: the reason is told.

use crate::common::json_of;
use crate::common::supervised::{Installed, wait_for};
use crate::rig::{CONFIG, Running, Waits, member, words};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// Not in a PID namespace of its own, in which no thread of the kernel is seen.
#[test]
fn thread_of_the_kernel_is_refused_on_the_host() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let output = installed.pagefold(&["attach", "2", "--group", "acme", "--all-anonymous"]);
    assert!(!output.status.success() && words(&output).contains("a thread of the kernel's"), "{output:?}");
}

#[test]
fn processes_that_cannot_be_attached_are_refused_with_the_reason() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let refused = |pid: &str, more: &[&str]| {
        let output = installed.pagefold(&[&["attach", pid, "--group", "acme"], more].concat());
        assert!(!output.status.success(), "{output:?}");
        words(&output)
    };
    let mut waits = Waits::start_filled(&installed);
    let pid = waits.pid();
    assert!(refused(&pid, &[]).contains("see --all-anonymous"));
    let dry = installed.pagefold(&["attach", &pid, "--group", "acme", "--all-anonymous", "--dry-run", "--json"]);
    assert!(json_of(&dry)[0]["enrolled_bytes"].as_u64().is_some_and(|bytes| bytes >= 3072 * 4096));
    assert!(member(&installed, &pid).is_none());
    let filtered = "import ctypes, sys, threading, time
libc = ctypes.CDLL(None)
# All but mremap.
code = ctypes.create_string_buffer(bytes.fromhex('2000000000000000 1500000119000000 0600000001000500 060000000000ff7f'), 32)
program = ctypes.create_string_buffer(bytes([4, 0, 0, 0, 0, 0, 0, 0]) + ctypes.addressof(code).to_bytes(8, 'little'), 16)
def run():
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
    print(flush=True)
    time.sleep(600)
threading.Thread(target=run).start() if 'thread' in sys.argv else run()";
    for (more, why) in
        [(&[][..], "does not let the agent call mremap"), (&["thread"], "threads have different filters")]
    {
        let words = [&["-c", filtered], more].concat();
        let mut child = Running(Command::new("python3").args(words).stdout(Stdio::piped()).spawn().expect("python3"));
        BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        let said = refused(&child.0.id().to_string(), &["--all-anonymous"]);
        assert!(said.contains("(seccomp)") && said.contains(why), "{said}");
    }
    let blind = ["--mount", "sh", "-c", "umount -l /proc; exec sleep 600"];
    let mut inner = Command::new("unshare").args(blind).spawn().expect("unshare");
    let seen = format!("/proc/{}/root/proc/uptime", inner.id());
    wait_for("it sees no processes", || fs::exists(&seen).is_ok_and(|there| !there).then_some(()));
    assert!(refused(&inner.id().to_string(), &["--all-anonymous"]).contains("there is no /proc where it runs"));
    inner.kill().unwrap();
    inner.wait().unwrap();
    json_of(&installed.pagefold(&["attach", &pid, "--group", "acme", "--all-anonymous", "--json"]));
    assert!(refused(&pid, &["--all-anonymous"]).contains("already"));
    let other = installed.pagefold(&["detach", "1"]);
    assert!(words(&other).contains("is no member"), "{other:?}");
    waits.tell("stop");
}
