//! Commands on clones that are killed in between, and disks that are full.

use crate::common::service::until;
use crate::rig::{Rig, processes_with};
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A file system of this size.
struct Small(PathBuf);

impl Small {
    fn mount(at: &Path, size: &str) -> Option<Self> {
        fs::create_dir_all(at).expect("make a directory");
        let options = format!("size={size},mode=700");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "small"]).arg(at).status();
        if !mounted.expect("run mount").success() {
            eprintln!("skipped: nothing can be mounted here");
            return None;
        }
        Some(Self(at.to_owned()))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

fn start(rig: &Rig, words: &[&str]) -> Child {
    rig.command(words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("run pagefold")
}

fn kill(mut child: Child) {
    child.kill().expect("kill it");
    child.wait().expect("wait for it");
}

/// Kills a command at each of these moments. Afterwards, the clone runs, or it is gone with its machine.
fn assert_nothing_is_left_of(rig: &Rig, words: &[&str], stages: &[fn(&Rig) -> bool], prepare: impl Fn()) {
    for stage in stages {
        prepare();
        let mut child = start(rig, words);
        while !stage(rig) && child.try_wait().expect("look at it").is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        kill(child);
        let living = rig.living();
        until(20, "no process is left without a clone", || processes_with(&rig.dir_text()).len() == living.len());
        for name in living {
            assert_eq!(rig.inside(&name, "hostname"), name);
            rig.json(&["clones", "end", &name]);
        }
    }
}

#[test]
fn rollback_and_restore_that_are_killed_leave_a_clone_or_none() {
    let rig = Rig::new();
    if !rig.template("web", "acme", &[]) {
        return;
    }
    assert_nothing_is_left_of(&rig, &["rollback", "web-1"], &[|_| true, is_starting, has_socket], || {
        rig.clone("web", &["--name", "web-1"]);
    });
    rig.clone("web", &[]);
    let file = rig.templates().join("web-1.saved").to_str().expect("a plain path").to_owned();
    assert!(rig.run(&["save", "web-1", &file]).status.success());
    rig.json(&["clones", "end", "web-1"]);
    assert_nothing_is_left_of(&rig, &["restore", "web-1", &file], &[|_| true, is_starting, has_socket], || ());
    rig.json(&["template", "verify", "web"]);
}

fn is_starting(rig: &Rig) -> bool {
    fs::read_to_string(rig.clones().join("web-1/clone.json")).is_ok_and(|text| text.contains("\"starting\""))
}

/// Whether the machine of a clone that starts has a socket.
fn has_socket(rig: &Rig) -> bool {
    is_starting(rig) && rig.clones().join("web-1/identity").exists()
}

#[test]
fn clone_goes_on_after_the_command_that_saved_it_was_killed() {
    let rig = Rig::new();
    if !rig.template("web", "acme", &[]) {
        return;
    }
    rig.clone("web", &[]);
    // A file that takes what a pipe holds, and no more: QEMU waits in the middle.
    let file = rig.templates().join("slow");
    let part = file.with_extension("part");
    assert!(Command::new("mkfifo").arg(&part).status().expect("run mkfifo").success());
    let mut reader = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&part).expect("open a pipe");
    let child = start(&rig, &["save", "web-1", file.to_str().expect("a plain path")]);
    let mut heard: Vec<u8> = Vec::new();
    until(60, "QEMU writes its state", || {
        let mut some = [0; 512];
        let count = reader.read(&mut some).unwrap_or(0);
        heard.extend(&some[..count]);
        heard.windows(4).any(|word| word == b"QEVM")
    });
    kill(child);
    assert_eq!(rig.living(), ["web-1"]);
    assert_eq!(rig.inside("web-1", "hostname"), "web-1");
    drop(reader);
    until(60, "it can be saved", || rig.run(&["save", "web-1", "/tmp/web-1.saved"]).status.success());
    fs::remove_file("/tmp/web-1.saved").expect("remove it");
}

#[test]
fn full_disk_is_told_and_leaves_clones_as_they_were() {
    let rig = Rig::new();
    if !rig.template("web", "acme", &[]) {
        return;
    }
    rig.clone("web", &[]);
    let place = rig.templates().join("small");
    let Some(small) = Small::mount(&place, "4m") else { return };
    let file = place.join("web-1.saved");
    let said = rig.fails(&["save", "web-1", file.to_str().expect("a plain path")], 1);
    assert!(said.contains("is there room?"), "{said}");
    assert_eq!(fs::read_dir(&place).expect("list it").count(), 0, "nothing is left");
    assert_eq!(rig.inside("web-1", "hostname"), "web-1", "it goes on");
    drop(small);
    rig.json(&["clones", "end", "--all"]);
    // No room for a record.
    let Some(_small) = Small::mount(&rig.clones(), "4k") else { return };
    let mut filled = File::create(rig.clones().join("filled")).expect("make a file");
    std::io::Write::write_all(&mut filled, &[1; 4096]).expect("fill the disk");
    let said = rig.fails(&["clone", "web", "--group", "acme"], 1);
    assert!(said.contains("cannot write") && said.contains("No space left"), "{said}");
    assert!(rig.living().is_empty() && processes_with(&rig.dir_text()).is_empty());
}
