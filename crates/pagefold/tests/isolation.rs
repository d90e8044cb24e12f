//! Isolation: no frame is mapped by two groups, by Pagefold's own audit and by an independent look at page frames. A
//! member can read its group's pool, and never write it.

mod common;

use common::number;
use common::service::{Member, Service, cannot_fold, torture, until};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

/// Page frames of a process's private writable mappings: its memory, folded or not.
fn frames(pid: u32) -> BTreeSet<u64> {
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).expect("its page map");
    let flags = File::open("/proc/kpageflags").expect("flags of page frames");
    let word = |file: &File, n: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, n * 8).map_or(0, |()| u64::from_ne_bytes(bytes))
    };
    let mut frames = BTreeSet::new();
    for line in fs::read_to_string(format!("/proc/{pid}/maps")).expect("its mappings").lines() {
        let mut words = line.split_ascii_whitespace();
        let (range, rights) = (words.next().expect("a range"), words.next().expect("rights"));
        // Programs and libraries are common to all processes, and no memory of a guest.
        let file = words.nth(3).unwrap_or_default();
        if !rights.starts_with("rw-p") || file.starts_with("/usr") || file.starts_with("/lib") || file.contains("/t-") {
            continue;
        }
        if file.contains("target/") {
            continue;
        }
        let (start, end) = range.split_once('-').expect("a range");
        let page = |hex| u64::from_str_radix(hex, 16).expect("an address") / 4096;
        for n in page(start)..page(end) {
            let entry = word(&pagemap, n);
            let frame = entry & ((1 << 55) - 1);
            const ZERO_PAGE: u64 = 1 << 24;
            if entry >> 63 == 1 && word(&flags, frame) & ZERO_PAGE == 0 {
                frames.insert(frame);
            }
        }
    }
    assert!(!frames.contains(&0), "page frames are hidden");
    frames
}

#[test]
fn no_frame_crosses_a_group() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let words = ["stable", "--pages", "6000", "--classes", "200", "--writes", "100"];
    let names = [("acme", "a1"), ("acme", "a2"), ("beta", "b1"), ("beta", "b2")];
    let mut members: Vec<(&str, Member)> =
        names.map(|(group, name)| (group, service.torture(group, name, &[], &words))).into();
    for group in ["acme", "beta"] {
        service.show(group);
        service.set(group, &["--scan-rate", "200000"]);
    }
    until(60, "both groups fold", || {
        members.iter_mut().for_each(|(_, m)| m.assert_is_well());
        ["acme", "beta"].iter().all(|group| number(&service.show(group)["sharing_pages"]) > 8000)
    });
    // All four members hold the same contents, so folding by content alone would have crossed the groups.
    let audit = service.assert_audit_is_clean();
    assert!(number(&audit["frames_checked"]) > 500, "{audit}");
    assert!(number(&audit["shared_within_group"]) > 100, "{audit}");
    assert!(number(&audit["saved_bytes"]) > 8000 * 4096, "{audit}");

    let mut by_group: BTreeMap<&str, Vec<BTreeSet<u64>>> = BTreeMap::new();
    let mut pids: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
    for (group, member) in &members {
        by_group.entry(group).or_default().push(frames(member.pid()));
        pids.entry(group).or_default().push(member.pid());
    }
    assert_eq!(in_common(&pids["acme"], &pids["beta"]), BTreeSet::new(), "frames of both groups");
    for group in ["acme", "beta"] {
        let [one, other] = &by_group[group][..] else { panic!("two members") };
        let shared = one.intersection(other).count();
        assert!((100..=260).contains(&shared), "{group}: {shared} frames are of both members, of 200 contents");
        assert!(one.len() < 5000, "{group}: {} frames for 6000 pages", one.len());
    }
    // A process of no group that holds the same contents shares no frame.
    let mut stranger = std::process::Command::new(torture());
    stranger.args(words).env(service.mark().0, service.mark().1);
    let stranger = Member::spawn(stranger, "stranger", &service.place());
    until(20, "the stranger has its pages", || !stranger.lines().is_empty());
    for group in ["acme", "beta"] {
        assert_eq!(in_common(&[stranger.pid()], &pids[group]), BTreeSet::new(), "frames of a stranger and {group}");
    }
}

/// Frames that processes of both lists map. The processes are read one after the other, and a frame that one frees may
/// become the other's meanwhile. So only frames that are in common at each of five looks count.
fn in_common(some: &[u32], others: &[u32]) -> BTreeSet<u64> {
    let all = |pids: &[u32]| pids.iter().flat_map(|pid| frames(*pid)).collect::<BTreeSet<u64>>();
    let look = || all(some).intersection(&all(others)).copied().collect::<BTreeSet<u64>>();
    let mut common = look();
    for _ in 0..4 {
        if common.is_empty() {
            break;
        }
        common = common.intersection(&look()).copied().collect();
    }
    common
}

#[test]
fn a_member_cannot_write_the_pool() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let mut witness = service.torture("acme", "witness", &[], &["stable", "--pages", "1000", "--classes", "16"]);
    service.show("acme");
    service.set("acme", &["--scan-rate", "200000"]);
    let mut prisoner =
        service.torture("acme", "prisoner", &[], &["escape", "--pool", &format!("pagefold-{}", service.group("acme"))]);
    let said = prisoner.finish(90);
    let attempts = said["attempts"].as_array().expect("a list");
    assert!(number(&said["mappings"]) > 0 && attempts.len() > 20, "{said}");
    eprintln!("{} attempts, {} descriptors", attempts.len(), said["descriptors"]);
    witness.assert_is_well();
}
