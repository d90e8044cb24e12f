//! VMs that map the file of a snapshot privately, as Firecracker and Cloud Hypervisor restore them, and such as cannot be folded at all.
//!
//! Neither VMM is here. In their place stands a program that maps its guest's RAM as they do, has their name, and has `/dev/kvm` open where
//! there is one.

mod common;

use common::service::{Service, cannot_fold};
use common::{Ends, copy_program, json_of, not_root, number, pagefold};
use serde_json::Value;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Pages of the snapshot, and those of them that each guest has written: a tenth.
const PAGES: u64 = 20_000;
const WRITTEN: u64 = 2000;
/// Pages that a stand-in has beside its guest's RAM, at most: 8 MiB.
const OTHER: u64 = 2048;

/// A directory with the stand-ins, and a snapshot in memory.
struct Rig(TempDir);

impl Rig {
    fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("vmm").tempdir_in("/tmp").expect("a temporary directory");
        let known = Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
        ["firecracker", "cloud-hypervisor"].iter().for_each(|name| copy_program(&known, &dir.path().join(name)));
        let file = File::create(dir.path().join("snapshot")).expect("make a snapshot");
        for page in 0..PAGES {
            let content: Vec<u8> = (0..512).flat_map(|n| (page * 512 + n + 1).to_ne_bytes()).collect();
            file.write_all_at(&content, page * 4096).expect("fill it");
        }
        Self(dir)
    }

    /// A VM by one of the stand-ins, whose memory comes about by these commands.
    fn vm(&self, program: &str, name: &str, commands: &[String]) -> Ends {
        let (path, option) =
            (self.0.path().join(program), if program == "firecracker" { "--id" } else { "--api-socket" });
        let script = "[ ! -w /dev/kvm ] || exec 9<>/dev/kvm; exec \"$@\"";
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh"]).arg(path).args([option, name]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("start a stand-in");
        let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
        let input = child.stdin.as_mut().expect("a pipe");
        for line in commands {
            writeln!(input, "{line}").expect("tell it");
            let mut answer = String::new();
            output.read_line(&mut answer).expect("hear from it");
            assert_eq!(answer.trim(), "ok", "{line}");
        }
        Ends(child)
    }

    /// One that maps the snapshot privately, has read all of it, and has written a tenth.
    fn restored(&self, program: &str, name: &str, seed: u64) -> Ends {
        let file = self.0.path().join("snapshot");
        let commands = [
            format!("file ram {}", file.display()),
            format!("read ram 0 {PAGES}"),
            format!("fill ram 0 {WRITTEN} {seed}"),
        ];
        self.vm(program, name, &commands)
    }
}

fn found_by(doctor: &Value, id: &str) -> String {
    let checks = doctor["checks"].as_array().expect("checks");
    let check = checks.iter().find(|check| check["id"] == format!("guest:{id}:mergeable"));
    let check = check.unwrap_or_else(|| panic!("no {id} in {doctor}"));
    format!("{}; {}", check["found"].as_str().unwrap_or_default(), check["fix"].as_str().unwrap_or_default())
}

#[test]
fn guests_of_one_snapshot_are_seen_as_sharing_what_they_do_not_write() {
    if not_root() {
        return;
    }
    let rig = Rig::new();
    let _vms: Vec<Ends> = (1..=3).map(|n| rig.restored("firecracker", &format!("fc{n}"), n * 1_000_000)).collect();
    let all = ["--guest", "fc*"];
    let found = json_of(&pagefold(&[&["census", "--json"], &all[..]].concat()));
    let guests = found["guests"].as_array().expect("guests");
    assert_eq!(guests.len(), 3, "{found}");
    for guest in guests {
        assert_eq!(guest["kind"], "firecracker");
        let alone = number(&guest["incremental_pages"]);
        assert!((WRITTEN..WRITTEN + OTHER).contains(&alone), "{guest}");
        let ram = guest["regions"].as_array().expect("regions").iter().find(|region| region["region"] == "guest_ram");
        assert!(ram.is_some_and(|ram| number(&ram["resident_pages"]) >= PAGES), "{guest}");
    }
    // Of three frames for each page, two are saved already, and folding could save nothing more of them.
    assert!(number(&found["already_shared"]["saved_pages"]) >= 2 * (PAGES - WRITTEN), "{found}");
    assert!(number(&found["all_saved_pages"]) < 3 * OTHER, "{found}");
    let forecast = json_of(&pagefold(&[&["forecast", "--json"], &all[..]].concat()));
    let next = number(&forecast["next_guest_bytes"]) >> 12;
    assert!((WRITTEN..WRITTEN + OTHER).contains(&next), "{forecast}");
    let average = number(&forecast["now"]["average_bytes"]) >> 12;
    let expected = (PAGES - WRITTEN) / 3 + WRITTEN;
    assert!((expected..expected + OTHER).contains(&average), "{forecast}");
}

#[test]
fn memory_of_a_vm_that_cannot_be_folded_is_told_with_the_way_out() {
    if cannot_fold() {
        return;
    }
    let (service, rig) = (Service::start(), Rig::new());
    let shared = [format!("shared ram {PAGES}"), format!("fill ram 0 {PAGES} 1")];
    let _vms = [
        rig.restored("firecracker", "fc1", 1),
        rig.restored("cloud-hypervisor", "/run/ch1.sock", 1),
        rig.vm("cloud-hypervisor", "/run/ch2.sock", &shared),
    ];
    let doctor = pagefold(&["doctor", "--json", "--guest", "fc*", "--guest", "ch*"]);
    let doctor: Value = serde_json::from_slice(&doctor.stdout).expect("JSON");
    // 18,000 pages are the file's, and 2,000 are not.
    let sizes = "70 MiB are the file's, one frame for all its guests; 7 MiB that it has written";
    for (id, parts) in [
        ("firecracker:fc1", ["in part", sizes, "boot it in place of restoring it"]),
        ("cloud_hypervisor:ch1", ["in part", sizes, "memory_restore_mode=copy"]),
        ("cloud_hypervisor:ch2", ["no", "shared memory", "shared=off"]),
    ] {
        let said = found_by(&doctor, id);
        let name = id.split_once(':').expect("a name").1;
        let attach = service.pagefold(&["attach", "--guest", name, "--group", &service.group("acme")]);
        let attached = String::from_utf8_lossy(&attach.stderr).into_owned();
        assert_eq!(attach.status.code(), Some(1), "{attached}");
        for part in parts {
            assert!(said.contains(part), "{part}: {said}");
            assert!(attached.contains(part), "{part}: {attached}");
        }
    }
    fs::metadata(rig.0.path().join("snapshot")).expect("the snapshot outlives its guests");
}
