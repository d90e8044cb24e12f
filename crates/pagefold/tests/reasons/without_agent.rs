//! Reasons why a member has no agent that is connected: `no_agent`, and how `group show` and `doctor` explain it.

use crate::common::service::{Member, Service, cannot_fold, find_member, until};
use crate::common::{json_of, unprivileged};
use crate::{fix, known_pages, until_state};
use serde_json::Value;
use std::fs;
use std::process::{Command, ExitStatus};
use tempfile::TempDir;

/// A program that folds as soon as it has an agent: a shell's script executes it.
fn started(service: &Service, name: &str, script: &str) -> Member {
    let mut member = service.run("acme", name, &[], &["sh", "-c", script, &known_pages()]);
    for line in ["alloc x 400", "fill x 0 200 1", "fill x 200 200 1", "mergeable x"] {
        member.tell(line);
    }
    member
}

fn doctor(service: &Service, member: &Member) -> String {
    json_of(&service.pagefold(&["doctor", "--pid", &member.pid().to_string(), "--json"])).to_string()
}

/// A program that loads no library. `None`, with the reason printed, where there is no compiler.
fn without_library() -> Option<(String, TempDir)> {
    let dir = tempfile::tempdir().expect("a directory");
    let (source, program) = (dir.path().join("fixed.c"), dir.path().join("fixed"));
    fs::write(&source, "#include <unistd.h>\nint main(void) { for (;;) pause(); }\n").expect("write a program");
    let made = Command::new("cc").arg("-static").arg("-o").arg(&program).arg(&source).status();
    made.map_err(|e| eprintln!("skipped: there is no C compiler on this host: {e}"))
        .ok()
        .filter(ExitStatus::success)?;
    Some((program.to_str().expect("text").to_owned(), dir))
}

#[test]
fn limit_of_open_files_is_named_and_raised() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let few = started(&service, "a", "ulimit -n 4; exec \"$0\"");
    let row = until_state(&service, "a", "no_agent");
    assert!(row["detail"].as_str().is_some_and(|why| why.contains("is there, and is not connected")), "{row}");
    assert!(fix(&row).contains("raise its limit of open files (ulimit -n)"), "{row}");
    assert!(doctor(&service, &few).contains("is there, and is not connected"));
    let _more = started(&service, "b", "ulimit -n 64; exec \"$0\"");
    until_state(&service, "b", "folding");
}

#[test]
fn valgrind_is_named_and_the_program_folded_without() {
    if cannot_fold() {
        return;
    }
    if Command::new("valgrind").arg("--version").output().is_err() {
        return eprintln!("skipped: there is no valgrind on this host");
    }
    let service = Service::start();
    let under = started(&service, "a", "exec valgrind -q \"$0\"");
    let row = until_state(&service, "a", "no_agent");
    assert!(row["detail"].as_str().is_some_and(|why| why.contains("valgrind looks after its memory")), "{row}");
    assert_eq!(fix(&row), "start it without valgrind");
    assert!(doctor(&service, &under).contains("valgrind looks after its memory"));
    let _without = started(&service, "b", "exec \"$0\"");
    until_state(&service, "b", "folding");
}

#[test]
fn program_without_the_library_is_named_and_folded_when_it_is_started_itself() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let Some((program, _dir)) = without_library() else { return };
    let wrapped = service.run("acme", "a", &[], &["sh", "-c", "exec \"$0\"", &program]);
    // The shell before it has the library, and no agent yet.
    let mut row = Value::Null;
    until(60, "the program runs without the library", || {
        row = until_state(&service, "a", "no_agent");
        row["detail"].as_str().is_some_and(|why| why.contains("runs without libpagefold.so"))
    });
    assert!(fix(&row).starts_with("start the program itself with pagefold run"), "{row}");
    assert!(doctor(&service, &wrapped).contains("runs without libpagefold.so"));
    let _itself = started(&service, "b", "exec \"$0\"");
    until_state(&service, "b", "folding");
}

/// Executes a program under a filter of system calls that ends a process which traces another one.
const FILTERED: &str = "python3 -c '
import ctypes, os, struct, sys
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 101), (6, 0, 0, 0x80000000), (6, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b\"\".join(struct.pack(\"HBBI\", *step) for step in code))
program = ctypes.create_string_buffer(struct.pack(\"HxxxxxxQ\", 4, ctypes.addressof(code)))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])' \"$0\"";

#[test]
fn filter_of_system_calls_is_named_and_the_program_folded_without() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let filtered = started(&service, "a", &format!("exec {FILTERED}"));
    let row = until_state(&service, "a", "no_agent");
    assert!(row["detail"].as_str().is_some_and(|why| why.contains("has a filter of system calls (seccomp)")), "{row}");
    assert!(
        fix(&row).starts_with("start it without that filter, or let pagefold run stand behind the filter"),
        "{row}"
    );
    assert!(doctor(&service, &filtered).contains("has a filter of system calls (seccomp)"));
    let _without = started(&service, "b", "exec \"$0\"");
    until_state(&service, "b", "folding");
}

/// Seizes and stops a process, as a debugger does, until its input ends.
const DEBUGGER: &str = "
import ctypes, os, sys
ptrace = ctypes.CDLL(None).ptrace
ptrace.argtypes = [ctypes.c_ulong, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
threads = [int(name) for name in os.listdir(f'/proc/{sys.argv[1]}/task')]
for thread in threads:
    assert ptrace(0x4206, thread, None, None) == 0 and ptrace(0x4207, thread, None, None) == 0
for thread in threads: os.waitpid(thread, 0x40000000)
print('stopped', flush=True)
sys.stdin.readline()
";

#[test]
fn debugger_is_named_until_it_lets_the_member_go_on() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let member = started(&service, "a", "exec \"$0\"");
    until_state(&service, "a", "folding");
    let mut command = Command::new("python3");
    command.args(["-c", DEBUGGER, &member.pid().to_string()]);
    let mut debugger = Member::spawn(command, "debugger", &service.place());
    until(60, "it is stopped", || debugger.lines() == ["stopped"]);
    let row = until_state(&service, "a", "stopped");
    assert_eq!((&row["detail"], fix(&row)), (&"a debugger has stopped it".into(), "let the debugger go on with it"));
    debugger.close_input();
    debugger.end(30);
    until_state(&service, "a", "folding");
}

#[test]
fn member_that_may_not_be_looked_at_is_so_for_others_than_root() {
    if cannot_fold() {
        return;
    }
    let service = Service::start_with(Some("[[group]]\nname = 'acme-TOKEN'\nusers = [0, 65534]\n"));
    let Some((program, _dir)) = without_library() else { return };
    let _wrapped = service.run("acme", "a", &[], &["sh", "-c", "exec \"$0\"", &program]);
    until_state(&service, "a", "no_agent");
    let mut other = unprivileged(env!("CARGO_BIN_EXE_pagefold"));
    other.args(["group", "show", &service.group("acme"), "--json", "--service"]).arg(service.place());
    let dir = service.place();
    let dir = dir.parent().expect("a directory").to_str().expect("text");
    assert!(Command::new("chmod").args(["755", dir]).status().expect("run chmod").success());
    let shown = json_of(&other.output().expect("run pagefold"));
    let row = find_member(&shown, "a").cloned().unwrap_or_default();
    assert_eq!(row["detail"], "its process has ended, or you may not look at it", "{row}");
    assert_eq!(fix(&row), "ask as root, or start it again");
    assert!(
        until_state(&service, "a", "no_agent")["detail"].as_str().is_some_and(|why| why.contains("libpagefold.so"))
    );
}
