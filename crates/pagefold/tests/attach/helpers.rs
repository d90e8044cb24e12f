//! The helper beside an attached process: it may be killed at any instant, and costs next to nothing.

use crate::common::once_in_ten_times;
use crate::common::supervised::{Installed, wait_for, wait_for_within};
use crate::rig::{CONFIG, Running, Waits, attach, compile_source, detach, member, wait_for_folds, words};
use api::client::Service;
use api::place::Place;
use host::{ProcessId, ThreadCpu};
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The helper beside an attached process.
fn helper_of(installed: &Installed, pid: &str) -> ProcessId {
    living_helper_of(installed, pid).expect("it runs")
}

/// The same, if it has not ended.
pub fn living_helper_of(installed: &Installed, pid: &str) -> Option<ProcessId> {
    let service = Service::connect(Place::at(&installed.path("s"))).unwrap();
    let members = service.members().unwrap();
    let member = members.iter().find(|member| member.identity.pid.to_string() == pid).expect("a member");
    ProcessId::of(member.attached_by.expect("attached")).ok().filter(ProcessId::is_alive)
}

#[test]
fn program_goes_on_when_helper_is_killed_at_any_instant() {
    let Some(installed) = Installed::attaching() else { return };
    // Nobody starts other helpers.
    let _supervisor = installed.serve(CONFIG, &["--enrol-apart"]);
    for turn in 0..5_u64 {
        // Calls that are interrupted at that moment answer so.
        let mut waits = Waits::start_with(&installed, &[], &["without-pipe", "count"]);
        let pid = waits.pid();
        attach(&installed, &pid);
        if turn % 2 == 0 {
            wait_for_folds(&installed, &pid, 1);
        }
        std::thread::sleep(Duration::from_millis(turn * 37));
        let helper = helper_of(&installed, &pid);
        assert!(Command::new("kill").args(["-KILL", &helper.pid.to_string()]).status().unwrap().success());
        wait_for("the helper ends", || (!helper.is_alive()).then_some(()));
        // All threads do a whole turn of their work, and nobody traces any of them.
        for _ in 0..2 {
            waits.tell("stop");
            waits.tell("go");
            waits.tell("break");
        }
        for thread in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
            let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap_or_default();
            assert!(!status.contains("State:\tt") && !status.contains("State:\tT"), "{status}");
            assert!(status.is_empty() || status.contains("TracerPid:\t0\n"), "{status}");
        }
        let refused = installed.pagefold(&["detach", &pid]);
        assert!(words(&refused).contains("is gone: the service starts another one soon"), "{refused:?}");
    }
}

#[test]
fn killed_helper_is_replaced_and_program_detached_as_ever() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut waits = Waits::start_with(&installed, &[], &["without-pipe", "count"]);
    let pid = waits.pid();
    attach(&installed, &pid);
    let helper = helper_of(&installed, &pid);
    assert!(Command::new("kill").args(["-KILL", &helper.pid.to_string()]).status().unwrap().success());
    let next = || living_helper_of(&installed, &pid).filter(|next| *next != helper);
    wait_for_within(Duration::from_secs(120), "another helper", next);
    // An agent that has just begun has yet to be given a keeper, and asks for one ever more rarely.
    let folds = || member(&installed, &pid)?["folded_pages"].as_u64().filter(|pages| *pages >= 1000);
    wait_for_within(Duration::from_secs(300), "the next helper lets it fold", folds);
    waits.break_enough();
    detach(&installed, &pid);
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs");
    assert!(!maps.contains("pagefold"), "{maps}");
    waits.tell("stop");
}

/// Processor time of an attached process's agent, and of the program beside it.
fn cost(pid: u32, helper: &ProcessId) -> Duration {
    let agent = ThreadCpu::of_process(pid).expect("its threads").into_iter().filter(|thread| thread.tid != pid);
    agent.chain(ThreadCpu::of_process(helper.pid).expect("its threads")).map(|thread| thread.used).sum()
}

/// MariaDB's agent took 65 ms a second at rest: each round looked at two million pieces of a reservation.
#[test]
fn attached_program_at_rest_costs_next_to_nothing_whatever_it_has_reserved() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let program = installed.path("reserves");
    compile_source("cc", &["-Wall"], &program, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/reserves.c"));
    let mut reserves = Running(Command::new(&program).stdout(Stdio::piped()).spawn().expect("start it"));
    let output = reserves.0.stdout.take().expect("a pipe");
    assert_eq!(BufReader::new(output).lines().next().expect("a line").expect("text"), "ready");
    let pid = reserves.0.id().to_string();
    attach(&installed, &pid);
    wait_for_folds(&installed, &pid, 8000);
    let helper = helper_of(&installed, &pid);
    // The longest time between two rounds, and then some.
    let time = Duration::from_secs(11);
    let used = || {
        let before = cost(reserves.0.id(), &helper);
        std::thread::sleep(time);
        cost(reserves.0.id(), &helper) - before
    };
    // It took 2.4% of a slow processor.
    once_in_ten_times(used, |used| *used < time / 25);
}
