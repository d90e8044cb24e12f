//! Refused requests, damaged templates, and killed commands.

use crate::common::formats::assert_documented;
use crate::common::service::until;
use crate::rig::{Rig, processes_with};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

#[test]
fn template_is_its_groups_and_its_clones_keep_their_memory() {
    let rig = Rig::new();
    if !rig.template("web", "acme", &[]) {
        return;
    }
    let listed = rig.json(&["template", "list"]);
    assert_documented(&["pagefold template --json"], &listed);
    let said = rig.fails(&["clone", "web", "--group", "beta"], 2);
    assert!(said.contains("of group acme") && said.contains("create web --group beta"), "{said}");
    let made = rig.clone("web", &["--count", "2"]);
    assert_eq!(rig.json(&["template", "show", "web"])["clones"], 2);
    let said = rig.fails(&["template", "remove", "web"], 2);
    assert!(said.contains("web-1, web-2") && said.contains("--when-unused"), "{said}");
    // Nobody can write what they map, root by the clone's own descriptor included.
    let memory = format!("/proc/{}/fd/0", made[0]["pid"]);
    let open = File::options().write(true).open(&memory).expect("open a memory file");
    assert!(open.write_at(b"x", 0).is_err() && open.set_len(0).is_err());
    // The device state is read anew for each clone.
    let device = rig.templates().join("acme/web/device");
    let bytes = fs::read(&device).expect("read the device state");
    let cut = &bytes[..bytes.len() - 1];
    for damaged in [cut, &[cut, &b"x"[..]].concat()[..]] {
        fs::write(&device, damaged).expect("damage it");
        for words in [&["clone", "web", "--group", "acme"][..], &["template", "verify", "web"]] {
            let said = rig.fails(words, 1);
            assert!(said.contains("/device ") && said.contains("when it was made"), "{words:?}: {said}");
        }
    }
    fs::write(&device, bytes).expect("mend it");
    assert_eq!(rig.living(), ["web-1", "web-2"]);
    // Neither a file that is cut short nor one that is changed reaches a clone that lives, or one that is made beside it.
    let file = rig.templates().join("acme/web/memory");
    let stored = File::options().write(true).open(&file).expect("open the template's memory");
    let bytes = stored.metadata().expect("its size").len();
    stored.write_at(b"changed", 1 << 20).expect("change it");
    assert_eq!(rig.inside("web-1", "hostname"), "web-1");
    rig.clone("web", &[]);
    rig.json(&["clones", "end", "--all"]);
    for cut in [bytes, bytes - 4096] {
        stored.set_len(cut).expect("cut it");
        for words in [&["clone", "web", "--group", "acme"][..], &["template", "verify", "web"]] {
            let said = rig.fails(words, 1);
            assert!(said.contains("when it was made") && said.contains("template remove web"), "{words:?}: {said}");
        }
    }
    assert!(rig.living().is_empty());
    rig.json(&["template", "remove", "web"]);
    assert_eq!(rig.json(&["template", "list"])["templates"].as_array().map(Vec::len), Some(0));
}

#[test]
fn unwanted_template_goes_with_its_last_clone() {
    let rig = Rig::new();
    if !rig.template("web", "acme", &[]) {
        return;
    }
    rig.json(&["template", "verify", "web"]);
    rig.clone("web", &[]);
    assert_eq!(rig.json(&["template", "remove", "web", "--when-unused"])["removed"], false);
    assert!(rig.fails(&["clone", "web", "--group", "acme"], 2).contains("to be removed"));
    rig.json(&["clones", "end", "web-1"]);
    assert!(!rig.templates().join("acme/web").exists());
}

#[test]
fn killed_commands_leave_nothing_that_the_next_does_not_clean_up() {
    let rig = Rig::new();
    if !rig.template("web", "acme", &[]) {
        return;
    }
    let dir = rig.dir_text();
    rig.clone("web", &["--name", "stays"]);
    for stage in STAGES {
        let mut command = rig.command(&["clone", "web", "--group", "acme", "--count", "4"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("run pagefold");
        let begin = Instant::now();
        while !stage(&rig) && begin.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().expect("kill it");
        child.wait().expect("wait for it");
        // Those that have answered are clones; others are gone after this.
        for name in rig.living().into_iter().filter(|name| name != "stays") {
            rig.json(&["clones", "end", &name]);
        }
        until(20, "one process is left", || processes_with(&dir).len() == 1);
        assert_eq!(rig.living(), ["stays"]);
        assert_eq!(fs::read_dir(rig.clones()).map_or(0, |found| found.filter(is_dir).count()), 1);
    }
    rig.json(&["clones", "end", "stays"]);
    for ms in [100, 1500] {
        let words = ["template", "create", "next", "--image", "tiny", "--memory", "128M", "--group", "acme"];
        let mut command = rig.command(&words);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("run pagefold");
        std::thread::sleep(Duration::from_millis(ms));
        child.kill().expect("kill it");
        child.wait().expect("wait for it");
        // A guest that was being started may live a moment longer, and its template with it.
        until(20, "no process is left", || {
            assert_eq!(rig.json(&["template", "list"])["templates"].as_array().map(Vec::len), Some(1));
            processes_with(&dir).is_empty()
        });
        rig.json(&["template", "list"]);
        assert!(!rig.templates().join("acme/.next.making").exists());
    }
}

/// Moments at which a command is killed that makes clones, each told by what is there then.
const STAGES: [fn(&Rig) -> bool; 5] = [
    |_| true,
    |rig| rig.clones().join("web-1").exists(),
    |rig| processes_with(&rig.dir_text()).len() > 1,
    |rig| rig.clones().join("web-1/identity").exists(),
    |rig| fs::read_to_string(rig.clones().join("web-1/clone.json")).is_ok_and(|text| text.contains("running")),
];

fn is_dir(entry: &std::io::Result<fs::DirEntry>) -> bool {
    entry.as_ref().is_ok_and(|entry| entry.path().is_dir())
}

#[test]
fn full_disk_is_told_and_leaves_no_template() {
    let rig = Rig::new();
    let full = rig.templates();
    fs::create_dir(&full).expect("make a directory");
    let mount =
        |words: &[&str]| std::process::Command::new("mount").args(words).arg(&full).status().expect("run mount");
    if !mount(&["-t", "tmpfs", "-o", "size=4m,mode=700", "full"]).success() {
        eprintln!("skipped: nothing can be mounted here");
        return;
    }
    let words = ["template", "create", "web", "--image", "tiny", "--memory", "128M", "--group", "acme"];
    let output = rig.run(&words);
    let left: Vec<_> = fs::read_dir(full.join("acme")).expect("list it").flatten().map(|e| text_of(&e)).collect();
    std::process::Command::new("umount").arg(&full).status().expect("run umount");
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.code() == Some(3) {
        eprintln!("skipped: {said}");
        return;
    }
    assert!(output.status.code() == Some(1) && said.contains("No space left"), "{said}");
    assert_eq!(left, ["lock"]);
}

fn text_of(entry: &fs::DirEntry) -> String {
    entry.file_name().to_string_lossy().into_owned()
}

#[test]
fn wrong_names_and_unknown_templates_are_refused() {
    let rig = Rig::new();
    for (words, part) in [
        (&["clone", "none", "--group", "acme"][..], "no template none"),
        (&["template", "show", "none"], "no template none"),
        (&["template", "show", "../etc"], "no template"),
        (&["clone", "../etc", "--group", "acme"], "template name"),
        (&["clones", "end", "none"], "no clone none"),
    ] {
        let said = rig.fails(words, 2);
        assert!(said.contains(part), "{words:?}: {said}");
    }
}
