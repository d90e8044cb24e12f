//! `pagefold run` of programs in which an agent would do harm: they run as without Pagefold, and the reason is said.

mod common;

use common::service::{Service, cannot_fold};
use std::fs;
use std::process::{Command, Output, Stdio};

/// Executes a program under a filter that ends a process which makes one system call: its number, then the program.
const FILTERED: &str = "
import ctypes, os, struct, sys
code = [(0x20, 0, 0, 0), (0x15, 0, 1, int(sys.argv[1])), (6, 0, 0, 0x80000000), (6, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *step) for step in code))
program = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', 4, ctypes.addressof(code)))
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0) == 0
os.execvp(sys.argv[2], sys.argv[2:])
";

/// Words that make a program a member of this service.
fn member<'a>(service: &'a str, program: &[&'a str]) -> Vec<&'a str> {
    let run = ["run", "--group", "unfit", "--service", service, "--all-anonymous", "--"];
    [&[env!("CARGO_BIN_EXE_pagefold")], &run[..], program].concat()
}

fn command(words: &[&str]) -> Command {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).env("PAGEFOLD_EAGER", "1").stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn assert_runs_with_reason(output: &Output, why: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{why}: {}: {said}", output.status);
    assert!(said.contains(why), "{why}: {said}");
}

#[test]
fn program_under_filter_that_ends_it_runs_without_agent() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let place = service.place();
    let place = place.to_str().expect("a plain path");
    let calls = [(323, "userfaultfd"), (319, "memfd_create"), (16, "ioctl"), (28, "madvise"), (25, "mremap")];
    let start = |words: &[&str]| command(words).spawn().expect("run python3");
    let mut started = Vec::new();
    for (number, name) in calls {
        let number = number.to_string();
        let filtered = ["python3", "-c", FILTERED, &number];
        started.push((start(&[&filtered[..], &member(place, &["sleep", "2"])].concat()), format!("call {name}")));
        // The agent has ended before such a filter, and the next program is started without it.
        started.push((start(&member(place, &[&filtered[..], &["sleep", "2"]].concat())), String::new()));
    }
    // The agent does not call `ptrace`, so it is there until the next program is executed.
    let behind = member(place, &["python3", "-c", FILTERED, "101", "sleep", "2"]);
    started.push((start(&behind), "filter of system calls".to_owned()));
    for (child, why) in started {
        assert_runs_with_reason(&child.wait_with_output().expect("wait for it"), &why);
    }
}

#[test]
fn program_under_valgrind_runs_without_agent() {
    if cannot_fold() {
        return;
    }
    if Command::new("valgrind").arg("--version").output().is_err() {
        return eprintln!("skipped: there is no valgrind on this host");
    }
    let service = Service::start();
    let place = service.place();
    let words = member(place.to_str().expect("a plain path"), &["valgrind", "-q", "sleep", "0"]);
    assert_runs_with_reason(&command(&words).output().expect("run pagefold"), "valgrind looks after its memory");
}

/// The runtime refuses to run if another library is loaded before it.
#[test]
fn program_with_sanitizer_runs_without_agent() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let (source, program) = (dir.path().join("nothing.c"), dir.path().join("nothing"));
    fs::write(&source, "int main(void) { return 0; }\n").expect("write a program");
    for (kind, name) in [("address", "AddressSanitizer"), ("thread", "ThreadSanitizer")] {
        let built = Command::new("cc").arg(format!("-fsanitize={kind}")).arg("-o").arg(&program).arg(&source).output();
        if !built.is_ok_and(|built| built.status.success()) {
            eprintln!("skipped: there is no C compiler with {name} on this host");
            continue;
        }
        let program = program.to_str().expect("a plain path");
        let output = command(&member("/nonexistent", &[program])).output().expect("run pagefold");
        assert_runs_with_reason(&output, name);
    }
}
