//! Guests that stay, because something fails before they have gone: they run, with all they had.

use crate::common::service::{cannot_fold, until};
use crate::rig::{PATIENCE, Vm, begin, hosts, migrate, said, until_sent};
use std::process::Output;
use std::time::Duration;

/// A speed at which the copy takes longer than what is done to it.
const SLOW: [&str; 4] = ["--bandwidth", "4M", "--give-up", "3"];

/// Moves a guest, does something when a part of its memory is sent, and returns what the command said. The guest must have stayed.
fn disturbed(from: &Vm, to: &Vm, disturb: impl FnOnce(u32)) -> String {
    let (mut mover, pid) = begin(from, &SLOW);
    until_sent(from, &mut mover, 2 << 20);
    disturb(pid);
    let output = mover.wait_with_output().expect("its end");
    assert_stayed(from, to, &output)
}

fn assert_stayed(from: &Vm, to: &Vm, output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = said(output);
    assert!(said.contains("is not moved, and runs as before"), "{said}");
    assert_eq!(from.status(), "running", "{said}");
    until(PATIENCE, "the other QEMU gives up", || to.has_ended());
    assert_eq!(from.ask("sha256sum -c /tmp/digest && echo good"), "/tmp/known: OK\ngood", "{said}");
    said
}

#[test]
fn guest_stays_and_runs_whatever_fails_before_it_has_gone() {
    if cannot_fold() {
        return;
    }
    let [a, b] = hosts(400);
    let Some(from) = Vm::up(&a) else { return };
    from.ask("seq 1 300000 > /tmp/known; sha256sum /tmp/known > /tmp/digest");
    let speed =
        || from.tell("query-migrate-parameters", serde_json::json!({})).expect("settings")["max-bandwidth"].clone();
    let usual = speed();

    let nobody = migrate(&from, &SLOW);
    assert!(!nobody.status.success() && said(&nobody).contains("runs as before"), "{}", said(&nobody));

    let to = from.waits_on(&b, &[]);
    disturbed(&from, &to, |_| to.kill());

    let to = from.waits_on(&b, &[]);
    let interrupted = disturbed(&from, &to, |pid| a.signal(pid, "TERM"));
    assert!(interrupted.contains("this command was interrupted"), "{interrupted}");

    let to = from.waits_on(&b, &[]);
    let cut = disturbed(&from, &to, |_| {
        a.run(&["ip", "link", "set", "eth0", "down"]);
        // The other side learns nothing through a dead link: its QEMU is ended by the operator.
        std::thread::sleep(Duration::from_millis(1500));
        to.kill();
    });
    assert!(cut.contains("nothing was sent for"), "{cut}");
    a.run(&["ip", "link", "set", "eth0", "up"]);
    assert_eq!(speed(), usual, "QEMU's settings are as before");

    let to = from.waits_on(&b, &[]);
    assert!(migrate(&from, &[]).status.success());
    to.assert_runs();
    assert!(from.has_ended());
    assert_eq!(to.ask("sha256sum -c /tmp/digest && echo good"), "/tmp/known: OK\ngood");
}

/// At each moment, the guest either has gone, and its QEMU here never runs again, or it runs here.
#[test]
fn guest_runs_once_when_its_destination_is_killed_around_the_switch() {
    if cannot_fold() {
        return;
    }
    let [a, b] = hosts(200);
    let Some(from) = Vm::up(&a) else { return };
    from.ask("echo kept > /tmp/kept");
    let (mut stayed, mut gone) = (0, 0);
    for pause_ms in [0, 50, 100, 150, 200, 300] {
        let to = from.waits_on(&b, &[]);
        let (mover, _) = begin(&from, &["--bandwidth", "23M", "--keep"]);
        // While it sends the last part, QEMU answers nobody.
        until(PATIENCE, "the switch begins", || from.status_within(100) != "running");
        std::thread::sleep(Duration::from_millis(pause_ms));
        to.kill();
        let output = mover.wait_with_output().expect("its end");
        if output.status.success() {
            assert_eq!(from.status(), "postmigrate", "it has gone: {}", said(&output));
            gone += 1;
            break;
        }
        assert!(said(&output).contains("runs as before"), "{}", said(&output));
        assert_eq!((from.status().as_str(), from.ask("cat /tmp/kept").as_str()), ("running", "kept"));
        stayed += 1;
    }
    eprintln!("it stayed {stayed} times, and had gone {gone} times");
}
