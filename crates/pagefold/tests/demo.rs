//! `./x demo` without the build: its output, and the end of its guests, also when it is interrupted.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Lock of these tests, for one demo at a time. A demo's census is of all guests of the host, and the guests of an
/// interrupted demo would end in the middle of it.
static ALONE: Mutex<()> = Mutex::new(());

/// Directories of the agent for running programs, and of the helper inside guests.
const MUSL: [&str; 2] = ["target/x86_64-unknown-linux-musl/release", "target/x86_64-unknown-linux-musl/guest"];

/// What is built for the C library musl.
fn built(kind: &str, program: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_BIN_EXE_pagefold")).parent().expect("a directory");
    dir.with_file_name("x86_64-unknown-linux-musl").join(kind).join(program)
}

/// That agent, if it is built.
fn agent() -> PathBuf {
    let dir = Path::new(env!("CARGO_BIN_EXE_pagefold")).parent().expect("a directory");
    built(dir.file_name().and_then(|kind| kind.to_str()).expect("a name"), "pagefold-agent")
}

/// That helper, if it is built.
fn helper() -> PathBuf {
    built("guest", "pagefold-identity")
}

/// A source tree with `x` and a finished build, and a fake cargo that does nothing.
struct Tree {
    dir: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Tree {
    fn new() -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let dir = tempfile::Builder::new().prefix("demo").tempdir_in("/tmp").expect("a temporary directory");
        let tree = Self { dir, _alone: alone };
        for sub in ["cargo/bin", "target/release", MUSL[0], MUSL[1], "tmp"] {
            fs::create_dir_all(tree.path(sub)).expect("make a directory");
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        for file in ["x", "Cargo.toml"] {
            fs::copy(root.join(file), tree.path(file)).expect("copy from the tree");
        }
        let program = Path::new(env!("CARGO_BIN_EXE_pagefold"));
        for name in [
            "pagefold",
            "pagefold-lab",
            "libpagefold.so",
            "pagefoldd",
            "pagefold-worker",
            "pagefold-prove",
            "pagefold-attach",
        ] {
            fs::copy(program.with_file_name(name), tree.path("target/release").join(name))
                .expect("copy what was built");
        }
        let _ = fs::copy(agent(), tree.path(MUSL[0]).join("pagefold-agent"));
        let _ = fs::copy(helper(), tree.path(MUSL[1]).join("pagefold-identity"));
        for (name, script) in [("cargo", "#!/bin/sh\n"), ("rustc", "#!/bin/sh\necho rustc 1.999.0\n")] {
            let path = tree.path("cargo/bin").join(name);
            fs::write(&path, script).expect("write a script");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("make it executable");
        }
        for open in ["", "tmp", "target"] {
            fs::set_permissions(tree.path(open), fs::Permissions::from_mode(0o777)).expect("let everybody in");
        }
        tree
    }

    fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    /// `./x demo`, executed by the command `by`.
    fn demo(&self, by: &[&str]) -> Command {
        let mut words: Vec<String> = by.iter().map(ToString::to_string).collect();
        words.extend([self.path("x").display().to_string(), "demo".into()]);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).env("CARGO_HOME", self.path("cargo")).env("TMPDIR", self.path("tmp"));
        command.env("CARGO_TARGET_DIR", self.path("target")).stdin(Stdio::null());
        command
    }

    /// Living processes of the demo's guests.
    fn guests(&self) -> Vec<PathBuf> {
        let needle = self.path("tmp").display().to_string();
        let processes = fs::read_dir("/proc").expect("list /proc").filter_map(|entry| Some(entry.ok()?.path()));
        let of_demo = |path: &PathBuf| {
            let environment = fs::read(path.join("environ")).unwrap_or_default();
            let environment = String::from_utf8_lossy(&environment).into_owned();
            environment.contains("PAGEFOLD_LAB=") && environment.contains(&needle)
        };
        processes.filter(of_demo).collect()
    }

    fn assert_clean(&self) {
        assert_eq!(self.guests(), Vec::<PathBuf>::new());
        assert_eq!(fs::read_dir(self.path("tmp")).expect("list it").count(), 0, "the demo's directory is left");
    }

    fn assert_good(&self, output: &Output, guests: &[&str]) {
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        // Also where process 1 of the host may not be read, or one has ended while it was counted: that is a note.
        assert!(output.status.success(), "{out}\n{err}");
        for guest in guests {
            assert!(
                out.lines().filter(|line| line.starts_with(guest)).count() >= 2,
                "{guest} in lists and tables: {out}"
            );
        }
        assert!(out.contains("price of isolation"), "{out}");
        let report = self.path("target/demo/report.html");
        assert!(err.contains(report.to_str().expect("a plain path")), "{err}");
        let html = fs::read_to_string(report).expect("the report");
        assert!(html.contains("</html>") && guests.iter().all(|guest| html.contains(guest)));
        self.assert_clean();
    }
}

/// Whether this host can run VMs and containers.
fn can_do_all() -> bool {
    let root = fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0);
    let have = |program: &&str| Path::new("/usr/bin").join(program).exists();
    root && ["qemu-system-x86_64", "lxc-start", "mmdebstrap", "busybox"].iter().all(have)
}

#[test]
fn demo_of_root_shows_vms_and_containers() {
    if !can_do_all() {
        return eprintln!("skipped: not root, or QEMU, LXC, mmdebstrap or busybox is missing");
    }
    let tree = Tree::new();
    let output = tree.demo(&[]).output().expect("run it");
    tree.assert_good(&output, &["acme-1", "acme-2", "beta-1", "beta-2", "acme-3", "acme-4", "beta-3", "beta-4"]);
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(out.contains("no two groups have any in common"), "{out}");
    // Once by `group show`, and once by `audit`.
    let saved = |line: &&str| line.starts_with("= saved") && line.contains("MiB") && !line.contains('-');
    assert_eq!(out.lines().filter(saved).count(), 4, "both groups save something: {out}");
    if agent().exists() {
        assert!(out.lines().any(|line| line.contains("nginx-")), "a container's programs are members: {out}");
    } else {
        eprintln!("skipped, that containers are folded: nothing is built for x86_64-unknown-linux-musl: ./x build");
    }
    if helper().exists() {
        // Once by `clone`, once by `group show`, and once when they are ended.
        let names = ["web-1", "web-2", "web-3"];
        let of =
            |name: &str| out.lines().filter(|line| line.split_whitespace().any(|word| word.starts_with(name))).count();
        assert!(names.iter().all(|name| of(name) >= 3), "three clones: {out}");
    } else {
        eprintln!("skipped, that clones are started: nothing is built for x86_64-unknown-linux-musl: ./x build");
    }
}

#[test]
fn demo_without_root_shows_processes() {
    if !can_do_all() {
        return eprintln!("skipped: only root can be somebody else");
    }
    let tree = Tree::new();
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let output = tree.demo(&nobody).env("HOME", "/nonexistent").output().expect("run it");
    tree.assert_good(&output, &["acme-1", "acme-2", "beta-1", "beta-2"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("sudo ./x demo"));
}

#[test]
fn interrupted_demo_leaves_nothing() {
    if !can_do_all() {
        return eprintln!("skipped: not root, or QEMU, LXC, mmdebstrap or busybox is missing");
    }
    // A terminal interrupts the whole process group; other senders signal the script alone.
    for (signal, to_group, code) in [("INT", true, 130), ("TERM", false, 143), ("HUP", false, 129)] {
        let tree = Tree::new();
        // The caller of this test may ignore signals, as nohup does. Children inherit that, and no shell undoes it.
        let by = ["setsid", "env", "--default-signal=HUP,INT,TERM"];
        let mut demo = tree.demo(&by).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("start it");
        let patience = Instant::now() + Duration::from_secs(60);
        while tree.guests().len() < 4 {
            assert!(Instant::now() < patience, "no guests");
            thread::sleep(Duration::from_millis(20));
        }
        let target = format!("{}{}", if to_group { "-" } else { "" }, demo.id());
        // A shell's own kill: that of procps takes a small group's number for a signal.
        let sent = Command::new("sh").args(["-c", &format!("kill -s {signal} -- {target}")]).status().expect("run sh");
        assert!(sent.success());
        assert_eq!(demo.wait().expect("collect it").code(), Some(code), "{signal}");
        tree.assert_clean();
    }
}
