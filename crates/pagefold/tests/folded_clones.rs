//! Clones of a group that a service serves: born folded, and members for as long as they live.

mod common;

#[allow(dead_code, reason = "each test binary uses its part of this")]
#[path = "clones/rig.rs"]
mod rig;

use common::service::{Service, cannot_fold, find_member, folded_pages, until};
use common::template::{Template, loaded};
use common::{has_shown, json_of, number};
use rig::{Rig, text};
use serde_json::Value;
use std::fs;
use std::process::Stdio;
use std::time::Duration;

/// Pages that a clone of the image `tiny` writes when it goes on, and answers: 8 MiB.
const WRITTEN: u64 = 2048;

/// A service, and a template of the group `acme`; `None`, with the reason printed, if the host lacks something.
fn with_template() -> Option<(Service, Rig)> {
    if cannot_fold() {
        return None;
    }
    let service = Service::start();
    let rig = Rig::folded_by(&service);
    rig.template("web", &service.group("acme"), &[]).then_some((service, rig))
}

/// Pages of a template's memory that are not zero, about.
fn filled(rig: &Rig) -> u64 {
    number(&rig.json(&["template", "show", "web"])["stored_bytes"]) >> 12
}

/// Waits until a member shows most of the template.
fn until_folded(service: &Service, rig: &Rig, name: &str) {
    let wanted = filled(rig) - WRITTEN;
    until(120, &format!("{name} has {wanted} pages folded: {}", service.log()), || {
        let shown = service.show("acme");
        find_member(&shown, name).is_some_and(|member| number(&member["folded_pages"]) >= wanted)
    });
}

/// The memory file that a clone maps, and how many mappings of it the clone has.
fn memory(clone: &Value) -> (String, usize) {
    let path = format!("/proc/{}/", clone["pid"]);
    let file = fs::metadata(format!("{path}fd/0")).expect("its memory");
    let inode = std::os::unix::fs::MetadataExt::ino(&file).to_string();
    let maps = fs::read_to_string(format!("{path}maps")).expect("its mappings");
    let is_ram = |line: &&str| line.contains(" rw-p ") && line.split_whitespace().any(|word| word == inode);
    let count = maps.lines().filter(is_ram).count();
    (inode, count)
}

#[test]
fn clones_are_born_folded_and_what_they_write_is_folded_again() {
    let Some((service, rig)) = with_template() else { return };
    let group = service.group("acme");
    let made = rig.clone("web", &["--count", "2"]);
    let place = service.place().to_str().expect("a plain path").to_owned();
    assert!(made.iter().all(|clone| text(clone, "service") == place), "{made:?}");
    // Soon after it was written, memory is folded to other slots, each with a mapping.
    assert!(made.iter().all(|clone| (1..=100).contains(&memory(clone).1)), "mappings of the template");
    assert_eq!(memory(&made[0]).0, memory(&made[1]).0);
    ["web-1", "web-2"].iter().for_each(|name| until_folded(&service, &rig, name));
    let kept = loaded(&service, &group);
    assert!(kept.len() == 1 && kept[0].starts_with("web-"), "{kept:?}");
    // The same new contents in both.
    let slots = || number(&service.show("acme")["slots"]);
    let before = slots();
    for name in ["web-1", "web-2"] {
        rig.inside(name, "i=0; while [ $i -lt 40000 ]; do echo $i-$i-$i-$i-$i-$i; i=$((i+1)); done >/tmp/new");
    }
    until(120, "new contents have slots", || slots() > before + 100);
    let same = rig.inside("web-1", "sha256sum </tmp/new");
    assert_eq!(rig.inside("web-2", "sha256sum </tmp/new"), same);
    service.assert_audit_is_clean();
    // The template stays for as long as a clone lives, with the service's copy, and no longer.
    assert!(rig.fails(&["template", "remove", "web"], 2).contains("web-1, web-2"));
    rig.json(&["clones", "end", "web-1"]);
    assert_eq!(loaded(&service, &group), kept);
    assert!(rig.fails(&["template", "remove", "web"], 2).contains("web-2"));
    rig.json(&["clones", "end", "web-2"]);
    assert!(loaded(&service, &group).is_empty());
    rig.json(&["template", "remove", "web"]);
}

#[test]
fn waiting_rolled_back_and_restored_clones_are_members_again() {
    let Some((service, rig)) = with_template() else { return };
    let made = rig.clone("web", &["--warm", "1"]);
    let next = rig.clone("web", &[]);
    assert_eq!(memory(&made[0]).0, memory(&next[0]).0);
    let pid = |name: &str| {
        let shown = service.show("acme");
        let members = shown["members"].as_array().expect("members").iter().map(|member| number(&member["pid"]));
        let found = rig.json(&["clones"])["clones"].as_array().expect("a list").clone();
        let found = found.iter().find(|clone| clone["name"] == name).map(|clone| number(&clone["process"]["pid"]));
        found.filter(|pid| members.into_iter().any(|member| member == *pid))
    };
    until(60, "the one that waited is a member", || pid("web-2") == Some(number(&next[0]["pid"])));
    rig.json(&["rollback", "web-1"]);
    until(60, "it is a member again", || pid("web-1").is_some_and(|pid| pid != number(&made[0]["pid"])));
    until_folded(&service, &rig, "web-1");
    let file = rig.templates().join("web-1.saved").to_str().expect("a plain path").to_owned();
    assert!(rig.run(&["save", "web-1", &file]).status.success());
    rig.json(&["clones", "end", "--all"]);
    assert!(loaded(&service, &service.group("acme")).is_empty());
    let restored = rig.json(&["restore", "web-1", &file]);
    assert!(restored["clones"][0]["service"].is_string(), "{restored}");
    assert_eq!(loaded(&service, &service.group("acme")).len(), 1, "its template is there to be folded onto");
    until(120, "copies are folded onto the template", || {
        folded_pages(&service.show("acme"), "web-1") > filled(&rig) / 2
    });
    rig.json(&["clones", "end", "--all"]);
    assert!(loaded(&service, &service.group("acme")).is_empty());
}

#[test]
fn clone_is_not_folded_where_no_service_serves_its_group_or_by_wish() {
    if cannot_fold() {
        return;
    }
    let service = Service::start_with(Some("[[group]]\nname = 'beta-TOKEN'\n"));
    let rig = Rig::folded_by(&service);
    let group = service.group("acme");
    if !rig.template("web", &group, &[]) {
        return;
    }
    let output = rig.run(&["clone", "web", "--group", &group, "--json"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains(&format!("no service serves group {group}")), "{said}");
    assert!(json_of(&output)["clones"][0]["service"].is_null());
    let place = service.place().to_str().expect("a plain path").to_owned();
    let said = rig.fails(&["clone", "web", "--group", &group, "--service", &place], 1);
    assert!(said.contains("no service serves group") && said.contains("--no-fold"), "{said}");
    let output = rig.run(&["clone", "web", "--group", &group, "--no-fold", "--json"]);
    assert!(has_shown(&output) && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(json_of(&output)["clones"][0]["service"].is_null());
}

#[test]
fn template_that_somebody_else_has_loaded_under_this_name_is_not_cloned() {
    let Some((service, rig)) = with_template() else { return };
    let group = service.group("acme");
    let digest = text(&rig.json(&["template", "show", "web"]), "digest");
    let name = format!("web-{}", digest.rsplit(':').next().expect("a digest"));
    let other = Template::known(&group, 32 << 10, 100, 7);
    assert_eq!(other.load(&service, &group, &name), Ok(()));
    let said = rig.fails(&["clone", "web", "--group", &group], 1);
    assert!(said.contains("something else as template web"), "{said}");
    assert!(rig.living().is_empty());
    let made = rig.clone("web", &[]);
    assert_eq!(rig.inside(&text(&made[0], "name"), "hostname"), "web-1");
}

#[test]
fn clones_have_one_memory_file_also_after_the_supervisor_was_killed() {
    let Some((mut service, rig)) = with_template() else { return };
    let first = rig.clone("web", &[]);
    service.kill_supervisor();
    until(60, "another supervisor answers", || has_shown(&service.pagefold(&["group", "list", "--json"])));
    let second = rig.clone("web", &[]);
    assert_eq!(memory(&first[0]).0, memory(&second[0]).0);
    assert_eq!(loaded(&service, &service.group("acme")).len(), 1);
    // One that died by itself counts no longer, either.
    for clone in first.iter().chain(&second) {
        assert!(std::process::Command::new("kill").args(["-9", &clone["pid"].to_string()]).status().unwrap().success());
    }
    until(20, "the template is let go", || {
        rig.living().is_empty() && loaded(&service, &service.group("acme")).is_empty()
    });
}

#[test]
fn pool_without_room_for_the_template_is_told_before_anything_is_started() {
    if cannot_fold() {
        return;
    }
    let service = Service::start_with(Some("[[group]]\nname = 'acme-TOKEN'\npool = '64M'\n"));
    let rig = Rig::folded_by(&service);
    let group = service.group("acme");
    if !rig.template("web", &group, &[]) {
        return;
    }
    let said = rig.fails(&["clone", "web", "--group", &group], 1);
    assert!(said.contains("raise it") && said.contains("--no-fold"), "{said}");
    assert!(rig.living().is_empty());
}

#[test]
fn killed_commands_and_damaged_templates_leave_nothing_in_the_service() {
    let Some((service, rig)) = with_template() else { return };
    let group = service.group("acme");
    let stages: [fn(&Rig) -> bool; 3] = [
        |rig| rig.clones().join("web-1").exists(),
        |rig| rig.clones().join("web-1/identity").exists(),
        |rig| fs::read_to_string(rig.clones().join("web-1/clone.json")).is_ok_and(|text| text.contains("running")),
    ];
    let is_empty = || {
        let shown = service.pagefold(&["group", "show", &group, "--json"]);
        // There is no such group before its first member.
        let is_there = shown.status.code() != Some(2);
        let has_members = || !has_shown(&shown) || json_of(&shown)["members"].as_array().map_or(0, Vec::len) > 0;
        rig.living().is_empty() && (!is_there || !has_members() && loaded(&service, &group).is_empty())
    };
    for stage in stages {
        let mut command = rig.command(&["clone", "web", "--group", &group, "--count", "2"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("run pagefold");
        while !stage(&rig) && child.try_wait().expect("look at it").is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().expect("kill it");
        child.wait().expect("wait for it");
        // Those that have answered are clones.
        rig.json(&["clones", "end", "--all"]);
        until(60, "the service has neither members nor the template", is_empty);
    }
    let file = rig.templates().join(&group).join("web/memory");
    let stored = fs::File::options().write(true).open(&file).expect("open the template's memory");
    std::os::unix::fs::FileExt::write_at(&stored, b"changed", 1 << 20).expect("change it");
    let said = rig.fails(&["clone", "web", "--group", &group], 1);
    assert!(said.contains("when it was made") && said.contains("template remove web"), "{said}");
    assert!(is_empty(), "{}", service.log());
}

/// Clones in turn; 1,000 with `PAGEFOLD_LONG_TESTS` or `PAGEFOLD_SOAK_SECONDS`.
const CLONES: usize = 12;
const MANY: usize = 1000;

#[test]
fn clones_in_turn_leave_the_service_as_it_was() {
    let Some((service, rig)) = with_template() else { return };
    rig.clone("web", &["--name", "stays"]);
    until_folded(&service, &rig, "stays");
    let pids = [service.supervisor_pid(), service.worker_pid("acme").expect("a worker")];
    let taken = || {
        pids.map(|pid| {
            let files = fs::read_dir(format!("/proc/{pid}/fd")).expect("its files").count();
            let mappings = fs::read_to_string(format!("/proc/{pid}/maps")).expect("its mappings").lines().count();
            let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
            let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB"));
            (files, mappings, anonymous.and_then(|kib| kib.trim().parse::<u64>().ok()).expect("its memory"))
        })
    };
    let in_turn = |count: usize| {
        for _ in 0..count {
            rig.clone("web", &[]);
            rig.json(&["clones", "end", "web-1"]);
        }
        // Members that are gone are forgotten within some seconds.
        until(60, "one member is left", || {
            service.show("acme")["members"].as_array().is_some_and(|all| all.len() == 1)
        });
    };
    let count = if common::is_long() { MANY } else { CLONES };
    in_turn(count / 3);
    let before = taken();
    in_turn(count - count / 3);
    until(60, &format!("{before:?} has become {:?}", taken()), || {
        taken().iter().zip(before).all(|(now, before)| {
            now.0 <= before.0 + 4 && now.1 <= before.1 + 16 && now.2 <= before.2 + before.2 / 4 + 2048
        })
    });
    assert_eq!(rig.inside("stays", "hostname"), "stays");
    assert_eq!(loaded(&service, &service.group("acme")).len(), 1);
}
