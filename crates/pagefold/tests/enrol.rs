//! Rules: running processes become members, those that start later too, and each that does not has a reason.

mod common;

use common::formats::assert_documented;
use common::service::{cgroup_path, small_memory};
use common::supervised::{Installed, signal, wait_for_within};
use common::{Afterwards, json_of};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longest time for anything to happen on a busy machine: 2 minutes.
const PATIENCE: Duration = Duration::from_secs(120);
/// Pages of each process that all have, and as many of its own: 4 MiB each.
const HALF: usize = 1024;

/// Control groups of a test, below one that nobody else has.
struct Places {
    dir: String,
    _afterwards: (Afterwards, Afterwards),
}

impl Places {
    fn new(name: &str, parts: &[&str]) -> Option<Self> {
        let name = format!("enrol-{name}-{}", common::world());
        let (dir, afterwards) = small_memory(&name, 12 << 30)?;
        parts.iter().for_each(|part| fs::create_dir(format!("{dir}/{part}")).expect("make a control group"));
        let patiently = format!("(for i in $(seq 300); do rmdir {dir}/* && break; sleep 0.1; done) > /dev/null 2>&1 &");
        Some(Self { dir, _afterwards: (afterwards, Afterwards::run(&patiently)) })
    }

    /// The path of a control group, as rules name it.
    fn path(&self, part: &str) -> String {
        format!("{}/{part}", cgroup_path(&self.dir))
    }

    /// Starts a program in a control group.
    fn start(&self, part: &str, words: &[&str]) -> Holder {
        let script = format!("echo $$ > {}/{part}/cgroup.procs && exec \"$@\"", self.dir);
        let mut command = Command::new("sh");
        command.args(["-c", &script, "sh"]).args(words);
        Holder::of(command)
    }

    /// Starts a process that holds 8 MiB, half of which all such processes have.
    fn hold(&self, part: &str, number: usize) -> Holder {
        let program = programs().join("known_pages");
        self.start(part, &[program.to_str().expect("a plain path")]).filled(number)
    }
}

/// The directory of the programs that are tested.
fn programs() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_pagefold")).parent().expect("a directory")
}

/// A running program that ends with the test.
struct Holder {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
    ends_by_itself: bool,
}

impl Holder {
    fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().expect("a pipe"), "{line}").expect("tell the program");
        let mut answer = String::new();
        self.output.read_line(&mut answer).expect("hear from the program");
        assert_eq!(answer.trim(), "ok", "{line}");
    }

    fn filled(mut self, number: usize) -> Self {
        self.tell(&format!("alloc a {}", 2 * HALF));
        self.tell(&format!("fill a 0 {HALF} 7"));
        self.tell(&format!("fill a {HALF} {HALF} {}", 1_000_000 + number * HALF));
        self
    }

    fn of(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start a program");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, output, ends_by_itself: false }
    }

    fn pid(&self) -> u64 {
        self.child.id().into()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // A container ends with its first process, which ends when its input does.
        drop(self.child.stdin.take());
        for _ in 0..100 {
            if !self.ends_by_itself || matches!(self.child.try_wait(), Ok(Some(_))) {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn until<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    wait_for_within(PATIENCE, what, look)
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

fn is_member(installed: &Installed, holder: &Holder) -> bool {
    let shown = installed.show("acme");
    list(&shown, "members").iter().any(|member| member["pid"] == holder.pid() && member["connected"] == true)
}

fn rule(path: &str) -> String {
    format!("[[enrol]]\ngroup = 'acme'\ncgroup = '{path}'\nall-anonymous = true\n")
}

const GROUP: &str = "[[group]]\nname = 'acme'\n";

/// The program beside each member.
const ATTACHER: &str = "pagefold-attach";

/// The service's processes, or those of them whose arguments have this word, of the first two.
fn ours(installed: &Installed, word: &str) -> Vec<u32> {
    let is_ours = |pid: &u32| {
        let exe = fs::read_link(format!("/proc/{pid}/exe")).ok();
        let arguments = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        exe.is_some_and(|exe| exe.starts_with(installed.dir.path()))
            && arguments.split('\0').take(2).any(|argument| argument.ends_with(word))
    };
    host::pids().unwrap().into_iter().filter(is_ours).collect()
}

/// Their processor time, in seconds.
fn cpu_s(installed: &Installed, word: &str) -> f64 {
    let ticks = |pid: u32| host::ProcessStat::read(pid).map_or(0, |stat| stat.cpu_ticks);
    ours(installed, word).into_iter().map(ticks).sum::<u64>() as f64 / 100.0
}

fn agents_cpu_s(installed: &Installed) -> f64 {
    installed.show("acme")["agent_cpu_s"].as_f64().unwrap_or_default()
}

#[test]
fn processes_that_run_and_that_start_later_are_enrolled_by_one_rule() {
    let Some(installed) = Installed::attaching() else { return };
    let Some(places) = Places::new("many", &["acme-1", "acme-2", "other"]) else { return };
    let long = std::env::var_os("PAGEFOLD_SOAK_SECONDS").is_some();
    let count = if long { 500 } else { 10 };
    let outside = places.hold("other", count);
    let mut holders: Vec<Holder> = (0..count - 2).map(|n| places.hold("acme-1", n)).collect();
    let config = format!("{GROUP}{}", rule(&places.path("acme-*")));
    let _supervisor = installed.serve(&config, &["--enrol-apart"]);
    let mut enroll = Command::new(installed.path("pagefold"));
    enroll.args(["enrol", "apply", "--service"]).arg(installed.path("s"));
    if !long {
        enroll.env("PAGEFOLD_EAGER", "1");
    }
    let mut enroller = Holder::of(enroll);
    let members = || {
        let plan = json_of(&installed.pagefold(&["enrol", "plan", "--json"]));
        plan.as_array().expect("a list").iter().filter(|one| one["decision"] == "member").count()
    };
    let began = Instant::now();
    until("all that run are members", || (members() == count - 2).then_some(()));
    eprintln!("{} processes enrolled in {:?}", holders.len(), began.elapsed());
    let began = Instant::now();
    holders.extend((count - 2..count).map(|n| places.hold("acme-2", n)));
    until("those that started later are members", || (members() == count).then_some(()));
    eprintln!("two more enrolled in {:?}", began.elapsed());
    // All but 10% of the pages that all have share a frame.
    let common = (count * HALF) as u64;
    let shown = until("nine tenths of what is common are folded", || {
        std::thread::sleep(Duration::from_millis(500));
        Some(installed.show("acme")).filter(|shown| shown["sharing_pages"].as_u64() >= Some(common * 9 / 10))
    });
    eprintln!("after {:?}, of {common} pages: {} folded", began.elapsed(), shown["sharing_pages"]);
    assert!(!is_member(&installed, &outside));
    assert_documented(&["`pagefold enrol plan --json`"], &json_of(&installed.pagefold(&["enrol", "plan", "--json"])));
    assert!(enroller.child.try_wait().unwrap().is_none(), "the enroller has ended");
    if long {
        assert_cheap_at_rest(&installed);
    }
}

/// Parts of the service whose processor time is told apart, by a word of their first two arguments.
const PARTS: [&str; 5] = ["pagefoldd", "enrol", "pagefold-prove", "worker", ATTACHER];
/// Bounds of the service: percents of a processor without the worker, and MiB of private memory beside the index. The
/// worker takes more: see docs/performance.md.
const AT_REST: [f64; 2] = [1.0, 64.0];

/// Measures the service, the programs beside members and the agents while nothing changes.
fn assert_cheap_at_rest(installed: &Installed) {
    // Agents and helpers look ever more rarely.
    std::thread::sleep(Duration::from_secs(180));
    let look = || (PARTS.map(|part| cpu_s(installed, part)), agents_cpu_s(installed));
    let (before, began) = (look(), Instant::now());
    std::thread::sleep(Duration::from_secs(90));
    let now = look();
    let percent = |now: f64, before: f64| (now - before) / began.elapsed().as_secs_f64() * 100.0;
    let cpu: [f64; 5] = std::array::from_fn(|n| percent(now.0[n], before.0[n]));
    let private: [u64; 5] =
        PARTS.map(|part| ours(installed, part).into_iter().map(|pid| host::anonymous_bytes(pid).unwrap_or(0)).sum());
    let shown = installed.show("acme");
    let bytes = |key: &str| shown[key].as_u64().unwrap_or_else(|| panic!("no {key} in {shown}"));
    for (part, (cpu, private)) in PARTS.iter().zip(cpu.iter().zip(private)) {
        eprintln!("{part:<16} {cpu:>6.2}% of a processor, {:>6.1} MiB private", mib(private));
    }
    eprintln!("agents           {:>6.2}% of a processor", percent(now.1, before.1));
    eprintln!("index {:.1} MiB; saved {:.1} MiB", mib(bytes("index_bytes")), mib(bytes("saved_bytes")));
    let service = [cpu[..3].iter().sum(), mib(private[..4].iter().sum::<u64>() - bytes("index_bytes"))];
    assert!(service[0] < AT_REST[0] && service[1] < AT_REST[1], "{service:?}, {AT_REST:?}");
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[test]
fn process_that_is_not_attached_has_a_reason_and_detached_stays_detached() {
    let Some(installed) = Installed::attaching() else { return };
    let Some(places) = Places::new("reasons", &["a", "b"]) else { return };
    let filtered = "import ctypes, time
libc = ctypes.CDLL(None)
# All but mremap.
code = ctypes.create_string_buffer(bytes.fromhex('2000000000000000 1500000119000000 0600000001000500 060000000000ff7f'), 32)
program = ctypes.create_string_buffer(bytes([4, 0, 0, 0, 0, 0, 0, 0]) + ctypes.addressof(code).to_bytes(8, 'little'), 16)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
held = bytes(8 << 20)
print('ok', flush=True)
time.sleep(600)";
    let (small, mut filtered) = (places.start("a", &["sleep", "600"]), places.start("a", &["python3", "-c", filtered]));
    filtered.output.read_line(&mut String::new()).expect("it has its filter");
    let (one, other) = (places.hold("a", 1), places.hold("b", 2));
    let mut supervisor = installed.serve(&format!("{GROUP}{}", rule(&places.path("a"))), &[]);
    until("it is a member", || is_member(&installed, &one).then_some(()));
    let reasons = until("there are reasons", || {
        let shown = installed.show("acme");
        Some(list(&shown, "not_attached").to_vec()).filter(|all| all.len() == 2)
    });
    let of = |holder: &Holder| reasons.iter().find(|one| one["pid"] == holder.pid()).expect("a reason");
    assert!(of(&small)["why"].as_str().unwrap().contains("and the rule wants 4.0 MiB at least"), "{reasons:?}");
    assert!(of(&small)["again_s"].is_null());
    assert!(of(&filtered)["why"].as_str().unwrap().contains("(seccomp)"), "{reasons:?}");
    assert!(of(&filtered)["again_s"].as_u64().is_some_and(|seconds| seconds <= 10));
    assert!(installed.log().contains("is not attached by a rule: it filters its system calls"), "{}", installed.log());
    let words = String::from_utf8(installed.pagefold(&["group", "show", "acme"]).stdout).unwrap();
    assert!(words.contains("Not attached, though a rule fits") && words.contains("it is tried again in"), "{words}");
    let tries = |text: &str| text.matches("is not attached by a rule").count();
    assert_eq!(tries(&installed.log()), 1, "{}", installed.log());

    json_of(&installed.pagefold(&["detach", &one.pid().to_string(), "--json", "--wait", "120"]));
    // Another supervisor knows of it, too, and carries out the rules that there are then.
    supervisor.kill();
    let config = format!("{GROUP}{}{}", rule(&places.path("a")), rule(&places.path("b")));
    let supervisor = installed.serve(&config, &[]);
    until("it is a member by the new rule", || is_member(&installed, &other).then_some(()));
    let why = "was detached by hand, and no rule attaches it again";
    until("it stays detached", || installed.log().contains(why).then_some(()));
    assert!(!is_member(&installed, &one));

    fs::write(installed.path("config.toml"), GROUP).unwrap();
    signal(supervisor.0.id(), "HUP");
    until("there is no rule", || {
        installed.log().contains("0 rules that enrol running processes, 2 before").then_some(())
    });
    until("no reason is left", || list(&installed.show("acme"), "not_attached").is_empty().then_some(()));
    assert!(is_member(&installed, &other), "a member stays one");
}

#[test]
fn rule_has_ksmd_merge_what_fits() {
    let Some(installed) = Installed::attaching() else { return };
    let Some(places) = Places::new("ksm", &["a"]) else { return };
    let holder = places.hold("a", 1);
    let config = format!("[service]\none-trust-domain = true\n{GROUP}{}via = 'ksm'\n", rule(&places.path("a")));
    let _supervisor = installed.serve(&config, &[]);
    until("it is a member", || {
        let shown = installed.show("acme");
        let is_it = |member: &Value| member["pid"] == holder.pid() && member["via"] == "ksm";
        list(&shown, "members").iter().any(is_it).then_some(())
    });
    let is_merged = || host::KsmStat::of(holder.child.id()).expect("it runs").ksm_merge_any;
    until("it asks for merging", || (is_merged() == Some(true)).then_some(()));
    // The program that has had it ask for that reports, and ends.
    until("nobody stays beside it", || ours(&installed, ATTACHER).is_empty().then_some(()));
    json_of(&installed.pagefold(&["detach", &holder.pid().to_string(), "--json"]));
    assert_eq!(is_merged(), Some(false));
}

#[test]
fn attached_control_group_also_enrols_what_starts_later() {
    let Some(installed) = Installed::attaching() else { return };
    let Some(places) = Places::new("later", &["a", "b"]) else { return };
    let _supervisor = installed.serve(GROUP, &[]);
    let first = places.hold("a", 1);
    let path = places.path("a");
    let attach = ["attach", "--cgroup", &path, "--group", "acme", "--all-anonymous", "--json"];
    let said = json_of(&installed.pagefold(&attach));
    assert_eq!(said[0]["pid"], first.pid(), "{said}");
    let later = places.hold("a", 2);
    until("what starts later is a member", || is_member(&installed, &later).then_some(()));
    let said = json_of(&installed.pagefold(&["detach", "--cgroup", &path, "--json", "--wait", "120"]));
    assert_eq!(said.as_array().map(Vec::len), Some(2), "{said}");
    assert_eq!(json_of(&installed.pagefold(&["enrol", "plan", "--json"])), Value::Array(Vec::new()));
}

/// A container of LXC's, whose files are the host's. Its first process holds pages, and it ends with that.
fn container(installed: &Installed, name: &str) -> Holder {
    let root = installed.path("root");
    let mut config = format!(
        "lxc.uts.name = inside\nlxc.rootfs.path = dir:{}\nlxc.net.0.type = empty\nlxc.autodev = 1\n\
         lxc.mount.auto = proc:mixed sys:ro\nlxc.console.path = none\nlxc.init.cmd = /opt/known_pages\n\
         lxc.mount.entry = {} opt none bind,ro 0 0\n",
        root.display(),
        programs().display()
    );
    for dir in ["usr", "lib", "lib64", "bin"] {
        config += &format!("lxc.mount.entry = /{dir} {dir} none bind,ro 0 0\n");
    }
    fs::create_dir_all(installed.path("lxc")).expect("make a directory");
    for dir in ["usr", "lib", "lib64", "bin", "opt", "proc", "dev", "sys"] {
        fs::create_dir_all(root.join(dir)).expect("make a directory");
    }
    fs::write(installed.path("lxc.conf"), config).expect("write a configuration");
    let mut command = Command::new("lxc-start");
    command.args(["-F", "-n", name, "-P"]).arg(installed.path("lxc")).arg("-f").arg(installed.path("lxc.conf"));
    let mut holder = Holder::of(command);
    holder.ends_by_itself = true;
    holder.filled(1)
}

#[test]
fn attached_container_also_enrols_what_starts_in_it_later() {
    let Some(installed) = Installed::attaching() else { return };
    if Command::new("lxc-start").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("skipped: no lxc-start here: install lxc");
        return;
    }
    let _supervisor = installed.serve(GROUP, &[]);
    let name = format!("pagefold-enrol-{}", common::world());
    let _first = container(&installed, &name);
    let attach = ["attach", "--container", &name, "--group", "acme", "--all-anonymous", "--json"];
    let said = json_of(&installed.pagefold(&attach));
    assert_eq!(said.as_array().map(Vec::len), Some(1), "{said}");
    let mut enter = Command::new("lxc-attach");
    enter.args(["-n", &name, "-P"]).arg(installed.path("lxc")).args(["--", "/opt/known_pages"]);
    let mut later = Holder::of(enter);
    later.ends_by_itself = true;
    let _later = later.filled(2);
    until("what starts later is a member", || {
        let plan = json_of(&installed.pagefold(&["enrol", "plan", "--json"]));
        let is_member =
            |one: &&Value| one["decision"] == "member" && one["rule"] == format!("container {name}").as_str();
        (plan.as_array().expect("a list").iter().filter(is_member).count() == 2).then_some(())
    });
    until("both have folded what they have in common", || {
        (installed.show("acme")["sharing_pages"].as_u64() >= Some(2 * HALF as u64 * 9 / 10)).then_some(())
    });
    let said = json_of(&installed.pagefold(&["detach", "--container", &name, "--json", "--wait", "120"]));
    assert_eq!(said.as_array().map(Vec::len), Some(2), "{said}");
    let nobody = installed.pagefold(&["attach", "--container", "no-such", "--group", "acme"]);
    assert_eq!(nobody.status.code(), Some(2), "{nobody:?}");
}
