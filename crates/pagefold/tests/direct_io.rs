//! Devices that write memory: reads past the page cache and by io_uring, into pages that are just being folded. And
//! devices that read it: a slow write of a page that was folded.

mod common;

use common::number;
use common::service::{Service, cannot_fold, find_member, seconds, torture, until};
use std::path::Path;

#[test]
fn data_written_by_devices_is_not_lost() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    // A directory beside the program: it is on a disk's filesystem, while /tmp may be a tmpfs.
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).to_str().expect("a plain path");
    let reads = (30_000 * seconds(12) / 12).to_string();
    let words = ["direct", "--dir", dir, "--reads", &reads, "--until-input-ends"];
    let mut reader = service.torture("acme", "reader", &[], &words);
    service.show("acme");
    service.set("acme", &["--scan-rate", "400000"]);
    let mut most = (0, 0);
    until(60, "pages that are folded while there are reads", || {
        reader.assert_is_well();
        let shown = service.show("acme");
        assert!(find_member(&shown, "reader").is_none_or(|m| m["state"] != "unpinned"), "{shown}");
        most = (most.0.max(number(&shown["sharing_pages"])), most.1.max(number(&shown["zero_pages"])));
        most.0 > 500 && most.1 > 500
    });
    reader.close_input();
    let counted = reader.finish(seconds(60) + 60);
    eprintln!("{most:?} {counted}");
    for way in ["pread", "preadv", "io_uring", "io_uring_cached", "io_uring_fixed"] {
        assert!(number(&counted["done"][way]) > 50, "{way} in {counted}");
    }
    assert!(number(&counted["folds_seen"]) > 0, "{counted}");
}

/// The memory of pools that a worker has touched, in pages.
fn pool_pages(service: &Service) -> u64 {
    let pid = service.worker_pid("acme").expect("a worker");
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
    let line = status.lines().find_map(|line| line.strip_prefix("RssShmem:")).expect("a size");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") / 4
}

/// A page is folded, its write to a slow file begins, and it is written again. Its slot is free, and other slots take
/// other contents. The file gets the bytes of the first moment.
///
/// Fails with a worker that fills free slots without asking the prover: the file gets what other members have there.
#[test]
fn slow_write_of_folded_page_gets_right_bytes() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let program = torture().replace("torture", "held_pages");
    let member = |name: &str, seed: u32| {
        let mut member = service.run("acme", name, &[], &[&program]);
        assert_eq!(member.tell(&format!("fill {seed}")), "ok");
        member
    };
    let sharing = |pages: u64| {
        until(60, &format!("{pages} pages share slots"), || number(&service.show("acme")["sharing_pages"]) == pages);
    };
    let (mut writer, mut other) = (member("writer", 0), member("other", 0));
    service.set("acme", &["--scan-rate", "400000"]);
    sharing(1024);
    assert_eq!(writer.tell("write 5"), "ok");
    for (n, member) in [&mut writer, &mut other].into_iter().enumerate() {
        assert_eq!(member.tell(&format!("fill {}", 10_000 * (n + 1))), "ok");
    }
    until(60, "all slots are free", || number(&service.show("acme")["slots"]) == 0);
    let before = pool_pages(&service);
    // The worker asks the prover within a second, and again a second later about what the kernel itself still held.
    std::thread::sleep(std::time::Duration::from_secs(4));
    let _more = (member("one", 50_000), member("another", 50_000));
    sharing(1024);
    let after = pool_pages(&service);
    assert!((512..900).contains(&before) && after < before + 300, "the slots are used again: {before}, {after} pages");
    assert_eq!(writer.tell("take"), "right");
}
