use super::*;
use crate::fake_qemu::{FakeQemu, ended_pid};
use crate::gather::{Gatherer, Saved};
use crate::ledger::Ledger;
use crate::rules::Rules;
use crate::shrink::{Held, shrink};
use balance::DriverState;
use std::process::{Child, Command};
use std::time::Instant;

const WHY: &str = "a test parks it";

/// Parks a guest.
fn park(dir: &Path, guest: &Guest, turn: &Turn) -> anyhow::Result<Parked> {
    lock(dir).park(guest, &Ledger::open(dir).unwrap(), turn, WHY)
}

/// A service's directory, its lock [`Turn`], and a guest that runs.
fn scene() -> (tempfile::TempDir, Turn, FakeQemu) {
    let dir = tempfile::tempdir().unwrap();
    let turn = Ledger::open(dir.path()).unwrap().take_turn().unwrap();
    let qemu = FakeQemu::start("one", 1 << 20, dir.path());
    (dir, turn, qemu)
}

fn lock(dir: &Path) -> Parking {
    Parking::lock(dir, NOTES_WITHIN).unwrap()
}

/// Entries of the journal, in their order.
fn journal(dir: &Path) -> Vec<String> {
    let lines = Journal::of_service(dir).read(0, 1 << 20).unwrap().lines;
    let entry = |(_, line): (u64, String)| serde_json::from_str::<serde_json::Value>(&line).unwrap()["entry"].take();
    lines.into_iter().map(entry).filter_map(|entry| Some(entry.as_str()?.to_owned())).collect()
}

/// A program, as a guest.
fn program() -> (Child, Guest) {
    let child = Command::new("sleep").arg("600").spawn().unwrap();
    let start_ticks = ProcessId::of(child.id()).unwrap().start_ticks;
    let facts = guest::Facts { start_ticks, ..guest::Facts::default() };
    let (id, name, group) = (format!("process:{}", child.id()), "sleep".into(), "g".into());
    let pids = vec![child.id()];
    (child, Guest { id, name, kind: GuestKind::Process, pids, group, ram_bytes: None, facts })
}

/// Waits until a process is in this state of `/proc/PID/stat`.
fn comes_to(pid: u32, state: u8) {
    let end = Instant::now() + Duration::from_secs(30);
    while host::ProcessStat::read(pid).unwrap().state != state {
        assert!(Instant::now() < end, "{:?}", host::ProcessStat::read(pid));
        std::thread::sleep(PAUSE);
    }
}

#[test]
fn vm_stands_still_until_it_is_woken_and_both_are_in_the_journal() {
    let (dir, turn, qemu) = scene();
    // As it may be where QEMU takes its time.
    qemu.state().fails = "stop";
    let parked = park(dir.path(), &qemu.guest, &turn).unwrap();
    assert_eq!((qemu.state().status, lock(dir.path()).list().unwrap()), ("paused", vec![parked.clone()]));
    lock(dir.path()).keep(&parked).unwrap();
    let listed = lock(dir.path()).list().unwrap();
    assert_eq!((listed[0].parker, processes(dir.path())), (None, vec![parked.process]));
    let again = park(dir.path(), &qemu.guest, &turn).unwrap_err().to_string();
    assert!(again.contains("it does not run: it is paused") && qemu.state().status == "paused", "{again}");
    lock(dir.path()).wake(&listed[0], WHY).unwrap();
    assert_eq!((qemu.state().status, lock(dir.path()).list().unwrap()), ("running", Vec::new()));
    assert_eq!(journal(dir.path()), ["park", "wake"]);
}

#[test]
fn guest_goes_on_whose_parker_was_killed_before_it_was_done() {
    let (dir, turn, qemu) = scene();
    for look in [wake_left as fn(&Path), |dir| assert_eq!(lock(dir).list().unwrap(), [])] {
        let parking = lock(dir.path());
        let parked = parking.park(&qemu.guest, &Ledger::open(dir.path()).unwrap(), &turn, WHY).unwrap();
        let killed = Some(ProcessId { pid: ended_pid(), start_ticks: 1 });
        parking.note(&Parked { parker: killed, ..parked }).unwrap();
        drop(parking);
        assert_eq!(qemu.state().status, "paused");
        look(dir.path());
        assert_eq!(qemu.state().status, "running");
    }
    assert_eq!(journal(dir.path()), ["park", "wake", "park", "wake"]);
}

/// A directory in place of a file makes writing fail, as a full disk would.
#[test]
fn guest_runs_where_it_cannot_be_noted_or_written_down() {
    let (dir, turn, qemu) = scene();
    let next = dir_of(dir.path()).join(format!("{}.next", std::process::id()));
    fs::create_dir_all(&next).unwrap();
    let refused = park(dir.path(), &qemu.guest, &turn).unwrap_err().to_string();
    assert!(
        refused.contains("goes on: cannot write") && qemu.state().cont_at.is_none(),
        "it was not stopped: {refused}"
    );
    fs::remove_dir(&next).unwrap();
    let parked = park(dir.path(), &qemu.guest, &turn).unwrap();
    fs::create_dir(&next).unwrap();
    let parking = lock(dir.path());
    let why = parking.keep(&parked).unwrap_err();
    assert!(parking.give_up(&parked, &why).to_string().contains("is not parked, and goes on"));
    assert_eq!((qemu.state().status, parking.list().unwrap()), ("running", Vec::new()));
    fs::remove_dir(&next).unwrap();
    fs::remove_dir_all(dir.path().join("journal")).unwrap();
    fs::write(dir.path().join("journal"), "no directory").unwrap();
    qemu.state().cont_at = None;
    parking.park(&qemu.guest, &Ledger::open(dir.path()).unwrap(), &turn, WHY).unwrap_err();
    assert!(qemu.state().cont_at.is_none() && parking.list().unwrap().is_empty(), "it was not stopped");
}

#[test]
fn guest_that_is_woken_while_it_is_parked_goes_on() {
    let (dir, turn, qemu) = scene();
    let parked = park(dir.path(), &qemu.guest, &turn).unwrap();
    lock(dir.path()).wake(&parked, WHY).unwrap();
    let refused = lock(dir.path()).keep(&parked).unwrap_err().to_string();
    assert_eq!((refused.as_str(), qemu.state().status), ("somebody has woken it", "running"));
    assert_eq!(lock(dir.path()).list().unwrap(), []);
}

#[test]
fn nobody_is_woken_between_the_note_and_the_stop() {
    let (dir, _turn, _qemu) = scene();
    let held = lock(dir.path());
    let refused = Parking::lock(dir.path(), Duration::from_millis(5)).unwrap_err().to_string();
    assert!(refused.contains("try again"), "{refused}");
    wake_left(dir.path());
    drop(held);
    Parking::lock(dir.path(), Duration::ZERO).unwrap();
}

#[test]
fn guest_whose_qemu_does_not_answer_is_still_noted() {
    let (dir, turn, qemu) = scene();
    let parked = park(dir.path(), &qemu.guest, &turn).unwrap();
    qemu.state().fails = "cont";
    let refused = lock(dir.path()).wake(&parked, WHY).unwrap_err().to_string();
    assert!(refused.contains("does not go on"), "{refused}");
    assert_eq!(lock(dir.path()).list().unwrap(), [parked]);
}

#[test]
fn note_that_cannot_be_read_keeps_nobody_from_the_others() {
    let (dir, turn, qemu) = scene();
    let parked = park(dir.path(), &qemu.guest, &turn).unwrap();
    for (name, text) in [("7.json", "{\"guest\""), ("8.next", "{"), ("9.json", "[]")] {
        fs::write(dir_of(dir.path()).join(name), text).unwrap();
    }
    let listed = lock(dir.path()).list().unwrap();
    assert_eq!(listed, [parked]);
    lock(dir.path()).wake(&listed[0], WHY).unwrap();
    assert_eq!(qemu.state().status, "running");
}

#[test]
fn program_stands_still_and_one_that_others_have_stopped_is_theirs() {
    let (dir, turn, _qemu) = scene();
    let (mut child, guest) = program();
    let parked = park(dir.path(), &guest, &turn).unwrap();
    comes_to(child.id(), b'T');
    let before = Held { private_bytes: 7, ..Held::default() };
    assert!(!parked.is_vm() && shrink(&guest, before, None).private_before_bytes == 7);
    lock(dir.path()).wake(&parked, WHY).unwrap();
    comes_to(child.id(), b'S');
    assert!(parked.process.stand_still());
    comes_to(child.id(), b'T');
    let refused = park(dir.path(), &guest, &turn).unwrap_err().to_string();
    assert!(refused.contains("it is stopped already"), "{refused}");
    assert_eq!(host::ProcessStat::read(child.id()).unwrap().state, b'T', "it is left alone");
    lock(dir.path()).wake(&parked, WHY).unwrap();
    comes_to(child.id(), b'S');
    let parked = park(dir.path(), &guest, &turn).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(lock(dir.path()).list().unwrap(), [], "it has ended");
    lock(dir.path()).wake(&parked, WHY).unwrap();
    let refused = park(dir.path(), &guest, &turn).unwrap_err().to_string();
    assert!(refused.contains("it has ended"), "{refused}");
    let own = Guest { pids: vec![std::process::id()], facts: guest::Facts { start_ticks: 1, ..guest.facts }, ..guest };
    assert!(park(dir.path(), &own, &turn).is_err(), "another process has its pid");
}

#[test]
fn containers_and_vms_without_qmp_are_left_to_their_own_means() {
    let (dir, turn, qemu) = scene();
    for (kind, means) in [(GuestKind::Docker, "docker pause"), (GuestKind::Firecracker, "no QMP")] {
        let refused = park(dir.path(), &Guest { kind, ..qemu.guest.clone() }, &turn).unwrap_err().to_string();
        assert!(refused.contains(means), "{refused}");
    }
    assert_eq!(journal(dir.path()), Vec::<String>::new());
}

/// A program that has woken the guest may be using it; and a balloon that is on its way would stop half-way.
#[test]
fn guest_that_is_in_use_or_whose_balloon_moves_is_not_parked() {
    let (dir, turn, qemu) = scene();
    let own = ProcessId::of(std::process::id()).unwrap();
    let mut user = Command::new("sleep").arg("600").spawn().unwrap();
    lock(dir.path()).keep_awake(own, ProcessId::of(user.id()).unwrap()).unwrap();
    let refused = park(dir.path(), &qemu.guest, &turn).unwrap_err().to_string();
    assert!(refused.contains(&format!("process {} keeps it awake", user.id())), "{refused}");
    user.kill().unwrap();
    user.wait().unwrap();
    qemu.state().takes = None;
    let mut ledger = Ledger::open(dir.path()).unwrap();
    ledger.note_targets(&turn, std::iter::once((&qemu.guest, 1 << 19))).unwrap();
    let refused = park(dir.path(), &qemu.guest, &turn).unwrap_err().to_string();
    assert!(refused.contains("its balloon is on its way from 1.0 MiB to 512 KiB"), "{refused}");
    assert_eq!((qemu.state().status, journal(dir.path())), ("running", Vec::new()));
    // It has taken memory back since. Nothing moves any more.
    ledger.note_arrived(&turn, std::iter::once(&qemu.guest)).unwrap();
    let parked = park(dir.path(), &qemu.guest, &turn).unwrap();
    lock(dir.path()).wake(&parked, WHY).unwrap();
}

/// Otherwise a parked guest would be told sizes, its memory would count as withdrawable, and its driver would be
/// flagged.
#[test]
fn balloon_of_a_parked_guest_is_not_counted_on() {
    let (dir, turn, qemu) = scene();
    let rules = Rules { guaranteed: vec![("one".parse().unwrap(), 1 << 18)], ..Rules::default() };
    let (mut gatherer, ledger) = (Gatherer::new(rules), Ledger::open(dir.path()).unwrap());
    let mut seen = || {
        let facts = gatherer.gather(std::slice::from_ref(&qemu.guest), &ledger, &Saved::default()).unwrap();
        (facts.guests[0].driver, gatherer.drivers()["qemu:one"])
    };
    assert_eq!(seen(), (DriverState::Works, DriverState::Works));
    let parked = park(dir.path(), &qemu.guest, &turn).unwrap();
    assert_eq!(seen(), (DriverState::Stuck, DriverState::Works));
    lock(dir.path()).wake(&parked, WHY).unwrap();
    assert_eq!(seen(), (DriverState::Works, DriverState::Works));
}
