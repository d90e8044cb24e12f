//! `pagefold explain` names emulated devices of real QEMUs, what each costs, and the option that leaves it out.

mod common;

use common::formats::assert_documented;
use common::number;
use common::qemu::Qemu;
use common::service::until;
use guest::{Guest, Qmp, Survey};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;
use survey::explain::Device;

/// Time-out of anything here, in seconds.
const PATIENCE: u64 = 120;
/// Memory of the display: 8 MiB.
const DISPLAY_BYTES: u64 = 8 << 20;

/// A QEMU that never runs its guest, with these options.
struct Machine {
    process: common::Ends,
    socket: PathBuf,
}

impl Machine {
    /// Starts one; `None`, with the reason said, if QEMU is not installed.
    fn start(dir: &Path, options: &[&str]) -> Option<Self> {
        let socket = dir.join("qmp");
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-accel", "tcg,tb-size=32", "-m", "16", "-S", "-display", "none", "-machine", "pc"])
            .args(options);
        command.env("QEMU_AUDIO_DRV", "none");
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", socket.display()));
        match command.stdin(Stdio::null()).stdout(Stdio::null()).spawn() {
            Ok(child) => Some(Self { process: common::Ends(child), socket }),
            Err(e) => {
                eprintln!("skipped: cannot run qemu-system-x86_64: {e}");
                None
            }
        }
    }

    fn qmp(&self) -> Qmp {
        let mut qmp = None;
        until(PATIENCE, "QEMU answers", || {
            qmp = Qmp::connect(&self.socket, Duration::from_secs(10)).ok();
            qmp.is_some()
        });
        qmp.expect("an answer")
    }

    fn guest(&self) -> Guest {
        let pid = self.process.0.id();
        let guests = Survey::take().expect("processes").guests(&[], &[]);
        guests.into_iter().find(|guest| guest.pids == [pid]).expect("it is a guest")
    }

    /// Names of all of its devices.
    fn drivers(&self) -> BTreeSet<String> {
        let mappings = host::Mapping::list(self.process.0.id()).expect("mappings");
        let all = guest::Device::all(&mut self.qmp(), &mappings).expect("devices");
        all.into_iter().map(|device| device.driver).collect()
    }
}

#[test]
fn option_that_is_told_leaves_a_device_out() {
    if common::not_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let asked = ["-usb", "-device", "usb-tablet", "-device", "AC97"];
    let Some(usual) = Machine::start(dir.path(), &asked) else { return };
    let mut qmp = usual.qmp();
    let told = Device::all(&usual.guest(), &mut qmp).expect("devices");
    drop(qmp);
    drop(usual);
    let found: Vec<(&str, &str)> =
        told.iter().filter_map(|device| Some((device.driver.as_str(), device.left_out.as_deref()?))).collect();
    let named: BTreeSet<&str> = found.iter().map(|(driver, _)| *driver).collect();
    let usual =
        ["AC97", "VGA", "e1000", "floppy", "hpet", "ide-cd", "isa-parallel", "piix3-usb-uhci", "usb-tablet", "vmport"];
    assert!(usual.iter().all(|driver| named.contains(driver)), "{found:?}");
    let ways: BTreeSet<&str> = found.iter().map(|(_, way)| *way).collect();
    for way in ways {
        let mut options: Vec<&str> = asked.to_vec();
        match (way.strip_prefix("with "), way.strip_prefix("without ")) {
            (Some(added), _) => options.extend(added.split(' ')),
            (_, Some("-usb")) => options = vec!["-device", "AC97"],
            (_, Some(taken)) => {
                let (_, name) = taken.split_once(' ').expect("an option with a value");
                let at = options.iter().position(|word| *word == name).expect("it is there");
                options.drain(at - 1..=at);
            }
            _ => panic!("{way}"),
        }
        let left = Machine::start(dir.path(), &options).expect("QEMU is there").drivers();
        let out = || found.iter().filter(|(_, by)| *by == way).map(|(driver, _)| *driver);
        assert!(out().all(|driver| !left.contains(driver)), "{way}: {left:?}");
        eprintln!("{way}: {}", out().collect::<Vec<_>>().join(", "));
    }
}

fn explain(qemu: &Qemu, more: &[&str]) -> Output {
    let pid = qemu.pid().to_string();
    common::pagefold(&[&["explain", &qemu.name, "--pid", &pid, "--no-host"], more].concat())
}

/// There is no kernel in its memory, which makes it a partial answer.
fn devices(qemu: &Qemu) -> Value {
    let output = explain(qemu, &["--json"]);
    let found: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    assert_documented(&["pagefold explain --json"], &found);
    found["devices"].clone()
}

#[test]
fn display_costs_what_its_memory_holds() {
    if common::not_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let socket = dir.path().join("qmp");
    let qmp = format!("unix:{},server=on,wait=off", socket.display());
    let Some(silent) = Qemu::start("silent", &["-device", "VGA"]) else { return };
    assert_eq!(devices(&silent), Value::Null, "nobody tells");
    drop(silent);
    let Some(qemu) = Qemu::start("video", &["-device", "VGA,vgamem_mb=8", "-device", "virtio-rng-pci", "-qmp", &qmp])
    else {
        return;
    };
    // A busy QEMU may be late with its answer, which is none then.
    let display = || devices(&qemu).as_array()?.iter().find(|one| one["driver"] == "VGA").cloned();
    let mut shown = Value::Null;
    until(PATIENCE, "it is listed", || {
        shown = display().unwrap_or_default();
        !shown.is_null()
    });
    assert!(shown["regions"] == json!([]) && shown["costs_bytes"].is_null(), "{shown}");
    Qmp::connect(&socket, Duration::from_secs(60)).and_then(|mut qmp| qmp.execute("cont", json!({}))).expect("it runs");
    // The firmware maps the display's memory, and writes to it. The kernel's account is of the one mapping of that size.
    until(PATIENCE, "it costs what the kernel says", || {
        shown = display().unwrap_or_default();
        let mappings = host::Mapping::read_all(qemu.pid()).expect("mappings");
        let mut ours = mappings.iter().filter(|one| one.bytes() == DISPLAY_BYTES);
        let costs = shown["costs_bytes"].as_u64().unwrap_or(0);
        costs > 0 && ours.any(|one| one.usage.rss_bytes == costs)
    });
    eprintln!("{shown}");
    assert_eq!((&shown["class"], &shown["left_out"]), (&json!("VGA controller"), &json!("without -device VGA")));
    let [region] = &shown["regions"].as_array().expect("regions")[..] else { panic!("{shown}") };
    assert_eq!((&region["name"], number(&region["bytes"])), (&json!("vga.vram"), DISPLAY_BYTES));
    let mut text = String::new();
    until(PATIENCE, "people are told", || {
        text = String::from_utf8(explain(&qemu, &[]).stdout).expect("text");
        text.contains("Emulated devices")
    });
    let line = text.lines().find(|line| line.starts_with("VGA")).unwrap_or_else(|| panic!("{text}"));
    assert!(line.contains("8.0") && line.contains("without -device VGA"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 120) && !text.contains("virtio-rng"), "{text}");
}
