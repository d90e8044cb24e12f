//! A separate process that pauses guests, and resumes them even if the balancer that asked for the pause is killed.
//!
//! ```text
//!   balancer                         holder                          guest
//!      | -- stop: guests ------------> | -- QMP stop ----------------> |
//!      | <- which are paused --------- |                               |
//!      | -- cont: guests ------------> | -- QMP cont ----------------> |
//!      X  killed: the pipe closes      | -- QMP cont: all -----------> |
//!                10 s after its stop   | -- QMP cont ----------------> |
//! ```
//!
//! The ledger names each paused guest before its pause. So the next balancer resumes it where the holder was killed,
//! too. Guests that do not run at that moment are neither noted nor resumed. QEMU serves one client at a time. The
//! holder connects anew for each command, and others can ask in between.

use crate::many;
use guest::{Guest, Qmp};
use host::ProcessId;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Longest pause of a guest: 10 s.
const LONGEST: Duration = Duration::from_secs(10);
/// Time in which the guests of one command are paused: 5 s. Guests that were not reached by then are left running.
const STOPS_WITHIN: Duration = Duration::from_secs(5);
/// Pause between two questions to QEMU whether a guest is paused: 10 ms.
const LOOK: Duration = Duration::from_millis(10);
/// Most characters of QEMU's error message that are passed on.
const MOST_WORDS: usize = 200;
/// Pause between two tries to resume a guest whose QEMU did not answer: 500 ms.
const TRY_EVERY: Duration = Duration::from_millis(500);
/// Time for which the holder tries to resume guests after the balancer's end: 10 min.
const GIVE_UP: Duration = Duration::from_secs(600);
/// Wait for a command while no guest is paused: 1 hour.
const IDLE: Duration = Duration::from_secs(3600);

/// States of a migration (`query-migrate`) in which none is under way.
pub(crate) const NO_MIGRATION: [&str; 4] = ["none", "completed", "failed", "cancelled"];

/// A guest to pause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Target {
    /// Its id.
    pub guest: String,
    /// Its QEMU.
    pub process: ProcessId,
    /// Its QMP socket.
    pub qmp: PathBuf,
}

impl Target {
    /// The QEMU of a guest; `None` if it has no QMP socket, or has ended.
    pub fn of(guest: &Guest) -> Option<Self> {
        let (pid, qmp) = guest::qmp_place(guest)?;
        Some(Self { guest: guest.id.clone(), process: ProcessId::of(pid).ok()?, qmp })
    }
}

/// A command to the holder, one JSON line.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    /// Pause these guests, each for 10 s at most.
    Stop(Vec<Target>),
    /// Resume these guests.
    Cont(Vec<String>),
}

/// The holder's reply to a command, one JSON line with an entry for each guest.
pub(crate) type Replies = Vec<Reply>;

/// The state of one guest, in a reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Reply {
    /// Its id.
    pub guest: String,
    /// Whether it is paused.
    pub is_paused: bool,
    /// Length of the pause so far, in milliseconds.
    pub paused_ms: u64,
    /// The reason why it was not paused, or not resumed.
    pub problem: Option<String>,
}

/// A guest that the holder has paused.
struct Held {
    target: Target,
    since: Instant,
    due: Instant,
    /// Length of the pause, once the guest runs again.
    paused: Option<Duration>,
    problem: Option<String>,
}

/// The holder's main function: commands on standard input, replies on standard output. It ends when its input is closed
/// and all guests run.
pub fn hold() {
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        let read = std::io::stdin().lock().lines().map_while(Result::ok);
        read.map_while(|line| sender.send(line).ok()).for_each(drop);
    });
    // Replies are written by a thread of their own: if the balancer is stopped and reads nothing, guests are resumed
    // nevertheless.
    let (replies, said) = mpsc::channel::<String>();
    std::thread::spawn(move || {
        let say = |text| writeln!(std::io::stdout(), "{text}").and_then(|()| std::io::stdout().flush());
        // The balancer may be gone; its pipe closes then.
        said.iter().map_while(|text| say(text).ok()).for_each(drop);
    });
    serve(&lines, |all| drop(replies.send(serde_json::to_string(&all).unwrap_or_default())));
}

/// Carries out commands until the input closes, then resumes all guests.
fn serve(lines: &Receiver<String>, reply: impl Fn(Replies)) {
    let mut all: Vec<Held> = Vec::new();
    loop {
        let now = Instant::now();
        let next = all.iter().filter(|held| held.paused.is_none()).map(|held| held.due).min();
        match lines.recv_timeout(next.map_or(IDLE, |due| due.saturating_duration_since(now))) {
            Ok(line) => reply(obey(&line, &mut all)),
            Err(RecvTimeoutError::Timeout) => resume_due(&mut all),
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    all.iter_mut().for_each(|held| held.due = Instant::now());
    let end = Instant::now() + GIVE_UP;
    while all.iter().any(|held| held.paused.is_none()) && Instant::now() < end {
        resume_due(&mut all);
        std::thread::sleep(TRY_EVERY);
    }
}

fn obey(line: &str, all: &mut Vec<Held>) -> Replies {
    match serde_json::from_str(line) {
        Ok(Command::Stop(targets)) => {
            let until = Instant::now() + STOPS_WITHIN;
            let stop_in_time = |target: &Target| {
                if Instant::now() < until { stop(target) } else { Err("others take too long to be stopped".into()) }
            };
            let mut replies = Replies::new();
            // Guests are stopped a few at a time, so that a guest that does not answer does not lengthen the pause of
            // others.
            for some in targets.chunks(many::AT_ONCE) {
                let stopped = many::each(some.iter(), |target| (stop_in_time(target), target.clone()));
                replies.extend(stopped.into_iter().map(|(stopped, target)| note(stopped, target, all)));
                resume_due(all);
            }
            replies
        }
        Ok(Command::Cont(guests)) => {
            let now = Instant::now();
            all.iter_mut().filter(|held| guests.contains(&held.target.guest)).for_each(|held| held.due = now);
            resume_due(all);
            all.iter().filter(|held| guests.contains(&held.target.guest)).map(Held::reply).collect()
        }
        Err(_) => Replies::new(),
    }
}

fn note(stopped: Result<Instant, String>, target: Target, all: &mut Vec<Held>) -> Reply {
    match stopped {
        Ok(since) => {
            let held = Held { target, since, due: since + LONGEST, paused: None, problem: None };
            let reply = held.reply();
            all.push(held);
            reply
        }
        Err(problem) => Reply { guest: target.guest, is_paused: false, paused_ms: 0, problem: Some(brief(&problem)) },
    }
}

impl Held {
    fn reply(&self) -> Reply {
        let paused = self.paused.unwrap_or_else(|| self.since.elapsed());
        Reply {
            guest: self.target.guest.clone(),
            is_paused: self.paused.is_none(),
            paused_ms: u64::try_from(paused.as_millis()).unwrap_or(u64::MAX),
            problem: self.problem.as_deref().map(brief),
        }
    }
}

fn brief(problem: &str) -> String {
    problem.chars().take(MOST_WORDS).collect()
}

/// Resumes the guests whose longest pause is over, or that are to be resumed now.
fn resume_due(all: &mut [Held]) {
    let now = Instant::now();
    many::each(all.iter_mut().filter(|held| held.paused.is_none() && held.due <= now), |held| {
        let target = &held.target;
        match resume(target.process, &target.qmp) {
            Ok(()) => (held.paused, held.problem) = (Some(held.since.elapsed()), None),
            Err(problem) => (held.due, held.problem) = (Instant::now() + TRY_EVERY, Some(problem)),
        }
    });
}

/// Connects to a guest that runs, and so may be paused. If a guest does not run, the program that paused it must resume
/// it.
///
/// # Errors
/// It does not run, is being moved to another host, or does not answer.
pub(crate) fn running(target: &Target) -> Result<Qmp, String> {
    let mut qmp = Qmp::of(target.process.pid, &target.qmp).map_err(|error| brief(&error.to_string()))?;
    match status(&mut qmp)?.as_str() {
        "running" => {}
        other => return Err(brief(&format!("it does not run: it is {other}"))),
    }
    // A paused guest that moves to another host would not be resumed there.
    let migration = qmp.execute("query-migrate", json!({})).map_err(|error| brief(&error.to_string()))?;
    if migration["status"].as_str().is_some_and(|status| !NO_MIGRATION.contains(&status)) {
        return Err("it is being moved to another host".into());
    }
    Ok(qmp)
}

/// Pauses a guest that runs.
pub(crate) fn stop(target: &Target) -> Result<Instant, String> {
    let mut qmp = running(target)?;
    // The guest counts as held from here on, because QEMU may have stopped it without answering in time.
    let since = Instant::now();
    let _ = qmp.execute("stop", json!({}));
    Ok(since)
}

/// Pauses a guest that runs, until somebody resumes it.
///
/// # Errors
/// The guest does not run, or was not seen to stand still in time. In the second case it may stand still later.
pub(crate) fn stop_for_long(target: &Target) -> Result<(), String> {
    let since = stop(target)?;
    loop {
        let found = Qmp::of(target.process.pid, &target.qmp).map_err(|error| error.to_string());
        match found.and_then(|mut qmp| status(&mut qmp)) {
            Ok(status) if status == "paused" => return Ok(()),
            found if since.elapsed() > STOPS_WITHIN => {
                return Err(brief(&format!("it does not stand still: {}", found.unwrap_or_else(|why| why))));
            }
            _ => std::thread::sleep(LOOK),
        }
    }
}

/// Resumes a guest that is paused. One that has ended, runs, or was moved to another host meanwhile, is left as it is.
pub(crate) fn resume(process: ProcessId, path: &Path) -> Result<(), String> {
    if !process.is_alive() {
        return Ok(());
    }
    let mut qmp = Qmp::of(process.pid, path).map_err(|error| error.to_string())?;
    if status(&mut qmp)? != "paused" {
        return Ok(());
    }
    qmp.execute("cont", json!({})).map(drop).map_err(|error| error.to_string())
}

fn status(qmp: &mut Qmp) -> Result<String, String> {
    let answer = qmp.execute("query-status", json!({})).map_err(|error| error.to_string())?;
    Ok(answer["status"].as_str().unwrap_or("in no known state").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_qemu::FakeQemu;

    fn start(name: &str) -> (FakeQemu, Target) {
        let qemu = FakeQemu::start(name, 1 << 20, Path::new("/nonexistent"));
        let target = Target::of(&qemu.guest).unwrap();
        (qemu, target)
    }

    /// The guests that a command to the holder has paused.
    fn hold_all(targets: &[&Target]) -> Vec<Held> {
        let mut all = Vec::new();
        let command = Command::Stop(targets.iter().copied().cloned().collect());
        let replies = obey(&serde_json::to_string(&command).unwrap(), &mut all);
        assert!(replies.iter().all(|reply| reply.is_paused && reply.problem.is_none()), "{replies:?}");
        all
    }

    #[test]
    fn guest_that_does_not_run_or_is_being_moved_is_not_paused() {
        for (status, migration) in [("paused", "none"), ("inmigrate", "none"), ("running", "active")] {
            let (qemu, target) = start("other");
            (qemu.state().status, qemu.state().migration) = (status, migration);
            assert!(stop(&target).is_err(), "{status} {migration}");
            assert_eq!(qemu.state().status, status);
        }
        let (qemu, target) = start("moved");
        qemu.state().migration = "completed";
        assert!(stop(&target).is_ok());
        assert_eq!(qemu.state().status, "paused");
    }

    /// Once, all guests whose QEMU did not answer were waited for, while those that had been paused already stood
    /// still.
    #[test]
    fn guest_is_resumed_after_its_time_while_others_do_not_answer() {
        let (qemu, target) = start("good");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("silent");
        let _silent = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let silent = Target { guest: "silent".into(), qmp: path, ..target.clone() };
        let mut all = hold_all(&[&target]);
        all[0].due = Instant::now();
        let command = Command::Stop(vec![silent; 2 * many::AT_ONCE]);
        let began = Instant::now();
        let replies = obey(&serde_json::to_string(&command).unwrap(), &mut all);
        assert!(replies.iter().all(|reply| !reply.is_paused) && replies.len() == 2 * many::AT_ONCE);
        let (paused, took) = (all[0].paused.expect("it runs"), began.elapsed());
        assert!(qemu.state().status == "running" && paused < took * 3 / 4, "{paused:?} of {took:?}");
    }

    #[test]
    fn guest_is_on_hold_although_the_answer_to_its_stop_was_lost() {
        let (qemu, target) = start("lost");
        qemu.state().fails = "stop";
        let mut all = hold_all(&[&target]);
        all[0].due = Instant::now();
        resume_due(&mut all);
        assert_eq!(qemu.state().status, "running");
    }

    #[test]
    fn only_a_paused_guest_is_resumed() {
        let (qemu, target) = start("any");
        for (before, after) in [("postmigrate", "postmigrate"), ("io-error", "io-error"), ("paused", "running")] {
            qemu.state().status = before;
            resume(target.process, &target.qmp).unwrap();
            assert_eq!(qemu.state().status, after);
        }
        qemu.state().status = "paused";
        let earlier = ProcessId { start_ticks: 1, ..target.process };
        resume(earlier, &target.qmp).unwrap();
        assert_eq!(qemu.state().status, "paused", "another process has its pid");
    }

    #[test]
    fn guest_is_resumed_after_10_s_though_nobody_asks() {
        let (qemu, target) = start("late");
        let mut all = hold_all(&[&target]);
        assert_eq!(all[0].due - all[0].since, Duration::from_secs(10));
        resume_due(&mut all);
        assert_eq!(qemu.state().status, "paused", "too early");
        all[0].due = Instant::now();
        resume_due(&mut all);
        assert_eq!((qemu.state().status, all[0].reply().is_paused), ("running", false));
    }

    #[test]
    fn guest_that_could_not_be_resumed_is_tried_again() {
        let (qemu, target) = start("refuses");
        let mut all = hold_all(&[&target]);
        qemu.state().fails = "cont";
        let command = Command::Cont(vec![target.guest]);
        let replies = obey(&serde_json::to_string(&command).unwrap(), &mut all);
        assert!(replies[0].is_paused && replies[0].problem.is_some(), "{replies:?}");
        qemu.state().fails = "";
        std::thread::sleep(TRY_EVERY);
        resume_due(&mut all);
        assert_eq!((qemu.state().status, all[0].reply().problem), ("running", None));
    }

    #[test]
    fn all_guests_run_when_the_balancer_has_ended() {
        let (one, other) = (start("one"), start("other"));
        let command = Command::Stop(vec![one.1, other.1]);
        let (sender, lines) = mpsc::channel();
        sender.send(serde_json::to_string(&command).unwrap()).unwrap();
        drop(sender);
        serve(&lines, |replies| {
            assert_eq!(replies.len(), 2);
            assert_eq!([&one.0, &other.0].map(|qemu| qemu.state().status), ["paused"; 2]);
        });
        assert_eq!([&one.0, &other.0].map(|qemu| qemu.state().status), ["running"; 2]);
    }
}
