//! Programs that filter their system calls.

use crate::common::built::Built;
use crate::common::json_of;
use crate::common::supervised::{Installed, wait_for};
use crate::rig::{CONFIG, Running, attach, detach, member, wait_for_folds, words};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

/// A running `filtered.c`, which lets itself make only these system calls.
struct Filtered(Running, BufReader<std::process::ChildStdout>);

impl Filtered {
    fn start(program: &Built, calls: &[String]) -> Self {
        let mut command = Command::new(program.program());
        let mut child = command.args(calls).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start it");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut filtered = Self(Running(child), output);
        assert_eq!(filtered.ask("c"), "good\n", "it has its filter");
        filtered
    }

    fn ask(&mut self, request: &str) -> String {
        write!(self.0.0.stdin.as_mut().expect("a pipe"), "{request}").expect("ask it");
        let mut line = String::new();
        self.1.read_line(&mut line).expect("hear from it");
        line
    }

    fn pid(&self) -> String {
        self.0.0.id().to_string()
    }
}

#[test]
fn program_that_filters_its_system_calls_is_attached_if_the_agents_are_allowed() {
    let Some(installed) = Installed::attaching() else { return };
    let Some(program) = Built::new("filtered.c") else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let listed = json_of(&Command::new(installed.path("pagefold-attach")).arg("--calls").output().expect("ask it"));
    let number_of = |call: &Value| (call["name"].as_str().unwrap().to_owned(), call["number"].to_string());
    let calls: Vec<(String, String)> = listed.as_array().expect("a list").iter().map(number_of).collect();
    let but = |left_out: &str| {
        calls.iter().filter(|(name, _)| name != left_out).map(|(_, number)| number.clone()).collect::<Vec<_>>()
    };

    let mut filtered = Filtered::start(&program, &but(""));
    let pid = filtered.pid();
    for _ in 0..2 {
        attach(&installed, &pid);
        wait_for_folds(&installed, &pid, 1500);
        assert_eq!([filtered.ask("c"), filtered.ask("w")], ["good\n", "good\n"]);
        wait_for_folds(&installed, &pid, 1500);
        detach(&installed, &pid);
        assert_eq!([filtered.ask("c"), filtered.ask("w")], ["good\n", "good\n"]);
    }

    // A thread of the agent's must not have more rights than the program, which has one filter more from here on.
    attach(&installed, &pid);
    wait_for_folds(&installed, &pid, 1500);
    assert_eq!(filtered.ask("f"), "good\n");
    wait_for("the agent has left", || member(&installed, &pid).is_none().then_some(()));
    assert_eq!(filtered.ask("c"), "good\n");

    for missing in ["mremap", "restart_syscall", "clone"] {
        let mut filtered = Filtered::start(&program, &but(missing));
        let pid = filtered.pid();
        for more in [&["--dry-run"][..], &[]] {
            let words = [&["attach", &pid, "--group", "acme", "--all-anonymous"], more].concat();
            let refused = installed.pagefold(&words);
            assert!(!refused.status.success(), "{refused:?}");
            let why = format!("(seccomp), and does not let the agent call {missing}");
            assert!(self::words(&refused).contains(&why), "{refused:?}");
        }
        assert_eq!(filtered.ask("w"), "good\n");
        assert!(member(&installed, &pid).is_none());
    }
}
