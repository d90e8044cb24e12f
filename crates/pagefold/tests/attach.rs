//! `pagefold attach` and `pagefold detach`: running programs become members, and are left as they were before.

mod common;

use api::client::Service;
use api::place::Place;
use common::Afterwards;
use common::built::Built;
use common::formats::assert_documented;
use common::qemu::{Qemu, RAM_BYTES};
use common::service::small_memory;
use common::supervised::{Installed, wait_for, wait_for_within};
use common::{json_of, once_in_ten_times};
use host::{Mapping, Pagemap, ProcessId, ThreadCpu};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const CONFIG: &str = "[[group]]\nname = 'acme'\n";

/// Attaches a process, and has it folded as fast as can be.
fn attach(installed: &Installed, pid: &str) -> Value {
    json_of(&attach_eagerly(installed, &[pid]))
}

/// Attaches what is named, and has it folded as fast as can be.
fn attach_eagerly(installed: &Installed, named: &[&str]) -> Output {
    attach_command(installed, named).output().unwrap()
}

fn attach_command(installed: &Installed, named: &[&str]) -> Command {
    let mut command = Command::new(installed.path("pagefold"));
    command.arg("attach").args(named).args(["--group", "acme", "--all-anonymous", "--json"]);
    command.env("PAGEFOLD_DIR", installed.path("s")).env("PAGEFOLD_EAGER", "1");
    command
}

fn detach(installed: &Installed, pid: &str) -> Value {
    json_of(&installed.pagefold(&["detach", pid, "--json", "--wait", "120"]))
}

fn path(installed: &Installed, name: &str) -> String {
    installed.path(name).to_str().expect("a plain path").to_owned()
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A running `waits.c`.
struct Waits {
    child: Child,
    /// Its process: the child, or one that the child has started.
    pid: u32,
    output: BufReader<std::process::ChildStdout>,
}

impl Waits {
    fn start(installed: &Installed, flags: &[&str]) -> Self {
        Self::start_with(installed, flags, &[])
    }

    /// Starts it, and waits until it has filled its memory.
    fn start_filled(installed: &Installed) -> Self {
        let mut waits = Self::start(installed, &[]);
        waits.tell("stop");
        waits.tell("go");
        waits
    }

    fn start_with(installed: &Installed, flags: &[&str], arguments: &[&str]) -> Self {
        let program = installed.path("waits");
        compile("cc", flags, &program);
        Self::run(Command::new(&program).args(arguments))
    }

    fn run(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start waits");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { pid: child.id(), child, output }
    }

    /// Starts it in a container: as user nobody, in namespaces and a root directory of its own. Nothing is there but it and
    /// its C library.
    fn contained(installed: &Installed, compiler: &str, libraries: &[&str]) -> Self {
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

    fn tell(&mut self, command: &str) -> String {
        let told = writeln!(self.child.stdin.as_mut().expect("a pipe"), "{command}");
        let mut line = String::new();
        self.output.read_line(&mut line).expect("hear from waits");
        assert!(
            told.is_ok() && !line.is_empty(),
            "waits was told {command} ({told:?}); it ended: {:?}",
            self.child.wait()
        );
        line
    }

    fn pid(&self) -> String {
        self.pid.to_string()
    }

    /// Has it write pages that are folded. Returns how many pages are its own then, in mappings of the pool.
    fn break_folds(&mut self) -> u64 {
        self.tell("break");
        own_in_pool(self.pid)
    }

    /// Its mappings, its threads and its open files.
    fn look(&self) -> BTreeMap<&'static str, Vec<String>> {
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
fn own_in_pool(pid: u32) -> u64 {
    let all = Mapping::read_all(pid).expect("its mappings");
    let pooled = all.iter().filter(|mapping| mapping.name.contains("pagefold"));
    pooled.map(|mapping| mapping.usage.anonymous_bytes / 4096).sum()
}

fn compile(compiler: &str, flags: &[&str], program: &Path) {
    compile_source(compiler, flags, program, concat!(env!("CARGO_MANIFEST_DIR"), "/../bench/src/attach/waits.c"));
}

fn compile_source(compiler: &str, flags: &[&str], program: &Path, source: &str) {
    let made = Command::new(compiler).args(["-O1", "-pthread"]).args(flags).arg("-o").arg(program).arg(source).status();
    assert!(made.expect("run a compiler").success());
}

/// The kernel's list of a process's mappings.
///
/// Anonymous neighbours with the same rights count as one: the kernel does not always join them again.
fn mappings(pid: u32) -> Vec<String> {
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
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn member(installed: &Installed, pid: &str) -> Option<Value> {
    let shown = installed.show("acme");
    let found = shown["members"]
        .as_array()?
        .iter()
        .find(|member| member["pid"].as_u64().is_some_and(|found| found.to_string() == pid));
    found.filter(|member| member["connected"] == true).cloned()
}

/// Waits until the program has pages folded.
fn wait_for_folds(installed: &Installed, pid: &str, least: u64) {
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

/// Cycles of attaching and detaching: more for longer tests.
fn cycles() -> usize {
    if std::env::var_os("PAGEFOLD_LONG_TESTS").is_some() { 1000 } else { 3 }
}

/// Asserts that a process has the same mappings, threads and files as before.
fn assert_same(now: &BTreeMap<&str, Vec<String>>, before: &BTreeMap<&str, Vec<String>>, cycle: usize) {
    for (kind, before) in before {
        let new: Vec<_> = now[kind].iter().filter(|one| !before.contains(one)).collect();
        let gone: Vec<_> = before.iter().filter(|one| !now[kind].contains(one)).collect();
        assert!(new.is_empty() && gone.is_empty(), "{kind} after cycle {cycle}: {new:#?} in place of {gone:#?}");
    }
}

fn attach_and_detach(flags: &[&str], cycles: usize) {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    cycle(&installed, &mut Waits::start(&installed, flags), cycles);
}

fn cycle(installed: &Installed, waits: &mut Waits, cycles: usize) {
    let pid = waits.pid();
    for cycle in 0..cycles {
        waits.tell("stop");
        let before = waits.look();
        waits.tell("go");
        let said = attach(installed, &pid);
        assert_documented(&["`pagefold attach --json`"], &said);
        assert_eq!((&said[0]["pid"].to_string(), said[0]["threads"].as_u64()), (&pid, Some(7)), "{said}");
        wait_for_folds(installed, &pid, 1000);
        assert!(waits.break_folds() >= 100, "in cycle {cycle}");
        let said = detach(installed, &pid);
        assert_documented(&["`pagefold detach --json`"], &said);
        assert_eq!(said[0]["group"], "acme");
        waits.tell("stop");
        assert_same(&waits.look(), &before, cycle);
        waits.tell("go");
    }
    assert!(waits.child.try_wait().unwrap().is_none(), "it has ended");
}

#[test]
fn attached_program_is_folded_and_left_as_it_was_before() {
    attach_and_detach(&[], cycles());
}

/// A running `moves.c`.
fn start_moves(installed: &Installed, compiler: &str) -> Waits {
    let program = installed.path("moves");
    compile_source(compiler, &[], &program, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/moves.c"));
    Waits::run(&mut Command::new(&program))
}

/// The kernel refuses to move or to enlarge memory of which parts are folded. And a mapping of the pool that grows would show
/// more of the pool.
fn move_folded_memory(installed: &Installed, moves: &mut Waits) {
    let pid = moves.pid();
    let threads = || Path::new("/proc").join(&pid).join("task").read_dir().unwrap().count();
    assert_eq!(moves.tell("go on"), "ok\n");
    let before = threads();
    attach(installed, &pid);
    assert_eq!(moves.tell("move"), "ok\n");
    detach(installed, &pid);
    assert_eq!(moves.tell("go on"), "ok\n");
    let all = Mapping::read_all(moves.pid).expect("its mappings");
    let left: Vec<_> = all.iter().filter(|mapping| is_changed_code(mapping)).collect();
    assert!(left.is_empty(), "code that is not a file's: {left:#?}");
    assert_eq!(threads(), before);
}

/// Whether a mapping has code that no file holds, but for the kernel's.
fn is_changed_code(mapping: &Mapping) -> bool {
    mapping.execute && (mapping.usage.anonymous_bytes > 0 || mapping.name.is_empty())
}

#[test]
fn folded_memory_is_moved_and_enlarged_as_any_other() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    for compiler in ["cc", "musl-gcc"] {
        let mut moves = start_moves(&installed, compiler);
        for _ in 0..2 {
            move_folded_memory(&installed, &mut moves);
        }
    }
}

#[test]
fn folded_memory_is_moved_and_enlarged_in_forked_child_too() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut moves = start_moves(&installed, "cc");
    let parent = moves.pid();
    attach(&installed, &parent);
    assert_eq!(moves.tell("move"), "ok\n");
    assert_eq!(moves.tell("fork"), "ok\n");
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
    moves.pid = children.trim().parse().expect("one child");
    move_folded_memory(&installed, &mut moves);
}

/// Detaching from a program that locks its memory did not end once, or left it with zeros, or with a jump to nowhere.
#[test]
fn program_that_has_locked_folded_memory_is_left_as_it_was_before() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let program = installed.path("locked");
    compile_source("cc", &[], &program, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/locked.c"));
    for (how, least_locked) in [("all", 2048), ("future", 0), ("page", 1)] {
        let mut locked = Waits::run(&mut Command::new(&program));
        let pid = locked.pid();
        attach(&installed, &pid);
        wait_for_folds(&installed, &pid, 1000);
        assert_eq!(locked.tell(how), "ok\n");
        detach(&installed, &pid);
        assert_eq!(locked.tell("check"), "ok\n", "{how}");
        let all = Mapping::read_all(locked.pid).expect("its mappings");
        assert!(!all.iter().any(|mapping| mapping.name.contains("pagefold")), "{how}");
        let pages = all.iter().map(|mapping| mapping.usage.locked_bytes / 4096).sum::<u64>();
        assert!(pages >= least_locked, "{how}: {pages} pages are locked");
    }
}

/// A program that holds the gate's lock, or whose thread was killed there, was once attached for good.
#[test]
fn program_that_holds_the_lock_of_the_gate_is_detached() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut waits = Waits::start(&installed, &[]);
    let pid = waits.pid();
    attach(&installed, &pid);
    // The agent opens its gate once it has joined.
    let code = wait_for("the gate's code", || {
        let all = Mapping::list(waits.pid).expect("its mappings");
        all.into_iter().find(|mapping| mapping.execute && mapping.name.is_empty())
    });
    // The lock is the second number of the page behind.
    let memory = File::options().write(true).open(format!("/proc/{pid}/mem")).unwrap();
    memory.write_all_at(&1_u32.to_ne_bytes(), code.end.0 + 4).unwrap();
    detach(&installed, &pid);
    assert!(waits.child.try_wait().unwrap().is_none(), "it has ended");
}

#[test]
fn statically_linked_program_is_folded_and_left_as_it_was_before() {
    attach_and_detach(&["-static"], 2);
}

#[test]
fn programs_in_containers_are_folded_and_left_as_they_were_before() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let glibc = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"];
    cycle(&installed, &mut Waits::contained(&installed, "cc", &glibc), 2);
    if Command::new("musl-gcc").arg("--version").output().is_err() {
        return eprintln!("skipped: no musl-gcc here: install musl-tools");
    }
    fs::remove_dir_all(installed.path("root")).unwrap();
    cycle(&installed, &mut Waits::contained(&installed, "musl-gcc", &["/lib/ld-musl-x86_64.so.1"]), 2);
}

#[test]
fn go_program_without_c_library_keeps_its_memory() {
    let Some(installed) = Installed::attaching() else { return };
    let Ok(go) = Command::new("go")
        .arg("version")
        .output()
        .map(|_| "go")
        .or_else(|_| Path::new("/usr/local/go/bin/go").exists().then_some("/usr/local/go/bin/go").ok_or("none"))
    else {
        eprintln!("skipped: no Go here: install golang-go");
        return;
    };
    let source = include_str!("programs/slices.go").replace("// #include <sys/mman.h>\nimport \"C\"\n", "");
    fs::write(installed.path("slices.go"), source).unwrap();
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("go-cache");
    let mut build = Command::new(go);
    build.args(["build", "-o", &path(&installed, "slices"), &path(&installed, "slices.go")]).env("GOCACHE", cache);
    assert!(build.env("CGO_ENABLED", "0").env("GOTOOLCHAIN", "local").status().unwrap().success());
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut child = Command::new(installed.path("slices")).arg("600").stdout(Stdio::null()).spawn().unwrap();
    for _ in 0..2 {
        let pid = child.id().to_string();
        attach(&installed, &pid);
        wait_for_folds(&installed, &pid, 500);
        detach(&installed, &pid);
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("it goes on");
        assert!(!maps.contains("pagefold"), "{maps}");
    }
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert!(child.wait().unwrap().success(), "its memory is not what it wrote");
}

#[test]
fn member_leaves_only_when_there_is_memory_and_nothing_of_the_pool_is_left() {
    let Some(installed) = Installed::attaching() else { return };
    let config = format!("[service]\nreserve = '1TiB'\n{CONFIG}");
    let supervisor = installed.serve(&config, &[]);
    let mut waits = Waits::start(&installed, &[]);
    let pid = waits.pid();
    attach(&installed, &pid);
    wait_for_folds(&installed, &pid, 1000);
    let process = ProcessId::of(waits.child.id()).unwrap();
    let service = Service::connect(Place::at(&installed.path("s"))).unwrap();
    let why = format!("{:#}", service.leave(process).unwrap_err());
    assert!(why.contains("maps pages of group acme"), "{why}");
    let refused = installed.pagefold(&["detach", &pid]);
    assert!(words(&refused).contains("are kept in reserve"), "{refused:?}");
    assert!(member(&installed, &pid).is_some());
    waits.tell("stop");
    drop(supervisor);
}

#[test]
fn tracers_and_suspension_are_no_harm() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    // A stop of the whole process interrupts calls and cuts writes short, and so does another tracer's: `man 7 signal`.
    let mut waits = Waits::start_with(&installed, &[], &["without-pipe", "count"]);
    let pid = waits.pid();
    attach(&installed, &pid);
    let send = |name: &str| assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    for _ in 0..20 {
        send("-STOP");
        std::thread::sleep(Duration::from_millis(30));
        send("-CONT");
        // It may be refused, for a thread that is looked after.
        let _ = Command::new("timeout").args(["1", "strace", "-qq", "-f", "-o", "/dev/null", "-p", &pid]).output();
    }
    wait_for_folds(&installed, &pid, 1000);
    detach(&installed, &pid);
    waits.tell("stop");
}

/// The helper beside an attached process.
fn helper_of(installed: &Installed, pid: &str) -> ProcessId {
    living_helper_of(installed, pid).expect("it runs")
}

/// The same, if it has not ended.
fn living_helper_of(installed: &Installed, pid: &str) -> Option<ProcessId> {
    let service = Service::connect(Place::at(&installed.path("s"))).unwrap();
    let members = service.members().unwrap();
    let member = members.iter().find(|member| member.identity.pid.to_string() == pid).expect("a member");
    ProcessId::of(member.attached_by.expect("attached")).ok().filter(ProcessId::is_alive)
}

#[test]
fn program_goes_on_when_helper_is_killed_at_any_instant() {
    let Some(installed) = Installed::attaching() else { return };
    // Nobody starts other helpers.
    let _supervisor = installed.serve(CONFIG, &["--enrol-apart"]);
    for turn in 0..5_u64 {
        // Calls that are interrupted at that moment answer so.
        let mut waits = Waits::start_with(&installed, &[], &["without-pipe", "count"]);
        let pid = waits.pid();
        attach(&installed, &pid);
        if turn % 2 == 0 {
            wait_for_folds(&installed, &pid, 1);
        }
        std::thread::sleep(Duration::from_millis(turn * 37));
        let helper = helper_of(&installed, &pid);
        assert!(Command::new("kill").args(["-KILL", &helper.pid.to_string()]).status().unwrap().success());
        wait_for("the helper ends", || (!helper.is_alive()).then_some(()));
        // All threads do a whole turn of their work, and nobody traces any of them.
        for _ in 0..2 {
            waits.tell("stop");
            waits.tell("go");
            waits.tell("break");
        }
        for thread in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
            let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap_or_default();
            assert!(!status.contains("State:\tt") && !status.contains("State:\tT"), "{status}");
            assert!(status.is_empty() || status.contains("TracerPid:\t0\n"), "{status}");
        }
        let refused = installed.pagefold(&["detach", &pid]);
        assert!(words(&refused).contains("is gone: the service starts another one soon"), "{refused:?}");
    }
}

#[test]
fn killed_helper_is_replaced_and_program_detached_as_ever() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut waits = Waits::start_with(&installed, &[], &["without-pipe", "count"]);
    let pid = waits.pid();
    attach(&installed, &pid);
    let helper = helper_of(&installed, &pid);
    assert!(Command::new("kill").args(["-KILL", &helper.pid.to_string()]).status().unwrap().success());
    let next = || living_helper_of(&installed, &pid).filter(|next| *next != helper);
    wait_for_within(Duration::from_secs(120), "another helper", next);
    // An agent that has just begun has yet to be given a keeper, and asks for one ever more rarely.
    let folds = || member(&installed, &pid)?["folded_pages"].as_u64().filter(|pages| *pages >= 1000);
    wait_for_within(Duration::from_secs(300), "the next helper lets it fold", folds);
    assert!(waits.break_folds() >= 100);
    detach(&installed, &pid);
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs");
    assert!(!maps.contains("pagefold"), "{maps}");
    waits.tell("stop");
}

/// Attaches a process, and kills the helper as soon as the agent is seen: that has its name, and soon tells of its gate.
fn attach_and_kill_helper(installed: &Installed, pid: u32) {
    let mut attaching = attach_command(installed, &[&pid.to_string()]).stderr(Stdio::null()).spawn().expect("attach");
    let helper = loop {
        match host::children(attaching.id())[..] {
            [helper] => break helper,
            _ => assert!(attaching.try_wait().unwrap().is_none(), "it has no helper"),
        }
    };
    let is_agent = |task: fs::DirEntry| fs::read(task.path().join("comm")).is_ok_and(|name| name == b"pagefold\n");
    let until = Instant::now() + Duration::from_secs(60);
    while !fs::read_dir(format!("/proc/{pid}/task")).expect("it runs").flatten().any(is_agent) {
        assert!(Instant::now() < until, "no agent comes");
    }
    kill_process(Pid::from_raw(helper.cast_signed()).unwrap(), Signal::KILL).expect("kill our own child's child");
    attaching.wait().unwrap();
}

/// The first helper may have led none of the program's calls to the gate, of which the agent has told it alone.
#[test]
fn next_helper_leads_calls_to_the_gate() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let mut moves = start_moves(&installed, "cc");
    let pid = moves.pid();
    attach_and_kill_helper(&installed, moves.pid);
    wait_for_within(Duration::from_secs(120), "another helper", || living_helper_of(&installed, &pid));
    let is_led = |mapping: &Mapping| is_changed_code(mapping) && !mapping.name.is_empty();
    wait_for("calls are led to the gate", || {
        Mapping::read_all(moves.pid).expect("its mappings").iter().any(is_led).then_some(())
    });
    detach(&installed, &pid);
    assert_eq!(moves.tell("go on"), "ok\n");
}

#[test]
fn of_vm_its_ram_is_folded_and_nothing_else() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let sandbox = ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"];
    for more in [&[][..], &sandbox] {
        attach_vm(&installed, more);
    }
}

/// The mappings of a QEMU whose guest is paused, once they have not changed for a second. It frees memory for a while after its start.
fn mappings_at_rest(pid: u32) -> Vec<String> {
    let mut last = Vec::new();
    wait_for("QEMU's mappings are at rest", || {
        std::thread::sleep(Duration::from_secs(1));
        let now = mappings(pid);
        let before = std::mem::replace(&mut last, now.clone());
        (before == now).then_some(now)
    })
}

/// Attaches a QEMU with these further arguments, and detaches it.
fn attach_vm(installed: &Installed, more: &[&str]) {
    let Some(qemu) = Qemu::start("attach", more) else { return };
    let status = fs::read_to_string(format!("/proc/{}/status", qemu.pid())).expect("its status");
    assert_eq!(status.contains("Seccomp:\t2"), !more.is_empty(), "{status}");
    let pid = qemu.pid().to_string();
    let before = mappings_at_rest(qemu.pid());
    let attached = installed.pagefold(&["attach", "--guest", &qemu.name, "--group", "acme", "--json"]);
    let said = json_of(&attached);
    assert_eq!(said[0]["pid"].to_string(), pid, "{said}");
    // QEMU advises its RAM, its firmware and the like to be mergeable.
    let is_ram = |bytes: u64| (RAM_BYTES..RAM_BYTES + (32 << 20)).contains(&bytes);
    assert!(said[0]["enrolled_bytes"].as_u64().is_some_and(is_ram), "{said}");
    let enrolled = || member(installed, &pid)?["enrolled_pages"].as_u64().filter(|pages| *pages > 0);
    assert!(is_ram(wait_for("it is enrolled", enrolled) * 4096));
    detach(installed, &pid);
    assert_eq!(mappings(qemu.pid()), before);
}

/// The file with the agent's code, and which parts of it are there to be executed. None of their pages may be the process's own.
fn agents_code(pid: &str) -> Vec<(u64, u64)> {
    let all = Mapping::read_all(pid.parse().expect("a pid")).expect("its mappings");
    let code = all.iter().filter(|mapping| mapping.execute && mapping.name.starts_with("/memfd:pagefold.agent"));
    code.map(|mapping| {
        assert!(!mapping.write, "{mapping:?}");
        assert_eq!(mapping.usage.anonymous_bytes, 0, "{mapping:?}");
        (mapping.inode, mapping.offset)
    })
    .collect()
}

#[test]
fn all_processes_of_control_group_are_attached() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let name = format!("attach-{}", std::process::id());
    let Some((dir, _afterwards)) = small_memory(&name, 1 << 30) else { return };
    let inner = format!("{dir}/inner");
    fs::create_dir(&inner).expect("make a control group");
    let patiently = format!("(for i in $(seq 300); do rmdir {inner} && break; sleep 0.1; done) > /dev/null 2>&1 &");
    let _inner = Afterwards::run(&patiently);
    // One with less memory would be left alone.
    let (one, other) = (Waits::start_filled(&installed), Waits::start_filled(&installed));
    let outside = Waits::start(&installed, &[]);
    fs::write(format!("{dir}/cgroup.procs"), one.pid()).expect("move a process");
    fs::write(format!("{inner}/cgroup.procs"), other.pid()).expect("move a process");
    let path = format!("/pagefold-test-{name}");
    let attach = ["attach", "--cgroup", &path, "--group", "acme", "--all-anonymous", "--json", "--once"];
    let said = json_of(&installed.pagefold(&attach));
    let mut pids: Vec<String> = said.as_array().unwrap().iter().map(|one| one["pid"].to_string()).collect();
    pids.sort();
    let mut expected = [one.pid(), other.pid()];
    expected.sort();
    assert_eq!(pids, expected);
    assert!(pids.iter().all(|pid| wait_for("it is a member", || member(&installed, pid)).is_object()));
    assert!(member(&installed, &outside.pid()).is_none());
    let [code, its] = [0, 1].map(|n| agents_code(&pids[n]));
    assert!(!code.is_empty() && code == its, "{code:?} {its:?}");
    json_of(&installed.pagefold(&["detach", &pids[0], &pids[1], "--json", "--wait", "120"]));
}

#[test]
fn processes_that_cannot_be_attached_are_refused_with_the_reason() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let refused = |pid: &str, more: &[&str]| {
        let output = installed.pagefold(&[&["attach", pid, "--group", "acme"], more].concat());
        assert!(!output.status.success(), "{output:?}");
        words(&output)
    };
    assert!(refused("2", &["--all-anonymous"]).contains("a thread of the kernel's"));
    let mut waits = Waits::start_filled(&installed);
    let pid = waits.pid();
    assert!(refused(&pid, &[]).contains("see --all-anonymous"));
    let dry = installed.pagefold(&["attach", &pid, "--group", "acme", "--all-anonymous", "--dry-run", "--json"]);
    assert!(json_of(&dry)[0]["enrolled_bytes"].as_u64().is_some_and(|bytes| bytes >= 3072 * 4096));
    assert!(member(&installed, &pid).is_none());
    let filtered = "import ctypes, sys, threading, time
libc = ctypes.CDLL(None)
# All but mremap.
code = ctypes.create_string_buffer(bytes.fromhex('2000000000000000 1500000119000000 0600000001000500 060000000000ff7f'), 32)
program = ctypes.create_string_buffer(bytes([4, 0, 0, 0, 0, 0, 0, 0]) + ctypes.addressof(code).to_bytes(8, 'little'), 16)
def run():
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
    print(flush=True)
    time.sleep(600)
threading.Thread(target=run).start() if 'thread' in sys.argv else run()";
    for (more, why) in
        [(&[][..], "does not let the agent call mremap"), (&["thread"], "threads have different filters")]
    {
        let words = [&["-c", filtered], more].concat();
        let mut child = Running(Command::new("python3").args(words).stdout(Stdio::piped()).spawn().expect("python3"));
        BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        let said = refused(&child.0.id().to_string(), &["--all-anonymous"]);
        assert!(said.contains("(seccomp)") && said.contains(why), "{said}");
    }
    let blind = ["--mount", "sh", "-c", "umount -l /proc; exec sleep 600"];
    let mut inner = Command::new("unshare").args(blind).spawn().expect("unshare");
    let seen = format!("/proc/{}/root/proc/uptime", inner.id());
    wait_for("it sees no processes", || fs::exists(&seen).is_ok_and(|there| !there).then_some(()));
    assert!(refused(&inner.id().to_string(), &["--all-anonymous"]).contains("there is no /proc where it runs"));
    inner.kill().unwrap();
    inner.wait().unwrap();
    json_of(&installed.pagefold(&["attach", &pid, "--group", "acme", "--all-anonymous", "--json"]));
    assert!(refused(&pid, &["--all-anonymous"]).contains("already"));
    let other = installed.pagefold(&["detach", "1"]);
    assert!(words(&other).contains("was not attached"), "{other:?}");
    waits.tell("stop");
}

/// The kernel hides it from its own user: that may open neither its page table, nor anything else that shows its memory.
#[test]
fn program_that_gave_up_roots_rights_is_folded_and_left_as_it_was_before() {
    let Some(installed) = Installed::attaching() else { return };
    let mut supervisor = installed.serve(CONFIG, &[]);
    let mut waits = Waits::start_with(&installed, &[], &["give-up-root"]);
    waits.tell("stop");
    assert_eq!(host::Visibility::of(waits.pid).unwrap(), host::Visibility::RootSinceGivenUp);
    waits.tell("go");
    cycle(&installed, &mut waits, 2);
    // A further supervisor knows it, too. To fold again what was broken, and to leave, takes proofs of the prover's.
    attach(&installed, &waits.pid());
    wait_for_folds(&installed, &waits.pid(), 1000);
    supervisor.kill();
    drop(supervisor);
    let _supervisor = installed.serve(CONFIG, &[]);
    let broken = waits.break_folds();
    assert!(broken >= 100, "{broken}");
    wait_for_within(Duration::from_secs(120), "most of it is folded again", || {
        (own_in_pool(waits.pid) < broken / 2).then_some(())
    });
    detach(&installed, &waits.pid());
    assert!(!mappings(waits.pid).iter().any(|mapping| mapping.contains("pagefold")));
}

/// Page tables that threads of a process have open, in whatever table of files. A thread may end meanwhile.
fn page_tables_of(pid: u32) -> Vec<Pagemap> {
    let mut all = Vec::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task")).expect("its threads").flatten() {
        let tid = thread.file_name().to_str().and_then(|text| text.parse().ok()).and_then(Pid::from_raw);
        for file in fs::read_dir(thread.path().join("fd")).into_iter().flatten().flatten() {
            let is_one = fs::read_link(file.path()).is_ok_and(|target| target.ends_with("pagemap"));
            let number = file.file_name().to_str().and_then(|text| text.parse().ok()).filter(|_| is_one);
            all.extend(number.map(|number| act::file_of_thread(tid.expect("a thread"), number).expect("its file")));
        }
    }
    all.into_iter().map(Pagemap::handed).collect()
}

/// Its user must not learn from it where the host has which page.
#[test]
fn page_table_that_agent_was_given_shows_no_frame_numbers() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    for arguments in [&[][..], &["give-up-root"]] {
        let mut waits = Waits::start_with(&installed, &[], arguments);
        waits.tell("stop");
        waits.tell("go");
        attach(&installed, &waits.pid());
        wait_for_folds(&installed, &waits.pid(), 1000);
        let all = Mapping::read_all(waits.pid).expect("its mappings");
        let end = all.iter().find(|mapping| mapping.name == "[stack]").expect("a stack").end;
        let place = page::HostVirt(end.0 - 4096);
        let frame = |table: &Pagemap| {
            let mut entries = Vec::new();
            table.read(place, 1, &mut entries).expect("its page table");
            assert!(entries[0].present(), "{arguments:?}");
            entries[0].pfn()
        };
        assert!(frame(&Pagemap::open(waits.pid).expect("its page table")).is_some());
        let tables = page_tables_of(waits.pid);
        assert!(!tables.is_empty(), "{arguments:?}");
        assert!(tables.iter().all(|table| frame(table).is_none()), "{arguments:?}");
        detach(&installed, &waits.pid());
        assert!(page_tables_of(waits.pid).is_empty());
    }
}

/// As `ssh-agent` and `gpg-agent` ask for, and as programs are that have more rights than their user.
#[test]
fn process_that_is_hidden_from_its_user_for_another_reason_is_refused() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let as_user = ["--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c"];
    let hides =
        "import ctypes, time; assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0; print(flush=True); time.sleep(600)";
    let mut child = Command::new("setpriv");
    let mut child = Running(child.args(as_user).arg(hides).stdout(Stdio::piped()).spawn().expect("setpriv"));
    assert_eq!(BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut String::new()).unwrap(), 1);
    let refused = |more: &[&str]| {
        let pid = child.0.id().to_string();
        let output = installed.pagefold(&[&["attach", &pid, "--group", "acme", "--all-anonymous"], more].concat());
        assert!(!output.status.success(), "{output:?}");
        words(&output)
    };
    for said in [refused(&[]), refused(&["--dry-run"])] {
        assert!(said.contains("not because it gave up root's rights"), "{said}");
    }
    assert!(member(&installed, &child.0.id().to_string()).is_none());
}

/// Its open files are looked at in each table, and there is nothing against a pair of sockets.
#[test]
fn program_with_thread_that_has_files_of_its_own_is_folded() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let script = "import ctypes, mmap, socket, threading, time
memory = mmap.mmap(-1, 2000 * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(2000): memory[page * 4096:page * 4096 + 4096] = bytes([page % 50 + 1]) * 4096
def apart():
    assert ctypes.CDLL(None).unshare(0x400) == 0
    pair = socket.socketpair()
    print(flush=True)
    pair[0].recv(1)
threading.Thread(target=apart).start()
time.sleep(600)";
    let mut child =
        Running(Command::new("python3").args(["-c", script]).stdout(Stdio::piped()).spawn().expect("python3"));
    BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
    let pid = child.0.id().to_string();
    attach(&installed, &pid);
    wait_for_folds(&installed, &pid, 1000);
    detach(&installed, &pid);
}

/// Processor time of an attached process's agent, and of the program beside it.
fn cost(pid: u32, helper: &ProcessId) -> Duration {
    let agent = ThreadCpu::of_process(pid).expect("its threads").into_iter().filter(|thread| thread.tid != pid);
    agent.chain(ThreadCpu::of_process(helper.pid).expect("its threads")).map(|thread| thread.used).sum()
}

/// MariaDB's agent took 65 ms a second at rest: each round looked at two million pieces of a reservation.
#[test]
fn attached_program_at_rest_costs_next_to_nothing_whatever_it_has_reserved() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let program = installed.path("reserves");
    compile_source("cc", &["-Wall"], &program, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/reserves.c"));
    let mut reserves = Running(Command::new(&program).stdout(Stdio::piped()).spawn().expect("start it"));
    let output = reserves.0.stdout.take().expect("a pipe");
    assert_eq!(BufReader::new(output).lines().next().expect("a line").expect("text"), "ready");
    let pid = reserves.0.id().to_string();
    attach(&installed, &pid);
    wait_for_folds(&installed, &pid, 8000);
    let helper = helper_of(&installed, &pid);
    // The longest time between two rounds, and then some.
    let time = Duration::from_secs(11);
    let used = || {
        let before = cost(reserves.0.id(), &helper);
        std::thread::sleep(time);
        cost(reserves.0.id(), &helper) - before
    };
    // It took 2.4% of a slow processor.
    once_in_ten_times(used, |used| *used < time / 25);
}

/// A running `filtered.c`, which lets itself make only these system calls.
struct Filtered(Running, BufReader<std::process::ChildStdout>);

impl Filtered {
    fn start(program: &Built, calls: &[String]) -> Self {
        let mut command = Command::new(program.program());
        let mut child = command.args(calls).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start it");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut filtered = Self(Running(child), output);
        assert_eq!(filtered.ask("c"), "good\n", "it has its filter");
        filtered
    }

    fn ask(&mut self, request: &str) -> String {
        write!(self.0.0.stdin.as_mut().expect("a pipe"), "{request}").expect("ask it");
        let mut line = String::new();
        self.1.read_line(&mut line).expect("hear from it");
        line
    }

    fn pid(&self) -> String {
        self.0.0.id().to_string()
    }
}

#[test]
fn program_that_filters_its_system_calls_is_attached_if_the_agents_are_allowed() {
    let Some(installed) = Installed::attaching() else { return };
    let Some(program) = Built::new("filtered.c") else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let listed = json_of(&Command::new(installed.path("pagefold-attach")).arg("--calls").output().expect("ask it"));
    let number_of = |call: &Value| (call["name"].as_str().unwrap().to_owned(), call["number"].to_string());
    let calls: Vec<(String, String)> = listed.as_array().expect("a list").iter().map(number_of).collect();
    let but = |left_out: &str| {
        calls.iter().filter(|(name, _)| name != left_out).map(|(_, number)| number.clone()).collect::<Vec<_>>()
    };

    let mut filtered = Filtered::start(&program, &but(""));
    let pid = filtered.pid();
    for _ in 0..2 {
        attach(&installed, &pid);
        wait_for_folds(&installed, &pid, 1500);
        assert_eq!([filtered.ask("c"), filtered.ask("w")], ["good\n", "good\n"]);
        wait_for_folds(&installed, &pid, 1500);
        detach(&installed, &pid);
        assert_eq!([filtered.ask("c"), filtered.ask("w")], ["good\n", "good\n"]);
    }

    // A thread of the agent's must not have more rights than the program, which has one filter more from here on.
    attach(&installed, &pid);
    wait_for_folds(&installed, &pid, 1500);
    assert_eq!(filtered.ask("f"), "good\n");
    wait_for("the agent has left", || member(&installed, &pid).is_none().then_some(()));
    assert_eq!(filtered.ask("c"), "good\n");

    for missing in ["mremap", "restart_syscall", "clone"] {
        let mut filtered = Filtered::start(&program, &but(missing));
        let pid = filtered.pid();
        for more in [&["--dry-run"][..], &[]] {
            let words = [&["attach", &pid, "--group", "acme", "--all-anonymous"], more].concat();
            let refused = installed.pagefold(&words);
            assert!(!refused.status.success(), "{refused:?}");
            let why = format!("(seccomp), and does not let the agent call {missing}");
            assert!(self::words(&refused).contains(&why), "{refused:?}");
        }
        assert_eq!(filtered.ask("w"), "good\n");
        assert!(member(&installed, &pid).is_none());
    }
}

/// Podman on this host, and a root directory for containers in which nothing is but `waits.c`.
struct Podman {
    root: String,
    containers: Vec<String>,
    /// The directory of a user without any rights, if that runs it.
    home: Option<String>,
    _afterwards: Option<Afterwards>,
}

impl Podman {
    /// Says why if it does not run containers here.
    fn find(installed: &Installed, is_rootless: bool) -> Option<Self> {
        if Command::new("podman").arg("--version").output().is_err() {
            eprintln!("skipped: no podman here: install podman and runc");
            return None;
        }
        let root = installed.path("podman");
        for dir in ["", "proc", "sys", "dev", "etc", "run", "tmp"] {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        compile("cc", &["-static"], &root.join("waits"));
        let home = is_rootless.then(|| path(installed, "home"));
        // A process that keeps the user's namespaces stays behind.
        let stop = |home: &String| Afterwards::run(&format!("kill -9 $(cat {home}/libpod/tmp/pause.pid) 2>/dev/null"));
        let _afterwards = home.as_ref().map(stop);
        let root = root.to_str().expect("a plain path").to_owned();
        if let Some(home) = &home {
            fs::create_dir(home).expect("make a directory");
            let given = Command::new("chown").args(["-R", "65534:65534", &root, home]).status().expect("run chown");
            assert!(given.success(), "{given}");
        }
        let podman = Self { root, containers: Vec::new(), home, _afterwards };
        let tried = podman.run(&["--rm"]).stdin(Stdio::null()).output().expect("run podman");
        if !tried.status.success() {
            eprintln!("skipped: podman runs no container here: {}", words(&tried));
            return None;
        }
        Some(podman)
    }

    fn command(&self) -> Command {
        let Some(home) = &self.home else { return Command::new("podman") };
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--", "podman"]);
        command.env("HOME", home).env("XDG_RUNTIME_DIR", home).current_dir(&self.root);
        command
    }

    /// A command that runs a container.
    fn run(&self, arguments: &[&str]) -> Command {
        let mut command = self.command();
        // Where both versions of control groups are there, crun refuses to run. The limits take no right to raise them.
        if Command::new("runc").arg("--version").output().is_ok() {
            command.args(["--runtime", "runc"]);
        }
        command.args(["--cgroup-manager", "cgroupfs", "run", "--network", "none"]);
        command.args(["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000"]).args(arguments);
        command.args(["--rootfs", &self.root, "/waits"]);
        command
    }

    /// Starts a container. Returns its program, and its name.
    fn start(&mut self, arguments: &[&str]) -> (Waits, String) {
        let name = format!("pagefold-test-{}-{}", std::process::id(), self.containers.len());
        self.containers.push(name.clone());
        let mut waits = Waits::run(&mut self.run(&[&["-i", "--rm", "--name", &name], arguments].concat()));
        waits.tell("stop");
        waits.tell("go");
        let asked = self.command().args(["container", "inspect", "-f", "{{.State.Pid}}", &name]).output();
        let said = String::from_utf8(asked.expect("run podman").stdout).expect("text");
        waits.pid = said.trim().parse().expect("its process");
        (waits, name)
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        for name in &self.containers {
            let _ = self.command().args(["rm", "-f", "-t", "0", name]).output();
        }
    }
}

/// A container of LXC's with LXC's default filter of system calls, in which `waits.c` runs. It ends with this.
struct Lxc<'a>(&'a Installed, Waits);

impl<'a> Lxc<'a> {
    fn start(installed: &'a Installed) -> Option<Self> {
        let filter = Path::new("/usr/share/lxc/config/common.seccomp");
        if !filter.exists() {
            eprintln!("skipped: no LXC here: install lxc");
            return None;
        }
        let root = installed.path("lxc/root");
        for dir in ["proc", "sys", "dev"] {
            fs::create_dir_all(root.join(dir)).unwrap();
        }
        compile("cc", &["-static"], &root.join("waits"));
        let lines = [
            format!("lxc.rootfs.path = dir:{}", root.display()),
            format!("lxc.seccomp.profile = {}", filter.display()),
            "lxc.net.0.type = empty\nlxc.init.cmd = /waits\nlxc.console.path = none".to_owned(),
            "lxc.mount.auto = proc:mixed sys:ro\n".to_owned(),
        ];
        fs::write(installed.path("lxc.conf"), lines.join("\n")).expect("write a configuration");
        let mut command = Self::command(installed, "lxc-start");
        let waits = Waits::run(command.args(["-F", "-f", &path(installed, "lxc.conf")]));
        let mut this = Self(installed, waits);
        this.1.tell("stop");
        this.1.tell("go");
        let asked = Self::command(installed, "lxc-info").arg("-pH").output().expect("run lxc-info");
        this.1.pid = String::from_utf8_lossy(&asked.stdout).trim().parse().expect("its process");
        Some(this)
    }

    fn command(installed: &Installed, program: &str) -> Command {
        let mut command = Command::new(program);
        command.args(["-P", &path(installed, "lxc"), "-n", "waits"]);
        command
    }
}

impl Drop for Lxc<'_> {
    fn drop(&mut self) {
        let _ = Self::command(self.0, "lxc-stop").arg("-k").output();
    }
}

#[test]
fn container_with_default_filter_of_lxc_is_folded_and_left_as_it_was_before() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let Some(mut lxc) = Lxc::start(&installed) else { return };
    let status = fs::read_to_string(format!("/proc/{}/status", lxc.1.pid)).expect("its status");
    assert!(status.contains("Seccomp:\t2"), "it has no filter: {status}");
    cycle(&installed, &mut lxc.1, 1);
}

/// The default filter of Docker 20.10: that of Podman, less calls that it allows only with rights which containers do not
/// have. Newer ones allow `process_vm_readv`.
fn filter_of_docker(installed: &Installed) -> String {
    let podmans = fs::read("/usr/share/containers/seccomp.json").expect("read Podman's default filter");
    let mut filter: Value = serde_json::from_slice(&podmans).expect("JSON");
    filter["defaultErrnoRet"] = 1.into();
    let forbidden = ["get_mempolicy", "kcmp", "pidfd_getfd", "process_vm_readv", "statmount", "userfaultfd"];
    let rules = filter["syscalls"].as_array_mut().expect("rules");
    for rule in &mut *rules {
        let names = rule["names"].as_array_mut().expect("names");
        names.retain(|name| !forbidden.contains(&name.as_str().expect("a name")));
    }
    rules.retain(|rule| rule["names"] != serde_json::json!([]));
    fs::write(installed.path("docker.json"), filter.to_string()).expect("write a filter");
    format!("seccomp={}", path(installed, "docker.json"))
}

#[test]
fn containers_with_default_filters_of_podman_and_docker_are_folded_and_left_as_they_were_before() {
    let Some(installed) = Installed::attaching() else { return };
    let Some(mut podman) = Podman::find(&installed, false) else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let (podmans, name) = podman.start(&[]);
    let (dockers, _) = podman.start(&["--security-opt", &filter_of_docker(&installed)]);
    let groups = fs::read_to_string(format!("/proc/{}/cgroup", dockers.pid)).expect("its control groups");
    let group = groups.lines().last().and_then(|line| line.rsplit(':').next()).expect("a control group").to_owned();
    let mut both = [(podmans, ["--container", &name]), (dockers, ["--cgroup", &group])];
    let before = both.each_mut().map(|(waits, place)| {
        let status = fs::read_to_string(format!("/proc/{}/status", waits.pid)).expect("its status");
        assert!(status.contains("Seccomp:\t2"), "it has no filter: {status}");
        waits.tell("stop");
        let before = waits.look();
        waits.tell("go");
        let attached = attach_eagerly(&installed, place);
        let is_member = || member(&installed, &waits.pid());
        wait_for_within(Duration::from_secs(60), &format!("it is a member: {attached:?}"), is_member);
        before
    });
    for ((waits, place), before) in both.iter_mut().zip(before) {
        wait_for_folds(&installed, &waits.pid(), 1000);
        assert!(waits.break_folds() >= 100);
        installed.pagefold(&[&["detach", "--wait", "120"], &place[..]].concat());
        assert!(member(&installed, &waits.pid()).is_none());
        waits.tell("stop");
        assert_same(&waits.look(), &before, 0);
        waits.tell("go");
        assert!(waits.child.try_wait().unwrap().is_none(), "it has ended");
    }
}

/// The container's users are not the host's, and its control group may be that of the user's session.
#[test]
fn container_of_user_without_rights_is_folded_and_left_as_it_was_before() {
    let Some(installed) = Installed::attaching() else { return };
    let Some(mut podman) = Podman::find(&installed, true) else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let (mut waits, _) = podman.start(&[]);
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/user")).expect("its namespace");
    assert_ne!(namespace(&waits.pid()), namespace("self"));
    cycle(&installed, &mut waits, 2);
}

#[test]
fn bench_counts_what_is_stopped_interrupted_and_left() {
    let Some(installed) = Installed::attaching() else { return };
    let output = Command::new(installed.path("pagefold")).args(["bench", "attach", "--cycles", "2", "--json"]).output();
    let said = json_of(&output.expect("run the bench"));
    assert_documented(&["`pagefold bench attach --json`"], &said);
    assert_eq!([&said["cycles"], &said["leftovers"], &said["eintr"]], [2, 0, 0], "{said}");
    for times in ["stopped_us", "cycle_ms"] {
        let time = |part: &str| said[times][part].as_u64().unwrap_or_default();
        assert!(0 < time("p50") && time("p50") <= time("p99") && time("p99") <= time("max"), "{said}");
    }
}
