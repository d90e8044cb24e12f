//! Two hosts with a link between them, a guest on the first, and QEMUs on the second that wait for it.

use crate::common::service::until;
use crate::common::{Ends, json_of};
use guest::Qmp;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The group of all guests.
pub const GROUP: &str = "mig";
/// RAM of a guest.
pub const MEMORY: &str = "128M";
/// Time-out of anything here, in seconds.
pub const PATIENCE: u64 = 120;
/// Destination of all guests.
pub const TO: &str = "tcp:10.77.0.2:4444";
/// The directory of each host's service.
pub const SERVICE: &str = "/run/pagefold";

/// A host: its end is that of all its processes.
pub struct Host {
    init: u32,
    _unshare: Ends,
    service: Option<Child>,
}

impl Host {
    fn start() -> Self {
        let script = "mount -t tmpfs -o mode=755 tmpfs /run && mkdir -p /run/pagefold && ip link set lo up && \
                      touch /run/begun && exec sleep infinity";
        let mut command = Command::new("unshare");
        command.args([
            "--pid",
            "--fork",
            "--kill-child",
            "--mount",
            "--mount-proc",
            "--net",
            "--ipc",
            "sh",
            "-c",
            script,
        ]);
        let unshare = Ends(command.stdin(Stdio::null()).spawn().expect("run unshare"));
        let mut init = 0;
        until(PATIENCE, "a host has begun", || {
            init = host::children(unshare.0.id()).first().copied().unwrap_or(0);
            init > 0 && Path::new(&format!("/proc/{init}/root/run/begun")).exists()
        });
        let mut host = Self { init, _unshare: unshare, service: None };
        let log = File::create(host.path("/run/log")).expect("make a log");
        let mut serve = host.command(env!("CARGO_BIN_EXE_pagefold"), &["serve", "--stop-workers", "--dir", SERVICE]);
        host.service =
            Some(serve.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().expect("start a service"));
        until(PATIENCE, "its service answers", || host.pagefold(&["group", "list", "--json"]).status.success());
        host
    }

    /// A file of this host, as this process finds it.
    pub fn path(&self, path: &str) -> PathBuf {
        format!("/proc/{}/root{path}", self.init).into()
    }

    /// A command that this host runs.
    pub fn command(&self, program: &str, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &self.init.to_string(), "--pid", "--mount", "--net", "--ipc", "--", program])
            .args(words);
        command.env("PAGEFOLD_LAB_DIR", "/run/lab").env("PAGEFOLD_DIR", SERVICE).env("PAGEFOLD_EAGER", "1");
        command
    }

    pub fn run(&self, words: &[&str]) {
        let output = self.command(words[0], &words[1..]).output().expect("run a program");
        assert!(output.status.success(), "{words:?}: {output:?}");
    }

    pub fn pagefold(&self, words: &[&str]) -> Output {
        self.command(env!("CARGO_BIN_EXE_pagefold"), words).output().expect("run pagefold")
    }

    /// The output of `group show`, once the group's worker answers.
    pub fn shown(&self) -> Value {
        let mut shown = None;
        until(PATIENCE, "the group's worker answers", || {
            shown = Some(self.pagefold(&["group", "show", GROUP, "--json"]));
            shown.as_ref().is_some_and(crate::common::has_shown)
        });
        json_of(&shown.expect("an answer"))
    }

    /// Sends a signal to a process of this host.
    pub fn signal(&self, pid: u32, name: &str) {
        self.run(&["kill", &format!("-{name}"), &pid.to_string()]);
    }

    /// State of a process of this host, as one letter; `None` if it has ended.
    pub fn state(&self, pid: u32) -> Option<char> {
        let stat = fs::read_to_string(self.path(&format!("/proc/{pid}/stat"))).ok()?;
        stat.rsplit(") ").next()?.chars().next().filter(|state| *state != 'Z')
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- log of a service\n{}---", fs::read_to_string(self.path("/run/log")).unwrap_or_default());
        }
        if let Some(mut service) = self.service.take() {
            let _ = service.kill();
            let _ = service.wait();
        }
    }
}

/// Two hosts, with a link of so many Mbit/s.
pub fn hosts(mbit: u32) -> [Host; 2] {
    let hosts = [Host::start(), Host::start()];
    let [from, to] = hosts.each_ref().map(|host| host.init.to_string());
    let link = ["link", "add", "eth0", "netns", &from, "type", "veth", "peer", "name", "eth0", "netns", &to];
    assert!(Command::new("ip").args(link).status().expect("run ip").success(), "make a link");
    for (host, address) in hosts.iter().zip(["10.77.0.1/24", "10.77.0.2/24"]) {
        host.run(&["ip", "addr", "add", address, "dev", "eth0"]);
        host.run(&["ip", "link", "set", "eth0", "up"]);
        let rate = format!("{mbit}mbit");
        host.run(&[
            "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", &rate, "burst", "256kb", "latency", "50ms",
        ]);
    }
    hosts
}

/// A guest on one of the hosts: the QEMU that it is in, or that waits for it.
pub struct Vm<'a> {
    pub host: &'a Host,
    /// Its process, as the host numbers it.
    pub pid: u32,
    pub name: String,
    dir: String,
    child: Option<Child>,
}

impl<'a> Vm<'a> {
    /// A guest of the lab's, a member of its host's group; `None`, with the reason said, if this host lacks something.
    pub fn up(host: &'a Host) -> Option<Self> {
        Self::up_in(host, None)
    }

    /// The same, in a control group, by its directory.
    pub fn up_in(host: &'a Host, group: Option<&str>) -> Option<Self> {
        let script = "[ -z \"$0\" ] || echo $$ > \"$0/cgroup.procs\"; exec \"$@\"";
        let start = ["-c", script, group.unwrap_or(""), env!("CARGO_BIN_EXE_pagefold")];
        let words =
            ["lab", "up", "--image", "tiny", "--groups", GROUP, "--memory", MEMORY, "--saved", "--fold", "--json"];
        let mut command = host.command("sh", &[&start[..], &words, &["--service", SERVICE]].concat());
        let output = command.output().expect("run pagefold lab");
        if output.status.code() == Some(3) {
            eprintln!("skipped: {}", String::from_utf8_lossy(&output.stderr));
            return None;
        }
        let listed = json_of(&output);
        let guest = &listed["guests"].as_array().or(listed.as_array()).expect("a list")[0];
        let (name, pid) = (guest["name"].as_str().expect("a name").to_owned(), guest["pid"].as_u64().expect("a pid"));
        Some(Self { host, pid: pid as u32, dir: format!("/run/lab/{name}"), name, child: None })
    }

    /// A QEMU with the same machine that waits on another host, as a member there.
    pub fn waits_on<'b>(&self, host: &'b Host, more: &[&str]) -> Vm<'b> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("{}-{}", self.name, NUMBER.fetch_add(1, Ordering::Relaxed));
        let dir = format!("/run/{name}");
        fs::create_dir(host.path(&dir)).expect("a directory");
        let line = fs::read(self.host.path(&format!("/proc/{}/cmdline", self.pid))).expect("its command line");
        let line = String::from_utf8(line).expect("text");
        let mut words: Vec<String> = line.split_terminator('\0').map(|word| word.replace(&self.dir, &dir)).collect();
        if let Some(at) = words.iter().position(|word| word == "-incoming") {
            words.drain(at..at + 2);
        }
        words.extend(more.iter().chain(&["-incoming", "tcp:0.0.0.0:4444"]).map(|word| (*word).to_owned()));
        let mut run = host.command(env!("CARGO_BIN_EXE_pagefold"), &["run", "--group", GROUP, "--name", &name]);
        run.args(["--service", SERVICE, "--"]).args(words);
        let log = File::create(host.path(&format!("{dir}/log"))).expect("make a log");
        let child = run.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().expect("start QEMU");
        let mut vm = Vm { host, pid: 0, name, dir, child: Some(child) };
        until(PATIENCE, "a QEMU waits for a guest", || vm.status() == "inmigrate");
        vm.pid = vm.inner_pid();
        vm
    }

    /// The pid in its host's namespace: the last one of `NSpid`.
    fn inner_pid(&self) -> u32 {
        let child = self.child.as_ref().expect("a child");
        let outer = host::children(child.id()).first().copied().expect("nsenter has forked");
        inner(outer)
    }

    /// Runs a QMP command.
    pub fn tell(&self, command: &str, arguments: Value) -> Result<Value, String> {
        self.tell_within(5000, command, arguments)
    }

    /// The same, with so many milliseconds for an answer.
    pub fn tell_within(&self, ms: u64, command: &str, arguments: Value) -> Result<Value, String> {
        let socket = self.host.path(&format!("{}/qmp", self.dir));
        let mut qmp = Qmp::connect(&socket, Duration::from_millis(ms)).map_err(|e| e.to_string())?;
        qmp.execute(command, arguments).map_err(|e| e.to_string())
    }

    /// Its state as QEMU tells it; empty if that does not answer.
    pub fn status(&self) -> String {
        self.status_within(5000)
    }

    /// The same, with so many milliseconds for an answer.
    pub fn status_within(&self, ms: u64) -> String {
        let found = self.tell_within(ms, "query-status", json!({})).unwrap_or_default();
        found["status"].as_str().unwrap_or_default().to_owned()
    }

    /// A guest that has just arrived answers soon, and runs.
    pub fn assert_runs(&self) {
        until(PATIENCE, "it runs there", || {
            assert!(!self.has_ended(), "{} has ended", self.name);
            let found = self.tell("query-status", json!({}));
            found.as_ref().is_ok_and(|found| found["status"] == "running") || {
                eprintln!("{}: {found:?}", self.name);
                false
            }
        });
    }

    /// Runs a shell script inside.
    pub fn ask(&self, script: &str) -> String {
        ask(&self.host.path(&format!("{}/agent", self.dir)), script)
    }

    /// Bytes of its RAM in frames of its own.
    pub fn own_ram_bytes(&self) -> u64 {
        let found = json_of(&self.host.pagefold(&["guests", "--json"]));
        let guests = found["guests"].as_array().or(found.as_array()).expect("a list").clone();
        let is_it = |guest: &&Value| guest["pids"].as_array().is_some_and(|pids| pids.contains(&json!(self.pid)));
        let guest = guests.iter().find(is_it).unwrap_or_else(|| panic!("no process {} in {found}", self.pid));
        let ram = guest["regions"].as_array().and_then(|all| all.iter().find(|region| region["region"] == "guest_ram"));
        // One that waits has none yet.
        ram.and_then(|ram| ram["rss_bytes"].as_u64()).unwrap_or(0)
    }

    pub fn kill(&self) {
        self.host.signal(self.pid, "KILL");
    }

    /// Start of its process, in clock ticks after boot.
    pub fn start_ticks(&self) -> u64 {
        let stat = fs::read_to_string(self.host.path(&format!("/proc/{}/stat", self.pid))).expect("its state");
        let behind_name = stat.rsplit(") ").next().expect("fields");
        behind_name.split(' ').nth(19).and_then(|ticks| ticks.parse().ok()).expect("ticks")
    }

    pub fn has_ended(&self) -> bool {
        self.host.state(self.pid).is_none()
    }
}

impl Drop for Vm<'_> {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            if !self.has_ended() {
                let _ = self.host.command("kill", &["-KILL", &self.pid.to_string()]).status();
            }
            let end = child.wait();
            if std::thread::panicking() {
                let log = fs::read_to_string(self.host.path(&format!("{}/log", self.dir))).unwrap_or_default();
                eprintln!("--- log of {}: {end:?}\n{log}---", self.name);
            }
        }
    }
}

/// The pid of a process in the innermost of its namespaces.
pub fn inner(pid: u32) -> u32 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:")).expect("namespaces");
    line.split_whitespace().next_back().and_then(|pid| pid.parse().ok()).expect("a pid")
}

/// `pagefold migrate` of a guest, with further words.
pub fn migrate(vm: &Vm, more: &[&str]) -> Output {
    vm.host.pagefold(&[&["migrate", &vm.name, "--to", TO, "--service", SERVICE], more].concat())
}

/// The same in the background, with the pid that its host gives it.
pub fn begin(vm: &Vm, more: &[&str]) -> (Child, u32) {
    let words = [&["migrate", &vm.name, "--to", TO, "--service", SERVICE], more].concat();
    let mut command = vm.host.command(env!("CARGO_BIN_EXE_pagefold"), &words);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("run pagefold migrate");
    let mut pid = 0;
    until(PATIENCE, "it has begun", || {
        pid = host::children(child.id()).first().copied().unwrap_or(0);
        pid > 0
    });
    (child, inner(pid))
}

/// Standard error of a command.
pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Waits until more than so many bytes have been sent.
pub fn until_sent(vm: &Vm, mover: &mut Child, bytes: u64) {
    until(PATIENCE, "memory is sent", || {
        if mover.try_wait().expect("its state").is_some() {
            let mut told = String::new();
            mover.stderr.take().expect("a pipe").read_to_string(&mut told).expect("its words");
            panic!("the command has ended: {told}");
        }
        sent(vm) > bytes
    });
}

/// Bytes that have been sent of a migration that is under way; 0 if none is.
fn sent(vm: &Vm) -> u64 {
    let found = vm.tell("query-migrate", json!({})).unwrap_or_default();
    if found["status"] == "active" { found["ram"]["transferred"].as_u64().unwrap_or(0) } else { 0 }
}

/// Asks the shell behind a guest's second serial port, by the protocol of the lab's `agent.sh`.
fn ask(socket: &Path, script: &str) -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let id = format!("{:016x}", NUMBER.fetch_add(1, Ordering::Relaxed));
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./'=:,".contains(&byte);
    let encoded: String = script
        .bytes()
        .map(|byte| if plain(byte) { char::from(byte).into() } else { format!("\\0{byte:03o}") })
        .collect();
    let mut stream = UnixStream::connect(socket).expect("a guest's serial port");
    stream.set_read_timeout(Some(Duration::from_secs(PATIENCE))).expect("a time-out");
    stream.write_all(format!("\n{id} {PATIENCE} {encoded}\n").as_bytes()).expect("ask the guest");
    let (mark, mut heard) = (format!("\n@{id} "), Vec::new());
    loop {
        let mut chunk = [0; 4096];
        let count = stream.read(&mut chunk).unwrap_or_else(|e| panic!("no answer from inside to {script}: {e}"));
        assert!(count > 0, "the guest has ended at: {script}");
        heard.extend(&chunk[..count]);
        let text = String::from_utf8_lossy(&heard);
        let Some((header, rest)) = text.split_once(&mark).and_then(|(_, rest)| rest.split_once('\n')) else { continue };
        let words: Vec<usize> = header.split(' ').map(|word| word.parse().unwrap_or(usize::MAX)).collect();
        assert_eq!(words[0], 0, "{script}: {header}");
        if rest.len() >= words[1] + words[2] {
            return rest[..words[1]].trim().to_owned();
        }
    }
}
