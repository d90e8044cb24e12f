use super::*;
use crate::fake_qemu::FakeQemu;

#[test]
fn estimate_is_what_is_sent_by_bandwidth_and_nothing_without_one() {
    let pace = Pace { bandwidth: Some(10 << 20), limit_ms: 300 };
    assert_eq!(pace.last_bytes(), 5 << 19);
    let found = pace.estimate(128 << 20, 100 << 20, 1 << 20);
    let seconds = found.seconds.expect("a time");
    assert!((10.0..10.1).contains(&seconds), "{seconds}");
    assert_eq!(found.downtime_ms, Some(100));
    let boundless = Pace { bandwidth: None, limit_ms: 300 };
    assert_eq!(boundless.estimate(1 << 20, 1 << 20, 0), Estimate { seconds: None, downtime_ms: None });
}

#[test]
fn large_guest_has_more_than_ten_minutes() {
    let within =
        |bandwidth: Option<u64>, ram_bytes: u64| Pace { bandwidth, limit_ms: 300 }.usual_within(ram_bytes).as_secs();
    assert_eq!(
        [within(None, 1 << 40), within(Some(100 << 20), 1 << 30), within(Some(1), u64::MAX)],
        [600, 600, u64::MAX]
    );
    assert_eq!(within(Some(100 << 20), 100 << 30), 4096);
    assert_eq!(within(Some(0), 1 << 30), u64::MAX);
}

fn told(pauses: bool) -> Told {
    let before = serde_json::from_value(json!({"capabilities": [], "bandwidth": null})).unwrap();
    Told { to: "tcp:h:1".into(), before, pauses }
}

/// The result of the command that moves a guest to `to`, after another such command was killed and has left `note`.
fn told_again(qemu: &FakeQemu, dir: &Path, to: &str, note: Option<Told>) -> Result<Option<Moved>, String> {
    let movable = Movable::of(&qemu.guest).unwrap();
    if let Some(told) = note {
        Note::take(dir, movable.target.process).unwrap().tell(told).unwrap();
    }
    let wanted = Wanted { to: to.into(), bandwidth: None, give_up: Duration::from_secs(30), within: Duration::ZERO };
    movable.go_on(&wanted, dir, &mut |_| ()).map_err(|why| why.to_string())
}

#[test]
fn guest_that_was_paused_by_a_command_that_was_killed_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let qemu = FakeQemu::start("paused", 1 << 30, dir.path());
    qemu.state().status = "paused";
    assert_eq!(told_again(&qemu, dir.path(), "tcp:h:1", None), Ok(None), "somebody else has paused it");
    let elsewhere = told_again(&qemu, dir.path(), "tcp:h:2", Some(told(true))).unwrap_err();
    assert!(elsewhere.contains("on its way to tcp:h:1"), "{elsewhere}");
    let ended = told_again(&qemu, dir.path(), "tcp:h:1", None).unwrap_err();
    assert!(
        ended.contains("runs as before: the command that moved it was killed") && qemu.state().status == "running",
        "{ended}"
    );
    assert_eq!(told_again(&qemu, dir.path(), "tcp:h:1", None), Ok(None), "all is over");
}

#[test]
fn migration_is_cancelled_after_its_bound_by_the_next_command_too() {
    let dir = tempfile::tempdir().unwrap();
    let qemu = FakeQemu::start("endless", 1 << 30, dir.path());
    qemu.state().migration = "active";
    assert_eq!(told_again(&qemu, dir.path(), "tcp:h:1", None), Ok(None), "somebody else moves it");
    assert_eq!(qemu.state().migration, "active");
    let late = told_again(&qemu, dir.path(), "tcp:h:1", Some(told(false))).unwrap_err();
    assert!(late.contains("runs as before: it had not arrived after 0 s"), "{late}");
    let state = qemu.state();
    assert_eq!((state.migration, state.status), ("cancelled", "running"));
}
