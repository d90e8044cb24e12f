//! Devices that write memory: reads past the page cache and by io_uring, into pages that are just being folded.

mod common;

use common::number;
use common::service::{Service, cannot_fold, find_member, seconds, until};
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
    let mut reader = service.torture("acme", "reader", &[], &["direct", "--dir", dir, "--reads", &reads]);
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
    let counted = reader.finish(seconds(60) + 60);
    eprintln!("{most:?} {counted}");
    for way in ["pread", "preadv", "io_uring", "io_uring_cached", "io_uring_fixed"] {
        assert!(number(&counted["done"][way]) > 50, "{way} in {counted}");
    }
    assert!(number(&counted["folds_seen"]) > 0, "{counted}");
}
