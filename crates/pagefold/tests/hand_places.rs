//! Places at the socket through which connections are handed on: silent connections of a user keep nobody else away.

mod common;

use api::hand::kept_object;
use api::place::Place;
use common::not_root;
use common::supervised::{Installed, wait_for};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const CONFIG: &str = "[[group]]\nname = 'acme'\n";
/// Connects 600 times, as a user without rights, and says nothing on any of these connections. Says how many are open after 9 s, when
/// all were accepted.
const CROWD: &str = "
import os, resource, select, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
os.setgid(65534); os.setuid(65534)
silent = []
for n in range(600):
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.connect(sys.argv[1]); silent.append(one)
time.sleep(9)
gone = select.poll()
for one in silent: gone.register(one, select.POLLIN)
print(len(silent) - len(gone.poll(0)), flush=True)
sys.stdin.read()
";

/// Processor time that a process has used.
fn cpu(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let (_, fields) = stat.rsplit_once(')').expect("its name");
    let ticks: u64 = fields.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>().expect("ticks")).sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

/// They had all 64 places for 2 s each. The supervisor asked the kernel about a listener meanwhile that it accepted nothing from.
#[test]
fn silent_crowd_keeps_no_agent_of_others_waiting_and_supervisor_sleeps() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let supervisor = installed.serve(CONFIG, &[]);
    let place = Place::at(&installed.path("s"));
    wait_for("it answers", || kept_object(&place).ok());
    let mut crowd = Command::new("python3");
    crowd.args(["-c", CROWD]).arg(place.hand_socket()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let began = Instant::now();
    let mut crowd = crowd.spawn().expect("run python3");
    let mut line = String::new();
    BufReader::new(crowd.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    let open: usize = line.trim().parse().expect("a number");
    let asked = Instant::now();
    kept_object(&place).expect("an answer");
    let answered = asked.elapsed();
    let (before, slept) = (cpu(supervisor.0.id()), Instant::now());
    std::thread::sleep(Duration::from_secs(2));
    let used = cpu(supervisor.0.id()).saturating_sub(before);
    eprintln!("{open} open, answered in {answered:?}, {used:?} of {:?} used", slept.elapsed());
    crowd.kill().expect("end it");
    crowd.wait().expect("wait for it");
    assert!(open <= 8, "{open} places of one user, {:?} after it began", began.elapsed());
    assert!(answered < Duration::from_secs(5), "root was answered after {answered:?}");
    assert!(used < slept.elapsed() / 2, "the supervisor has used {used:?}");
}
