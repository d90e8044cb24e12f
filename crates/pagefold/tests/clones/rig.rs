//! Templates and clones of a test's own, and commands inside clones and inside guests that become templates.

use crate::common::service::Service;
use crate::common::supervised::{signal, wait_for_within};
use crate::common::{Ends, json_of};
use serde_json::Value;
use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Longest time that a command inside may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// Longest time for a guest to boot.
const BOOT: Duration = Duration::from_secs(240);

/// Directories for templates and clones. Dropping it ends the clones.
pub struct Rig {
    dir: tempfile::TempDir,
    /// The group that clones are made in.
    group: String,
    env: Vec<(String, String)>,
}

impl Rig {
    pub fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("cl").tempdir_in("/tmp").expect("a temporary directory");
        Self { dir, group: "acme".into(), env: Vec::new() }
    }

    /// One whose clones are folded by a service, soon after they were written.
    #[allow(dead_code, reason = "each test binary uses its part of this")]
    pub fn folded_by(service: &Service) -> Self {
        let (variable, token) = service.mark();
        let place = service.place().to_str().expect("a plain path").to_owned();
        let env = [(variable, token), ("PAGEFOLD_DIR", &place), ("PAGEFOLD_EAGER", "1")];
        let env = env.map(|(variable, value)| (variable.to_owned(), value.to_owned())).to_vec();
        let mut rig = Self::new();
        (rig.group, rig.env) = (service.group("acme"), env);
        rig
    }

    pub fn command(&self, words: &[&str]) -> Command {
        self.program(env!("CARGO_BIN_EXE_pagefold"), words)
    }

    /// A program that finds templates and clones as `pagefold` does.
    pub fn program(&self, program: &str, words: &[&str]) -> Command {
        let mut command = Command::new(program);
        command.args(words);
        command.env("PAGEFOLD_TEMPLATES", self.templates()).env("PAGEFOLD_CLONES", self.clones());
        command.envs(self.env.iter().map(|(variable, value)| (variable, value)));
        command
    }

    pub fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("run pagefold")
    }

    pub fn json(&self, words: &[&str]) -> Value {
        json_of(&self.run(&[words, &["--json"]].concat()))
    }

    /// Errors of a command that fails; its exit code is checked.
    pub fn fails(&self, words: &[&str], code: i32) -> String {
        let output = self.run(words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{words:?}: {said}");
        said
    }

    /// Makes a template of the image `tiny` for a group; false, with the reason printed, if the host lacks something.
    pub fn template(&self, name: &str, group: &str, more: &[&str]) -> bool {
        let words = ["template", "create", name, "--image", "tiny", "--memory", "128M", "--group", group];
        let output = self.run(&[&words, more].concat());
        if output.status.code() == Some(3) {
            eprintln!("skipped: {}", String::from_utf8_lossy(&output.stderr));
            return false;
        }
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        true
    }

    /// Makes a template of a guest of the group `acme` in which something happens before: `prepare` gets a function that runs a shell
    /// command inside. `None`, with the reason printed, if the host lacks something. `words` begin with the template's name.
    pub fn prepared<T>(&self, words: &[&str], prepare: impl FnOnce(&dyn Fn(&str) -> String) -> T) -> Option<T> {
        let mut making = self.command(&[&["template", "create"], words, &["--group", "acme"]].concat());
        let mut maker = Ends(making.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("run pagefold"));
        let agent = self.templates().join(format!("acme/.{}.making/agent", words[0]));
        let boots = wait_for_within(BOOT, "a guest boots", || match UnixStream::connect(&agent) {
            Ok(stream) => Some(Some(stream)),
            Err(_) => maker.0.try_wait().expect("look at it").map(|_| None),
        });
        let prepared = boots.map(|stream| {
            // The guest boots on. It does not become a template as long as its maker stands still.
            signal(maker.0.id(), "STOP");
            wait_ready(stream);
            let prepared = prepare(&|command| inside(&agent, command));
            signal(maker.0.id(), "CONT");
            prepared
        });
        let status = maker.0.wait().expect("wait for it");
        let mut said = String::new();
        maker.0.stderr.take().expect("its errors").read_to_string(&mut said).expect("read them");
        if status.code() == Some(3) {
            eprintln!("skipped: {said}");
            return None;
        }
        assert!(status.success() && prepared.is_some(), "{said}");
        prepared
    }

    /// Makes clones in the group `acme`.
    pub fn clone(&self, template: &str, more: &[&str]) -> Vec<Value> {
        let made = self.json(&[&["clone", template, "--group", &self.group], more].concat());
        made["clones"].as_array().expect("a list").clone()
    }

    /// Names of all clones that live.
    pub fn living(&self) -> Vec<String> {
        let listed = self.json(&["clones"]);
        listed["clones"].as_array().expect("a list").iter().map(|clone| text(clone, "name")).collect()
    }

    /// A text that is in the command line of each machine of this rig.
    pub fn dir_text(&self) -> String {
        format!("path={}", self.dir.path().display())
    }

    pub fn templates(&self) -> PathBuf {
        self.dir.path().join("t")
    }

    pub fn clones(&self) -> PathBuf {
        self.dir.path().join("c")
    }

    /// Output of a shell command inside a clone: the lab's agent runs it.
    pub fn inside(&self, clone: &str, command: &str) -> String {
        inside(&self.clones().join(clone).join("agent"), command)
    }

    /// The clock of a clone of `tiny`, in seconds since 1970, and by how much it differs from the host's at least.
    pub fn clock(&self, clone: &str) -> (f64, f64) {
        let before = host_clock();
        let told = self.inside(clone, "adjtimex");
        let after = host_clock();
        let field = |name: &str| {
            let value = told.lines().find_map(|line| line.trim().strip_prefix(name));
            value.and_then(|value| value.trim().parse::<f64>().ok()).unwrap_or_else(|| panic!("no {name} in {told}"))
        };
        let clock = field("time.tv_sec:") + field("time.tv_usec:") / 1e6;
        (clock, (before - clock).max(clock - after))
    }
}

/// Seconds since 1970, by the host's clock.
#[expect(clippy::disallowed_methods, reason = "guests are asked for this very clock")]
fn host_clock() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("a time after 1970").as_secs_f64()
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.run(&["clones", "end", "--all"]);
    }
}

/// Waits until the agent in a guest that boots says that it reads.
fn wait_ready(mut stream: UnixStream) {
    stream.set_read_timeout(Some(Duration::from_secs(1))).expect("set a time");
    let mut heard = Vec::new();
    wait_for_within(BOOT, "its agent is ready", || {
        let mut chunk = [0; 4096];
        match stream.read(&mut chunk) {
            Ok(0) => panic!("the guest has ended: {}", String::from_utf8_lossy(&heard)),
            Ok(count) => heard.extend(&chunk[..count]),
            Err(_) => {}
        }
        String::from_utf8_lossy(&heard).contains("\n@ready\n").then_some(())
    });
}

/// See `crates/lab/recipes/agent.sh`.
fn inside(socket: &Path, command: &str) -> String {
    let mut stream = UnixStream::connect(socket).expect("connect to the agent");
    stream.set_read_timeout(Some(Duration::from_secs(1))).expect("set a time");
    let id = format!("{:016x}", u64::from(std::process::id()) << 32 | u64::from(command.len() as u32));
    let mut line = format!("\n{id} {} ", PATIENCE.as_secs());
    for byte in command.bytes() {
        write!(line, "\\0{byte:03o}").expect("write to a string");
    }
    stream.write_all(format!("{line}\n").as_bytes()).expect("ask the agent");
    let (mut heard, begin) = (String::new(), Instant::now());
    while begin.elapsed() < PATIENCE {
        let mut chunk = [0; 4096];
        match stream.read(&mut chunk) {
            Ok(0) => panic!("the guest has ended: {heard}"),
            Ok(count) => heard.push_str(&String::from_utf8_lossy(&chunk[..count])),
            Err(_) => continue,
        }
        let Some((_, answer)) = heard.split_once(&format!("\n@{id} ")) else { continue };
        let Some((header, output)) = answer.split_once('\n') else { continue };
        let words: Vec<usize> = header.split(' ').skip(1).map_while(|word| word.parse().ok()).collect();
        if output.len() >= words.iter().sum() {
            assert!(header.starts_with("0 "), "{command}: {header}: {output}");
            return output[..words[0]].trim().to_owned();
        }
    }
    panic!("no answer to {command}: {heard}");
}

pub fn text(value: &Value, field: &str) -> String {
    value[field].as_str().unwrap_or_else(|| panic!("no {field} in {value}")).to_owned()
}

/// Pids of all processes whose command line has this text.
pub fn processes_with(text: &str) -> Vec<u32> {
    let pids = fs::read_dir("/proc").expect("list /proc").flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let has =
        |pid: &u32| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|l| String::from_utf8_lossy(&l).contains(text));
    pids.filter(has).collect()
}
