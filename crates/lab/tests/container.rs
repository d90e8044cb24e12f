//! Real containers: started, used, ended.

mod common;

use common::{TestLab, group, processes_with, sh, skipped, text};
use lab::{Guest, Idle, Image};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

/// Device and inode of a file in a container's root, seen from the host.
fn identity(guest: &Guest, path: &str) -> (u64, u64) {
    let inside = guest
        .pids()
        .into_iter()
        .find(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == "nginx"));
    let path = format!("/proc/{}/root{path}", inside.expect("its web server"));
    let meta = fs::metadata(Path::new(&path)).expect("stat inside");
    (meta.dev(), meta.ino())
}

#[test]
fn containers_run_on_shared_and_copied_roots_and_end_without_trace() {
    if let Some(why) = skipped(&["lxc-start", "mmdebstrap"]) {
        return eprintln!("{why}");
    }
    let test = TestLab::new();
    let mut guests = test.up(Image::LxcShared, 2, |_| {}).expect("two containers");
    guests.extend(test.up(Image::LxcCopied, 1, |_| {}).expect("a third"));
    let names: Vec<&str> = guests.iter().map(|guest| guest.name.as_str()).collect();
    assert_eq!(names, [1, 2, 3].map(|number| format!("{}-{number}", group())));

    for guest in &guests {
        assert_eq!(text(guest, "hostname"), guest.name);
        assert_eq!(text(guest, "cat /proc/1/comm"), "pagefold-init");
        assert!(guest.pids().len() >= 5, "monitor, first program, web server, workers, cron: {:?}", guest.pids());
        assert_eq!(text(guest, "cat /proc/net/dev | grep -c :"), "1", "a loopback device and no other");
    }
    let program = "/usr/sbin/nginx";
    assert_eq!(identity(&guests[0], program), identity(&guests[1], program));
    assert_ne!(identity(&guests[0], program), identity(&guests[2], program));
    assert_ne!(sh(&guests[0], "echo x >/etc/motd").status, 0, "a shared root is read-only");
    assert_eq!(text(&guests[2], "echo mine >/etc/motd && cat /etc/motd"), "mine");

    let failed = sh(&guests[1], "echo out; echo err >&2; exit 7");
    assert_eq!((failed.status, &failed.stdout[..], &failed.stderr[..]), (7, &b"out\n"[..], &b"err\n"[..]));
    assert!(guests[1].exec(&["sleep", "4321"], Duration::from_secs(1)).is_err());
    assert_eq!(text(&guests[1], "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c 'sleep 432[1]' || true"), "0");

    let settled = test.lab.settle(Idle::default(), Duration::from_secs(30), &|_| {}).expect("settle");
    assert!(settled.idle, "{settled:?}");

    let inside: Vec<u32> = guests.iter().flat_map(Guest::pids).collect();
    let dir = test.lab.dir().to_str().expect("a plain path").to_owned();
    test.lab.down().expect("down");
    assert!(processes_with(&dir).is_empty());
    let left = |pid: &&u32| fs::read_link(format!("/proc/{pid}/exe")).is_ok();
    assert_eq!(inside.iter().filter(left).count(), 0);
    assert!(!test.lab.dir().exists());
    assert_eq!(traces("/sys/fs/cgroup", 2), 0);
    let copies = lab::cache_dir().expect("a cache").join("copies");
    assert_eq!(traces(copies.to_str().expect("a plain path"), 1), 0);
}

/// Directories that bear the name of this test's group.
fn traces(dir: &str, depth: usize) -> usize {
    let entries = fs::read_dir(dir).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
    let dirs: Vec<_> = entries.filter(|path| path.is_dir()).collect();
    let here = dirs.iter().filter(|path| path.to_string_lossy().contains(&format!("{}-", group()))).count();
    let below = dirs.iter().filter_map(|path| path.to_str()).map(|path| traces(path, depth - 1));
    here + if depth > 1 { below.sum() } else { 0 }
}
