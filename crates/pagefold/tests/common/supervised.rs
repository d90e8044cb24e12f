//! A supervisor with workers, and members that only send prescribed messages. Tests check which processes are admitted,
//! and which processes outlive others. An empty library replaces the agent.

use super::{Afterwards, copy_program, has_shown, json_of, unprivileged};
use serde_json::Value;
use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Python program that executes another one, for which `setsockopt` and `getsockopt` do not know an option
/// (`ENOPROTOOPT`). It is for x86-64.
const WITHOUT_OPTION: &str = "
import ctypes, os, struct, sys
option, program = int(sys.argv[1]), sys.argv[2:]
LOAD, EQUALS, RETURN, ALLOW, ERROR = 0x20, 0x15, 0x06, 0x7fff0000, 0x50000 | 92
code = [(LOAD, 0, 0, 0), (EQUALS, 1, 0, 54), (EQUALS, 0, 3, 55), (LOAD, 0, 0, 32), (EQUALS, 0, 1, option),
        (RETURN, 0, 0, ERROR), (RETURN, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *line) for line in code), 8 * len(code))
filter = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', 7, ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(22, 2, filter, 0, 0) == 0, ctypes.get_errno()
os.execv(program[0], program)
";

/// Waits until `look` finds something, and returns it: a minute at most, for a busy machine.
pub fn wait_for<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    wait_for_within(Duration::from_secs(60), what, look)
}

/// Waits until `look` finds something, and returns it.
pub fn wait_for_within<T>(patience: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + patience;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "not in {patience:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Files of an installation with an empty library as the agent, and the directory of a service.
pub struct Installed {
    pub dir: TempDir,
    /// Ends the remaining processes of the service, also if the test is killed.
    _afterwards: Afterwards,
}

impl Installed {
    /// Has a process connect for a group, which maps a file that looks like the pool of a group `acme`, and is hung up on.
    pub fn connect_with_pool_of_acme(&self, group: &str) {
        let script = format!(
            "import mmap, os, socket, sys
f = os.memfd_create('pagefold-acme'); os.ftruncate(f, 4096)
m = mmap.mmap(f, 4096, mmap.MAP_PRIVATE)
s = socket.socket(1, 5); s.connect('{}')
s.settimeout(5)
sys.exit(0 if s.recv(9) == b'' else 9)",
            self.text("s/agent.sock")
        );
        let run = self.pagefold(&["run", "--group", group, "--", "python3", "-c", &script]);
        assert!(run.status.success(), "{run:?}");
    }

    pub fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("svc").tempdir_in("/tmp").expect("a temporary directory");
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("open the directory");
        let pagefold = Path::new(env!("CARGO_BIN_EXE_pagefold"));
        for name in ["pagefold", "pagefoldd", "pagefold-worker", "pagefold-prove", "pagefold-web", "fake_agent"] {
            copy_program(&pagefold.with_file_name(name), &dir.path().join(name));
        }
        let library = dir.path().join("libpagefold.so");
        let source = dir.path().join("nothing.c");
        fs::write(&source, "").expect("write a program");
        let made = Command::new("cc").args(["-shared", "-o"]).arg(&library).arg(&source).status().expect("run cc");
        assert!(made.success(), "make a library that does nothing");
        // Kills every process whose program lies in this directory.
        let script = format!(
            "for p in /proc/[0-9]*; do case $(readlink $p/exe) in {}/*) kill -9 ${{p#/proc/}};; esac; done 2>/dev/null",
            dir.path().display()
        );
        Self { _afterwards: Afterwards::run(&script), dir }
    }

    /// An installation with the programs that attaching takes; `None` if this machine cannot have one, which was said then.
    pub fn attaching() -> Option<Self> {
        if super::not_root() {
            return None;
        }
        let built = Path::new(env!("CARGO_BIN_EXE_pagefold"));
        let dir = built.parent().expect("a directory");
        let object =
            dir.parent().expect("a directory").join("x86_64-unknown-linux-musl").join(dir.file_name().unwrap());
        if !object.exists() {
            eprintln!("skipped: nothing is built for x86_64-unknown-linux-musl: ./x build");
            return None;
        }
        let installed = Self::new();
        for from in [built.with_file_name("pagefold-attach"), object.join("pagefold-agent")] {
            assert!(from.is_file(), "{} is missing: ./x build", from.display());
            copy_program(&from, &installed.path(from.file_name().unwrap().to_str().unwrap()));
        }
        Some(installed)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("a plain path").to_owned()
    }

    /// Runs the program under test, for this service.
    pub fn pagefold(&self, args: &[&str]) -> Output {
        let mut command = Command::new(self.path("pagefold"));
        command.args(args).env("PAGEFOLD_DIR", self.path("s")).output().expect("run pagefold")
    }

    /// Like [`Self::pagefold`], as a user without any rights.
    pub fn pagefold_unprivileged(&self, args: &[&str]) -> Output {
        let mut command = unprivileged(&self.text("pagefold"));
        command.args(args).env("PAGEFOLD_DIR", self.path("s")).output().expect("run pagefold")
    }

    /// The output of `group show`, once the group's worker answers.
    pub fn show(&self, group: &str) -> Value {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            let output = self.pagefold(&["group", "show", group, "--json"]);
            if has_shown(&output) || Instant::now() > end {
                return json_of(&output);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The line of a group in `group list`.
    pub fn listed(&self, group: &str) -> Value {
        let groups = json_of(&self.pagefold(&["group", "list", "--json"]));
        let found = groups.as_array().expect("a list").iter().find(|g| g["name"] == group);
        found.unwrap_or_else(|| panic!("no {group} in {groups}")).clone()
    }

    /// Names of the members that are connected to the group's worker.
    pub fn members(&self, group: &str) -> Vec<String> {
        let shown = self.show(group);
        let name = |m: &Value| m["name"].as_str().expect("a name").to_owned();
        let mut names: Vec<_> =
            shown["members"].as_array().expect("a list").iter().filter(|m| m["connected"] == true).map(name).collect();
        names.sort();
        names
    }

    /// Waits until exactly these members are connected: a worker that has just been started tells of none at first.
    pub fn until_members(&self, group: &str, names: &[&str]) {
        wait_for(&format!("the members of {group} are {names:?}"), || (self.members(group) == names).then_some(()));
    }

    /// The process of a group's worker, once it runs.
    pub fn worker(&self, group: &str) -> u32 {
        wait_for("a worker runs", || {
            let shown = self.show(group);
            let pid = shown["worker_pid"].as_u64().filter(|_| shown["worker"] == "running")?;
            u32::try_from(pid).ok()
        })
    }

    pub fn serve(&self, config: &str, more: &[&str]) -> Supervisor {
        self.serve_by(Command::new(self.path("pagefold")), config, more)
    }

    /// Like [`Self::serve`], on a kernel that does not know this option of sockets. A filter of system calls says so to
    /// all processes of the service.
    pub fn serve_without_option(&self, config: &str, option: u32) -> Supervisor {
        let mut command = Command::new("python3");
        command.args(["-c", WITHOUT_OPTION, &option.to_string()]).arg(self.path("pagefold"));
        self.serve_by(command, config, &[])
    }

    /// Runs `pagefold serve` with `command`, to which its arguments are added.
    pub fn serve_by(&self, mut command: Command, config: &str, more: &[&str]) -> Supervisor {
        fs::write(self.path("config.toml"), config).expect("write the configuration");
        let log = File::options().append(true).create(true).open(self.path("log")).expect("open the log");
        command.arg("serve").arg("--dir").arg(self.path("s")).args(more).stderr(log);
        if !config.is_empty() {
            command.arg("--config").arg(self.path("config.toml"));
        }
        let mut child = command.spawn().expect("start pagefold serve");
        wait_for("the service answers", || {
            assert!(child.try_wait().expect("ask for its state").is_none(), "{}", self.log());
            let list = ["group", "list"];
            // Each user has its own service.
            let answers = self.pagefold(&list).status.success() || self.pagefold_unprivileged(&list).status.success();
            answers.then_some(())
        });
        Supervisor(child)
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// A registered process, which connects when a test tells it to.
    pub fn member(&self, group: &str, name: &str) -> Fake {
        let mut command = Command::new(self.path("pagefold"));
        command.args(["run", "--group", group, "--name", name, "--"]).arg(self.path("fake_agent"));
        Fake::start(command.env("PAGEFOLD_DIR", self.path("s")))
    }

    /// The same program, not registered with the service.
    pub fn stranger(&self) -> Fake {
        Fake::start(&mut Command::new(self.path("fake_agent")))
    }

    /// Like [`Self::stranger`], as a user without any rights.
    pub fn stranger_unprivileged(&self) -> Fake {
        Fake::start(&mut unprivileged(&self.text("fake_agent")))
    }
}

/// A running supervisor. Dropping it kills it alone.
pub struct Supervisor(pub Child);

impl Supervisor {
    pub fn kill(&mut self) {
        self.0.kill().expect("kill our own child");
        self.0.wait().expect("wait for our own child");
    }

    /// `SIGTERM`, and waits until it has ended in an orderly way.
    pub fn terminate(mut self) {
        signal(self.0.id(), "TERM");
        let status = wait_for("the supervisor ends", || self.0.try_wait().expect("ask for its state"));
        assert!(status.success(), "{status}");
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends a signal to a process of ours.
pub fn signal(pid: u32, name: &str) {
    assert!(Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().expect("run kill").success());
}

/// Whether a process runs.
pub fn is_alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// A running `trials/fake_agent.rs`. Dropping it ends it.
pub struct Fake {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Fake {
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start a program");
        let input = child.stdin.take().expect("a pipe");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut fake = Self { child, input, output };
        // An answer proves that the program was executed, and so that it was registered before.
        fake.tell("state");
        fake
    }

    pub fn tell(&mut self, line: &str) -> String {
        writeln!(self.input, "{line}").expect("tell the program");
        let mut answer = String::new();
        self.output.read_line(&mut answer).expect("hear from the program");
        assert!(!answer.is_empty(), "it ended at: {line}");
        answer.trim().to_owned()
    }

    /// Connects to the service, and says whether it is still connected a while later.
    pub fn connects(&mut self, installed: &Installed) -> bool {
        self.connect(installed) && self.is_connected()
    }

    /// Connects to the service, and says whether it is refused or hung up on.
    pub fn is_refused(&mut self, installed: &Installed) -> bool {
        !self.connect(installed) || self.tell("closed").starts_with("closed")
    }

    fn connect(&mut self, installed: &Installed) -> bool {
        self.tell(&format!("connect {}", installed.text("s/agent.sock"))) == "ok"
    }

    pub fn is_connected(&mut self) -> bool {
        self.tell("state").starts_with("open")
    }

    pub fn ask(&mut self, installed: &Installed, question: &str) -> Value {
        let answer = self.tell(&format!("ask {} {question}", installed.text("s/control.sock")));
        serde_json::from_str(&answer).unwrap_or(Value::String(answer))
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("kill our own child");
        self.child.wait().expect("wait for our own child");
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
