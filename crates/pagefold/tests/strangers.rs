//! The hostile set: users of the host and workers that try to stop a service, or to get what is not theirs.

mod common;

use common::not_root;
use common::supervised::{Fake, Installed, Supervisor, signal, wait_for};
use host::{ProcessId, own_socket};
use std::path::Path;
use std::time::{Duration, Instant};

const TWO: &str = "\
[[group]]
name = 'acme'
users = [65533]
[[group]]
name = 'beta'
[[group.processes]]
uid = 65534
program = '/tmp/*/fake_agent'
";

/// User of acme.
const ACMES: &str = "65533";
/// Places of one user at the supervisor's socket for everybody, and of all users together.
const SHARES: (usize, usize) = (8, 64);

/// Time for an answer to those who are not concerned: 10 s. Closing a file of an attacker's takes a minute or for ever.
const SOON: Duration = Duration::from_secs(10);

/// Asserts that the supervisor, the prover and acme's worker answer root at its own sockets.
fn assert_all_answer(installed: &Installed, others: &mut Fake, after: &str) {
    let [control, prove] = ["control", "prove"].map(|name| {
        own_socket(&installed.path(&format!("s/{name}.sock")), 0).to_str().expect("a plain path").to_owned()
    });
    for (question, command) in [
        ("the supervisor", format!("ask {control} \"groups\"")),
        ("the prover", format!("prove {prove}")),
        ("acme's worker", format!("ask {control} {{\"show\":{{\"group\":\"acme\"}}}}")),
    ] {
        let began = Instant::now();
        let answer = others.tell(&command);
        assert!(began.elapsed() < SOON, "{question} was silent for {:?} after {after}", began.elapsed());
        assert!(answer == "ok" || answer.contains("acme"), "{question} after {after}: {answer}");
    }
}

/// A process of a user without rights that has files of this kind. `None` if there are none here.
fn attacker(installed: &Installed, kind: &str) -> Option<Fake> {
    let mut attacker = installed.stranger();
    let made = attacker.tell(&format!("files {kind}"));
    if made != "ok" {
        eprintln!("skipped: no files of the kind {kind}: {made}");
        return None;
    }
    assert_eq!(attacker.tell("become 65534"), "ok");
    Some(attacker)
}

/// Has files sent to every socket of a service, also over connections that are refused or closed before they are read.
fn assert_files_keep_nobody_waiting(installed: &Installed) {
    let mut member = installed.member("acme", "web");
    assert!(member.connects(installed), "{}", installed.log());
    let mut others = installed.stranger();
    let prover = installed.text("s/prove.sock");
    wait_for("the prover answers", || (others.tell(&format!("prove {prover}")) == "ok").then_some(()));
    for kind in ["linger", "fuse"] {
        let Some(mut attacker) = attacker(installed, kind) else { continue };
        for socket in ["control", "agent", "prove"] {
            for count in [1, 64] {
                let sent = attacker.tell(&format!("send {} {count}", installed.text(&format!("s/{socket}.sock"))));
                assert_all_answer(installed, &mut others, &format!("{kind} files for {socket}.sock: {sent}"));
            }
        }
        // Connections beyond a user's share are closed with what was sent over them.
        attacker.tell(&format!("crowd {prover} 40"));
        attacker.tell(&format!("send {prover} 1"));
        assert_all_answer(installed, &mut others, &format!("{kind} files over a connection too many"));
        // Now a member, to its worker.
        let mut tenant = installed.member("acme", kind);
        assert_eq!(tenant.tell(&format!("files {kind}")), "ok");
        assert!(tenant.connects(installed));
        let sent = tenant.tell("send-here 2");
        assert_all_answer(installed, &mut others, &format!("{kind} files for a worker: {sent}"));
    }
    assert!(member.is_connected(), "{}", installed.log());
}

#[test]
fn files_sent_along_keep_nobody_waiting() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let _supervisor = installed.serve(TWO, &[]);
    assert_files_keep_nobody_waiting(&installed);
}

#[test]
fn files_sent_along_keep_nobody_waiting_on_older_kernel() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let _supervisor = installed.serve_without_option(TWO, 83);
    assert_files_keep_nobody_waiting(&installed);
}

/// Replaces acme's worker by a process that says what a test wants, and starts the next supervisor.
fn compromised_worker(installed: &Installed, supervisor: &mut Supervisor) -> (Fake, Supervisor) {
    let mut web = installed.member("acme", "web");
    assert!(web.connects(installed), "{}", installed.log());
    let worker = installed.worker("acme");
    supervisor.kill();
    signal(worker, "KILL");
    let mut evil = installed.stranger();
    assert_eq!(evil.tell(&format!("listen {}", installed.text("s/workers/acme.sock"))), "ok");
    (evil, installed.serve(TWO, &[]))
}

fn news(evil: &mut Fake, json: &serde_json::Value, files: usize) -> String {
    evil.tell(&format!("news {json} {files}"))
}

fn adopted(claims: &[&Fake]) -> serde_json::Value {
    let identity = |fake: &&Fake| {
        let process = ProcessId::of(fake.pid()).expect("it runs");
        serde_json::json!({ "name": format!("claimed-{}", process.pid), "pid": process.pid, "started": process.start_ticks })
    };
    let members: Vec<_> = claims.iter().map(identity).collect();
    serde_json::json!({ "adopted": { "members": members, "segments": [], "begun": true } })
}

#[test]
fn compromised_worker_gets_no_process_that_it_claims() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let mut supervisor = installed.serve(TWO, &[]);
    let (mut evil, _supervisor) = compromised_worker(&installed, &mut supervisor);
    let (mut stranger, mut betas) = (installed.stranger(), installed.stranger_unprivileged());
    assert_eq!(news(&mut evil, &adopted(&[&stranger, &betas]), 0), "ok");
    wait_for("the claim is refused", || installed.log().contains("was never admitted to it").then_some(()));
    assert!(stranger.is_refused(&installed), "a stranger was handed to the worker that claimed it");
    assert!(betas.connects(&installed), "{}", installed.log());
    installed.until_members("beta", &[&format!("fake-agent-{}", betas.pid())]);
    let orders = evil.tell("orders");
    assert!(!orders.contains("admit"), "{orders}");
}

#[test]
fn compromised_worker_keeps_nobody_waiting() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let mut supervisor = installed.serve(TWO, &[]);
    let (mut evil, _supervisor) = compromised_worker(&installed, &mut supervisor);
    let mut others = installed.stranger();
    assert_eq!(evil.tell("files linger"), "ok");
    for (message, files) in [
        (adopted(&[]), 2),
        (serde_json::json!({ "segment": { "number": 9, "slots": 16 } }), 1),
        (serde_json::json!({ "segment": { "number": 9, "slots": 16 } }), 64),
        (serde_json::json!({ "dropped": 9 }), 2),
    ] {
        assert_eq!(news(&mut evil, &message, files), "ok");
        let began = Instant::now();
        let answer = others.ask(&installed, "\"groups\"");
        assert!(began.elapsed() < SOON, "silent for {:?} after {message}", began.elapsed());
        assert!(answer.to_string().contains("acme"), "{answer}");
    }
}

/// The next supervisor believes no worker, so a member must be on disk before a worker hears of it.
#[test]
fn member_by_rule_that_cannot_be_written_down_is_not_admitted() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let mut supervisor = installed.serve(TWO, &[]);
    let mut one = installed.stranger_unprivileged();
    assert!(one.connects(&installed), "{}", installed.log());
    let obstacle = installed.path("s/state.json.next");
    std::fs::create_dir(&obstacle).expect("make an obstacle");
    assert!(installed.stranger_unprivileged().is_refused(&installed));
    // The reason is logged after the connection has been closed.
    wait_for("the log has the reason", || installed.log().contains("cannot write").then_some(()));
    std::fs::remove_dir(&obstacle).expect("remove it again");
    let mut other = installed.stranger_unprivileged();
    assert!(other.connects(&installed), "{}", installed.log());
    supervisor.kill();
    let _supervisor = installed.serve(TWO, &[]);
    assert!(one.is_connected() && other.is_connected());
    let mut wanted = [one.pid(), other.pid()].map(|pid| format!("fake-agent-{pid}"));
    wanted.sort();
    installed.until_members("beta", &wanted.each_ref().map(String::as_str));
    assert!(!installed.log().contains("never admitted"), "{}", installed.log());
}

/// Opens connections and keeps them. Returns the number of those that were let in.
fn open(fake: &mut Fake, socket: &str, count: usize) -> usize {
    fake.tell(&format!("crowd {socket} {count}")).parse().expect("a number")
}

/// Has one more user than have room together at the supervisor take places at a socket. Returns their numbers of places, too.
///
/// The supervisor forgets a client after 10 s. Where a machine is as slow as that, the crowd goes, and another one
/// comes.
fn crowd(installed: &Installed, socket: &str) -> (Vec<Fake>, Vec<usize>) {
    for _ in 0..5 {
        let user = |user| {
            let mut fake = installed.stranger();
            assert_eq!(fake.tell(&format!("become {}", 70_000 + user)), "ok");
            fake
        };
        let mut crowd: Vec<Fake> = (0..=SHARES.1 / SHARES.0).map(user).collect();
        let began = Instant::now();
        let counts = crowd.iter_mut().map(|fake| open(fake, socket, 2 * SHARES.0)).collect();
        if began.elapsed() < Duration::from_secs(9) {
            return (crowd, counts);
        }
        drop(crowd);
        std::thread::sleep(Duration::from_secs(12));
    }
    panic!("each crowd took more than 9 s");
}

/// One person may have many users: subordinate ids. Users with a claim have sockets of their own, which others may not write.
#[test]
fn crowd_of_users_leaves_places_of_root_and_of_members() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let _supervisor = installed.serve(TWO, &[]);
    let (mut others, mut beta) = (installed.stranger(), installed.stranger_unprivileged());
    assert!(beta.connects(&installed), "{}", installed.log());
    let sockets = ["prove", "control"].map(|name| installed.path(&format!("s/{name}.sock")));
    let text = |socket: &Path| socket.to_str().expect("a plain path").to_owned();
    wait_for("the prover answers", || (others.tell(&format!("prove {}", text(&sockets[0]))) == "ok").then_some(()));
    // A user with a member has a claim to the prover's places, and a user of a group to the supervisor's, too.
    let [betas, acmes] =
        [(0, "65534"), (1, ACMES)].map(|(n, uid)| own_socket(&sockets[n], uid.parse().expect("a user")));
    for (n, (own, uid)) in [(&betas, None), (&acmes, Some(ACMES))].into_iter().enumerate() {
        let (mut crowd, counts) = crowd(&installed, &text(&sockets[n]));
        let all = if n == 0 { (0, 0) } else { SHARES };
        assert_eq!((counts[0], counts.iter().sum()), all, "{counts:?} at {}", sockets[n].display());
        assert_eq!(counts.last(), Some(&0), "{counts:?} at {}", sockets[n].display());
        let refused = crowd[0].tell(&format!("connect {}", text(own)));
        assert!(refused.contains("Permission denied"), "{refused}");
        let mut claims = installed.stranger();
        uid.inspect(|uid| assert_eq!(claims.tell(&format!("become {uid}")), "ok"));
        let entitled = uid.map_or(&mut beta, |_| &mut claims);
        assert_eq!(open(entitled, &text(own), 2 * SHARES.0), 2 * SHARES.0);
        assert_all_answer(&installed, &mut others, &format!("a crowd at {}", sockets[n].display()));
    }
}
