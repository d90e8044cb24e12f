//! Questions to a supervisor whose answers nobody reads.

mod common;

use common::not_root;
use common::supervised::{Installed, wait_for_within};
use host::{Received, Seqpacket};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Questions that are more than the kernel's buffers of a connection hold, in both directions: 20,000.
const FLOOD: usize = 20_000;
/// Questions and answers of a few bytes that these buffers may hold: 2,000. With 208 KiB for each direction, they hold some 550.
const MOST: usize = 2_000;
/// Time in which the service takes at least one more question, if it takes any: 1 s.
const STANDSTILL: Duration = Duration::from_secs(1);

/// Asks without reading any answer. Returns how many questions were taken, at most [`FLOOD`].
fn flood(socket: &Seqpacket) -> usize {
    let (mut asked, mut since) = (0, Instant::now());
    while asked < FLOOD && since.elapsed() < STANDSTILL {
        match socket.send(b"\"members\"", &[]) {
            Ok(true) => (asked, since) = (asked + 1, Instant::now()),
            Ok(false) => std::thread::sleep(Duration::from_millis(1)),
            Err(_) => break,
        }
    }
    asked
}

/// Processor time of a process, in clock ticks.
fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let fields: Vec<&str> = stat.rsplit_once(')').expect("a name").1.split_whitespace().collect();
    fields[11].parse::<u64>().expect("a number") + fields[12].parse::<u64>().expect("a number")
}

#[test]
fn client_that_does_not_read_is_heard_no_more_and_let_go() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let supervisor = installed.serve("", &[]);
    let socket = Seqpacket::connect(Path::new(&installed.text("s/control.sock"))).expect("connect");
    let asked = flood(&socket);
    assert!((10..MOST).contains(&asked), "{asked} questions were taken, and no answer was read");
    let before = ticks(supervisor.0.id());
    let mut others = installed.stranger();
    assert_eq!(others.ask(&installed, "\"groups\""), serde_json::json!("done"), "others are answered");
    // The flood goes on, which does not renew its time.
    wait_for_within(Duration::from_secs(60), "the client is let go", || {
        std::thread::sleep(Duration::from_millis(100));
        socket.send(b"\"members\"", &[]).is_err().then_some(())
    });
    let spent = ticks(supervisor.0.id()) - before;
    assert!(spent < 300, "the supervisor has spent {spent} ticks on one that is not heard");
    let mut answers = 0;
    while let Ok(Received::Frame(_)) = socket.receive_bare(&mut [0; 64]) {
        answers += 1;
    }
    assert!(answers > 0, "it reads what was sent, and then the end");
}

/// Asks about a group whose worker stands still, and goes on asking: nothing polls what it does not take.
#[test]
fn client_that_waits_for_a_worker_costs_no_processor_time() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let supervisor = installed.serve("[[group]]\nname = 'acme'\n", &[]);
    let mut web = installed.member("acme", "web");
    assert!(web.connects(&installed), "{}", installed.log());
    let worker = installed.worker("acme");
    common::supervised::signal(worker, "STOP");
    let socket = Seqpacket::connect(Path::new(&installed.text("s/control.sock"))).expect("connect");
    for _ in 0..2 {
        assert!(socket.send(br#"{"show":{"group":"acme"}}"#, &[]).expect("ask"));
    }
    let (before, began) = (ticks(supervisor.0.id()), Instant::now());
    wait_for_within(Duration::from_secs(60), "the worker is given up", || {
        std::thread::sleep(Duration::from_millis(50));
        matches!(socket.receive_bare(&mut [0; 4096]), Ok(Received::Frame(_))).then_some(())
    });
    let (spent, waited) = (ticks(supervisor.0.id()) - before, began.elapsed());
    common::supervised::signal(worker, "CONT");
    assert!(waited > Duration::from_secs(2), "the worker answered: {waited:?}");
    assert!(spent < 40, "the supervisor has spent {spent} ticks on waiting for {waited:?}");
}
