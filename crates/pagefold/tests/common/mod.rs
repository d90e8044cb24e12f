//! Programs with known pages, and running `pagefold` on them.

#![allow(dead_code, reason = "each test binary uses its part of this")]

pub mod brute_force;
pub mod built;
pub mod cgroup;
pub mod formats;
pub mod http;
pub mod keeper;
pub mod lab;
pub mod lies;
pub mod member;
pub mod package;
pub mod qemu;
pub mod service;
pub mod supervised;
pub mod template;
pub mod web;

use serde_json::Value;
use std::fmt::Debug;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use tempfile::TempDir;

/// Whether this test must be skipped for want of root; prints the reason.
pub fn not_root() -> bool {
    let root = fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0);
    if !root {
        eprintln!("skipped: page frames are shown to root only");
    }
    !root
}

/// Whether tests take their long forms, of minutes and more.
pub fn is_long() -> bool {
    ["PAGEFOLD_LONG_TESTS", "PAGEFOLD_SOAK_SECONDS"].iter().any(|name| std::env::var_os(name).is_some())
}

/// A number that no other test bears which runs on this host at the same time. `tests/world` gives each test PID namespaces of
/// its own, so a pid is none.
pub fn world() -> String {
    std::env::var("TEST_WORLD").unwrap_or_else(|_| std::process::id().to_string())
}

/// Gives this test's world copies of QEMU and of its libraries. QEMUs of other worlds then map none of the pages that are counted
/// here. Without a world, nothing runs beside this test.
pub fn own_qemu() {
    if std::env::var_os("TEST_WORLD").is_none() {
        return;
    }
    let script = r#"
        set -e
        qemu=$(command -v qemu-system-x86_64) || exit 0
        linked=$(ldd "$qemu" | grep -o '/[^ ]*')
        mkdir -p /tmp/own
        for file in "$qemu" $linked /usr/lib/*/qemu/accel-tcg-*.so; do
            [ -f "$file" ] || continue
            file=$(readlink -f "$file")
            copy=/tmp/own/$(basename "$file")
            [ ! -e "$copy" ] || continue
            cp -p "$file" "$copy"
            mount --bind "$copy" "$file"
        done"#;
    assert!(Command::new("sh").args(["-c", script]).status().expect("run sh").success(), "copy QEMU");
}

/// Copies a file that will be executed, by `cp`. If this process had the copy open for writing, a child that another
/// thread starts at that moment would inherit the descriptor. The copy could not be executed (`ETXTBSY`) while the
/// child has it.
pub fn copy_program(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg(from).arg(to).status().expect("run cp");
    assert!(copied.success(), "copy {}", from.display());
}

/// A directory with private copies of the program and of its libraries. No other process on the host maps their pages,
/// so other processes change no count.
pub struct Stage {
    dir: TempDir,
}

impl Stage {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("open the directory");
        let stage = Self { dir };
        let linked = Command::new("ldd").arg(program()).arg(env!("CARGO_BIN_EXE_pagefold")).output().expect("run ldd");
        let linked = String::from_utf8(linked.stdout).expect("paths");
        for library in linked.split_whitespace().filter(|word| word.starts_with('/') && !word.ends_with(':')) {
            stage.copy(library.as_ref(), Path::new(library).file_name().expect("a name").as_ref());
        }
        stage.copy(&program(), "known_pages".as_ref());
        stage.copy(env!("CARGO_BIN_EXE_pagefold").as_ref(), "pagefold".as_ref());
        stage.copy("/bin/bash".as_ref(), "data".as_ref());
        stage
    }

    fn copy(&self, from: &Path, name: &Path) {
        copy_program(from, &self.dir.path().join(name));
    }

    /// Path of a file: `data` is some file to map, `pagefold` the program under test.
    pub fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().expect("a plain path").to_owned()
    }

    fn program(&self, mut command: Command) -> Command {
        command.args(["--library-path", &self.path(""), &self.path("known_pages")]);
        command
    }

    /// Starts the program and has it execute these commands.
    pub fn start(&self, commands: &[&str]) -> Known {
        Known::start(self.program(Command::new(self.path("ld-linux-x86-64.so.2"))), commands)
    }

    /// Like [`Self::start`], as a user without any rights.
    pub fn start_unprivileged(&self, commands: &[&str]) -> Known {
        Known::start(self.program(unprivileged(&self.path("ld-linux-x86-64.so.2"))), commands)
    }
}

/// A running `trials/known_pages.rs`. Dropping it ends it.
pub struct Known {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Known {
    fn start(mut command: Command, commands: &[&str]) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start known_pages");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut known = Self { child, input, output };
        commands.iter().for_each(|c| _ = known.tell(c));
        known
    }

    /// Has it execute a command, and waits for its answer.
    pub fn tell(&mut self, command: &str) -> String {
        self.send(command);
        let mut line = String::new();
        self.output.read_line(&mut line).expect("hear from known_pages");
        assert!(!line.is_empty(), "known_pages ended at: {command}");
        line.trim().to_owned()
    }

    /// Has it execute a command, without waiting.
    pub fn send(&mut self, command: &str) {
        writeln!(self.input.as_mut().expect("a pipe"), "{command}").expect("tell known_pages");
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("kill our own child");
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Stops a process, and waits until all of its threads stand still.
pub fn stop(pid: u32) {
    assert!(Command::new("kill").args(["-STOP", &pid.to_string()]).status().expect("run kill").success());
    let stands = |task: fs::DirEntry| fs::read_to_string(task.path().join("stat")).is_ok_and(|s| s.contains(") T "));
    service::until(60, &format!("process {pid} stands still"), || {
        fs::read_dir(format!("/proc/{pid}/task")).expect("its threads").flatten().all(stands)
    });
}

/// Path of the program with known pages, which `./x test` builds.
fn program() -> PathBuf {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    assert!(path.exists(), "{} is not there: cargo build -p trials", path.display());
    path
}

/// A process that ends when this is dropped.
pub struct Ends(pub Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a shell script when dropped, and also if this process is killed before that. A shell in its own session waits
/// for the end of this process's pipe. Tests use it to restore everything that they change on the host.
pub struct Afterwards(Child);

impl Afterwards {
    pub fn run(script: &str) -> Self {
        let script = format!("cat > /dev/null; {script}");
        let shell = Command::new("setsid").args(["sh", "-c", &script]).stdin(Stdio::piped()).spawn();
        Self(shell.expect("start a shell"))
    }
}

impl Drop for Afterwards {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Directory of KSM's knobs.
pub const KSM: &str = "/sys/kernel/mm/ksm";

/// Starts KSM at full speed. Dropping the result restores its knobs.
pub fn start_merging() -> Afterwards {
    let restore = ["run", "pages_to_scan", "sleep_millisecs", "smart_scan"].map(|knob| {
        let value = fs::read_to_string(format!("{KSM}/{knob}")).expect("a kernel with KSM");
        format!("echo {} > {KSM}/{knob}", value.trim())
    });
    let afterwards = Afterwards::run(&format!("echo 2 > {KSM}/run; {}", restore.join("; ")));
    for (knob, value) in [("pages_to_scan", "20000"), ("sleep_millisecs", "1"), ("smart_scan", "0"), ("run", "1")] {
        fs::write(format!("{KSM}/{knob}"), value).expect("root");
    }
    afterwards
}

/// A program run as a user without any rights.
pub fn unprivileged(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--", program]);
    command
}

/// Runs `pagefold`.
pub fn pagefold(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagefold")).args(args).output().expect("run pagefold")
}

/// The same command, such that an interrupt ends it. Programs that a shell starts in the background ignore interrupts, and
/// so do the tests of such a run, and their children.
pub fn interruptible(command: &Command) -> Command {
    let mut all = Command::new("env");
    all.arg("--default-signal=INT").arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => all.env(name, value),
            None => all.env_remove(name),
        };
    }
    all
}

/// Takes a census of processes as a user without any rights.
pub fn census_unprivileged(stage: &Stage, pids: &[u32]) -> Output {
    unprivileged(&stage.path("pagefold")).args(census_args(pids, &[])).output().expect("run pagefold")
}

/// The JSON that a successful command printed.
pub fn json_of(output: &Output) -> Value {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "exit {:?}: {errors}", output.status.code());
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {errors}"))
}

/// Whether `group show --json` has answered with the report of the group's worker, if the group has one. A worker that starts, or
/// that a new supervisor has not heard yet, seems to have no members.
pub fn has_shown(output: &Output) -> bool {
    let shown = || serde_json::from_slice::<Value>(&output.stdout).unwrap_or_default();
    output.status.success() && shown()["worker"] != "starting"
}

/// Takes a census of processes.
pub fn census(pids: &[u32], more: &[&str]) -> Value {
    json_of(&pagefold(&census_args(pids, more).iter().map(String::as_str).collect::<Vec<_>>()))
}

/// Arguments of a census of processes.
pub fn census_args(pids: &[u32], more: &[&str]) -> Vec<String> {
    let mut args = vec!["census".to_owned(), "--json".to_owned()];
    for pid in pids {
        args.extend(["--pid".to_owned(), pid.to_string()]);
    }
    args.extend(more.iter().map(|&a| a.to_owned()));
    args
}

/// The guest that is this process.
pub fn guest(found: &Value, pid: u32) -> &Value {
    let id = format!("process:{pid}");
    let guests = found["guests"].as_array().expect("a list of guests");
    guests.iter().find(|g| g["id"] == *id).unwrap_or_else(|| panic!("no {id} in {guests:?}"))
}

/// Asserts that one of up to ten measurements is right: other programs disturb some.
pub fn once_in_ten_times<T: Debug>(mut measure: impl FnMut() -> T, is_right: impl Fn(&T) -> bool) {
    let mut all = Vec::new();
    while !all.last().is_some_and(&is_right) {
        assert!(all.len() < 10, "not in ten times: {all:?}");
        all.push(measure());
    }
}

/// A JSON value that must be a count.
pub fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("not a count: {value}"))
}
