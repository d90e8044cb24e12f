//! Guests that the service parks when they are idle, and that a connection wakes.

mod common;

use common::service::{Member, Service, cannot_fold, until};
use common::{Ends, json_of};
use serde_json::Value;
use std::fs;
use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const CONFIG: &str = "[[group]]\nname = 'acme-TOKEN'\nfold = 'off'\n[[group]]\nname = 'beta-TOKEN'\nfold = 'off'\n[park]\nidle = '2s'\n\
                      groups = ['acme-TOKEN', 'beta-TOKEN']\nonly = ['sle*']\nmost = 1\n";

/// Answers one connection after the other.
const SERVER: &str = "import socket, sys\ns = socket.socket()\ns.bind(('127.0.0.1', int(sys.argv[1])))\ns.listen()\nprint('ready', flush=True)\n\
                      while True:\n    c, _ = s.accept()\n    c.sendall(b'pong')\n    c.close()\n";

fn state(pid: u32) -> char {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
    stat.rsplit(") ").next().and_then(|rest| rest.chars().next()).expect("a state")
}

/// Reasons of the journal's entries about this process.
fn reasons(service: &Service, entry: &str, pid: u32) -> Vec<String> {
    let journal = fs::read_to_string(service.place().join("journal/journal")).unwrap_or_default();
    let lines = journal.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let is_it = |line: &Value| {
        line["entry"] == entry && line["guest"].as_str().is_some_and(|guest| guest.ends_with(&pid.to_string()))
    };
    lines.filter(is_it).map(|line| line["reason"].as_str().expect("a reason").to_owned()).collect()
}

#[test]
fn service_parks_idle_guests_that_are_named_and_not_one_that_a_program_uses() {
    if cannot_fold() {
        return;
    }
    let service = Service::start_with(Some(CONFIG));
    let sleeper = |group: &str, name: &str| service.run(group, name, &[], &["sleep", "600"]);
    let one = sleeper("acme", "a");
    let other = service.run("acme", "other", &[], &["tail", "-f", "/dev/null"]);
    let is_parked = |member: &Member| state(member.pid()) == 'T';
    until(120, "the guest that does nothing is parked", || is_parked(&one));
    assert_eq!(reasons(&service, "park", one.pid()), ["it was idle for 2 s"]);
    // One may be parked at a time.
    let two = sleeper("beta", "b");
    let place = service.place();
    let mut user = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    user.args(["wake", &one.pid().to_string(), "--why", "it is asked for", "--service"]).arg(&place);
    let mut user = Ends(user.args(["--", "sleep", "600"]).spawn().expect("run pagefold wake"));
    until(60, "it goes on", || !is_parked(&one));
    assert_eq!(reasons(&service, "wake", one.pid()), ["it is asked for"]);
    // Both are as idle, and one of them is in use.
    until(120, "the other guest is parked", || is_parked(&two));
    assert!(json_of(&service.pagefold(&["wake", "--all", "--json"]))["woken"].is_string());
    until(120, "the other guest is parked again", || is_parked(&two));
    let refused = service.pagefold(&["park", &one.pid().to_string()]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains(&format!("process {} keeps it awake", user.0.id())), "{said}");
    assert_eq!(reasons(&service, "park", one.pid()).len(), 1, "it is in use");
    user.0.kill().expect("end it");
    user.0.wait().expect("its end");
    service.pagefold(&["wake", "--all"]);
    // The one that has been idle for longer comes first.
    until(120, "it is parked again", || {
        let is_again = reasons(&service, "park", one.pid()).len() == 2;
        if !is_again {
            service.pagefold(&["wake", &two.pid().to_string()]);
        }
        is_again
    });
    assert_eq!((reasons(&service, "park", other.pid()).len(), state(other.pid())), (0, 'S'), "it is not named");
    service.pagefold(&["wake", "--all"]);
}

/// The words of the unit in the documents.
fn unit() -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/balance.md");
    let text = fs::read_to_string(path).expect("docs/balance.md");
    let line = text.lines().find_map(|line| line.trim().strip_prefix("ExecStart=/usr/bin/pagefold "));
    line.expect("a unit that wakes").split_whitespace().map(str::to_owned).collect()
}

fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).expect("a free port").local_addr().expect("its address").port()
}

/// The unit for the guest of this process: a connection to the port outside is for that inside.
fn activate(service: &Service, pid: &str, inside: u16, outside: u16) -> Ends {
    let mut activate = Command::new("systemd-socket-activate");
    activate.args(["-l", &format!("127.0.0.1:{outside}"), env!("CARGO_BIN_EXE_pagefold")]);
    for word in unit() {
        match word.as_str() {
            "web-7" => activate.args([pid, "--service"]).arg(service.place()),
            "10.0.0.7:80" => activate.arg(format!("127.0.0.1:{inside}")),
            "--exit-idle-time=1min" => activate.arg("--exit-idle-time=5s"),
            word => activate.arg(word),
        };
    }
    Ends(activate.spawn().expect("run systemd-socket-activate"))
}

#[test]
fn connection_wakes_a_parked_guest_by_the_unit_in_the_documents() {
    if cannot_fold() {
        return;
    }
    let needed = ["/usr/bin/systemd-socket-activate", "/lib/systemd/systemd-socket-proxyd", "/usr/bin/setpriv"];
    if let Some(lacks) = needed.iter().find(|path| !Path::new(path).exists()) {
        eprintln!("skipped: there is no {lacks}");
        return;
    }
    let service = Service::start();
    let (inside, outside) = (free_port(), free_port());
    let server = service.run("acme", "web", &[], &["/usr/bin/python3", "-c", SERVER, &inside.to_string()]);
    until(60, "the server listens", || !server.lines().is_empty());
    let pid = server.pid().to_string();
    let park = || service.pagefold(&["park", &pid, "--fold-for", "1"]);
    assert!(park().status.success());
    until(10, "it stands still", || state(server.pid()) == 'T');
    let mut proxy = activate(&service, &pid, inside, outside);
    let ask = || {
        let mut answer = String::new();
        let mut stream = TcpStream::connect(("127.0.0.1", outside)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a time limit");
        stream.read_to_string(&mut answer).ok()?;
        Some(answer)
    };
    let mut answer = None;
    until(60, "the first connection is answered", || {
        answer = ask();
        answer.is_some()
    });
    assert_eq!((answer.as_deref(), state(server.pid()) == 'T'), (Some("pong"), false));
    assert_eq!(reasons(&service, "wake", server.pid()), ["a program is about to use it"]);
    // The proxy is nobody's, and has the process of the command that woke the guest.
    let status = fs::read_to_string(format!("/proc/{}/status", proxy.0.id())).expect("the proxy runs");
    assert!(status.contains("Name:\tsystemd-socket-") && status.contains("Uid:\t65534\t65534"), "{status}");
    let mut held = TcpStream::connect(("127.0.0.1", outside)).expect("the proxy listens");
    let mut word = [0; 4];
    held.read_exact(&mut word).expect("an answer");
    let refused = park();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    let ended = proxy.0.try_wait().expect("ask for its state").is_some();
    assert!(ended || said.contains("keeps it awake"), "{said}");
    until(60, "the proxy ends when nobody is connected", || proxy.0.try_wait().expect("ask for its state").is_some());
    service.pagefold(&["wake", "--all"]);
    assert!(park().status.success());
    service.pagefold(&["wake", "--all"]);
}
