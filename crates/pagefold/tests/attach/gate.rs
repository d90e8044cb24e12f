//! System calls that are led to the gate: folded memory is moved and enlarged as any other, and a program may hold its lock.

use crate::common::supervised::{Installed, wait_for, wait_for_within};
use crate::helpers::living_helper_of;
use crate::rig::{CONFIG, Waits, attach, attach_command, compile_source, detach};
use host::Mapping;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A running `moves.c`.
fn start_moves(installed: &Installed, compiler: &str) -> Waits {
    let program = installed.path("moves");
    compile_source(compiler, &[], &program, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/moves.c"));
    Waits::run(&mut Command::new(&program))
}

/// The kernel refuses to move or to enlarge memory of which parts are folded. And a mapping of the pool that grows would show
/// more of the pool.
fn move_folded_memory(installed: &Installed, moves: &mut Waits) {
    let pid = moves.pid();
    let threads = || Path::new("/proc").join(&pid).join("task").read_dir().unwrap().count();
    assert_eq!(moves.tell("go on"), "ok\n");
    let before = threads();
    attach(installed, &pid);
    assert_eq!(moves.tell("move"), "ok\n");
    detach(installed, &pid);
    assert_eq!(moves.tell("go on"), "ok\n");
    let all = Mapping::read_all(moves.pid).expect("its mappings");
    let left: Vec<_> = all.iter().filter(|mapping| is_changed_code(mapping)).collect();
    assert!(left.is_empty(), "code that is not a file's: {left:#?}");
    assert_eq!(threads(), before);
}

/// Whether a mapping has code that no file holds, but for the kernel's.
fn is_changed_code(mapping: &Mapping) -> bool {
    mapping.execute && (mapping.usage.anonymous_bytes > 0 || mapping.name.is_empty())
}

#[test]
fn folded_memory_is_moved_and_enlarged_as_any_other() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    for (compiler, cycles) in [("cc", 2), ("musl-gcc", 1)] {
        let mut moves = start_moves(&installed, compiler);
        for _ in 0..cycles {
            move_folded_memory(&installed, &mut moves);
        }
    }
}

#[test]
fn folded_memory_is_moved_and_enlarged_in_forked_child_too() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut moves = start_moves(&installed, "cc");
    let parent = moves.pid();
    attach(&installed, &parent);
    assert_eq!(moves.tell("move"), "ok\n");
    assert_eq!(moves.tell("fork"), "ok\n");
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
    moves.pid = children.trim().parse().expect("one child");
    move_folded_memory(&installed, &mut moves);
}

/// A program that holds the gate's lock, or whose thread was killed there, was once attached for good.
#[test]
fn program_that_holds_the_lock_of_the_gate_is_detached() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut waits = Waits::start(&installed, &[]);
    let pid = waits.pid();
    attach(&installed, &pid);
    // The agent opens its gate once it has joined.
    let code = wait_for("the gate's code", || {
        let all = Mapping::list(waits.pid).expect("its mappings");
        all.into_iter().find(|mapping| mapping.execute && mapping.name.is_empty())
    });
    // The lock is the second number of the page behind.
    let memory = File::options().write(true).open(format!("/proc/{pid}/mem")).unwrap();
    memory.write_all_at(&1_u32.to_ne_bytes(), code.end.0 + 4).unwrap();
    detach(&installed, &pid);
    assert!(waits.child.try_wait().unwrap().is_none(), "it has ended");
}

/// Attaches a process, and kills the helper as soon as the agent is seen: that has its name, and soon tells of its gate.
fn attach_and_kill_helper(installed: &Installed, pid: u32) {
    let mut attaching = attach_command(installed, &[&pid.to_string()]).stderr(Stdio::null()).spawn().expect("attach");
    let helper = loop {
        // The first child only tells its version.
        let words = |child: &u32| fs::read_to_string(format!("/proc/{child}/cmdline")).unwrap_or_default();
        match host::children(attaching.id())[..] {
            [helper] if words(&helper).contains("--pid") => break helper,
            _ => assert!(attaching.try_wait().unwrap().is_none(), "it has no helper"),
        }
    };
    let is_agent = |task: fs::DirEntry| fs::read(task.path().join("comm")).is_ok_and(|name| name == b"pagefold\n");
    let until = Instant::now() + Duration::from_secs(60);
    while !fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").flatten().any(is_agent) {
        assert!(Instant::now() < until, "no agent comes");
    }
    kill_process(Pid::from_raw(helper.cast_signed()).unwrap(), Signal::KILL).expect("kill our own child's child");
    attaching.wait().unwrap();
}

/// The first helper may have led none of the program's calls to the gate, of which the agent has told it alone.
#[test]
fn next_helper_leads_calls_to_the_gate() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut moves = start_moves(&installed, "cc");
    let pid = moves.pid();
    attach_and_kill_helper(&installed, moves.pid);
    wait_for_within(Duration::from_secs(120), "another helper", || living_helper_of(&installed, &pid));
    let is_led = |mapping: &Mapping| is_changed_code(mapping) && !mapping.name.is_empty();
    wait_for("calls are led to the gate", || {
        Mapping::read_all(moves.pid).expect("its mappings").iter().any(is_led).then_some(())
    });
    // The helper that was killed may count still: then it is said to try again soon.
    wait_for("it is detached", || {
        let output = installed.pagefold(&["detach", &pid, "--json", "--wait", "120"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() || said.contains("then try again"), "{output:?}");
        output.status.success().then_some(())
    });
    assert_eq!(moves.tell("go on"), "ok\n");
}
