//! A worker that stands still is found, and another one takes its place.

mod common;

use common::service::{Service, cannot_fold, folded_pages, until};
use common::supervised::{is_alive, signal};
use std::path::Path;

/// It was `running`, and nothing was in the log.
#[test]
fn worker_that_a_signal_has_stopped_is_replaced() {
    if cannot_fold() {
        return;
    }
    let service = Service::start();
    let program = Path::new(env!("CARGO_BIN_EXE_pagefold")).with_file_name("known_pages");
    let mut member = service.run("acme", "a", &[], &[program.to_str().expect("a plain path")]);
    for line in ["alloc x 400", "fill x 0 200 1", "fill x 200 200 1", "mergeable x"] {
        assert_eq!(member.tell(line), "ok");
    }
    until(60, "it is folded", || folded_pages(&service.show("acme"), "a") == 400);
    let worker = service.worker_pid("acme").expect("a worker");
    signal(worker, "STOP");
    until(90, "another worker", || service.worker_pid("acme").is_some_and(|pid| pid != worker));
    assert!(!is_alive(worker));
    let said = format!("the worker, process {worker}, is ended: it has stood still for ");
    assert!(service.log().contains(&said), "{}", service.log());
    until(60, "it serves the member", || folded_pages(&service.show("acme"), "a") == 400);
    assert_eq!(member.tell("check x 0 200 1"), "ok");
}
