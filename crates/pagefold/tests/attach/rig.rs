//! Programs to attach, of which `waits.c` is the usual one; and attaching and detaching them.

use crate::common::formats::assert_documented;
use crate::common::json_of;
use crate::common::service::until;
use crate::common::supervised::Installed;
use host::Mapping;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

pub const CONFIG: &str = "[[group]]\nname = 'acme'\n";

/// Attaches a process, and has it folded as fast as can be.
pub fn attach(installed: &Installed, pid: &str) -> Value {
    json_of(&attach_eagerly(installed, &[pid]))
}

/// Attaches what is named, and has it folded as fast as can be.
pub fn attach_eagerly(installed: &Installed, named: &[&str]) -> Output {
    attach_command(installed, named).output().unwrap()
}

pub fn attach_command(installed: &Installed, named: &[&str]) -> Command {
    let mut command = Command::new(installed.path("pagefold"));
    command.arg("attach").args(named).args(["--group", "acme", "--all-anonymous", "--json"]);
    command.env("PAGEFOLD_DIR", installed.path("s")).env("PAGEFOLD_EAGER", "1");
    command
}

pub fn detach(installed: &Installed, pid: &str) -> Value {
    json_of(&installed.pagefold(&["detach", pid, "--json", "--wait", "120"]))
}

pub fn path(installed: &Installed, name: &str) -> String {
    installed.path(name).to_str().expect("a plain path").to_owned()
}

pub fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A running `waits.c`.
pub struct Waits {
    pub child: Child,
    /// Its process: the child, or one that the child has started.
    pub pid: u32,
    output: BufReader<std::process::ChildStdout>,
}

impl Waits {
    pub fn start(installed: &Installed, flags: &[&str]) -> Self {
        Self::start_with(installed, flags, &[])
    }

    /// Starts it, and waits until it has filled its memory.
    pub fn start_filled(installed: &Installed) -> Self {
        let mut waits = Self::start(installed, &[]);
        waits.tell("stop");
        waits.tell("go");
        waits
    }

    pub fn start_with(installed: &Installed, flags: &[&str], arguments: &[&str]) -> Self {
        let program = installed.path("waits");
        compile("cc", flags, &program);
        Self::run(Command::new(&program).args(arguments))
    }

    pub fn run(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start waits");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { pid: child.id(), child, output }
    }

    /// Starts it in a container: as user nobody, in namespaces and a root directory of its own. Nothing is there but it and
    /// its C library.
    pub fn contained(installed: &Installed, compiler: &str, libraries: &[&str]) -> Self {
        let root = installed.path("root");
        for dir in ["proc", "lib", "lib64", "lib/x86_64-linux-gnu"] {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        for dir in ["", "lib", "lib64", "lib/x86_64-linux-gnu"] {
            fs::set_permissions(root.join(dir), fs::Permissions::from_mode(0o755)).unwrap();
        }
        for library in libraries {
            fs::copy(library, root.join(&library[1..])).expect("copy a library");
        }
        compile(compiler, &[], &root.join("waits"));
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]);
        command.arg("--root").arg(&root).args(["--setgid", "65534", "--setuid", "65534", "/waits"]);
        let mut waits = Self::run(&mut command);
        waits.tell("stop");
        waits.tell("go");
        let children = format!("/proc/{}/task/{}/children", waits.pid, waits.pid);
        waits.pid = fs::read_to_string(children).unwrap().trim().parse().expect("one child");
        waits
    }

    pub fn tell(&mut self, command: &str) -> String {
        let told = writeln!(self.child.stdin.as_mut().expect("a pipe"), "{command}");
        let line = self.hear();
        assert!(
            told.is_ok() && !line.is_empty(),
            "waits was told {command} ({told:?}); it ended: {:?}",
            self.child.wait()
        );
        line
    }

    /// The next line of its output.
    pub fn hear(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("hear from waits");
        line
    }

    pub fn pid(&self) -> String {
        self.pid.to_string()
    }

    /// Fails as soon as it has ended.
    pub fn assert_runs(&mut self, when: &str) {
        let ended = self.child.try_wait().expect("ask for its state");
        assert!(ended.is_none(), "waits has ended: {ended:?}: {when}");
    }

    /// Has it write pages that are folded. Returns how many pages are its own then, in mappings of the pool.
    pub fn break_folds(&mut self) -> u64 {
        self.tell("break");
        own_in_pool(self.pid)
    }

    /// Has it write until 100 pages are broken. Others than those that it writes may be folded first.
    pub fn break_enough(&mut self) -> u64 {
        let mut broken = 0;
        until(60, "100 pages are broken", || {
            broken = self.break_folds();
            broken >= 100
        });
        broken
    }

    /// Its mappings, its threads and its open files.
    pub fn look(&self) -> BTreeMap<&'static str, Vec<String>> {
        let dir = format!("/proc/{}", self.pid);
        let maps = mappings(self.pid);
        let listed = |name: &str| {
            let entries = fs::read_dir(format!("{dir}/{name}")).unwrap();
            let mut names: Vec<String> =
                entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().to_owned()).collect();
            names.sort();
            names
        };
        BTreeMap::from([("maps", maps), ("task", listed("task")), ("fd", listed("fd"))])
    }
}

/// Pages of a process that are its own, in mappings of the pool.
pub fn own_in_pool(pid: u32) -> u64 {
    let all = Mapping::read_all(pid).expect("its mappings");
    let pooled = all.iter().filter(|mapping| mapping.name.contains("pagefold"));
    pooled.map(|mapping| mapping.usage.anonymous_bytes / 4096).sum()
}

pub fn compile(compiler: &str, flags: &[&str], program: &Path) {
    compile_source(compiler, flags, program, concat!(env!("CARGO_MANIFEST_DIR"), "/../bench/src/attach/waits.c"));
}

pub fn compile_source(compiler: &str, flags: &[&str], program: &Path, source: &str) {
    let made = Command::new(compiler).args(["-O1", "-pthread"]).args(flags).arg("-o").arg(program).arg(source).status();
    assert!(made.expect("run a compiler").success());
}

/// The kernel's list of a process's mappings.
///
/// Anonymous neighbours with the same rights count as one: the kernel does not always join them again.
pub fn mappings(pid: u32) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for line in fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().lines() {
        let (range, rest) = line.split_once(' ').expect("a mapping");
        let (start, end) = range.split_once('-').expect("a range");
        let before = all.last().and_then(|last| last.split_once(' ')?.0.split_once('-').zip(Some(last.clone())));
        match before {
            Some(((first, stop), last)) if stop == start && rest.ends_with(" 0 ") && last.ends_with(rest) => {
                *all.last_mut().expect("one") = format!("{first}-{end} {rest}");
            }
            _ => all.push(line.to_owned()),
        }
    }
    all
}

/// A program that is ended with the test.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        if let Ok(Some(status)) = self.child.try_wait() {
            eprintln!("waits has ended before: {status}");
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn member(installed: &Installed, pid: &str) -> Option<Value> {
    let shown = installed.show("acme");
    let found = shown["members"]
        .as_array()?
        .iter()
        .find(|member| member["pid"].as_u64().is_some_and(|found| found.to_string() == pid));
    found.filter(|member| member["connected"] == true).cloned()
}

/// Waits until the program has pages folded.
pub fn wait_for_folds(installed: &Installed, pid: &str, least: u64) {
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        if let Some(found) = member(installed, pid)
            && found["folded_pages"].as_u64().is_some_and(|pages| pages >= least)
        {
            return;
        }
        assert!(Instant::now() < until, "not folded: {}", installed.show("acme"));
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Asserts that a process has the same mappings, threads and files as before.
pub fn assert_same(now: &BTreeMap<&str, Vec<String>>, before: &BTreeMap<&str, Vec<String>>, cycle: usize) {
    for (kind, before) in before {
        let new: Vec<_> = now[kind].iter().filter(|one| !before.contains(one)).collect();
        let gone: Vec<_> = before.iter().filter(|one| !now[kind].contains(one)).collect();
        assert!(new.is_empty() && gone.is_empty(), "{kind} after cycle {cycle}: {new:#?} in place of {gone:#?}");
    }
}

pub fn cycle(installed: &Installed, waits: &mut Waits, cycles: usize) {
    let pid = waits.pid();
    for cycle in 0..cycles {
        waits.tell("stop");
        let before = waits.look();
        waits.tell("go");
        let said = attach(installed, &pid);
        assert_documented(&["`pagefold attach --json`"], &said);
        assert_eq!((&said[0]["pid"].to_string(), said[0]["threads"].as_u64()), (&pid, Some(7)), "{said}");
        wait_for_folds(installed, &pid, 1000);
        waits.break_enough();
        let said = detach(installed, &pid);
        assert_documented(&["`pagefold detach --json`"], &said);
        assert_eq!(said[0]["group"], "acme");
        waits.tell("stop");
        assert_same(&waits.look(), &before, cycle);
        waits.tell("go");
    }
    assert!(waits.child.try_wait().unwrap().is_none(), "it has ended");
}
