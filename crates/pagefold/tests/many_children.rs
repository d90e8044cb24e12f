//! More children than can be followed, and strangers who would have theirs followed.

mod common;

use common::built::Built;
use common::not_root;
use common::number;
use common::service::{Member, Service, cannot_fold, until};
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// More children of one program than the keeper has places for.
const CHILDREN: &str = "1100";

/// Runs a member with so many children under a limit of open files. Each discards folded pages while its parent lives, and after its end.
fn assert_children_neither_hang_nor_read_stale_bytes(open_files: &str, children: &str, pause_ms: &str) {
    if cannot_fold() {
        return;
    }
    let Some(built) = Built::new("crowd.c") else { return };
    let service = Service::start();
    let limited = format!("ulimit -Sn {open_files}; exec {} {children} {pause_ms}", built.program());
    let never = [("PAGEFOLD_CHILDREN_AFTER", "never")];
    let mut member = service.run_with("acme", "crowd", &["--all-anonymous"], &["sh", "-c", &limited], &never);
    service.show("acme");
    service.set("acme", &["--scan-rate", "400000"]);
    let said = |member: &Member, line: usize| -> Option<Value> { serde_json::from_str(member.lines().get(line)?).ok() };
    until(300, "it makes all children", || said(&member, 0).is_some());
    assert_eq!(said(&member, 0).map(|made| number(&made["made"]).to_string()).as_deref(), Some(children));
    until(60, "it is said why nothing is folded", || {
        service.show("acme").to_string().contains("children live as are followed")
    });
    member.close_input();
    until(300, "all children have discarded pages", || said(&member, 1).is_some());
    assert_eq!(said(&member, 1), Some(json!({"hung": 0, "hung_later": 0, "wrong": 0})), "{}", service.log());
}

/// Of 1,100 children, 76 hung, and read the pool's bytes after their parent's end.
#[test]
fn children_beyond_the_keepers_places_neither_hang_nor_read_stale_bytes() {
    assert_children_neither_hang_nor_read_stale_bytes("8192", CHILDREN, "2");
}

/// `fork` did not return when some 116 children lived.
#[test]
fn forks_return_although_children_outnumber_the_limit_of_open_files() {
    assert_children_neither_hang_nor_read_stale_bytes("128", CHILDREN, "2");
}

/// `fork` did not return when 51 children lived: within a section, the agent did not hear that the keeper follows them alone.
#[test]
fn forks_without_a_pause_return_although_children_outnumber_the_limit_of_open_files() {
    assert_children_neither_hang_nor_read_stale_bytes("64", "600", "0");
}

/// Sends userfaultfds that it has opened, as this user, with each frame in turn. Says how many of the connections were closed without an
/// answer: `SOCKET UID`.
const SENDER: &str = "
import ctypes, os, socket, sys, time
path, uid = sys.argv[1], int(sys.argv[2])
os.setgid(uid); os.setuid(uid)
libc, closed, kept = ctypes.CDLL(None, use_errno=True), 0, []
def opened():
    fd = libc.syscall(323, os.O_CLOEXEC | os.O_NONBLOCK | 1)
    assert fd >= 0, os.strerror(ctypes.get_errno())
    return fd
for frame in [b'f', b'k', b'K' + bytes(4)]:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.settimeout(20)
    one.connect(path)
    try:
        while True:
            try:
                socket.send_fds(one, [frame], [opened()])
                break
            except PermissionError:  # It has no place yet.
                time.sleep(0.001)
        closed += one.recv(8) == b''
    except (BrokenPipeError, ConnectionResetError):
        closed += 1
    kept.append(one)
print(closed, flush=True)
sys.stdin.read()
";

fn prover(service: &Service) -> Option<u32> {
    let children = host::children(service.supervisor_pid());
    children.into_iter().find(|pid| host::runs_program(*pid, "pagefold-prove") == Some(true))
}

/// Number of userfaultfds that a process has open.
fn followed(pid: u32) -> usize {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    links.filter(|link| fs::read_link(link.path()).is_ok_and(|to| to == Path::new("anon_inode:[userfaultfd]"))).count()
}

/// A stranger was given messages of his forks. Userfaultfds that nobody had begun filled all places, and a processor waited for them.
#[test]
fn neither_strangers_nor_userfaultfds_that_nobody_has_begun_take_places() {
    if not_root() {
        return;
    }
    let service = Service::start();
    until(30, "there is a prover", || prover(&service).is_some());
    // Root has a claim: only what it sends first is as it should be.
    for (uid, closed) in [("65534", "3"), ("0", "2")] {
        let mut sender = Command::new("python3");
        sender.args(["-c", SENDER]).arg(service.place().join("prove.sock")).arg(uid);
        let mut sender = sender.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("run python3");
        let mut line = [0; 1];
        std::io::Read::read_exact(&mut sender.stdout.take().expect("a pipe"), &mut line).expect("a line");
        assert_eq!(std::str::from_utf8(&line), Ok(closed), "user {uid}: {}", service.log());
        until(30, "nothing is kept", || prover(&service).is_some_and(|pid| followed(pid) == 0));
        let _ = sender.stdin.take().map(|mut input| input.write(b"."));
        let _ = sender.wait();
        std::thread::sleep(Duration::from_millis(10));
    }
}
