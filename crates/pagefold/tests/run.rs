//! `pagefold run`: the environment of the executed program, and calls that are refused.

mod common;

use common::supervised::{Installed, is_alive, signal, wait_for};
use common::{not_root, unprivileged};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn program_keeps_arguments_status_and_descriptors() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let _supervisor = installed.serve("", &[]);
    let script = "echo $0 $1 $$; echo $LD_PRELOAD; env | grep ^PAGEFOLD_ | sort; ls /proc/self/fd | wc -l; exit 7";
    let run = |more: &[&str]| {
        let mut args = vec!["run", "--group", "acme"];
        args.extend(more);
        args.extend(["--", "sh", "-c", script, "zero", "--flag"]);
        installed.pagefold(&args)
    };
    let output = run(&[]);
    assert_eq!(output.status.code(), Some(7), "{}", words(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let pid = lines[0].strip_prefix("zero --flag ").expect("its arguments");
    assert_eq!(lines[1], installed.text("libpagefold.so"));
    let expected = [
        format!("PAGEFOLD_DIR={}", installed.text("s")),
        format!("PAGEFOLD_PID={pid}"),
        format!("PAGEFOLD_SOCKET={}", installed.text("s/agent.sock")),
    ];
    assert_eq!(lines[2..5], expected);
    let otherwise = Command::new("sh").args(["-c", "ls /proc/self/fd | wc -l"]).output().unwrap();
    assert_eq!(lines[5].as_bytes(), otherwise.stdout.trim_ascii(), "something of ours stays open in the program");
    let all = String::from_utf8(run(&["--all-anonymous"]).stdout).unwrap();
    assert!(all.contains("PAGEFOLD_ALL=1"), "{all}");
}

/// The kernel does not tell a process in a PID namespace the number of one outside. It once took the service for gone.
#[test]
fn program_in_a_pid_namespace_is_a_member() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let _supervisor = installed.serve("", &[]);
    let mut inside = Command::new("unshare");
    inside.args(["--pid", "--fork", "--mount-proc"]).arg(installed.path("pagefold"));
    inside.args(["run", "--group", "acme", "--name", "inside", "--", "sh", "-c", "echo $$; exit 7"]);
    let output = inside.env("PAGEFOLD_DIR", installed.path("s")).output().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(7), &b"1\n"[..]), "{output:?}");
    assert!(installed.log().contains("is member inside"), "{}", installed.log());
}

#[test]
fn program_runs_where_files_may_not_have_a_page() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let _supervisor = installed.serve("", &[]);
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f 0; exec \"$0\" \"$@\""]).arg(installed.path("pagefold"));
    limited.args(["run", "--group", "acme", "--", "sh", "-c", "exit 7"]).env("PAGEFOLD_DIR", installed.path("s"));
    let output = limited.output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
}

#[test]
fn reason_is_given_for_programs_that_cannot_be_members() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    let config = "[[group]]\nname = 'acme'\n";
    let _supervisor = installed.serve(config, &[]);
    let script = installed.text("program");
    fs::write(&script, "#!/bin/sh\necho fine\n").unwrap();
    let run = |args: &[&str]| {
        let output = installed.pagefold(&[&["run", "--group"], args].concat());
        (output.status.code(), words(&output))
    };
    let (code, error) = run(&["acme", "--", "no-such-program"]);
    assert!(code == Some(127) && error.contains("there is no program no-such-program"), "{error}");
    let (code, error) = run(&["acme", "--", &script]);
    assert!(code == Some(126) && error.contains("cannot be executed"), "{error}");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(run(&["acme", "--", &script]).0, Some(0));
    let (code, error) = run(&["beta", "--", "true"]);
    assert!(code == Some(2) && error.contains("the configuration has no group beta; it has acme"), "{error}");
    let (code, error) = run(&["../x", "--", "true"]);
    assert!(code == Some(2) && error.contains("group name"), "{error}");
    let (code, error) = run(&["acme", "--service", "/nonexistent", "--", "true"]);
    assert!(code == Some(1) && error.contains("no service answers in /nonexistent"), "{error}");
    // A set-uid program does not load preloaded libraries.
    let su = installed.text("su");
    common::copy_program("/bin/true".as_ref(), su.as_ref());
    fs::set_permissions(&su, fs::Permissions::from_mode(0o4755)).unwrap();
    let output = installed.pagefold_unprivileged(&["run", "--group", "acme", "--", &su]);
    assert!(output.status.code() == Some(2) && words(&output).contains("is set-uid (user 0)"), "{output:?}");
    if let Ok(busybox) = which("busybox.static").or_else(|()| which("busybox")) {
        let (code, error) = run(&["acme", "--", &busybox, "true"]);
        assert!(code == Some(2) && error.contains("linked statically"), "{error}");
    }
    fs::remove_file(installed.path("libpagefold.so")).unwrap();
    let (code, error) = run(&["acme", "--", "true"]);
    assert!(code == Some(3) && error.contains("libpagefold.so is missing"), "{error}");
}

fn which(name: &str) -> Result<String, ()> {
    let path = format!("/bin/{name}");
    fs::exists(&path).is_ok_and(|there| there).then_some(path).ok_or(())
}

#[test]
fn user_without_userfaultfd_is_told_the_remedies() {
    if not_root() {
        return;
    }
    let allowed = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|text| text.trim() == "1");
    if allowed || fs::metadata("/dev/userfaultfd").is_ok_and(|m| m.permissions().mode() & 0o006 != 0) {
        eprintln!("skipped: anybody may use userfaultfd here");
        return;
    }
    let installed = Installed::new();
    let output = installed.pagefold_unprivileged(&["run", "--group", "acme", "--", "true"]);
    assert_eq!(output.status.code(), Some(3));
    let error = words(&output);
    for part in ["kernel:uffdio_move", "vm.unprivileged_userfaultfd=1", "/dev/userfaultfd", "run as root"] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

/// Starts a private service of the user without any rights, which ends 2 s after its last member, in this directory.
/// It starts as `pagefold run` would start it where none runs. An unprivileged `pagefold run` cannot do so here, for
/// want of a right that only root has.
fn start_private(installed: &Installed, dir: &Path) {
    for dir in [dir.parent().expect("a parent"), dir] {
        fs::create_dir(dir).unwrap();
        std::os::unix::fs::chown(dir, Some(65534), Some(65534)).unwrap();
    }
    let mut start = unprivileged(&installed.text("pagefold"));
    start.args(["serve", "--private", "--linger", "2", "--detach", "--dir"]).arg(dir);
    let started = start.output().unwrap();
    assert!(started.status.success(), "{started:?}");
}

/// Has a private service end while a client asks it, and says whether the client was answered. It was not if a busy
/// machine had the member or the client come after the service's end.
fn client_of_ending_service_is_answered(installed: &Installed, own: &str) -> bool {
    let dir = installed.path(own).join("pagefold");
    let mut member = installed.stranger_unprivileged();
    start_private(installed, &dir);
    let dir = dir.to_str().unwrap();
    let list = || {
        let mut list = unprivileged(&installed.text("pagefold"));
        list.args(["group", "list", "--json", "--service", dir]).output().unwrap().status.success()
    };
    wait_for("the private service answers", || list().then_some(()));
    let question = r#"{"join":{"group":"any","name":null,"program":"fake"}}"#;
    let answer = member.tell(&format!("ask {dir}/control.sock {question}"));
    if !answer.contains(&format!("fake-{}", member.pid())) {
        eprintln!("the member came too late: {answer}");
        return false;
    }
    assert_eq!(member.tell(&format!("connect {dir}/agent.sock")), "ok");
    assert!(member.is_connected());
    let log = || fs::read_to_string(format!("{dir}/log")).unwrap();
    let worker: u32 =
        wait_for("a worker", || log().split("worker started: process ").nth(1)?.lines().next()?.parse().ok());
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert!(list() && is_alive(worker), "it ended with a member left: {}", log());
    // A client is answered that has asked a worker which ends. It ends 2 to 3 s after its last member.
    signal(worker, "STOP");
    member.kill();
    std::thread::sleep(std::time::Duration::from_millis(1000));
    let answered = list();
    signal(worker, "KILL");
    wait_for("the private service ends", || (!list() && !is_alive(worker)).then_some(()));
    assert!(log().contains("no member is left: this service ends"), "{}", log());
    answered
}

#[test]
fn private_service_ends_after_its_last_member() {
    if not_root() {
        return;
    }
    let installed = Installed::new();
    // A service that leaves its client without an answer does so each time.
    let mut services = ["first", "second", "third"].into_iter();
    assert!(services.any(|own| client_of_ending_service_is_answered(&installed, own)), "no client was answered");
}
