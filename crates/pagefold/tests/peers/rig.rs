//! One program's two runs: without Pagefold, and as members of a group that is folded as fast as can be.

use crate::attach::{self, Refused};
use crate::common::service::{Member, Service};
use serde::Serialize;
use serde_json::Value;
use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const GROUP: &str = "peers";
/// Pages that are fingerprinted a second: more than any program here has.
const SCAN_RATE: &str = "400000";
/// Time that a program rests at most, so that enough of it is folded: 30 s.
const REST: Duration = Duration::from_secs(30);
/// Users that may start members, besides root. Debian's packages make them for their servers.
const USERS: [&str; 2] = ["postgres", "mysql"];

/// A program of other people's.
pub struct Peer {
    pub name: &'static str,
    /// Its work here, for people.
    pub about: &'static str,
    /// Pages that must be folded at one time.
    pub floor: u64,
    /// Programs or files that must be there, each with the Debian package that has it.
    pub needs: &'static [(&'static str, &'static str)],
    /// Whether it belongs to the short list.
    pub is_short: bool,
    /// Whether both runs take place at the same time: for programs that wait for most of their time.
    pub at_once: bool,
    pub recipe: fn(&Side) -> Value,
}

/// The verdict on a program.
#[derive(Debug, Serialize)]
pub struct Verdict {
    pub program: &'static str,
    /// Whether both outcomes are the same and enough was folded; `None` where it could not be tried.
    pub ok: Option<bool>,
    pub baseline: Value,
    pub member: Value,
    /// Most pages folded at one time.
    pub folded_pages: u64,
    pub floor: u64,
    /// Why it is not ok, or was not tried; empty otherwise.
    pub reason: String,
    pub seconds: f64,
}

/// One of the two runs.
pub struct Side<'a> {
    service: &'a Service,
    /// An empty directory for its files.
    pub dir: &'a Path,
    pub is_member: bool,
    /// Whether members are attached while they run.
    pub is_attached: bool,
    /// Whether little time is to be spent.
    pub is_short: bool,
    floor: u64,
    most_folded: &'a AtomicU64,
    pub refused: Refused,
}

/// A program that has ended.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub output: String,
    pub errors: String,
}

/// Runs a program on both sides and compares.
pub fn judge(peer: &Peer, is_short: bool, is_attached: bool) -> Verdict {
    let begin = Instant::now();
    let mut verdict = Verdict {
        program: peer.name,
        ok: None,
        baseline: Value::Null,
        member: Value::Null,
        folded_pages: 0,
        floor: peer.floor,
        reason: String::new(),
        seconds: 0.0,
    };
    eprintln!("{}: {}", peer.name, peer.about);
    // The text of a recipe's panic is the verdict's reason.
    std::panic::set_hook(Box::new(|_| {}));
    match missing(peer) {
        Some(why) => verdict.reason = why,
        None => run_both(peer, (is_short, is_attached), &mut verdict),
    }
    verdict.seconds = begin.elapsed().as_secs_f64();
    verdict
}

/// The packages that are not installed, in words.
fn missing(peer: &Peer) -> Option<String> {
    let lacking = peer.needs.iter().filter(|(what, _)| find(what).is_none());
    let mut packages: Vec<&str> = lacking.map(|(_, package)| *package).collect();
    packages.dedup();
    (!packages.is_empty()).then(|| format!("not installed: apt-get install {}", packages.join(" ")))
}

/// Path of a program, or of a file that must be there.
pub fn find(what: &str) -> Option<PathBuf> {
    if what.starts_with('/') {
        return Some(PathBuf::from(what)).filter(|path| path.exists());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/local/go/bin", "/usr/sbin", "/usr/bin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(usual).map(|dir| dir.join(what)).find(|file| file.is_file())
}

fn run_both(peer: &Peer, (is_short, is_attached): (bool, bool), verdict: &mut Verdict) {
    let users: Vec<&str> = USERS.into_iter().filter(|user| is_user(user)).collect();
    let service = Service::start_with(Some(&format!(
        "[[group]]\nname = \"{GROUP}-TOKEN\"\nscan-rate = {SCAN_RATE}\nusers = {users:?}\n"
    )));
    let most_folded = AtomicU64::new(0);
    let run = |is_member| {
        let dir = tempfile::Builder::new().prefix("peer").tempdir_in("/tmp").expect("a temporary directory");
        // Servers that run as users of their own keep their data in it.
        fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).expect("open the directory");
        let side = Side {
            service: &service,
            dir: dir.path(),
            is_member,
            is_attached: is_member && is_attached,
            is_short,
            floor: peer.floor,
            most_folded: &most_folded,
            refused: Refused::default(),
        };
        side.run(peer)
    };
    let (baseline, member) = run_sides(peer.at_once, run);
    verdict.folded_pages = most_folded.load(Ordering::Relaxed);
    (verdict.baseline, verdict.member) = match (baseline, member) {
        (Ok(baseline), Ok(member)) => (baseline, member),
        (Err(why), _) => {
            verdict.reason = format!("without us: {why}");
            return;
        }
        (Ok(baseline), Err(why)) => {
            (verdict.baseline, verdict.ok, verdict.reason) = (baseline, Some(false), format!("as a member: {why}"));
            return;
        }
    };
    if verdict.baseline != verdict.member {
        verdict.reason = format!("without us {}, as a member {}", verdict.baseline, verdict.member);
    } else if verdict.folded_pages < peer.floor {
        verdict.reason = format!("only {} pages were folded at one time", verdict.folded_pages);
    }
    verdict.ok = Some(verdict.reason.is_empty());
}

/// Outcome of one side, or the reason why there is none.
type Outcome = Result<Value, String>;

/// Has both sides run, at the same time or in turns. Returns the outcome without us, and that as a member.
fn run_sides(at_once: bool, run: impl Fn(bool) -> Outcome + Sync) -> (Outcome, Outcome) {
    if at_once {
        return thread::scope(|scope| {
            let member = scope.spawn(|| run(true));
            (run(false), member.join().expect("panics are caught"))
        });
    }
    let baseline = run(false);
    // A program that fails by itself says nothing about us.
    let member = if baseline.is_ok() { run(true) } else { Ok(Value::Null) };
    (baseline, member)
}

fn is_user(name: &str) -> bool {
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    users.lines().any(|line| line.split(':').next() == Some(name))
}

impl Side<'_> {
    /// Runs the recipe, and notes meanwhile how much is folded.
    fn run(&self, peer: &Peer) -> Result<Value, String> {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            if self.is_member {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        self.note_folded();
                        thread::sleep(Duration::from_millis(250));
                    }
                });
            }
            let outcome = catch_unwind(AssertUnwindSafe(|| (peer.recipe)(self)));
            over.store(true, Ordering::Relaxed);
            if let [first, ..] = &self.refused.reasons()[..] {
                return Err(format!("not attached: {first}"));
            }
            outcome.map_err(|panic| {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked").to_owned()
            })
        })
    }

    fn note_folded(&self) {
        self.most_folded.fetch_max(self.shown()["sharing_pages"].as_u64().unwrap_or(0), Ordering::Relaxed);
    }

    /// The members' group in the words of `group show`; nothing while it does not answer.
    pub fn shown(&self) -> Value {
        let output = self.pagefold(&["group", "show", &self.group(), "--json"]);
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    }

    /// Runs `pagefold` for the members' service.
    pub fn pagefold(&self, words: &[&str]) -> Output {
        self.service.pagefold(words)
    }

    /// Full name of the members' group.
    pub fn group(&self) -> String {
        self.service.group(GROUP)
    }

    /// The directory of the members' service.
    pub fn place(&self) -> String {
        self.service.place().to_str().expect("a plain path").to_owned()
    }

    /// Variables of everything that is started here. They are the mark by which it is ended, and folding as fast as can be,
    /// also of children that do not live long.
    pub fn environment(&self) -> [(&str, &str); 3] {
        [self.service.mark(), ("PAGEFOLD_EAGER", "1"), ("PAGEFOLD_CHILDREN_AFTER", "0.3")]
    }

    /// A command that this side runs: a member's all anonymous memory is enrolled.
    fn command(&self, name: &str, user: Option<&str>, words: &[&str]) -> Command {
        let mut all: Vec<String> = Vec::new();
        if let Some(user) = user {
            all.extend(["setpriv", "--init-groups", "--reuid", user, "--regid", user].map(str::to_owned));
            // With it, a member without root may open a userfaultfd that sees the kernel's faults.
            all.extend(["--inh-caps", "+sys_ptrace", "--ambient-caps", "+sys_ptrace", "--"].map(str::to_owned));
        }
        if self.is_member && !self.is_attached {
            all.extend(self.member_words(&["--name", name]));
        }
        all.extend(words.iter().map(|word| (*word).to_owned()));
        let mut command = Command::new(&all[0]);
        command.args(&all[1..]).envs(self.environment()).current_dir(self.dir);
        command
    }

    /// The words before a command that make a member of it.
    fn member_words(&self, more: &[&str]) -> Vec<String> {
        let (group, place) = (self.group(), self.place());
        let words = [env!("CARGO_BIN_EXE_pagefold"), "run", "--group", &group, "--service", &place];
        [&words[..], more, &["--all-anonymous", "--"]].concat().into_iter().map(str::to_owned).collect()
    }

    /// The words before a command by which a program makes members of its children, on the members' side.
    pub fn wrapper(&self) -> Vec<String> {
        if self.is_member && !self.is_attached { self.member_words(&[]) } else { Vec::new() }
    }

    /// Processes that have been members of the group.
    pub fn members_seen(&self) -> usize {
        self.service.log().matches(" is member ").count()
    }

    /// Starts a program.
    pub fn start(&self, name: &str, words: &[&str]) -> Member {
        self.start_as(name, None, words)
    }

    /// Starts a program as another user.
    pub fn start_as(&self, name: &str, user: Option<&str>, words: &[&str]) -> Member {
        let member = Member::spawn(self.command(name, user, words), name, self.dir);
        if self.is_attached {
            self.attach_soon(&member, name, words[0]);
        }
        member
    }

    /// Has a program attached while it runs.
    fn attach_soon(&self, member: &Member, name: &str, program: &str) {
        let (group, place) = (self.group(), self.place());
        let mut attach = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        attach.args(["attach", &member.pid().to_string(), "--group", &group, "--service", &place, "--name", name]);
        attach.arg("--all-anonymous").envs(self.environment());
        attach::soon(attach, member.pid(), program, &self.refused);
    }

    /// Has a program attached that could not be while its memory was looked after by a userfaultfd of its own.
    pub fn attach_again(&self, member: &Member, name: &str, program: &str) {
        if self.refused.forgive(program, attach::OWN_USERFAULTFD) {
            self.attach_soon(member, name, program);
        }
    }

    /// Runs a program to its end, successful or not.
    pub fn run_to_end(&self, name: &str, words: &[&str], seconds: u64) -> Ended {
        let mut member = self.start(name, words);
        let status = member.end(seconds);
        member.until_all_is_read();
        Ended { status, output: member.lines().join("\n"), errors: member.errors() }
    }

    /// Runs a program to its end, which must be a success; returns its output.
    pub fn must(&self, name: &str, words: &[&str], seconds: u64) -> String {
        let ended = self.run_to_end(name, words, seconds);
        assert!(ended.status.success(), "{words:?}: {}: {}", ended.status, ended.errors);
        ended.output
    }

    /// Rests while the members are folded: until the floor is reached, or half a minute is over. Without members there is
    /// nothing to wait for.
    pub fn rest(&self) {
        let end = Instant::now() + REST;
        while self.is_member && self.most_folded.load(Ordering::Relaxed) < self.floor && Instant::now() < end {
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Runs a helper that is no part of what is judged: a client, a tool. It must succeed; returns its output.
    pub fn aside(&self, words: &[&str], input: &str) -> String {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).envs(self.environment()).current_dir(self.dir);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|e| panic!("{words:?}: {e}"));
        let mut pipe = child.stdin.take().expect("a pipe");
        let text = input.to_owned();
        // Output that is not read while input is written would block both.
        let writing = thread::spawn(move || pipe.write_all(text.as_bytes()));
        let output = child.wait_with_output().unwrap_or_else(|e| panic!("{words:?}: {e}"));
        let _ = writing.join();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {}: {errors}", output.status);
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Path of a file of this side, as text.
    pub fn path(&self, name: &str) -> String {
        self.dir.join(name).to_str().expect("a plain path").to_owned()
    }

    /// Writes a file of this side; returns its path.
    pub fn file(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        fs::write(&path, text).expect("write a file");
        path
    }
}
