//! Breakpoints of tracers (uprobes) on a function whose calls are led to the gate.

use crate::common::supervised::{Installed, wait_for};
use crate::rig::{CONFIG, Waits, attach, compile_source, detach};
use host::Mapping;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A uprobe on a copy of the C library that nobody else has mapped.
struct Uprobe {
    dir: PathBuf,
    name: String,
}

impl Uprobe {
    /// `None`, with the reason printed, where the kernel has none.
    fn on(installed: &Installed, library: &Path) -> Option<Self> {
        let dir = installed.path("tracing");
        fs::create_dir(&dir).unwrap();
        let mounted = Command::new("mount").args(["-t", "tracefs", "tracefs"]).arg(&dir).status();
        if !mounted.is_ok_and(|status| status.success()) {
            eprintln!("skipped: no tracefs");
            return None;
        }
        let uprobe = Self { dir, name: format!("pagefold_{}_{}", std::process::id(), mremap_of(library)) };
        let made = uprobe.write(
            "uprobe_events",
            &format!("p:{}/mremap {}:{:#x}", uprobe.name, library.display(), mremap_of(library)),
        );
        if let Err(e) = made {
            eprintln!("skipped: no uprobes: {e}");
            return None;
        }
        Some(uprobe)
    }

    fn write(&self, file: &str, text: &str) -> std::io::Result<()> {
        OpenOptions::new().append(true).open(self.dir.join(file))?.write_all(text.as_bytes())
    }

    fn enable(&self, enable: bool) {
        let file = format!("events/{}/mremap/enable", self.name);
        self.write(&file, if enable { "1" } else { "0" }).expect("enable the uprobe");
    }

    /// How often it was hit.
    fn hits(&self) -> u64 {
        let all = fs::read_to_string(self.dir.join("uprobe_profile")).unwrap();
        let its = all.lines().find(|line| line.contains("mremap") && line.contains("libc.so.6"));
        its.and_then(|line| line.split_ascii_whitespace().nth(2)?.parse().ok()).unwrap_or(0)
    }
}

impl Drop for Uprobe {
    fn drop(&mut self) {
        let _ = self.write(&format!("events/{}/mremap/enable", self.name), "0");
        let _ = self.write("uprobe_events", &format!("-:{}/mremap", self.name));
        let _ = Command::new("umount").arg("-l").arg(&self.dir).status();
    }
}

/// Where `mremap` lies in a library's file.
fn mremap_of(library: &Path) -> u64 {
    let listed = Command::new("readelf").args(["-W", "--dyn-syms"]).arg(library).output().expect("run readelf");
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    let line =
        text.lines().find(|line| line.split_ascii_whitespace().nth(7).is_some_and(|name| name.starts_with("mremap@")));
    let address = line.and_then(|line| line.split_ascii_whitespace().nth(1)).expect("it has mremap");
    u64::from_str_radix(address, 16).expect("a number")
}

/// The kernel executes the instruction below a breakpoint elsewhere, and goes on behind it. That was in the middle of a jump, and the
/// program crashed. When the uprobe was taken away, the jump had a byte that was not its own.
#[test]
fn program_with_uprobe_on_mremap_goes_on() {
    let Some(installed) = Installed::attaching() else { return };
    let _supervisor = installed.serve(CONFIG, &[]);
    let system =
        Mapping::list(std::process::id()).unwrap().into_iter().find(Mapping::is_c_library).expect("a C library");
    let library = installed.path("libc.so.6");
    fs::copy(&system.name, &library).unwrap();
    let Some(uprobe) = Uprobe::on(&installed, &library) else { return };
    let program = installed.path("moves");
    compile_source("cc", &[], &program, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/moves.c"));
    let mut moves = Waits::run(Command::new(&program).env("LD_LIBRARY_PATH", library.parent().unwrap()));
    let pid = moves.pid();
    assert_eq!(moves.tell("go on"), "ok\n");
    // Enabled and taken away while it is attached, and there from before it is detached.
    attach(&installed, &pid);
    assert_eq!(moves.tell("move"), "ok\n");
    for _ in 0..2 {
        let before = uprobe.hits();
        uprobe.enable(true);
        wait_for("it is hit", || (uprobe.hits() > before + 100).then_some(()));
        uprobe.enable(false);
        assert_eq!(moves.tell("go on"), "ok\n");
    }
    uprobe.enable(true);
    detach(&installed, &pid);
    assert_eq!(moves.tell("go on"), "ok\n");
    // There when it is attached: its calls are not led, and nobody crashes.
    attach(&installed, &pid);
    uprobe.enable(false);
    assert_eq!(moves.tell("go on"), "ok\n");
    detach(&installed, &pid);
    assert_eq!(moves.tell("go on"), "ok\n");
    let is_changed = |mapping: &&Mapping| mapping.execute && mapping.has_file() && mapping.usage.anonymous_bytes > 0;
    let all = Mapping::read_all(moves.pid).expect("its mappings");
    let left: Vec<_> = all.iter().filter(is_changed).collect();
    assert!(left.is_empty(), "code that is not a file's: {left:#?}");
}
