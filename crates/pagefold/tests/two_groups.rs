//! Two groups whose clones are of one image: neither has a page frame of the other's, folded or not.

mod common;

#[allow(dead_code, reason = "each test binary uses its part of this")]
#[path = "clones/rig.rs"]
mod rig;

use common::number;
use common::service::{Service, cannot_fold, find_member, until};
use rig::Rig;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

/// Pages that a clone writes when it goes on, and answers: 8 MiB.
const WRITTEN: u64 = 2048;

/// The kernel's page of zeros, in `/proc/kpageflags`.
const ZERO_PAGE: u64 = 1 << 24;

/// Frames of a process in mappings of templates and pools, and of what was written there.
fn frames(pid: u64) -> BTreeSet<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("its mappings");
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).expect("its page table");
    let mut frames = BTreeSet::new();
    for line in maps.lines().filter(|line| line.contains("/memfd:pagefold")) {
        let (start, end) = line.split(' ').next().and_then(|range| range.split_once('-')).expect("a range");
        let [start, end] = [start, end].map(|address| u64::from_str_radix(address, 16).expect("an address") >> 12);
        let mut entries = vec![0; (end - start) as usize * 8];
        pagemap.read_exact_at(&mut entries, start * 8).expect("root");
        let entries = entries.as_chunks::<8>().0.iter().map(|entry| u64::from_ne_bytes(*entry));
        frames.extend(entries.filter(|entry| entry >> 63 == 1).map(|entry| entry & ((1 << 55) - 1)));
    }
    frames
}

/// Two clones of a group, and their frames.
fn clone(rig: &Rig, group: &str, more: &[&str]) -> Vec<Value> {
    let names = format!("{}-%d", &group[..4]);
    let words = ["clone", "web", "--group", group, "--count", "2", "--name", &names];
    rig.json(&[&words, more].concat())["clones"].as_array().expect("a list").clone()
}

/// Asserts that clones of one group have `least` frames in common, and those of two groups none.
fn assert_apart(clones: &[Vec<Value>; 2], least: usize) {
    let of_group = |clones: &Vec<Value>| clones.iter().map(|clone| frames(number(&clone["pid"]))).collect::<Vec<_>>();
    let all = clones.each_ref().map(of_group);
    for group in &all {
        let common = group[0].intersection(&group[1]).count();
        assert!(common >= least, "{common} frames in common of {least}");
    }
    let flags = File::open("/proc/kpageflags").expect("root");
    let is_zero_page = |frame: &u64| {
        let mut word = [0; 8];
        flags.read_exact_at(&mut word, frame * 8).expect("a frame");
        u64::from_ne_bytes(word) & ZERO_PAGE != 0
    };
    for (one, other) in all[0].iter().flat_map(|one| all[1].iter().map(move |other| (one, other))) {
        let common: Vec<&u64> = one.intersection(other).filter(|frame| !is_zero_page(frame)).collect();
        assert!(common.is_empty(), "frames of two groups: {common:?}");
    }
}

#[test]
fn clones_of_two_groups_have_no_frame_in_common() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let rig = Rig::folded_by(&service);
    let groups = ["acme", "beta"].map(|name| service.group(name));
    if !rig.template("web", &groups[0], &[]) {
        return;
    }
    for more in [&[][..], &["--no-fold"], &["--name", "web-1", "--snippet", "command"], &["--name", "web-1", "--await"]]
    {
        let said = rig.fails(&[&["clone", "web", "--group", &groups[1]], more].concat(), 2);
        assert!(said.contains("a group's pages are its own"), "{more:?}: {said}");
    }
    assert!(rig.template("web", &groups[1], &[]));
    let clones = groups.each_ref().map(|group| clone(&rig, group, &[]));
    for (group, name) in [("acme", "acme-1"), ("acme", "acme-2"), ("beta", "beta-1"), ("beta", "beta-2")] {
        let words = ["template", "show", "web", "--group", &service.group(group)];
        let wanted = (number(&rig.json(&words)["stored_bytes"]) >> 12) - WRITTEN;
        until(120, &format!("{name} is folded"), || {
            let shown = service.show(group);
            find_member(&shown, name).is_some_and(|member| number(&member["folded_pages"]) >= wanted)
        });
    }
    let audit = service.assert_audit_is_clean();
    assert_eq!(number(&audit["cross_group_frames"]), 0, "{audit}");
    // Pages that a clone has not touched are in no page table of its own.
    assert_apart(&clones, 256);
    rig.json(&["clones", "end", "--all"]);
    let clones = groups.each_ref().map(|group| clone(&rig, group, &["--no-fold"]));
    assert_apart(&clones, 256);
}
