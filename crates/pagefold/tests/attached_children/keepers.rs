//! The keeper of userfaultfds of forked children: it may be killed at any time, and be asked all the time.

use crate::common::supervised::{Installed, signal};
use crate::rig::{
    ADDRESS, CONFIG, FAULTS, LOST, Server, TOUCHED, WRITTEN, attach, attach_with, detach_with, folded, wait,
};
use host::Mapping;
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Asks the keeper for the userfaultfd of its own page at an address again and again, on many connections. Says how often it was told
/// that none is kept: `SOCKET ADDRESS SECONDS`.
const ASKER: &str = "
import socket, struct, sys, threading, time
path, frame, end = sys.argv[1], b'l' + struct.pack('<Q', int(sys.argv[2])), time.time() + int(sys.argv[3])
told = []
def ask():
    while time.time() < end:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
            s.connect(path); s.send(frame); told.append(s.recv(8))
threads = [threading.Thread(target=ask) for _ in range(16)]
for t in threads: t.start()
for t in threads: t.join()
print(sum(answer == b'n' for answer in told))
";

/// The first page of a process that maps the pool.
fn first_pooled(pid: u32) -> u64 {
    let all = Mapping::list(pid).expect("its mappings");
    let mut pooled = all.iter().filter(|mapping| !mapping.shared && mapping.name.contains("pagefold"));
    pooled.next().expect("a mapping of the pool").start.0
}

/// Looking for a userfaultfd protects a page of each candidate. A process that asks all the time makes that no family's but its own.
#[test]
fn member_that_asks_for_a_userfaultfd_all_the_time_does_not_slow_children_of_others() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut server = Server::start(&installed);
    attach_with(&installed, server.pid(0), "never");
    folded(&installed, server.pid(0), 1000);
    let worker = server.fork();
    let [high, low] = ADDRESS.map(|word| u64::from(server.at(word)));
    let (page, area) = (first_pooled(server.pid(worker)), high << 32 | low);
    server.write(TOUCHED, u32::try_from((page - area) / 4096).expect("a page of the area"));
    let mut asker = Command::new("python3");
    asker.args(["-c", ASKER, &installed.text("s/prove.sock"), &page.to_string(), "4"]).stdout(Stdio::piped());
    let asker = asker.spawn().expect("run python3");
    server.order(b't', &[worker]);
    let faults = server.word(worker, FAULTS);
    let told = asker.wait_with_output().expect("wait for it").stdout;
    let told: u32 = String::from_utf8_lossy(&told).trim().parse().expect("a number");
    eprintln!("{faults} faults, and {told} answers");
    assert!(told > 50, "the keeper has answered {told} times");
    assert!(faults <= 20, "{faults} faults, of which the kernel's own look after memory is one or two");
}

/// The process of the service's keeper, if it runs.
pub fn keeper(supervisor: u32) -> Option<u32> {
    let children = host::children(supervisor);
    children.into_iter().find(|pid| host::runs_program(*pid, "pagefold-prove") == Some(true))
}

/// Kills the keeper at these times from here on, or as soon as there is one.
fn kill_keeper_at(supervisor: u32, times: [u64; 2]) {
    let start = Instant::now();
    for time in times.map(|time| start + Duration::from_millis(time)) {
        std::thread::sleep(time.saturating_duration_since(Instant::now()));
        signal(wait("there is a keeper", || keeper(supervisor)), "KILL");
    }
}

/// Number of userfaultfds that a process has open.
pub fn followed(pid: u32) -> usize {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    links.filter(|link| fs::read_link(link.path()).is_ok_and(|to| to.as_os_str() == "anon_inode:[userfaultfd]")).count()
}

/// Waits until the service's keeper follows so many children, and has a standby. Neither is this process, which was killed and may
/// take a moment to end. Returns both.
fn keeper_of(supervisor: u32, children: usize, but: u32) -> (u32, u32) {
    wait("the keeper follows all", || {
        let keeper = keeper(supervisor).filter(|keeper| *keeper != but && followed(*keeper) == children)?;
        let standby = host::children(keeper).into_iter().find(|pid| *pid != but)?;
        Some((keeper, standby))
    })
}

/// Pages that were being discarded showed their slots. Nobody followed children whose parents had ended, or children of children.
#[test]
fn discards_read_as_zeros_when_keeper_is_killed_at_any_time() {
    let Some(installed) = Installed::attaching() else { return };
    let supervisor = installed.serve(CONFIG, &[]);
    let service = supervisor.0.id();
    let mut server = Server::start(&installed);
    attach_with(&installed, server.pid(0), "never");
    folded(&installed, server.pid(0), 1000);
    let workers: Vec<u64> = (0..6).map(|_| server.fork()).collect();
    let grandchild = server.fork_by_last();
    let (first, _) = keeper_of(service, 7, 0);
    let killing = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        signal(first, "KILL");
    });
    server.order(b's', &workers[..5]);
    killing.join().expect("it kills");
    // Its standby has handed all of them on. The next keeper loses its standby first, and then its own life.
    let (second, standby) = keeper_of(service, 7, first);
    signal(server.pid(0), "KILL");
    signal(standby, "KILL");
    let (_, other) = keeper_of(service, 7, standby);
    signal(second, "KILL");
    server.order(b's', &[workers[5], grandchild]);
    server.order(b'd', &workers);
    wait("the last keeper follows all", || {
        keeper(service).filter(|keeper| *keeper != second && followed(*keeper) == 7)
    });
    wait("no other process is left", || (!fs::exists(format!("/proc/{other}/exe")).ok()?).then_some(()));
    server.order(b'w', &workers);
}

/// Another process and the kernel's own threads write pages of a worker all the time, which nobody can stop.
#[test]
fn no_write_is_lost_when_keeper_is_killed_while_worker_is_left() {
    let Some(installed) = Installed::attaching() else { return };
    let is_long = std::env::var_os("PAGEFOLD_SOAK_SECONDS").is_some();
    let supervisor = installed.serve(CONFIG, &[]);
    let mut server = Server::start(&installed);
    attach(&installed, server.pid(0));
    folded(&installed, server.pid(0), 1000);
    // A short run has the second cycle alone.
    for cycle in if is_long { 0..12 } else { 1..2 } {
        let worker = server.fork();
        let pid = server.pid(worker);
        folded(&installed, pid, 1000);
        let outsider = server.outsider(&installed, worker);
        wait("it has written", || (server.at(WRITTEN) > 1000).then_some(()));
        assert_eq!(server.at(LOST), 0, "writes from outside are lost in cycle {cycle} before the worker is left");
        // None is killed in the first: then pages are discarded, too.
        let orders: &[u8] = if cycle == 0 { b"kkbd" } else { b"KKb" };
        let mut killing = None;
        detach_with(&installed, pid, &mut server, (orders, &[worker]), |_| {
            let (supervisor, first) = (supervisor.0.id(), 100 + cycle * 350 % 1500);
            killing = (cycle > 0).then(|| std::thread::spawn(move || kill_keeper_at(supervisor, [first, first + 600])));
        });
        killing.into_iter().for_each(|thread| thread.join().expect("it kills"));
        server.assert_untouched(worker);
        server.order(b'k', &[worker]);
        let written = server.at(WRITTEN);
        wait("each page was read once more", || (server.at(WRITTEN) > written + 1000).then_some(()));
        drop(outsider);
        assert_eq!(server.at(LOST), 0, "writes from outside are lost in cycle {cycle}");
        signal(pid, "KILL");
    }
}
