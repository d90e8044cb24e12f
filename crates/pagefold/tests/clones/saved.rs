//! Clones in files, and templates of guests that run.

use crate::common::lab;
use crate::common::service::until;
use crate::rig::{Rig, processes_with, text};
use std::fs;
use std::process::Stdio;
use std::time::Duration;

#[test]
fn saved_clone_goes_on_where_it_stood_with_its_name_or_another() {
    let rig = Rig::new();
    if !rig.template("web", "acme", &[]) {
        return;
    }
    let made = rig.clone("web", &[]);
    rig.inside("web-1", "echo kept >/root/file");
    let file = rig.templates().join("web-1.saved");
    let file = file.to_str().expect("a plain path");
    assert!(rig.run(&["save", "web-1", file]).status.success());
    assert_eq!(rig.inside("web-1", "cat /root/file"), "kept", "it goes on");
    assert!(rig.fails(&["restore", "web-1", file], 2).contains("there is a clone web-1 already"));
    let other = rig.json(&["restore", "other", file]);
    assert_eq!(rig.inside("other", "cat /root/file; hostname"), "kept\nother");
    assert_ne!(text(&other["clones"][0], "machine_id"), text(&made[0], "machine_id"));
    rig.json(&["clones", "end", "web-1"]);
    let same = rig.json(&["restore", "web-1", file]);
    assert_eq!(rig.inside("web-1", "cat /root/file; hostname"), "kept\nweb-1");
    assert_eq!(text(&same["clones"][0], "machine_id"), text(&made[0], "machine_id"));
    fs::write(file, "no clone").expect("write");
    assert!(rig.fails(&["restore", "x", file], 1).contains("is no saved clone"));
}

#[test]
fn guest_that_runs_becomes_a_template_and_goes_on() {
    let (rig, lab) = (Rig::new(), lab::Lab::new(&[]));
    let line = format!("--qemu-arg=socket,id=identity,server=on,wait=off,path={}/identity", lab.dir().display());
    let helper = ["--qemu-arg=-chardev", &line, "--qemu-arg=-device", "--qemu-arg=isa-serial,chardev=identity,irq=5"];
    let words = ["--image", "tiny", "--memory", "128M", "--append", "pagefold.identity=/dev/ttyS2"];
    let Some(guests) = lab.up(&[&words[..], &helper].concat()) else { return };
    let name = lab::name(&guests[0]);
    let inside = |script: &str| lab.everywhere(std::slice::from_ref(&name), script).remove(0);
    inside("echo running >/root/file");
    let making = rig.templates().join("acme/.web.making");
    for stage in ["", "device", "memory"] {
        let words = ["template", "create", "web", "--from", &name, "--group", "acme"];
        let mut child = rig.command(&words).stderr(Stdio::null()).spawn().expect("run pagefold");
        while !making.join(stage).exists() && child.try_wait().expect("look at it").is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().expect("kill it");
        child.wait().expect("wait for it");
        assert_eq!(inside("cat /root/file; hostname"), format!("running\n{name}"), "it goes on after {stage:?}");
        until(60, "nothing is left", || {
            // One that was complete is no failure.
            rig.run(&["template", "remove", "web"]);
            rig.json(&["template", "list"]);
            !making.exists() && processes_with(&rig.dir_text()).is_empty()
        });
    }
    rig.json(&["template", "create", "web", "--from", &name, "--group", "acme"]);
    assert_eq!(inside("cat /root/file; hostname"), format!("running\n{name}"), "it goes on, and is what it was");
    rig.clone("web", &["--count", "2"]);
    for clone in ["web-1", "web-2"] {
        assert_eq!(rig.inside(clone, "cat /root/file; hostname"), format!("running\n{clone}"));
    }
    // Again, although this guest was copied before.
    rig.json(&["template", "create", "next", "--from", &name, "--group", "acme"]);
    assert_eq!(inside("hostname"), name);
    assert!(rig.fails(&["template", "create", "x", "--from", "nobody", "--group", "acme"], 2).contains("0 guests"));
}
