//! Faults around Pagefold: output that nobody reads, a full disk, files of the wrong type or size.

use std::fs::{self, File};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// A command with a lab directory of this test's own.
    fn pagefold(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(args).env("PAGEFOLD_LAB_DIR", self.0.path().join("lab")).stdin(Stdio::null());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.pagefold(args).output().unwrap()
    }
}

fn full_disk() -> File {
    File::options().write(true).open("/dev/full").unwrap()
}

/// The writing end of a pipe without a reader.
fn closed_pipe() -> Stdio {
    std::io::pipe().unwrap().1.into()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Commands that print something on every host.
const COMMANDS: [&[&str]; 7] = [
    &["doctor"],
    &["doctor", "--json"],
    &["guests", "--json"],
    &["lab", "list"],
    &["lab", "list", "--json"],
    &["lab", "down"],
    &["lab", "down", "--json"],
];

#[test]
fn a_full_disk_behind_stdout_is_an_error_and_a_closed_pipe_is_none() {
    let place = Place::new();
    for args in COMMANDS {
        let full = place.pagefold(args).stdout(full_disk()).output().unwrap();
        assert_eq!(full.status.code(), Some(1), "{args:?}: {}", errors(&full));
        assert!(errors(&full).contains("cannot write to stdout: No space left on device"), "{}", errors(&full));
        assert_eq!(errors(&full).matches("No space left").count(), 1, "{}", errors(&full));
        let closed = place.pagefold(args).stdout(closed_pipe()).output().unwrap();
        assert_eq!(closed.status.code(), Some(0), "{args:?}: {}", errors(&closed));
    }
}

#[test]
fn unwritable_stderr_does_not_change_the_exit_code() {
    let place = Place::new();
    for args in [&["lab", "exec", "--", "true"] as &[&str], &["guests", "--pid", "4294967295"], &["guests"]] {
        let heard = place.run(args);
        assert!(!heard.stderr.is_empty(), "{args:?} has something to say");
        for stderr in [Stdio::from(full_disk()), closed_pipe()] {
            let unheard = place.pagefold(args).stderr(stderr).output().unwrap();
            assert_eq!(unheard.status.code(), heard.status.code(), "{args:?}");
        }
    }
}

#[test]
fn pipes_devices_and_large_files_are_refused_at_once() {
    let place = Place::new();
    let pipe = place.0.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let large = place.0.path().join("large");
    fs::write(&large, vec![b'#'; (1 << 20) + 1]).unwrap();
    let pid = std::process::id().to_string();
    let begin = Instant::now();
    for (file, problem) in [
        (pipe.to_str().unwrap(), "not a plain file"),
        ("/dev/zero", "not a plain file"),
        (large.to_str().unwrap(), "more than 1048576 bytes"),
    ] {
        let refused = place.run(&["guests", "--pid", &pid, "--groups", file]);
        assert_eq!(refused.status.code(), Some(2));
        assert!(errors(&refused).contains(problem), "{}", errors(&refused));
    }
    for file in [pipe.to_str().unwrap(), "/dev/zero"] {
        let refused = place.run(&["census", "--pid", &pid, "--host-file", file]);
        assert_eq!(refused.status.code(), Some(2));
        assert!(errors(&refused).contains("not a plain file"), "{}", errors(&refused));
    }
    assert!(begin.elapsed() < Duration::from_secs(20));
}

#[test]
fn timeouts_out_of_range_are_usage_errors() {
    let place = Place::new();
    for call in [&["lab", "settle"] as &[&str], &["lab", "exec"], &["lab", "up", "--image=process"]] {
        for seconds in ["0", "86401", "18446744073709551615"] {
            let args = [call, &["--timeout", seconds, "--", "true"]].concat();
            let refused = place.run(&args);
            assert_eq!(refused.status.code(), Some(2), "{args:?}: {}", errors(&refused));
        }
    }
}
