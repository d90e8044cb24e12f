//! `pagefold-attach` is killed at each of its system calls, or the process beside it: the program is as before, or a member that works.

use crate::common::service::until;
use crate::common::supervised::{Installed, wait_for, wait_for_within};
use crate::rig::{CONFIG, Waits, assert_same, wait_for_folds};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Calls of `clone` by `pagefold-attach`, each of which makes a process beside it: while it puts the agent in, and while it takes it out. The
/// first calls are counted to its end, and nothing is folded there.
const PUTS_IN: &str = "1";
const TAKES_OUT: &str = "2";
/// Calls from one kill to the next, and most kills: a working member is detached after each. `./x soak` tries each call.
const KILLS: [(&str, usize, usize); 2] = [(PUTS_IN, 97, 32), (TAKES_OUT, 67, 4)];

fn attach_words(installed: &Installed, pid: &str) -> Vec<String> {
    let fixed = ["--group", "acme", "--all-anonymous", "--dir"].map(str::to_owned);
    let words = [installed.text("pagefold-attach"), "--pid".into(), pid.to_owned()];
    words.into_iter().chain(fixed).chain([installed.text("s")]).collect()
}

/// The kernel's word on each thread: whether it stands still, signals that it blocks, filters, a tracer.
fn threads(pid: u32) -> BTreeMap<String, Vec<String>> {
    let fields = ["State:\tT", "State:\tt", "SigBlk:", "Seccomp:", "TracerPid:"];
    let of = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).ok()?;
        let lines = status.lines().filter(|line| fields.iter().any(|field| line.starts_with(field)));
        Some((task.file_name().into_string().ok()?, lines.map(str::to_owned).collect()))
    };
    fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").flatten().filter_map(of).collect()
}

/// Whether the agent's object is there.
fn has_object(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs").contains("pagefold.agent")
}

/// Whether a thread of the agent's is there, or of what becomes it.
fn has_agent(pid: u32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").flatten();
    tasks.into_iter().any(|task| fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name == "pagefold\n"))
}

/// `pagefold-attach` that is killed at its nth call, counted from the start of the process beside it.
struct CutOff {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl CutOff {
    fn start(installed: &Installed, pid: &str, number: usize, from: &str) -> Self {
        let program = Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("cut_off");
        let mut command = Command::new(program);
        command.args([&number.to_string(), "56", from]).args(attach_words(installed, pid)).env("PAGEFOLD_EAGER", "1");
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("run cut_off: ./x build");
        let lines = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, lines }
    }

    /// Whether it says that the process is attached, before it is killed.
    fn attaches(&mut self) -> bool {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("hear from it");
        line.starts_with('{')
    }

    /// The process that was started.
    fn own(&self) -> Option<String> {
        let children = format!("/proc/{0}/task/{0}/children", self.child.id());
        fs::read_to_string(children).ok()?.split_whitespace().next().map(str::to_owned)
    }

    /// Waits for the end of all; says at which call a process was killed, and that.
    fn end(mut self) -> Value {
        let mut errors = self.child.stderr.take().map(BufReader::new).expect("a pipe");
        wait_for_within(Duration::from_secs(120), "all have ended", || self.child.try_wait().expect("ask for it"));
        let mut text = String::new();
        std::io::Read::read_to_string(&mut errors, &mut text).expect("hear from it");
        let last = text.lines().last().unwrap_or_default();
        serde_json::from_str(last).unwrap_or_else(|e| panic!("{e}: {text}"))
    }
}

impl Drop for CutOff {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program, and what it is like while nothing is attached to it.
struct Program {
    waits: Waits,
    before: BTreeMap<&'static str, Vec<String>>,
    threads: BTreeMap<String, Vec<String>>,
}

impl Program {
    fn start(installed: &Installed) -> Self {
        // A stop of the whole process interrupts calls and cuts writes short: `man 7 signal`.
        let mut waits = Waits::start_with(installed, &[], &["without-pipe", "count"]);
        waits.tell("stop");
        let (before, threads) = (waits.look(), threads(waits.pid));
        waits.tell("go");
        Self { waits, before, threads }
    }

    /// Looks at it after a kill: nothing has changed, or the agent works, or waits to be taken out by another one.
    fn assert_is_as_before(&mut self, installed: &Installed, number: usize, said: &Value) {
        let pid = self.waits.pid;
        wait_for(&format!("threads that were told to end have ended: {said}: {:?}", threads(pid)), || {
            self.waits.assert_runs(&said.to_string());
            (has_agent(pid) == has_object(pid)).then_some(())
        });
        if has_agent(pid) {
            // A process that was killed traces a moment longer.
            let is_traced =
                || threads(pid).values().flatten().any(|line| line.starts_with("TracerPid:") && !line.ends_with("\t0"));
            wait_for(&format!("nobody traces it: {said}"), || (!is_traced()).then_some(()));
        }
        // On a busy machine, the agent's threads may not have ended in time for the next one.
        (0..3).take_while(|_| has_agent(pid)).for_each(|_| leave(installed, &pid.to_string()));
        let own = |mut all: BTreeMap<String, Vec<String>>| {
            all.retain(|thread, _| self.threads.contains_key(thread));
            all
        };
        wait_for(&format!("its threads are as before: {said}: {:?}", threads(pid)), || {
            self.waits.assert_runs(&said.to_string());
            (own(threads(pid)) == self.threads).then_some(())
        });
        self.waits.tell("stop");
        assert_same(&self.waits.look(), &self.before, number);
        self.waits.tell("go");
    }
}

/// Kills at every `step`th call until none is left, and looks at the program after each.
fn kill_at_calls(from: &str) {
    let Some(installed) = Installed::attaching() else { return };
    // Nobody starts other helpers.
    let _supervisor = installed.serve(CONFIG, &["--enrol-apart"]);
    let (_, step, most) = *KILLS.iter().find(|kills| kills.0 == from).expect("one of them");
    let is_long = std::env::var_os("PAGEFOLD_SOAK_SECONDS").is_some();
    let (step, most) = if is_long { (1, usize::MAX) } else { (step, most) };
    let mut program = Program::start(&installed);
    let mut kills = Vec::new();
    for number in (1..).step_by(step).take(most) {
        let pid = program.waits.pid();
        let mut cut = CutOff::start(&installed, &pid, number, from);
        let is_attached = cut.attaches();
        if is_attached {
            // It leaves the process when it is told to.
            let own = cut.own();
            if from == TAKES_OUT {
                wait_for_folds(&installed, &pid, 1000);
            }
            own.map(|own| Command::new("kill").args(["-TERM", &own]).status());
        }
        let said = cut.end();
        if is_long {
            eprintln!("{number}: {said}");
        }
        program.assert_is_as_before(&installed, number, &said);
        kills.push(said["killed_at"].clone());
        if said["killed_at"].is_null() {
            break;
        }
    }
    eprintln!("killed at {} calls: {kills:?}", kills.len());
    assert!(kills.len() > 3, "{kills:?}");
}

/// Has the agent taken out of the process by a helper that takes the place of the killed one.
fn leave(installed: &Installed, pid: &str) {
    let words = attach_words(installed, pid);
    let mut next =
        Command::new(&words[0]).args(&words[1..]).arg("--again").stdout(Stdio::piped()).spawn().expect("start it");
    let mut line = String::new();
    BufReader::new(next.stdout.take().expect("a pipe")).read_line(&mut line).expect("hear from it");
    assert!(line.starts_with('{'), "no other takes the place of the killed one");
    // An agent that was told to leave before does that at once.
    let _ = installed.pagefold(&["detach", pid, "--wait", "120"]);
    until(60, "it has ended", || next.try_wait().expect("ask for it").is_some());
}

/// A thread of the program's ran on with registers of ours, and crashed it.
#[test]
fn program_goes_on_when_what_puts_the_agent_in_is_killed_at_any_call() {
    kill_at_calls(PUTS_IN);
}

/// The agent's last thread ran on over memory that was being unmapped, or ended and left its memory and the jump to it.
#[test]
fn program_goes_on_when_what_takes_the_agent_out_is_killed_at_any_call() {
    kill_at_calls(TAKES_OUT);
}
