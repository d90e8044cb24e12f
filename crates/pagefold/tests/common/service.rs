//! A service of a test's own, and programs that run as its members.
//!
//! All of it ends with the test, also if the test is killed. Every process bears the test's token, in its environment
//! or in the name of its group. A shell that outlives the test kills all processes with that token.

#[allow(unused_imports, reason = "each test binary uses its part of this")]
pub use super::cgroup::{cgroup_path, limit, small_memory};
use super::keeper::Keeper;
#[allow(unused_imports, reason = "each test binary uses its part of this")]
pub use super::member::{Member, failures, find_member, folded_pages, member};
use super::{Afterwards, has_shown, json_of, number};
use serde_json::Value;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of services that run at the same time in this test program.
static RUNNING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// A place among the services that may run at the same time; dropping it frees it.
///
/// Usually there is one: two cores are few for programs that do nothing but write memory. Where tests mostly wait, `./x test` allows more.
struct Turn;

impl Turn {
    fn take() -> Self {
        let most = std::env::var("PAGEFOLD_TEST_SERVICES").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
        let mut running = RUNNING.0.lock().unwrap_or_else(PoisonError::into_inner);
        while *running >= most {
            running = RUNNING.1.wait(running).unwrap_or_else(PoisonError::into_inner);
        }
        *running += 1;
        Self
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *RUNNING.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        RUNNING.1.notify_one();
    }
}

/// Path of the program that verifies its own memory, which `./x test` builds.
pub fn torture() -> String {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("torture");
    assert!(path.exists(), "{} is not there: cargo build -p trials", path.display());
    path.to_str().expect("a plain path").to_owned()
}

/// Duration of a test, in seconds: `usually`, or more with `PAGEFOLD_SOAK_SECONDS`.
pub fn seconds(usually: u64) -> u64 {
    std::env::var("PAGEFOLD_SOAK_SECONDS").ok().and_then(|n| n.parse().ok()).map_or(usually, |n: u64| n.max(usually))
}

/// Whether nothing can be folded here; prints the reason for skipping.
pub fn cannot_fold() -> bool {
    let library = PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("libpagefold.so");
    assert!(library.exists(), "{} is not there: cargo build -p preload", library.display());
    super::not_root()
}

/// Waits until a condition holds.
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
    /// The service manager that starts it.
    keeper: Option<Keeper>,
    child: Child,
    // The order matters: remaining processes are ended before the next test begins.
    _afterwards: Afterwards,
    _turn: Turn,
}

impl Service {
    /// Starts one for any group.
    pub fn start() -> Self {
        Self::start_with(None)
    }

    /// Starts one with a configuration, in which `TOKEN` stands for the end of the groups' names.
    pub fn start_with(config: Option<&str>) -> Self {
        Self::start_on(config, |_| {}, false)
    }

    /// Like [`Self::start_with`], by a service manager that keeps files for it.
    pub fn start_kept(config: &str) -> Self {
        Self::start_on(Some(config), |_| {}, true)
    }

    /// Like [`Self::start_with`], on a file system of the service's own, of one megabyte.
    pub fn start_on_small_disk(config: &str) -> Self {
        let prepare = |dir: &Path| {
            fs::create_dir(dir).expect("make a directory");
            let mounted =
                Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs"]).arg(dir).status();
            assert!(mounted.expect("run mount").success(), "mount a small file system at {}", dir.display());
        };
        Self::start_on(Some(config), prepare, false)
    }

    fn start_on(config: Option<&str>, prepare: impl FnOnce(&Path), is_kept: bool) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let turn = Turn::take();
        // No token is part of another: what is left is killed by it.
        let token = format!("t{}x{}z", super::world(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let dir = tempfile::Builder::new().prefix("fold").tempdir_in("/tmp").expect("a temporary directory").keep();
        fs::write(dir.join("token"), &token).expect("write the token");
        let afterwards = Afterwards::run(&clean_up(&dir));
        let config = config.map(|text| write_config(&dir, &token, text));
        prepare(&dir.join("s"));
        let keeper = is_kept.then(|| Keeper::new(&dir));
        let child = serve(&dir, &token, config.as_deref(), keeper.as_ref());
        let service = Self { dir, token, config, keeper, child, _afterwards: afterwards, _turn: turn };
        service.wait_until_it_answers();
        service
    }

    fn wait_until_it_answers(&self) {
        let control = self.dir.join("s/control.sock");
        until(60, &format!("a service answers at {}: {}", control.display(), self.log()), || {
            self.pagefold(&["group", "list", "--json"]).status.success()
        });
    }

    /// The service's log.
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

    /// A group's full name, which is unique on this host because it ends with the token.
    pub fn group(&self, name: &str) -> String {
        format!("{name}-{}", self.token)
    }

    /// Variable that marks every process started here: name and value.
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

    /// The output of `group show`, once the group's worker answers.
    pub fn show(&self, group: &str) -> Value {
        let group = self.group(group);
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            let output = self.pagefold(&["group", "show", &group, "--json"]);
            if has_shown(&output) || Instant::now() > end {
                return json_of(&output);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Changes a group's settings.
    pub fn set(&self, group: &str, words: &[&str]) {
        let group = self.group(group);
        let output = self.pagefold(&[&["group", "set", &group], words].concat());
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// The output of `pagefold audit`.
    pub fn audit(&self) -> Value {
        json_of(&self.pagefold(&["audit", "--json"]))
    }

    /// Asserts that no two groups have a frame in common.
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
        let words = ["pagefold-worker".to_owned(), "--group".to_owned(), self.group(group)];
        let pids =
            fs::read_dir("/proc").expect("list /proc").filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
        pids.into_iter().find(|pid: &u32| {
            let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split('\0').take(3).eq(words.iter().map(String::as_str))
        })
    }

    /// Kills the supervisor and immediately starts another one.
    pub fn kill_supervisor(&mut self) {
        self.child.kill().expect("kill our own child");
        self.child.wait().expect("wait for our own child");
        self.child = serve(&self.dir, &self.token, self.config.as_deref(), self.keeper.as_ref());
    }

    /// Kills the supervisor, then a group's worker, which nobody starts again, and immediately starts another supervisor.
    pub fn kill_supervisor_and_worker(&mut self, group: &str) {
        let worker = self.worker_pid(group).expect("a worker");
        self.child.kill().expect("kill our own child");
        self.child.wait().expect("wait for our own child");
        assert!(Command::new("kill").args(["-9", &worker.to_string()]).status().expect("run kill").success());
        self.child = serve(&self.dir, &self.token, self.config.as_deref(), self.keeper.as_ref());
    }

    /// Ends the supervisor with its workers, by `SIGTERM`: then it also removes its control groups. It is killed after
    /// 15 s.
    pub fn end(&mut self) {
        let runs = |child: &mut Child| matches!(child.try_wait(), Ok(None));
        if runs(&mut self.child) {
            let _ = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status();
        }
        let end = Instant::now() + Duration::from_secs(15);
        while Instant::now() < end && runs(&mut self.child) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Names of files that the service manager keeps.
    pub fn kept(&self) -> Vec<String> {
        self.keeper.as_ref().map_or_else(Vec::new, Keeper::names)
    }

    /// Kills the supervisor, and starts another one with this configuration. Workers and members go on.
    pub fn configure(&mut self, text: &str) {
        self.config = Some(write_config(&self.dir, &self.token, text));
        self.kill_supervisor();
        self.wait_until_it_answers();
    }

    /// Runs the torture program as a member.
    pub fn torture(&self, group: &str, name: &str, run: &[&str], words: &[&str]) -> Member {
        self.torture_with(group, name, run, words, &[])
    }

    /// Like [`Self::torture`], with variables added to the environment.
    pub fn torture_with(&self, group: &str, name: &str, run: &[&str], words: &[&str], env: &[(&str, &str)]) -> Member {
        let program = torture();
        self.run_with(group, name, run, &[&[&program[..]], words].concat(), env)
    }

    /// Runs a program as a member.
    pub fn run(&self, group: &str, name: &str, run: &[&str], words: &[&str]) -> Member {
        self.run_with(group, name, run, words, &[])
    }

    /// Like [`Self::run`], with variables added to the environment. Empty ones are removed.
    pub fn run_with(&self, group: &str, name: &str, run: &[&str], words: &[&str], env: &[(&str, &str)]) -> Member {
        let (variable, token) = self.mark();
        let place = self.place();
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(["run", "--group", &self.group(group), "--name", name]);
        command.arg("--service").arg(&place).args(run).arg("--").args(words);
        // Without `PAGEFOLD_EAGER`, programs that only write would not be folded for a minute.
        command.env(variable, token).env("PAGEFOLD_EAGER", "1").envs(env.iter().copied());
        env.iter().filter(|(_, value)| value.is_empty()).for_each(|(name, _)| _ = command.env_remove(name));
        Member::spawn(command, name, &self.dir)
    }
}

fn write_config(dir: &Path, token: &str, text: &str) -> PathBuf {
    let path = dir.join("config.toml");
    fs::write(&path, text.replace("TOKEN", token)).expect("write the configuration");
    path
}

fn serve(dir: &Path, token: &str, config: Option<&Path>, keeper: Option<&Keeper>) -> Child {
    let log = File::options().create(true).append(true).open(dir.join("log")).expect("open the log");
    let program = env!("CARGO_BIN_EXE_pagefold");
    let mut command = keeper.map_or_else(|| Command::new(program), |keeper| keeper.command(program));
    command.args(["serve", "--stop-workers", "--dir"]).arg(dir.join("s"));
    if let Some(config) = config {
        command.arg("--config").arg(config);
    }
    command.env("PAGEFOLD_TEST", token).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.spawn().expect("start pagefold serve")
}

/// Script that kills all remaining processes by their token. It looks three times, because a killed process may have
/// started another one just before.
fn clean_up(dir: &Path) -> String {
    let dir = dir.display();
    format!(
        "for round in 1 2 3; do
           for f in $(grep -laf {dir}/token /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null); do
             p=${{f#/proc/}}; kill -9 ${{p%%/*}} 2>/dev/null
           done
         done
         umount -l {dir}/s 2>/dev/null
         rm -rf {dir}"
    )
}

impl Drop for Service {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- log of the service\n{}---", self.log());
        }
        self.end();
    }
}
