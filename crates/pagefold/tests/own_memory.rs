//! Some writes cannot wait for a page that is out of reach: a program's own through `/proc/self/mem`, and `FUTEX_WAKE_OP`.
//! They may be refused, and are never lost.

mod common;

use common::number;
use common::service::{Service, cannot_fold};
use std::path::Path;
use std::process::Command;

#[test]
fn writes_that_cannot_wait_are_made_or_refused() {
    if cannot_fold() {
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("own_memory");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/own_memory.c");
    let built = Command::new("cc").args(["-O1", "-Wall", "-Werror", "-o"]).arg(&program).arg(source).status();
    assert!(built.expect("run cc").success());
    let program = program.to_str().expect("a plain path");
    let service = Service::start();
    for way in ["mem", "futex"] {
        let mut member = service.run("acme", way, &["--all-anonymous"], &[program, way, "6"]);
        let status = member.end(60);
        member.until_all_is_read();
        assert!(status.success(), "{way}: {:?} {}", member.lines(), member.errors());
    }
    // 788 were seen beside a build.
    assert!(number(&service.show("acme")["folds"]) > 200, "{}", service.show("acme"));
}
