//! `pagefold attach` and `pagefold detach`: running programs become members, and are left as they were before.

#[path = "../common/mod.rs"]
mod common;

mod breakpoints;
mod containers;
mod filters;
mod gate;
mod held;
mod helpers;
mod hidden;
mod killed;
mod limits;
mod locked;
mod memory_limit;
mod named;
mod refused;
mod rig;
mod shares_memory;
mod silent;
mod unprivileged;

use api::client::Service;
use api::place::Place;
use common::formats::assert_documented;
use common::json_of;
use common::supervised::Installed;
use host::{Mapping, ProcessId};
use rig::{CONFIG, Running, Waits, attach, compile_source, cycle, detach, member, path, wait_for_folds, words};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Cycles of attaching and detaching: more for longer tests.
fn cycles() -> usize {
    if std::env::var_os("PAGEFOLD_LONG_TESTS").is_some() { 1000 } else { 3 }
}

fn attach_and_detach(flags: &[&str], cycles: usize) {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    cycle(&installed, &mut Waits::start(&installed, flags), cycles);
}

#[test]
fn attached_program_is_folded_and_left_as_it_was_before() {
    attach_and_detach(&[], cycles());
}

/// Detaching from a program that locks its memory did not end once, or left it with zeros, or with a jump to nowhere.
#[test]
fn program_that_has_locked_folded_memory_is_left_as_it_was_before() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let program = installed.path("locked");
    compile_source("cc", &[], &program, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/locked.c"));
    for (how, least_locked) in [("all", 2048), ("future", 0), ("page", 1)] {
        let mut locked = Waits::run(&mut Command::new(&program));
        let pid = locked.pid();
        attach(&installed, &pid);
        wait_for_folds(&installed, &pid, 1000);
        assert_eq!(locked.tell(how), "ok\n");
        detach(&installed, &pid);
        assert_eq!(locked.tell("check"), "ok\n", "{how}");
        let all = Mapping::read_all(locked.pid).expect("its mappings");
        assert!(!all.iter().any(|mapping| mapping.name.contains("pagefold")), "{how}");
        let pages = all.iter().map(|mapping| mapping.usage.locked_bytes / 4096).sum::<u64>();
        assert!(pages >= least_locked, "{how}: {pages} pages are locked");
    }
}

#[test]
fn statically_linked_program_is_folded_and_left_as_it_was_before() {
    attach_and_detach(&["-static"], 2);
}

#[test]
fn go_program_without_c_library_keeps_its_memory() {
    let Some(installed) = Installed::attaching() else { return };
    let Ok(go) = Command::new("go")
        .arg("version")
        .output()
        .map(|_| "go")
        .or_else(|_| Path::new("/usr/local/go/bin/go").exists().then_some("/usr/local/go/bin/go").ok_or("none"))
    else {
        eprintln!("skipped: no Go here: install golang-go");
        return;
    };
    let source = include_str!("../programs/slices.go").replace("// #include <sys/mman.h>\nimport \"C\"\n", "");
    fs::write(installed.path("slices.go"), source).unwrap();
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("go-cache");
    let mut build = Command::new(go);
    build.args(["build", "-o", &path(&installed, "slices"), &path(&installed, "slices.go")]).env("GOCACHE", cache);
    assert!(build.env("CGO_ENABLED", "0").env("GOTOOLCHAIN", "local").status().unwrap().success());
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut child = Command::new(installed.path("slices")).arg("600").stdout(Stdio::null()).spawn().unwrap();
    for _ in 0..2 {
        let pid = child.id().to_string();
        attach(&installed, &pid);
        wait_for_folds(&installed, &pid, 500);
        detach(&installed, &pid);
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("it goes on");
        assert!(!maps.contains("pagefold"), "{maps}");
    }
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert!(child.wait().unwrap().success(), "its memory is not what it wrote");
}

#[test]
fn member_leaves_only_when_there_is_memory_and_nothing_of_the_pool_is_left() {
    let Some(installed) = Installed::attaching() else { return };
    let config = format!("[service]\nreserve = '1TiB'\n{CONFIG}");
    let supervisor = installed.serve(&config, &[]);
    let mut waits = Waits::start(&installed, &[]);
    let pid = waits.pid();
    attach(&installed, &pid);
    wait_for_folds(&installed, &pid, 1000);
    let process = ProcessId::of(waits.child.id()).unwrap();
    let service = Service::connect(Place::at(&installed.path("s"))).unwrap();
    let why = format!("{:#}", service.leave(process).unwrap_err());
    assert!(why.contains("maps pages of group acme"), "{why}");
    let refused = installed.pagefold(&["detach", &pid]);
    assert!(words(&refused).contains("are kept in reserve"), "{refused:?}");
    assert!(member(&installed, &pid).is_some());
    waits.tell("stop");
    drop(supervisor);
}

#[test]
fn tracers_and_suspension_are_no_harm() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    // A stop of the whole process interrupts calls and cuts writes short, and so does another tracer's: `man 7 signal`.
    let mut waits = Waits::start_with(&installed, &[], &["without-pipe", "count"]);
    let pid = waits.pid();
    attach(&installed, &pid);
    let send = |name: &str| assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    for _ in 0..20 {
        send("-STOP");
        std::thread::sleep(Duration::from_millis(30));
        send("-CONT");
        // It may be refused, for a thread that is looked after.
        let _ = Command::new("timeout").args(["1", "strace", "-qq", "-f", "-o", "/dev/null", "-p", &pid]).output();
    }
    wait_for_folds(&installed, &pid, 1000);
    detach(&installed, &pid);
    waits.tell("stop");
}

/// Its open files are looked at in each table, and there is nothing against a pair of sockets.
#[test]
fn program_with_thread_that_has_files_of_its_own_is_folded() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let script = "import ctypes, mmap, socket, threading, time
memory = mmap.mmap(-1, 2000 * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(2000): memory[page * 4096:page * 4096 + 4096] = bytes([page % 50 + 1]) * 4096
def apart():
    assert ctypes.CDLL(None).unshare(0x400) == 0
    pair = socket.socketpair()
    print(flush=True)
    pair[0].recv(1)
threading.Thread(target=apart).start()
time.sleep(600)";
    let mut child =
        Running(Command::new("python3").args(["-c", script]).stdout(Stdio::piped()).spawn().expect("python3"));
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    let pid = child.0.id().to_string();
    attach(&installed, &pid);
    wait_for_folds(&installed, &pid, 1000);
    detach(&installed, &pid);
}

#[test]
fn bench_counts_what_is_stopped_interrupted_and_left() {
    let Some(installed) = Installed::attaching() else { return };
    let lab = Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("pagefold-lab");
    common::copy_program(&lab, &installed.path("pagefold-lab"));
    let output = Command::new(installed.path("pagefold")).args(["bench", "attach", "--cycles", "2", "--json"]).output();
    let said = json_of(&output.expect("run the bench"));
    assert_documented(&["`pagefold bench attach --json`"], &said);
    assert_eq!([&said["cycles"], &said["leftovers"], &said["eintr"]], [2, 0, 0], "{said}");
    for times in ["stopped_us", "cycle_ms"] {
        let time = |part: &str| said[times][part].as_u64().unwrap_or_default();
        assert!(0 < time("p50") && time("p50") <= time("p99") && time("p99") <= time("max"), "{said}");
    }
}
