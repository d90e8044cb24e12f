//! Folded programs behave as without folding. These programs make system calls without the C library, lock their
//! memory, or fork beside threads that allocate.
//!
//! Their sources are in `programs/`. Each test builds its own, so that each can also be built and tried by hand.

mod common;

use common::number;
use common::service::{Member, Service, cannot_fold, find_member, seconds, until};
use guest::qmp::Qmp;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const GROUP: &str = "acme";
const ALL: &[&str] = &["--all-anonymous"];
/// Time-out of a program that locks its memory or forks, in seconds: at least twice its time without folding.
const PATIENCE: u64 = 20;

/// A program built for a test. Dropping it removes the program.
struct Built {
    program: PathBuf,
    _dir: TempDir,
}

impl Built {
    /// Builds a program of `programs/`; `None`, with the reason printed, if its compiler is missing.
    fn new(source: &str) -> Option<Self> {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(source);
        let program = dir.path().join(file.file_stem().expect("a name"));
        let mut compiler = if source.ends_with(".go") { go() } else { cc() };
        compiler.arg("-o").arg(&program).arg(file);
        compile(compiler).then_some(Self { program, _dir: dir })
    }

    fn program(&self) -> &str {
        self.program.to_str().expect("a plain path")
    }
}

fn cc() -> Command {
    let mut command = Command::new("cc");
    command.args(["-O2", "-Wall", "-pthread"]);
    command
}

fn go() -> Command {
    let mut command = Command::new("go");
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("go-cache");
    command.arg("build").env("CGO_ENABLED", "1").env("GOCACHE", cache).env("GOFLAGS", "").env("GOTOOLCHAIN", "local");
    command
}

/// Runs a compiler; `false`, with the reason printed, if it is missing.
fn compile(mut command: Command) -> bool {
    match command.output() {
        Ok(output) => {
            assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
            true
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {
            eprintln!("skipped: there is no {} on this host", command.get_program().display());
            false
        }
        Err(e) => panic!("{command:?}: {e}"),
    }
}

/// Two members of one group that run the same program and are folded fast.
fn two_members(service: &Service, words: &[&str]) -> [Member; 2] {
    let members = ["one", "other"].map(|name| service.run(GROUP, name, ALL, words));
    fold_fast(service);
    members
}

fn fold_fast(service: &Service) {
    service.show(GROUP);
    service.set(GROUP, &["--scan-rate", "400000"]);
}

/// Lines of JSON that a member has printed.
fn said(member: &Member) -> Vec<Value> {
    member.lines().iter().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

#[test]
fn go_program_is_folded_and_right() {
    if cannot_fold() {
        return;
    }
    let Some(built) = Built::new("slices.go") else { return };
    let service = Service::start();
    let time = seconds(12);
    let mut members = two_members(&service, &[built.program(), &time.to_string()]);
    let (mut most, end) = (0, Instant::now() + Duration::from_secs(time - 2));
    while Instant::now() < end {
        members.iter_mut().for_each(Member::assert_is_well);
        most = most.max(number(&service.show(GROUP)["sharing_pages"]));
        std::thread::sleep(Duration::from_millis(200));
    }
    let counted = members.each_mut().map(|m| m.finish(60));
    eprintln!("{most} pages folded at a time, {counted:?}");
    for counted in &counted {
        for what in ["checks", "freed_slices", "fresh_slices", "programs"] {
            assert!(number(&counted[what]) > 0, "{what} in {counted}");
        }
    }
    assert!(most >= 1000, "only {most} pages were folded at a time");
}

/// Ways of discarding memory that some kernels and hosts lack: name, error numbers, and the reason.
const MAY_BE_REFUSED: [(&str, &[i32], &str); 2] = [
    (
        "process_madvise",
        &[libc::EPERM, libc::EINVAL, libc::ENOSYS],
        "Linux before 6.13 does not let a process discard by it",
    ),
    ("io_uring", &[libc::EPERM, libc::ENOSYS], "io_uring is disabled"),
];

/// Faults that a program found, in words.
fn faults_of_discards(found: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    for (way, result) in found["ways"].as_object().expect("ways") {
        let error = number(&result["error"]);
        let refused = MAY_BE_REFUSED
            .iter()
            .find(|(name, errors, _)| name == way && errors.iter().any(|&e| u64::try_from(e) == Ok(error)));
        match refused {
            Some((_, _, why)) => eprintln!("skipped: discarding by {way}: error {error}: {why}"),
            None if error != 0 || number(&result["wrong_pages"]) + number(&result["wrong_pages_later"]) != 0 => {
                faults.push(format!("by {way}: {result}"));
            }
            None => {}
        }
    }
    faults
}

#[test]
fn discards_by_any_way_read_as_zeros() {
    if cannot_fold() {
        return;
    }
    let Some(built) = Built::new("discards.c") else { return };
    let service = Service::start();
    let mut members = two_members(&service, &[built.program()]);
    let found = members.each_mut().map(|m| m.finish(150));
    let faults: Vec<String> = found.iter().flat_map(faults_of_discards).collect();
    assert!(faults.is_empty(), "discarded pages do not hold zeros, or others are wrong:\n{}", faults.join("\n"));
}

/// Faults that a program and its last child found, in words.
fn faults_in_children(found: &Value, survivor: &Value) -> Vec<String> {
    let mut faults = Vec::new();
    for (child, result) in found["children"].as_object().expect("children") {
        if number(&result["has_ended"]) != 1 || number(&result["wrong_pages"]) != 0 {
            faults.push(format!("in {child}: {result}"));
        }
    }
    if number(&found["wrong_in_parent"]) != 0 {
        faults.push(format!("where only children discarded: {} wrong pages", found["wrong_in_parent"]));
    }
    if *survivor != json!({"survivor": {"error": 0, "wrong_pages": 0}}) {
        faults.push(format!("in a child whose parent has ended: {survivor}"));
    }
    faults
}

#[test]
fn discards_in_children_read_as_zeros() {
    if cannot_fold() {
        return;
    }
    let Some(built) = Built::new("children.c") else { return };
    let service = Service::start();
    let mut members = two_members(&service, &[built.program()]);
    let mut faults = Vec::new();
    for member in &mut members {
        let status = member.end(150);
        assert!(status.success(), "{} ended with {status}: {}", member.name, member.errors());
        // The last child prints its line when its parent has ended.
        until(10, "what a child says whose parent has ended", || said(member).len() == 2);
        let said = said(member);
        faults.extend(faults_in_children(&said[0], &said[1]));
    }
    assert!(faults.is_empty(), "discarded pages do not hold zeros, or others are wrong:\n{}", faults.join("\n"));
}

/// Changes of mappings of folded memory that `changes.c` can make.
const CHANGES: [&str; 6] = ["unmap", "map_over", "protect", "lock", "move", "leave"];

#[test]
fn changes_of_mappings_past_the_c_library_are_noticed_and_end_folding() {
    if cannot_fold() {
        return;
    }
    let Some(built) = Built::new("changes.c") else { return };
    let service = Service::start();
    let _others = service.run(GROUP, "refill", ALL, &[built.program(), "refill"]);
    let mut members = CHANGES.map(|way| service.run(GROUP, way, ALL, &[built.program(), way]));
    fold_fast(&service);
    until(60, "all have changed what was folded", || members.iter().all(|member| !said(member).is_empty()));
    service.set(GROUP, &["--fold", "unfold"]);
    let mut put_aside = BTreeSet::<&str>::new();
    let is_put_aside = |way: &&str, shown: &Value| find_member(shown, way).is_some_and(|m| m["state"] == "lost_track");
    until(5, "what is unfolded is seen not to be as it was", || {
        let shown = service.show(GROUP);
        put_aside.extend(CHANGES.iter().filter(|way| is_put_aside(way, &shown)));
        // Locking faults in private pages. No folded page is left there, so unfolding replaces nothing.
        CHANGES.iter().all(|way| *way == "lock" || put_aside.contains(way))
    });
    service.set(GROUP, &["--fold", "on"]);
    let found = members.each_mut().map(|m| m.finish(60));
    eprintln!("{found:?}");
    for (way, found) in CHANGES.iter().zip(&found) {
        let expected = json!({"way": way, "wrong_pages": 0, "wrong_pages_later": 0, "wrong_others": 0});
        assert_eq!(*found, expected, "{put_aside:?}");
    }
}

#[test]
fn mlockall_returns() {
    if cannot_fold() {
        return;
    }
    let Some(built) = Built::new("locks.c") else { return };
    let service = Service::start();
    let mut members = two_members(&service, &[built.program()]);
    until(70, "both are folded", || {
        members.iter_mut().for_each(Member::assert_is_well);
        members.iter().all(|m| !m.lines().is_empty())
    });
    for member in &mut members {
        let found = member.finish(PATIENCE);
        eprintln!("{found}");
        assert_eq!(number(&found["wrong_pages"]), 0, "{found}");
    }
}

#[test]
fn qemu_with_locked_memory_answers() {
    if cannot_fold() {
        return;
    }
    if Command::new("qemu-system-x86_64").arg("--version").stdout(Stdio::null()).status().is_err() {
        return eprintln!("skipped: there is no qemu-system-x86_64 on this host");
    }
    let service = Service::start();
    let socket = service.place().join("qmp.sock");
    let qmp = format!("unix:{},server=on,wait=off", socket.display());
    let words = "qemu-system-x86_64 -overcommit mem-lock=on -m 64M -accel tcg,tb-size=32 -display none -S -monitor none \
                 -nodefaults -qmp";
    let words: Vec<&str> = words.split_whitespace().chain([&qmp[..]]).collect();
    let mut member = service.run(GROUP, "qemu", ALL, &words);
    let ask = |question: &str| {
        Qmp::connect(&socket, Duration::from_secs(2)).and_then(|mut qmp| qmp.execute(question, json!({})))
    };
    let (mut answer, end) = (ask("query-status"), Instant::now() + Duration::from_secs(PATIENCE));
    while let Err(why) = &answer {
        member.assert_is_well();
        assert!(Instant::now() < end, "no answer in {PATIENCE} s: {why}: {}", member.stacks());
        std::thread::sleep(Duration::from_millis(50));
        answer = ask("query-status");
    }
    let answer = answer.unwrap_or_default();
    assert_eq!(answer["running"], false, "{answer}");
    let quit = ask("quit");
    let status = member.end(PATIENCE);
    assert!(status.success(), "{status}, {quit:?}: {}", member.errors());
}

#[test]
fn forks_beside_allocating_threads_go_on() {
    if cannot_fold() {
        return;
    }
    let Some(built) = Built::new("forks.c") else { return };
    let service = Service::start();
    let mut member = service.run(GROUP, "forking", ALL, &[built.program()]);
    fold_fast(&service);
    let found = member.finish(2 * PATIENCE);
    eprintln!("{found}");
    assert!(number(&found["well"]) > 20, "{found}");
    assert_eq!((number(&found["failed"]), number(&found["hung"])), (0, 0), "{found}");
}

/// Path of the kernel's source, from Debian's `linux-source-6.12`.
const KERNEL_SOURCE: &str = "/usr/src/linux-source-6.12.tar.xz";
const SELFTESTS: [&str; 3] = ["mlock2-tests", "pagemap_ioctl", "virtual_address_range"];

/// Unpacks the kernel's own memory tests and builds those of `SELFTESTS`; `false` if the compiler is missing.
fn built_selftests(dir: &Path) -> bool {
    let tools = "linux-source-6.12/tools";
    let parts = ["testing/selftests", "include", "arch/x86/include"].map(|part| format!("{tools}/{part}"));
    let unpacked = Command::new("tar").arg("-xf").arg(KERNEL_SOURCE).args(parts).current_dir(dir).status();
    assert!(unpacked.expect("run tar").success(), "unpack {KERNEL_SOURCE}");
    let sources = dir.join(tools).join("testing/selftests/mm");
    SELFTESTS.iter().all(|name| {
        let mut command = cc();
        command.args(["-U_FORTIFY_SOURCE", "-isystem", "../../../include/uapi", "-I", "../../../..", "-o"]);
        command.arg(dir.join(name)).args([&format!("{name}.c"), "vm_util.c", "thp_settings.c", "-lrt", "-lm"]);
        command.current_dir(&sources);
        compile(command)
    })
}

/// Outcome of a selftest.
struct Ended {
    /// Its lines that begin with `ok` or `not ok`. Only their first number is kept, which is that of the case; others
    /// may be measurements.
    results: BTreeSet<String>,
    status: String,
    time: Duration,
}

/// Runs a selftest to its end, or kills it after `limit`.
fn run_selftest(mut member: Member, limit: Duration) -> Ended {
    let begin = Instant::now();
    let mut status = None;
    while status.is_none() && begin.elapsed() < limit {
        std::thread::sleep(Duration::from_millis(5));
        status = member.ended();
    }
    let time = begin.elapsed();
    let status = status.map_or(format!("killed after {} s", limit.as_secs()), |s| s.to_string());
    member.kill();
    // The reading thread may lag behind for a moment.
    std::thread::sleep(Duration::from_millis(200));
    let lines = member.lines();
    let results = lines.iter().filter(|l| l.starts_with("ok ") || l.starts_with("not ok "));
    Ended { results: results.map(|line| without_measures(line)).collect(), status, time }
}

/// Replaces all numbers but the first: `ok 7 pages 3.5` becomes `ok 7 pages N.N`.
fn without_measures(line: &str) -> String {
    let (mut text, mut numbers, mut was_digit) = (String::new(), 0, false);
    for c in line.chars() {
        let starts_number = c.is_ascii_digit() && !was_digit;
        was_digit = c.is_ascii_digit();
        numbers += u32::from(starts_number);
        if !was_digit || numbers == 1 {
            text.push(c);
        } else if starts_number {
            text.push('N');
        }
    }
    text
}

/// Starts a selftest in a directory where it may leave files, as a member or not.
fn start_selftest(service: &Service, dir: &Path, name: &str, as_member: bool) -> Member {
    let program = dir.join(name);
    let mut command = if as_member {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(["run", "--group", &service.group(GROUP), "--name", name, "--service"]).arg(service.place());
        command.args(ALL).arg("--").arg(program);
        command
    } else {
        Command::new(program)
    };
    let (variable, token) = service.mark();
    command.env(variable, token).env("PAGEFOLD_EAGER", "1").current_dir(dir);
    Member::spawn(command, name, dir)
}

/// Differences between a member's results and those without membership, line by line.
fn differences(name: &str, without: &Ended, with: &Ended) -> Vec<String> {
    let lost = without.results.difference(&with.results).map(|line| format!("{name}: only without us: {line}"));
    let new = with.results.difference(&without.results).map(|line| format!("{name}: only with us: {line}"));
    let status = (without.status != with.status).then(|| format!("{name}: {} -> {}", without.status, with.status));
    lost.chain(new).chain(status).collect()
}

#[test]
fn kernel_selftests_end_as_without_us() {
    if cannot_fold() {
        return;
    }
    if std::env::var_os("PAGEFOLD_SELFTESTS").is_none() && std::env::var_os("PAGEFOLD_SOAK_SECONDS").is_none() {
        return eprintln!("skipped: the kernel's own tests need its source: set PAGEFOLD_SELFTESTS=1");
    }
    if !Path::new(KERNEL_SOURCE).exists() {
        return eprintln!("skipped: {KERNEL_SOURCE} is missing: apt-get install linux-source-6.12");
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    if !built_selftests(dir.path()) {
        return;
    }
    let service = Service::start();
    let mut faults = Vec::new();
    for name in SELFTESTS {
        let without = run_selftest(start_selftest(&service, dir.path(), name, false), Duration::from_secs(60));
        assert!(!without.results.is_empty(), "{name} without us: {}", without.status);
        let limit = without.time * 3 + Duration::from_secs(10);
        let with = run_selftest(start_selftest(&service, dir.path(), name, true), limit);
        eprintln!(
            "{name}: {} results in {:?}, {} as a member in {:?}",
            without.results.len(),
            without.time,
            with.results.len(),
            with.time
        );
        faults.extend(differences(name, &without, &with));
    }
    assert!(faults.is_empty(), "the kernel's own tests end otherwise:\n{}", faults.join("\n"));
}
