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
    for _ in 0..20 {
        let lock = File::open(service.place().join("lock")).expect("the lock");
        // It gets the lock when the service is killed, before the next one does. On a busy machine it may be too late for that.
        let holder = std::thread::spawn(move || {
            let is_held = (0..20_000).any(|_| {
                std::thread::sleep(Duration::from_micros(100));
                lock.try_lock().is_ok()
            });
            std::thread::sleep(if is_held { Duration::from_millis(500) } else { Duration::ZERO });
            is_held
        });
        service.kill_supervisor();
        let is_held = holder.join().expect("it has let go");
        until(30, "the next one serves", || service.pagefold(&["group", "list"]).status.success());
        if is_held {
            return assert!(!service.log().contains("another service runs"), "{}", service.log());
        }
    }
    panic!("the next service always had the lock first");
}
