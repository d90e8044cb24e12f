//! Keeper and `hand.sock` under attack by a stranger and by a member of another group, while another tenant's processes are attached and fork.

use crate::common::supervised::Installed;
use crate::keepers::{followed, keeper};
use crate::rig::{CONFIG, Server, attach, detach, folded, member, pooled, wait};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The user of a member that attacks, a stranger, and the tenant that is to notice neither.
const MEMBER: u32 = 70_001;
const STRANGER: u32 = 70_002;
const TENANT: u32 = 70_003;
/// Places of the keeper's that a user with members has, where there are two such: half of those that are not root's.
const SHARE: usize = (8192 - 1024) / 2;
/// Longest time for an agent to come in: 20 s. With all places of the sockets taken, it was 153 s.
const SOON: Duration = Duration::from_secs(20);

/// Attacks until it is ended, in all ways at once. It has children followed that are none until no more are taken, and says how many were.
const ATTACKER: &str = "
import ctypes, os, resource, socket, struct, sys, threading, time
place, uid = sys.argv[1], os.getuid()
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
libc, kept = ctypes.CDLL(None, use_errno=True), []

def connect(name):
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.settimeout(30)
    own = f'{place}/users/{uid}/{name}'
    one.connect(own if os.path.exists(own) else f'{place}/{name}')
    return one

def send(one, frame, fd):
    while True:
        try:
            return socket.send_fds(one, [frame], [fd])
        except PermissionError:  # It has no place yet.
            time.sleep(0.001)

def userfaultfd(is_begun):
    fd = libc.syscall(323, os.O_CLOEXEC | os.O_NONBLOCK | 1)
    assert fd >= 0, os.strerror(ctypes.get_errno())
    begin = ctypes.create_string_buffer(struct.pack('QQQ', 0xaa, 0, 0))
    assert not is_begun or libc.ioctl(fd, ctypes.c_ulong(0xc018aa3f), begin) == 0
    return fd

def again(work):
    def forever():
        while True:
            try:
                work()
            except OSError:
                pass
            time.sleep(0.02)
    threading.Thread(target=forever, daemon=True).start()

def never_begun():
    fd = userfaultfd(False)
    for frame in [b'K' + bytes(4), b'k', b'f']:
        with connect('prove.sock') as one:
            send(one, frame, fd)
            one.recv(8)
    os.close(fd)

silent = []
def stares():
    silent.append(connect('hand.sock'))
    if len(silent) > 300:
        silent.pop(0).close()

def hands_on_what_is_not_its_own():
    # One of a process that has ended, and one whose other end is the supervisor's.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if not child:
        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(theirs, [b'x'], [a.fileno()])
        os._exit(0)
    _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    os.waitpid(child, 0)
    with connect('agent.sock') as roots:
        for fd in [fds[0], roots.fileno()]:
            for server in [b'a', b'p']:
                with connect('hand.sock') as one:
                    send(one, server, fd)
    for fd in fds: os.close(fd)
    ours.close(); theirs.close()

def fill():
    fd, number, places = userfaultfd(True), 0, 0
    while True:
        one = connect('prove.sock')
        kept.append(one)
        for _ in range(1000):
            send(one, b'K' + struct.pack('<I', number), fd)
            answer = one.recv(8)
            number += 1
            if answer[:1] not in (b'y', b'f'):
                return places
            places += 1

again(never_begun)
again(stares)
again(hands_on_what_is_not_its_own)
try:
    places = fill()
except OSError:
    places = 0
print(places, flush=True)
sys.stdin.read()
";

/// A running attacker. Dropping it ends it.
struct Attacker(Child, usize);

impl Attacker {
    fn begin(mut command: Command, installed: &Installed) -> Self {
        command.args(["/usr/bin/python3", "-c", ATTACKER]).arg(installed.path("s")).stdin(Stdio::piped());
        let mut child = command.stdout(Stdio::piped()).spawn().expect("run python3");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        Self(child, line.trim().parse().expect("a number of places"))
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn as_user(user: u32) -> Command {
    let mut command = Command::new("setpriv");
    command.args([format!("--reuid={user}"), format!("--regid={user}"), "--clear-groups".to_owned(), "--".to_owned()]);
    command
}

/// Processor time that a process has used.
fn cpu(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let (_, fields) = stat.rsplit_once(')').expect("its name");
    let ticks: u64 = fields.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>().expect("ticks")).sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

/// Userfaultfds that nobody had begun filled all places of all tenants: their children hung, and read stale bytes later.
#[test]
fn attackers_of_keeper_and_hand_keep_no_child_and_no_agent_of_another_tenant_waiting() {
    let Some(installed) = Installed::attaching() else { return };
    let supervisor = installed.serve(CONFIG, &[]);
    let keeper = wait("there is a keeper", || keeper(supervisor.0.id()));
    let mut other = Command::new(installed.path("pagefold"));
    other.args(["run", "--group", "beta", "--"]).env("PAGEFOLD_DIR", installed.path("s"));
    other.arg("setpriv").args(as_user(MEMBER).get_args());
    let mut server = Server::start_as(&installed, TENANT);
    attach(&installed, server.pid(0));
    folded(&installed, server.pid(0), 1000);
    let attackers = [Attacker::begin(other, &installed), Attacker::begin(as_user(STRANGER), &installed)];
    assert!(attackers[0].1 >= SHARE, "the member had {} places", attackers[0].1);
    assert_eq!(attackers[1].1, 0, "a stranger had places");
    let all = [0, server.fork(), server.fork()];
    for worker in &all[1..] {
        assert!(pooled(server.pid(*worker)) >= 1000, "nothing was inherited");
        folded(&installed, server.pid(*worker), 1000);
    }
    for order in *b"wbdwd" {
        server.order(order, &all);
    }
    // An agent comes in as soon as ever.
    detach(&installed, server.pid(0));
    let began = Instant::now();
    attach(&installed, server.pid(0));
    wait("its agent has come in", || member(&installed, server.pid(0)));
    let came_in = began.elapsed();
    let work = |pid| {
        let (before, began) = (cpu(pid), Instant::now());
        std::thread::sleep(Duration::from_secs(2));
        (cpu(pid).saturating_sub(before), began.elapsed())
    };
    let [serves, keeps] = [supervisor.0.id(), keeper].map(work);
    eprintln!("{} places, an agent after {came_in:?}, processors: {serves:?}, {keeps:?}", attackers[0].1);
    assert!(came_in < SOON, "an agent came in after {came_in:?}");
    for (used, time) in [serves, keeps] {
        assert!(used < time * 3 / 4, "{used:?} of a processor in {time:?}");
    }
    for order in *b"dwb" {
        server.order(order, &all);
    }
    drop(attackers);
    wait("places of attackers are free again", || (followed(keeper) <= all.len()).then_some(()));
    server.order(b'd', &all);
    server.order(b'w', &all);
}
