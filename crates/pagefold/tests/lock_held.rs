//! A service that is started while a process of a killed one before holds its lock for a moment.

mod common;

use common::service::{Service, cannot_fold, until};
use std::fs::File;
use std::time::Duration;

/// It ended: "another service runs".
#[test]
fn service_waits_for_the_lock_of_a_killed_one() {
    if cannot_fold() {
        return;
    }
    let mut service = Service::start();
    let lock = File::open(service.place().join("lock")).expect("the lock");
    let holder = std::thread::spawn(move || {
        // It gets the lock when the service is killed, before the next one does, or else while that one waits.
        lock.lock().expect("lock it");
        std::thread::sleep(Duration::from_millis(500));
    });
    std::thread::sleep(Duration::from_millis(200));
    service.kill_supervisor();
    holder.join().expect("it has let go");
    until(30, "the next one serves", || service.pagefold(&["group", "list"]).status.success());
    assert!(!service.log().contains("another service runs"), "{}", service.log());
}
