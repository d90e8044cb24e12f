//! `pagefold audit` on members that fold, and on groups that really have frames in common.

mod common;

use common::service::{Member, Service, cannot_fold, folded_pages, until};
use common::{not_root, number, unprivileged};
use serde_json::Value;
use std::fs;

/// Path of `trials/known_pages.rs`, a program with pages of known content.
fn known_pages() -> String {
    let path = std::path::PathBuf::from(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    path.to_str().expect("a plain path").to_owned()
}

fn group<'a>(audit: &'a Value, name: &str) -> &'a Value {
    let groups = audit["by_group"].as_array().expect("a list");
    groups.iter().find(|g| g["name"] == name).unwrap_or_else(|| panic!("no {name} in {audit}"))
}

/// Pages of a process's private mappings of the pool, and the anonymous ones among them, counted from `smaps`.
fn places(pid: u32) -> (u64, u64) {
    let (mut places, mut anonymous, mut in_pool) = (0, 0, false);
    for line in fs::read_to_string(format!("/proc/{pid}/smaps")).expect("it runs").lines() {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        if words[0].contains('-') && !words[0].ends_with(':') {
            in_pool = words[1].ends_with('p') && line.contains("/memfd:pagefold-");
            let (start, end) = words[0].split_once('-').expect("a range");
            let address = |hex| u64::from_str_radix(hex, 16).expect("an address");
            places += if in_pool { (address(end) - address(start)) >> 12 } else { 0 };
        } else if in_pool && (words[0] == "Anonymous:" || words[0] == "Swap:") {
            anonymous += words[1].parse::<u64>().expect("a size") >> 2;
        }
    }
    (places, anonymous)
}

/// Starts two members of `acme` and one of `beta`, and waits until they are folded.
fn folded_members(service: &Service) -> Vec<Member> {
    const MEMBERS: [(&str, &str); 3] = [("acme", "a"), ("acme", "b"), ("beta", "c")];
    let program = known_pages();
    // A forked child would be a member, too, 3 s later.
    let env = [("PAGEFOLD_CHILDREN_AFTER", "never")];
    let mut members: Vec<_> =
        MEMBERS.map(|(group, name)| service.run_with(group, name, &[], &[&program], &env)).into_iter().collect();
    for m in &mut members {
        for line in ["alloc x 1500", "fill x 0 1000 1", "same x 1000 500 5000", "mergeable x"] {
            m.tell(line);
        }
    }
    let folded = |group: &str, name: &str| folded_pages(&service.show(group), name);
    until(60, "all is folded", || MEMBERS.map(|m| folded(m.0, m.1)) == [1500, 1500, 500]);
    members
}

#[test]
fn savings_are_what_the_page_tables_say() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut members = folded_members(&service);
    let (acme, beta) = (service.group("acme"), service.group("beta"));
    let audit = service.assert_audit_is_clean();
    let a = group(&audit, &acme);
    let figures = ["members", "other_processes", "pool_mappings", "pool_frames", "broken_pages"].map(|f| number(&a[f]));
    assert_eq!(figures, [2, 0, 3000, 1001, 0]);
    let terms = |of: &Value| ["folded_bytes", "pool_bytes", "zero_bytes"].map(|term| number(&of[term]));
    assert_eq!(terms(&a["savings"]), [3000 << 12, 1001 << 12, 0]);
    assert_eq!(terms(&a["savings"]), terms(&a["engine"]));
    assert!(number(&a["shared_frames"]) >= 1001, "{a}");
    let b = group(&audit, &beta);
    assert_eq!(["members", "pool_mappings", "pool_frames"].map(|f| number(&b[f])), [1, 500, 1]);
    assert_eq!(terms(&b["savings"]), [500 << 12, 1 << 12, 0]);
    let groups = audit["by_group"].as_array().unwrap().iter().filter(|g| !g["service"].is_null());
    let all: i64 = groups.map(|g| g["saved_bytes"].as_i64().unwrap()).sum();
    assert_eq!(audit["saved_bytes"], all);

    // Each written page has its own frame again; a page that was only read has not.
    members[0].tell("fill x 0 10 77777");
    members[1].tell("read x 0 1500");
    let audit = service.assert_audit_is_clean();
    let a = group(&audit, &acme);
    assert_eq!(["pool_mappings", "broken_pages"].map(|f| number(&a[f])), [2990, 10]);
    let plainly = [&members[0], &members[1]].map(|m| places(m.pid()));
    assert_eq!(number(&a["pool_mappings"]), plainly.iter().map(|(all, broken)| all - broken).sum::<u64>());
    assert_eq!(number(&a["broken_pages"]), plainly.iter().map(|(_, broken)| broken).sum::<u64>());

    // A child of a member is no member, but maps the pool.
    members[1].tell("fork");
    let audit = service.assert_audit_is_clean();
    let a = group(&audit, &acme);
    assert_eq!(["members", "other_processes", "pool_mappings"].map(|f| number(&a[f])), [2, 1, 2990]);
    let text = service.pagefold(&["audit", "--group", &acme]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("no two groups have any in common") && !text.contains(&beta), "{text}");
}

/// Member of one group whose child joins another group by itself, with the frames that both map since the fork.
const CROSSING: &str = "
import json, mmap, os, socket, sys
control, group, pool = sys.argv[1:]
private = mmap.mmap(-1, 64 * 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for n in range(64): private[n * 4096] = 7
if pool:
    f = os.memfd_create('pagefold-' + pool); os.ftruncate(f, 32 * 4096); os.write(f, b'x' * 32 * 4096)
    mapped = mmap.mmap(f, 32 * 4096, mmap.MAP_PRIVATE)
if os.fork() == 0:
    s = socket.socket(1, 5); s.connect(control)
    s.send(json.dumps({'join': {'group': group, 'name': 'child', 'program': 'x'}}).encode())
    print(s.recv(1000).decode(), flush=True)
sys.stdin.read()
";

#[test]
fn frames_that_two_groups_have_in_common_are_found() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    // Nothing is folded in these groups, so the audit can find no other frames in common.
    let (acme, beta) = (service.group("acme"), service.group("beta"));
    let control = service.place().join("control.sock");
    let control = control.to_str().expect("a plain path");
    for (pool, least) in [(acme.as_str(), 96), ("", 64)] {
        let parent = service.run("acme", "parent", &[], &["python3", "-c", CROSSING, control, &beta, pool]);
        until(20, &format!("the child joins: {}", parent.errors()), || !parent.lines().is_empty());
        assert!(parent.lines()[0].contains("joined"), "{:?}", parent.lines());
        let output = service.pagefold(&["audit", "--json"]);
        assert_eq!(output.status.code(), Some(1));
        let audit: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        common::formats::assert_documented(&["audit --json", "Savings of folding"], &audit);
        let crossing = number(&audit["cross_group_frames"]);
        assert!((least..3000).contains(&crossing), "{audit}");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(errors.contains("groups are NOT isolated"), "{errors}");
        let first = &audit["cross_group"][0];
        let groups = [0, 1].map(|n| first["places"][n]["group"].as_str().expect("a name").to_owned());
        assert_eq!(groups, [acme.clone(), beta.clone()]);
        let text = service.pagefold(&["audit"]);
        let text = String::from_utf8_lossy(&text.stdout).into_owned();
        assert!(text.contains("in COMMON") && text.contains(&format!("process {} of {acme}", parent.pid())), "{text}");
        drop(parent);
        // The child ends when its input is closed.
        until(20, "the child is gone", || {
            let listed = service.pagefold(&["group", "list", "--json"]);
            let listed: Value = serde_json::from_slice(&listed.stdout).expect("JSON");
            listed.as_array().expect("a list").iter().all(|g| g["members"] == 0)
        });
    }
}

#[test]
fn audit_without_root_is_refused() {
    if not_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let copy = dir.path().join("pagefold");
    common::copy_program(env!("CARGO_BIN_EXE_pagefold").as_ref(), &copy);
    let output = unprivileged(copy.to_str().unwrap()).args(["audit", "--json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("takes root"), "{output:?}");
}
