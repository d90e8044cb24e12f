//! The link is lost in the switch: nobody can tell which side has the guest, and it must not run twice.

use crate::common::service::{cannot_fold, until};
use crate::rig::{PATIENCE, Vm, begin, hosts, migrate, said};
use serde_json::json;

#[test]
fn guest_whose_link_is_lost_in_the_switch_stands_still_until_somebody_knows_and_runs_once() {
    if cannot_fold() {
        return;
    }
    let [a, b] = hosts(80);
    let Some(from) = Vm::up(&a) else { return };
    from.ask("dd if=/dev/urandom of=/tmp/known bs=1M count=8 2>/dev/null; sha256sum /tmp/known > /tmp/digest");
    let to = from.waits_on(&b, &[]);
    // The last part takes seconds, so the link can be cut in it.
    from.tell("migrate-set-parameters", json!({"downtime-limit": 20_000})).expect("QEMU's settings");
    let (mover, _) = begin(&from, &["--give-up", "3"]);
    // While it sends the last part, QEMU answers nobody.
    until(PATIENCE, "the switch begins", || from.status_within(2000).is_empty());
    b.run(&["ip", "link", "set", "eth0", "down"]);
    let output = mover.wait_with_output().expect("its end");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(said(&output).contains(&format!("kill -CONT {}", from.pid)), "{}", said(&output));
    assert_eq!(a.state(from.pid), Some('T'), "{}", said(&output));
    assert_eq!(to.status(), "inmigrate");
    b.run(&["ip", "link", "set", "eth0", "up"]);
    a.signal(from.pid, "CONT");
    to.assert_runs();
    until(PATIENCE, "its old QEMU knows", || from.status() == "postmigrate");
    assert_eq!(to.ask("sha256sum -c /tmp/digest && echo good"), "/tmp/known: OK\ngood");
    let ended = migrate(&from, &[]);
    assert!(ended.status.success() && from.has_ended(), "{}", said(&ended));
}
