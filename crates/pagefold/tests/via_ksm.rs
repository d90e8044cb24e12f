//! Members that ksmd merges, the kernel's own merger: started with `pagefold run --via ksm`, and attached while they run.

mod common;

use api::client::Service;
use api::enrol::{Rule, Via};
use api::place::Place;
use common::formats::assert_documented;
use common::service::{member, until};
use common::supervised::{Installed, wait_for};
use common::{json_of, start_merging};
use host::KsmStat;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::{Mutex, PoisonError};

/// Lock of these tests: one starts and stops ksmd, and the other asks whether it runs.
static ALONE: Mutex<()> = Mutex::new(());

/// Pages that each program of this test holds, the same in all.
const PAGES: u64 = 1024;
const APART: &str = "[[group]]\nname = 'acme'\n";
const ONE_DOMAIN: &str = "[service]\none-trust-domain = true\n[[group]]\nname = 'acme'\n";

/// The memory of a program: the same bytes in each that starts with this.
const HOLD: &str = "import ctypes, mmap, os, random, sys
random.seed(7)
held = mmap.mmap(-1, 4 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
held.write(random.randbytes(4 << 20))
libc = ctypes.CDLL(None)
";
/// A filter of system calls, for which the kernel ends the program at any `prctl`.
const FILTER: &str = "word = lambda code, yes, no, k: code.to_bytes(2, 'little') + bytes([yes, no]) + k.to_bytes(4, 'little')
words = [word(0x20, 0, 0, 0), word(0x15, 0, 1, 157), word(6, 0, 0, 0x80000000), word(6, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b''.join(words), 32)
program = ctypes.create_string_buffer(bytes([4, 0, 0, 0, 0, 0, 0, 0]) + ctypes.addressof(code).to_bytes(8, 'little'), 16)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
";
/// A wait for a line, and the question then whether it is merged.
const ASK: &str = "print('ready', flush=True)
sys.stdin.readline()
print(libc.prctl(68, 0, 0, 0, 0), flush=True)
";
/// A fork: the child lives as long as its parent.
const FORK: &str = "child = os.fork()
if child == 0:
    ctypes.CDLL(None).prctl(1, 9)
    while True: __import__('time').sleep(600)
print(child, flush=True)
";

/// A program of this test. It ends with it.
struct Holder {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Holder {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start a program");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, output }
    }

    fn plain(script: &str) -> Self {
        let mut command = Command::new("python3");
        command.args(["-c", script]);
        let mut holder = Self::start(command);
        assert_eq!(holder.line(), "ready");
        holder
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("hear from the program");
        line.trim().to_owned()
    }

    fn tell(&mut self) -> String {
        writeln!(self.child.stdin.as_mut().expect("a pipe")).expect("tell the program");
        self.line()
    }

    fn pid(&self) -> String {
        self.child.id().to_string()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn stat(pid: u32) -> KsmStat {
    KsmStat::of(pid).expect("it runs")
}

/// Memory of a process that lies in frames of ksmd's, by its page tables: ksmd's own count follows later.
fn merged_kib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("it runs");
    let line = text.lines().find_map(|line| line.strip_prefix("KSM:")).expect("Linux 6.8 or newer");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

fn words(output: &Output) -> String {
    assert!(!output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn attach(installed: &Installed, pid: &str) -> Output {
    installed.pagefold(&["attach", pid, "--group", "acme", "--via", "ksm", "--json"])
}

#[test]
fn ksmd_merges_started_and_attached_members_until_they_are_detached() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(ONE_DOMAIN, &[]);
    let mut run = Command::new(installed.path("pagefold"));
    let script = format!("{HOLD}{FORK}{ASK}");
    run.args(["run", "--group", "acme", "--name", "started", "--via", "ksm", "--", "python3", "-c", &script]);
    let mut started = Holder::start({
        run.env("PAGEFOLD_DIR", installed.path("s"));
        run
    });
    let child: u32 = started.line().parse().expect("the pid of its child");
    assert_eq!(started.line(), "ready");
    assert_eq!(stat(child).ksm_merge_any, Some(true), "forked children have the setting");
    // The kernel would end it for the call that is made in it.
    let mut filtered = Holder::plain(&format!("{HOLD}{FILTER}{ASK}"));
    let refused = words(&attach(&installed, &filtered.pid()));
    assert!(refused.contains("does not let it call prctl"), "{refused}");
    let mut attached = Holder::plain(&format!("{HOLD}{ASK}"));
    let said = json_of(&attach(&installed, &attached.pid()));
    assert_documented(&["`pagefold attach --json`"], &said);
    let said = &said[0];
    assert_eq!((&said["via"], &said["groups_hold"]), (&"ksm".into(), &false.into()), "{said}");
    assert!(said["stopped_us"].as_u64() > Some(0) && said["enrolled_bytes"].as_u64() > Some(PAGES * 4096), "{said}");
    let pids = [started.child.id(), attached.child.id()];
    let merging = start_merging();
    let is_merged = |pid: u32| stat(pid).ksm_merging_pages >= Some(PAGES - 8) && merged_kib(pid) >= 4 * (PAGES - 8);
    until(120, "both are merged", || pids.iter().all(|pid| is_merged(*pid)));
    let shown = installed.show("acme");
    assert_documented(&["`pagefold group show --json`"], &shown["members"]);
    let row = member(&shown, "started");
    assert_eq!((&row["state"], &row["via"], &row["fix"]), (&"ksm".into(), &"ksm".into(), &Value::Null), "{row}");
    assert!(row["ksm_pages"].as_u64() >= Some(PAGES - 8), "{row}");
    let text = String::from_utf8(installed.pagefold(&["group", "show", "acme"]).stdout).unwrap();
    assert!(text.contains("groups do not hold there") && text.contains("MiB of it are merged"), "{text}");
    assert!(words(&attach(&installed, &attached.pid())).contains("is a member of group acme already"));

    for pid in &pids {
        json_of(&installed.pagefold(&["detach", &pid.to_string(), "--json"]));
        assert_eq!((stat(*pid).ksm_merge_any, merged_kib(*pid)), (Some(false), 0));
    }
    assert!(installed.members("acme").is_empty());
    drop(merging);
    assert_eq!((started.tell(), attached.tell()), ("0".into(), "0".into()));
    filtered.tell();
    assert_eq!(filtered.child.wait().unwrap().signal(), Some(31), "its filter ends it at its own prctl");
}

#[test]
fn ksm_is_refused_unless_the_host_is_one_trust_domain() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(installed) = Installed::attaching() else { return };
    let supervisor = installed.serve(APART, &[]);
    let holder = Holder::plain(&format!("{HOLD}{ASK}"));
    let run = installed.pagefold(&["run", "--group", "acme", "--via", "ksm", "--", "true"]);
    let rule = Rule { group: "acme".into(), user: Some(0), via: Via::Ksm, ..Rule::default() };
    let service = Service::connect(Place::at(&installed.path("s"))).expect("the service");
    let rule = service.add_rule(rule).expect_err("a rule").to_string();
    let words_of_dry_run = ["attach", &holder.pid(), "--group", "acme", "--via", "ksm", "--dry-run"];
    let dry_run = || installed.pagefold(&words_of_dry_run);
    for refused in [words(&run), words(&attach(&installed, &holder.pid())), words(&dry_run()), rule] {
        assert!(
            refused.contains("groups do not hold there") && refused.contains("one-trust-domain = true"),
            "{refused}"
        );
    }
    assert_eq!(stat(holder.child.id()).ksm_merge_any, Some(false));
    std::fs::write(installed.path("config.toml"), ONE_DOMAIN).unwrap();
    common::supervised::signal(supervisor.0.id(), "HUP");
    wait_for("the new configuration counts", || dry_run().status.success().then_some(()));
    assert_eq!(installed.show("acme")["members"], serde_json::json!([]), "a dry run makes no member");
    let attached = wait_for("the new configuration counts", || {
        let attached = attach(&installed, &holder.pid());
        attached.status.success().then_some(attached)
    });
    let said = String::from_utf8_lossy(&attached.stderr).into_owned();
    let runs = host::Ksm::read().is_some_and(|ksm| ksm.run == 1);
    assert_eq!(said.contains("ksmd does not run"), !runs, "{said}");
    assert_eq!(stat(holder.child.id()).ksm_merge_any, Some(true));
    json_of(&installed.pagefold(&["detach", &holder.pid(), "--json"]));
    assert_eq!(stat(holder.child.id()).ksm_merge_any, Some(false));
}
