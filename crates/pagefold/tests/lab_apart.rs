//! `pagefold lab`, `bench`, `study` and `template create --image`: pagefold-lab does them, which is a program and a package of its own.

mod common;

use common::{Stage, copy_program, pagefold};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Calls that pagefold-lab does.
const CALLS: [&[&str]; 4] = [
    &["lab", "list", "--json"],
    &["bench", "census", "--help"],
    &["study", "--list"],
    &["template", "create", "web", "--group", "acme", "--image", "tiny"],
];

/// Puts a script in the place of pagefold-lab that says this version and does the rest.
fn put_script(stage: &Stage, version: &str, rest: &str) {
    let path = PathBuf::from(stage.path("pagefold-lab"));
    let script = format!("#!/bin/sh\nif [ \"$1\" = --version ]; then echo '{version}'; exit; fi\n{rest}\n");
    // Written by another process: see `copy_program`.
    let mut write = Command::new("sh");
    write.args(["-c", "printf %s \"$1\" > \"$2\"", "sh", &script]).arg(&path);
    assert!(write.status().expect("run sh").success());
    fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("make it a program");
}

fn own_version() -> String {
    let said = pagefold(&["--version"]).stdout;
    let version = String::from_utf8(said).expect("text");
    version.trim().strip_prefix("pagefold ").expect("its name first").to_owned()
}

fn run(stage: &Stage, words: &[&str]) -> Output {
    // Templates of the host are not to be looked at.
    let mut command = Command::new(stage.path("pagefold"));
    command.args(words).env("PAGEFOLD_TEMPLATES", stage.path("t")).env("PAGEFOLD_CLONES", stage.path("c"));
    command.stdin(Stdio::null()).output().expect("run pagefold")
}

/// Asserts that it fails for lack of something, and says in one line what.
fn assert_lacks(output: &Output, what: &str) {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(3) && said.contains(what) && said.lines().count() == 1, "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
}

#[test]
fn missing_lab_or_one_of_another_version_is_told_in_one_line() {
    let stage = Stage::new();
    for words in CALLS {
        assert_lacks(&run(&stage, words), "install the package pagefold-lab");
    }
    put_script(&stage, "pagefold-lab 0.0.9 (release build)", "echo it runs");
    for words in CALLS {
        assert_lacks(&run(&stage, words), "pagefold-lab 0.0.9 (release build)");
    }
    // Nothing of what pagefold does itself needs it.
    for words in [&["template", "list"][..], &["guests", "--help"], &["doctor", "--help"]] {
        assert!(run(&stage, words).status.success(), "{words:?}");
    }
}

#[test]
fn lab_without_pagefold_or_with_another_one_is_told_in_one_line() {
    let dir = tempfile::tempdir().expect("a directory");
    let lab = dir.path().join("pagefold-lab");
    copy_program(&Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("pagefold-lab"), &lab);
    let list = || Command::new(&lab).args(["lab", "list"]).output().expect("run pagefold-lab");
    assert_lacks(&list(), "cannot find pagefold");
    fs::write(dir.path().join("pagefold"), "#!/bin/sh\necho pagefold 0.0.9\n").expect("write a script");
    fs::set_permissions(dir.path().join("pagefold"), Permissions::from_mode(0o755)).expect("make it a program");
    assert_lacks(&list(), "does not belong to this Pagefold");
}

#[test]
fn process_becomes_the_lab_with_its_arguments_and_signals() {
    let stage = Stage::new();
    put_script(&stage, &format!("pagefold-lab {}", own_version()), "printf '%s\\n' $$ \"$@\"; exit 42");
    let words = ["lab", "exec", "--dir", "", "--", "sh", "--help", "-c", "a b", "--", "--version"];
    let child = Command::new(stage.path("pagefold")).args(words).stdout(Stdio::piped()).spawn().expect("run pagefold");
    let pid = child.id().to_string();
    let output = child.wait_with_output().expect("its output");
    let said = String::from_utf8(output.stdout).expect("text");
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!((output.status.code(), lines[0], &lines[1..]), (Some(42), &pid[..], &words[..]));

    put_script(
        &stage,
        &format!("pagefold-lab {}", own_version()),
        "trap 'exit 43' TERM; echo ready; while :; do sleep 0.1; done",
    );
    let mut child = Command::new(stage.path("pagefold"));
    let mut child = child.args(["study", "x"]).stdout(Stdio::piped()).spawn().expect("run pagefold");
    let mut line = String::new();
    let mut out = std::io::BufReader::new(child.stdout.take().expect("its output"));
    std::io::BufRead::read_line(&mut out, &mut line).expect("its first line");
    common::supervised::signal(child.id(), "TERM");
    assert_eq!((&line[..], child.wait().expect("wait for it").code()), ("ready\n", Some(43)));
}
