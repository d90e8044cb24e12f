//! Exit codes: one table in the help of every command, and a case of each code.

mod common;

use common::{Stage, not_root, pagefold, unprivileged};
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn help(command: &[&str]) -> String {
    let output = pagefold(&[command, &["--help"]].concat());
    assert!(output.status.success(), "{command:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// A text as if no line were broken.
fn in_a_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Names in the list of commands of a help text.
fn commands(help: &str) -> Vec<String> {
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let names =
        list.take_while(|line| !line.is_empty()).filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").map(str::to_owned).collect()
}

#[test]
fn every_command_has_the_table_of_exit_codes_a_manual_page_and_completions() {
    let generated = tempfile::tempdir().expect("a directory");
    let mut generate = Command::new(Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("pagefold-lab"));
    assert!(generate.arg("generate").arg(generated.path()).status().expect("run pagefold-lab").success());
    let completions = fs::read_to_string(generated.path().join("completions/pagefold.fish")).expect("completions");
    let mut waiting = vec![Vec::new()];
    let mut seen = 0;
    while let Some(command) = waiting.pop() {
        let words: Vec<&str> = command.iter().map(String::as_str).collect();
        let text = help(&words);
        assert_eq!(in_a_line(&text).matches(&in_a_line(cli::exit::CODES)).count(), 1, "{command:?}: {text}");
        let page = format!("man/{}.1", [&["pagefold"][..], &words[..]].concat().join("-"));
        assert!(generated.path().join(&page).is_file(), "no {page}");
        let is_completed = |name: &&str| completions.contains(&format!("-a \"{name}\""));
        assert!(words.iter().all(is_completed), "{command:?} is not completed");
        waiting.extend(commands(&text).into_iter().map(|name| [&command[..], &[name]].concat()));
        seen += 1;
    }
    assert!(seen > 20, "{seen} commands");
}

fn assert_code(output: &Output, code: i32, words: &str, what: &str) {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(code) && said.contains(words), "{what}: {:?}: {said}", output.status);
}

/// Process 2 is a thread of the kernel's, which no PID namespace shows.
#[test]
fn requests_that_cannot_be_meant_are_refused_with_2_on_the_host() {
    let dir = tempfile::tempdir().expect("a directory");
    let groups = dir.path().join("groups.toml");
    let groups = groups.to_str().expect("a plain path");
    let me = std::process::id().to_string();
    let mine = format!("process:{me}");
    let folder = dir.path().to_str().expect("a plain path");
    let empty = dir.path().join("empty");
    fs::write(&empty, "").expect("write");
    let pool = dir.path().join("pool.toml");
    fs::write(&pool, "[[group]]\nname = 'acme'\npool = -1\n").expect("write");
    fs::write(groups, format!("[groups]\nacme = ['{mine}']\nbeta = [\n  'process:0',\n]\n")).expect("write");
    let nobody = format!("{groups}: line 4: no guest matches \"process:0\" of group \"beta\"");
    for (args, words) in [
        (&["guests", "--guest", "no-such-guest"][..], "no guest matches no-such-guest"),
        (&["explain", "no-such-guest"], "no guest matches no-such-guest"),
        (&["forecast", "--pid", &me, "--like", "no-such-guest"], "no guest matches no-such-guest"),
        (&["census", "--pid", "4194304"], "there is no process 4194304"),
        (&["guests", "--pid", "2"], "thread of the kernel"),
        (&["guests", "--groups", "/nonexistent.toml"], "cannot read /nonexistent.toml: No such file"),
        (&["guests", "--pid", &me, "--groups", groups], &nobody),
        (&["census", "--pid", &me, "--groups", groups], &nobody),
        (&["census", "--pid", &me, "--host-file", folder], "not a plain file"),
        (&["explain", "x", "--pid", &me, "--host-file", folder], "not a plain file"),
        (&["census", "--pid", &me, "--host-file", "/nonexistent"], "cannot open /nonexistent: No such file"),
        (&["census", "--pid", &me, "--host-file", empty.to_str().expect("a plain path")], "it is empty"),
        (&["forecast", "--pid", &me, "--reserve", "100T"], "--reserve 102400 GiB is more than this host has"),
        (&["forecast", "--pid", &me, "--reserve=-1"], "a size must not be negative"),
        (&["serve", "--config", "/nonexistent.toml"], "cannot read /nonexistent.toml"),
        (
            &["serve", "--config", pool.to_str().expect("a plain path")],
            "line 3, pool: \"-1\": a size must not be negative",
        ),
    ] {
        let output = pagefold(args);
        assert_code(&output, 2, words, &args.join(" "));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.stdout.is_empty() && said.matches("No such file").count() <= 1, "{args:?}: {said}");
    }
    // A file whose patterns all mean somebody is accepted, also if it names others than those that are selected.
    fs::write(groups, format!("[groups]\nacme = ['{mine}']\nbeta = ['process:1']\n")).expect("write");
    assert_code(&pagefold(&["guests", "--pid", &me, "--groups", groups]), 0, "", "good file");
}

#[test]
fn failures_for_a_reason_outside_are_1() {
    let dir = tempfile::tempdir().expect("a directory");
    let nowhere = dir.path().join("s");
    let nowhere = nowhere.to_str().expect("a plain path");
    let me = std::process::id().to_string();
    for (args, words) in [
        (&["group", "show", "acme", "--service", nowhere][..], "no service answers"),
        (&["audit", "--service", nowhere], "no service answers"),
        (&["census", "--pid", &me, "--html", "/nowhere/r.html"], "cannot create /nowhere/r.html: No such file"),
    ] {
        assert_code(&pagefold(args), 1, words, &args.join(" "));
    }
}

#[test]
fn lack_of_rights_is_3() {
    if not_root() {
        return;
    }
    let stage = Stage::new();
    let (own, other) = (stage.start_unprivileged(&["alloc a 1"]), std::process::id().to_string());
    for (args, words) in [
        (&["census", "--no-trace", "--pid", &own.pid().to_string()][..], "--no-trace needs root"),
        (&["audit"], "root"),
    ] {
        assert_code(
            &unprivileged(&stage.path("pagefold")).args(args).output().expect("run"),
            3,
            words,
            &args.join(" "),
        );
    }
    assert_code(&pagefold(&["guests", "--pid", &other]), 0, "", "as root");
}

/// In a namespace of its own, where no other process is and `/run` is empty.
#[test]
fn audit_without_service_says_that_nothing_was_checked() {
    if not_root() {
        return;
    }
    let script = "mount -t tmpfs none /run || exit 77; exec \"$0\" audit";
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", script]);
    let output = command.arg(env!("CARGO_BIN_EXE_pagefold")).env_remove("PAGEFOLD_DIR").output().expect("run unshare");
    if output.status.code() == Some(77) {
        eprintln!("skipped: cannot mount in a namespace: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    assert_code(&output, 1, "there is no service, and no process maps a pool: nothing was checked", "audit");
    assert!(output.stdout.is_empty(), "{output:?}");
}
