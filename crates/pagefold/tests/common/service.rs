//! A service of a test's own, and programs that run as its members. Whatever happens to the test, all of it ends:
//! every process bears the test's token, in its environment or in the name of its group, and is killed by it.

use super::{Afterwards, json_of, number};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One service at a time: two cores are few for programs that do nothing but write memory.
static ALONE: Mutex<()> = Mutex::new(());

/// The program that verifies itself. Cargo builds examples along with tests, beside them.
pub fn torture() -> String {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("examples").join("torture");
    assert!(path.exists(), "{} is not there: cargo build -p pagefold --examples", path.display());
    path.to_str().expect("a plain path").to_owned()
}

/// How long tests go on: longer where the variable says so, hours if need be.
pub fn seconds(usually: u64) -> u64 {
    std::env::var("PAGEFOLD_SOAK_SECONDS").ok().and_then(|n| n.parse().ok()).map_or(usually, |n: u64| n.max(usually))
}

/// Why nothing can be folded here, which is said then.
pub fn cannot_fold() -> bool {
    let library = PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("libpagefold.so");
    assert!(library.exists(), "{} is not there: cargo build -p agent", library.display());
    super::not_root()
}

/// Waits until something is so.
pub fn until(seconds: u64, what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(seconds);
    while !is_so() {
        assert!(Instant::now() < end, "not in {seconds} s: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A running `pagefold serve`. Dropping it ends it with its workers and members.
pub struct Service {
    dir: PathBuf,
    token: String,
    config: Option<PathBuf>,
    child: Child,
    // In this order: what is left is ended before the next test begins.
    _afterwards: Afterwards,
    _alone: MutexGuard<'static, ()>,
}

impl Service {
    /// Starts one for any group.
    pub fn start() -> Self {
        Self::start_with(None)
    }

    /// Starts one with a configuration, in which `TOKEN` stands for the end of the groups' names.
    pub fn start_with(config: Option<&str>) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let token = format!("t{}x{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let dir = tempfile::Builder::new().prefix("fold").tempdir_in("/tmp").expect("a temporary directory").keep();
        fs::write(dir.join("token"), &token).expect("write the token");
        let afterwards = Afterwards::run(&clean_up(&dir));
        let config = config.map(|text| {
            let path = dir.join("config.toml");
            fs::write(&path, text.replace("TOKEN", &token)).expect("write the configuration");
            path
        });
        let child = serve(&dir, &token, config.as_deref());
        let service = Self { dir, token, config, child, _afterwards: afterwards, _alone: alone };
        service.wait_until_it_answers();
        service
    }

    fn wait_until_it_answers(&self) {
        let control = self.dir.join("s/control.sock");
        until(20, &format!("a service answers at {}: {}", control.display(), self.log()), || {
            self.pagefold(&["group", "list", "--json"]).status.success()
        });
    }

    /// What it wrote.
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    /// The service's own directory.
    pub fn place(&self) -> PathBuf {
        self.dir.join("s")
    }

    /// Where agents connect.
    pub fn agent_socket(&self) -> String {
        self.place().join("agent.sock").to_str().expect("a plain path").to_owned()
    }

    /// A group's name on this host: nobody else's begins like this and ends with the token.
    pub fn group(&self, name: &str) -> String {
        format!("{name}-{}", self.token)
    }

    /// The mark in the environment of all that is started here.
    pub fn mark(&self) -> (&'static str, &str) {
        ("PAGEFOLD_TEST", &self.token)
    }

    /// Runs `pagefold` for this service.
    pub fn pagefold(&self, words: &[&str]) -> Output {
        let (variable, token) = self.mark();
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(words).args(["--service", self.place().to_str().expect("a plain path")]).env(variable, token);
        command.output().expect("run pagefold")
    }

    /// How a group does, once its worker answers.
    pub fn show(&self, group: &str) -> Value {
        let group = self.group(group);
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            let output = self.pagefold(&["group", "show", &group, "--json"]);
            if output.status.success() || Instant::now() > end {
                return json_of(&output);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Changes how a group is run.
    pub fn set(&self, group: &str, words: &[&str]) {
        let group = self.group(group);
        let output = self.pagefold(&[&["group", "set", &group], words].concat());
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// What the page frames say.
    pub fn audit(&self) -> Value {
        json_of(&self.pagefold(&["audit", "--json"]))
    }

    /// Asserts that the page frames say that no group has anything of another.
    pub fn assert_audit_is_clean(&self) -> Value {
        let audit = self.audit();
        assert_eq!(number(&audit["cross_group_frames"]), 0, "{audit}");
        audit
    }

    pub fn supervisor_pid(&self) -> u32 {
        self.child.id()
    }

    /// The process of a group's worker, if it has one.
    pub fn worker_pid(&self, group: &str) -> Option<u32> {
        let words = ["worker".to_owned(), "--group".to_owned(), self.group(group)];
        let pids =
            fs::read_dir("/proc").expect("list /proc").filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
        pids.into_iter().find(|pid: &u32| {
            let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split('\0').skip(1).take(3).eq(words.iter().map(String::as_str))
        })
    }

    /// Kills the supervisor, and with nothing in between starts another one.
    pub fn kill_supervisor(&mut self) {
        self.child.kill().expect("kill our own child");
        self.child.wait().expect("wait for our own child");
        self.child = serve(&self.dir, &self.token, self.config.as_deref());
    }

    /// Runs the torture program as a member.
    pub fn torture(&self, group: &str, name: &str, run: &[&str], words: &[&str]) -> Member {
        self.torture_with(group, name, run, words, &[])
    }

    /// The same with something in its environment.
    pub fn torture_with(&self, group: &str, name: &str, run: &[&str], words: &[&str], env: &[(&str, &str)]) -> Member {
        let program = torture();
        self.run_with(group, name, run, &[&[&program[..]], words].concat(), env)
    }

    /// Runs a program as a member.
    pub fn run(&self, group: &str, name: &str, run: &[&str], words: &[&str]) -> Member {
        self.run_with(group, name, run, words, &[])
    }

    /// The same with something in its environment.
    pub fn run_with(&self, group: &str, name: &str, run: &[&str], words: &[&str], env: &[(&str, &str)]) -> Member {
        let (variable, token) = self.mark();
        let place = self.place();
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(["run", "--group", &self.group(group), "--name", name]);
        command.arg("--service").arg(&place).args(run).arg("--").args(words);
        // Programs that do nothing but write would not be folded for a minute.
        command.env(variable, token).env("PAGEFOLD_EAGER", "1").envs(env.iter().copied());
        Member::spawn(command, name, &self.dir)
    }
}

fn serve(dir: &Path, token: &str, config: Option<&Path>) -> Child {
    let log = File::options().create(true).append(true).open(dir.join("log")).expect("open the log");
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.args(["serve", "--stop-workers", "--dir"]).arg(dir.join("s"));
    if let Some(config) = config {
        command.arg("--config").arg(config);
    }
    command.env("PAGEFOLD_TEST", token).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.spawn().expect("start pagefold serve")
}

/// Kills, by its token, all that is left: more than once, for who is killed may have just started another.
fn clean_up(dir: &Path) -> String {
    let dir = dir.display();
    format!(
        "for round in 1 2 3; do
           for f in $(grep -laf {dir}/token /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null); do
             p=${{f#/proc/}}; kill -9 ${{p%%/*}} 2>/dev/null
           done
         done
         rm -rf {dir}"
    )
}

impl Drop for Service {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- log of the service\n{}---", self.log());
        }
        // Asked to end it also removes its control groups; what is left after that is killed.
        let pid = self.child.id().to_string();
        let _ = Command::new("kill").args(["-TERM", &pid]).status();
        let end = Instant::now() + Duration::from_secs(3);
        while Instant::now() < end && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program that runs. Dropping it ends it.
pub struct Member {
    pub name: String,
    child: Child,
    input: Option<ChildStdin>,
    lines: Arc<Mutex<Vec<String>>>,
    errors: PathBuf,
}

impl Member {
    /// Starts a program with its output kept.
    pub fn spawn(mut command: Command, name: &str, dir: &Path) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let errors = dir.join(format!("{name}-{}.err", NUMBER.fetch_add(1, Ordering::Relaxed)));
        let file = File::create(&errors).expect("make a file");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(file);
        let mut child = command.spawn().expect("start a member");
        let (input, output) = (child.stdin.take(), child.stdout.take().expect("a pipe"));
        let lines = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&lines);
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                kept.lock().unwrap_or_else(PoisonError::into_inner).push(line);
            }
        });
        Self { name: name.to_owned(), child, input, lines, errors }
    }

    /// `pagefold run` executes the program, so this is the program's own process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has printed so far.
    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What it has to complain about.
    pub fn errors(&self) -> String {
        fs::read_to_string(&self.errors).unwrap_or_default()
    }

    /// Asserts that it lives and has found nothing wrong.
    pub fn assert_is_well(&mut self) {
        if let Some(status) = self.child.try_wait().expect("ask for its state") {
            panic!("{} ended with {status}: {}", self.name, self.errors());
        }
    }

    /// Waits for its end, and asserts that it is a good one; returns its last line.
    pub fn finish(&mut self, seconds: u64) -> Value {
        let status = self.end(seconds);
        assert!(status.success(), "{} ended with {status}: {}", self.name, self.errors());
        // The thread that reads may be a moment behind.
        let last = || self.lines().last().and_then(|line| serde_json::from_str(line).ok());
        until(5, "its last line", || last().is_some());
        last().unwrap_or_default()
    }

    /// How it has ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("ask for its state")
    }

    /// Waits for its end, however that is.
    pub fn end(&mut self, seconds: u64) -> ExitStatus {
        let end = Instant::now() + Duration::from_secs(seconds);
        loop {
            if let Some(status) = self.child.try_wait().expect("ask for its state") {
                return status;
            }
            assert!(Instant::now() < end, "{} still runs after {seconds} s: {}", self.name, self.stacks());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Where its threads are, for who wonders why it hangs.
    pub fn stacks(&self) -> String {
        let mut text = String::new();
        for thread in fs::read_dir(format!("/proc/{}/task", self.pid())).into_iter().flatten().flatten() {
            for file in ["comm", "wchan", "syscall", "stack"] {
                let mut part = String::new();
                let _ = File::open(thread.path().join(file)).and_then(|mut f| f.read_to_string(&mut part));
                text.push_str(&format!("{} ", part.trim().replace('\n', " ")));
            }
            text.push('\n');
        }
        text
    }

    /// Tells it a line and waits for its answer.
    pub fn tell(&mut self, line: &str) -> String {
        let before = self.lines().len();
        writeln!(self.input.as_mut().expect("a pipe"), "{line}").expect("tell a member");
        until(60, &format!("an answer to {line}"), || {
            self.assert_is_well();
            self.lines().len() > before
        });
        self.lines()[before].clone()
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "--- {} said\n{:?}\n{}---",
                self.name,
                self.lines().iter().rev().take(5).collect::<Vec<_>>(),
                self.errors()
            );
        }
        self.kill();
    }
}

/// What `group show` says of one member.
pub fn member<'a>(shown: &'a Value, name: &str) -> &'a Value {
    find_member(shown, name).unwrap_or_else(|| panic!("no {name} in {shown}"))
}

/// The same of one that may not have been let in yet.
pub fn find_member<'a>(shown: &'a Value, name: &str) -> Option<&'a Value> {
    let members = shown["members"].as_array().unwrap_or_else(|| panic!("no members in {shown}"));
    members.iter().find(|m| m["name"] == name)
}

/// Folded pages of a member; 0 of one that was not let in yet.
pub fn folded_pages(shown: &Value, name: &str) -> u64 {
    find_member(shown, name).map_or(0, |member| number(&member["folded_pages"]))
}

/// All pages that were to be folded and were not, by the group's account.
pub fn failures(shown: &Value) -> u64 {
    shown["fold_failures"].as_object().map_or(0, |reasons| reasons.values().map(number).sum())
}
