//! A guest that writes without a pause, and faster than the link carries: by itself it would never arrive.

use crate::common::service::{cannot_fold, folded_pages, until};
use crate::rig::{PATIENCE, Vm, begin, hosts, migrate, said, until_sent};
use serde_json::json;

/// Writes a copy of a file of random bytes over itself, again and again, and compares it each eighth time.
const WRITES: &str = "dd if=/dev/urandom of=/tmp/known bs=1M count=16 2>/dev/null; sha256sum /tmp/known > /tmp/digest; n=0; \
    (while [ ! -e /tmp/stop ]; do cat /tmp/known > /tmp/copy; n=$((n + 1)); \
    [ $((n % 8)) != 0 ] || cmp /tmp/known /tmp/copy || echo $n >> /tmp/wrong; echo $n > /tmp/count; done; \
    echo > /tmp/stopped) > /dev/null 2>&1 &";

/// The guest runs on: its writer does, and nothing that it holds has changed.
fn assert_runs_on(from: &Vm) {
    assert_eq!(from.status(), "running");
    let count = || from.ask("cat /tmp/count 2>/dev/null; :").parse::<u64>().unwrap_or(0);
    let before = count();
    until(PATIENCE, "it writes on", || count() > before);
    assert_eq!(
        from.ask("sha256sum -c /tmp/digest && echo good; cat /tmp/wrong 2>/dev/null; :"),
        "/tmp/known: OK\ngood"
    );
}

#[test]
fn guest_that_writes_faster_than_the_link_carries_stays_after_the_bound_and_is_folded_on() {
    if cannot_fold() {
        return;
    }
    let [a, b] = hosts(60);
    let Some(from) = Vm::up(&a) else { return };
    // On a busy machine the guest may write little for a while. All but a page or two would be little enough to switch.
    from.tell("migrate-set-parameters", json!({"downtime-limit": 1})).expect("set its downtime");
    from.ask(WRITES);
    let speed = || from.tell("query-migrate-parameters", json!({})).expect("settings")["max-bandwidth"].clone();
    let usual = speed();

    let to = from.waits_on(&b, &[]);
    let late = migrate(&from, &["--within", "25s"]);
    let told = said(&late);
    assert_eq!(late.status.code(), Some(1), "{told}");
    let ended = "is not moved, and runs as before: it had not arrived after 25 s (pass ";
    for words in ["s of 25 s: pass ", ended, "--bandwidth", "--within"] {
        assert!(told.contains(words), "{words}: {told}");
    }
    assert!(!told.contains("after 25 s (pass 1,"), "all of it was sent once, and what it wrote since: {told}");
    until(PATIENCE, "the other QEMU gives up", || to.has_ended());
    assert_runs_on(&from);

    let to = from.waits_on(&b, &[]);
    let (mut mover, pid) = begin(&from, &["--within", "1h", "--bandwidth", "5M"]);
    until_sent(&from, &mut mover, 4 << 20);
    a.signal(pid, "KILL");
    assert!(!mover.wait_with_output().expect("its end").status.success());
    assert_eq!(from.status(), "running", "QEMU goes on alone");
    let late = migrate(&from, &["--within", "3"]);
    assert!(late.status.code() == Some(1) && said(&late).contains("it had not arrived after "), "{}", said(&late));
    assert_eq!(speed(), usual, "QEMU's settings are as before the command that was killed");
    until(PATIENCE, "the other QEMU gives up", || to.has_ended());
    assert_runs_on(&from);

    from.ask("echo > /tmp/stop");
    until(PATIENCE, "its writer ends", || from.ask("cat /tmp/stopped 2>/dev/null; echo $?") == "0");
    let before = folded_pages(&a.shown(), &from.name);
    // 1,024 pages, twice.
    from.ask("dd if=/dev/urandom of=/tmp/new bs=1M count=4 2>/dev/null; cp /tmp/new /tmp/again");
    until(PATIENCE, "they are folded", || folded_pages(&a.shown(), &from.name) > before + 1700);
    assert_eq!(
        from.ask("cmp /tmp/new /tmp/again && cat /tmp/known > /tmp/copy && cmp /tmp/known /tmp/copy && echo good"),
        "good"
    );
}
