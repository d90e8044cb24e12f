//! Order of a plan's steps, with guests that are late, stuck or gone.

use super::*;
use crate::fake_qemu::{FakeQemu, Told, ended_pid};
use balance::HostFacts;
use std::cell::Cell;

const M: u64 = 1 << 20;
/// Time limit of withdrawals that are to end before it, on a machine that may be busy: 10 s.
const WITHIN: Duration = Duration::from_secs(10);
/// Time limit of withdrawals that are to reach it: 2 s.
const IN_VAIN: Duration = Duration::from_secs(2);

/// A directory for journal and ledger, and two guests of 256 MiB: the first is to shrink, the second to grow.
struct Scene {
    dir: tempfile::TempDir,
    shrinks: FakeQemu,
    grows: FakeQemu,
    within: Duration,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let guest = |name| FakeQemu::start(name, 256 * M, dir.path());
        let (shrinks, grows) = (guest("shrinks"), guest("grows"));
        grows.state().size_bytes = 100 * M;
        Self { dir, shrinks, grows, within: WITHIN }
    }

    /// As [`Scene::new`], but the first guest does not shrink.
    fn in_vain() -> Self {
        let scene = Self { within: IN_VAIN, ..Self::new() };
        scene.shrinks.state().takes = None;
        scene
    }

    /// Carries out a plan by which the first guest shrinks to 128 MiB, and the second grows to 128 MiB. The floor is 50
    /// MiB.
    fn carry_out(&self, is_owed: bool, available: &dyn Fn() -> u64) -> Vec<Outcome> {
        let guests = [self.shrinks.guest.clone(), self.grows.guest.clone()];
        self.carry_out_for(&guests, is_owed, available)
    }

    fn carry_out_for(&self, guests: &[Guest], is_owed: bool, available: &dyn Fn() -> u64) -> Vec<Outcome> {
        let frees = [step(&self.shrinks, 256 * M, 128 * M, false)];
        let grows = [step(&self.grows, 100 * M, 128 * M, is_owed)];
        self.with(guests, available, &mut Hold::default(), |means| carry_out((&frees, &grows), means).unwrap())
    }

    fn with<R>(
        &self,
        guests: &[Guest],
        available: &dyn Fn() -> u64,
        hold: &mut Hold,
        work: impl FnOnce(&mut Means) -> R,
    ) -> R {
        let mut ledger = Ledger::open(self.dir.path()).unwrap();
        let turn = ledger.take_turn().unwrap();
        let params = Params { withdrawal: self.within, ..Params::default() };
        let host = HostFacts { floor_bytes: 50 * M, ..HostFacts::default() };
        let facts = Facts { host, ..Facts::default() };
        let (ledger, turn, params, facts) = (&mut ledger, &turn, &params, &facts);
        work(&mut Means { guests, ledger, turn, params, hold, facts, available })
    }

    fn told(&self) -> [Vec<Told>; 2] {
        [&self.shrinks, &self.grows].map(|qemu| qemu.state().told.clone())
    }
}

fn step(qemu: &FakeQemu, from_bytes: u64, to_bytes: u64, is_owed: bool) -> Step {
    Step { guest: qemu.guest.id.clone(), from_bytes, to_bytes, expected_bytes: 0, is_owed, reason: "a test".into() }
}

const fn enough() -> u64 {
    1000 * M
}

#[test]
fn nobody_grows_before_all_that_shrink_have_landed() {
    let scene = Scene::new();
    let takes = Duration::from_millis(600);
    scene.shrinks.state().takes = Some(takes);
    let outcomes = scene.carry_out(true, &enough);
    assert!(outcomes.iter().all(|outcome| outcome.is_told && outcome.landed_s.is_some()), "{outcomes:?}");
    let [shrinks, grows] = scene.told();
    assert!(grows[0].at - shrinks[0].at >= takes, "a guarantee waits, too, as long as it is in time");
}

#[test]
fn guest_that_does_not_shrink_leaves_growth_to_guarantees_alone() {
    for (is_owed, size) in [(false, 256), (true, 256), (false, 137)] {
        let scene = Scene::in_vain();
        scene.shrinks.state().size_bytes = size * M;
        let outcomes = scene.carry_out(is_owed, &enough);
        let shrinks = outcomes.iter().find(|outcome| outcome.step.to_bytes < outcome.step.from_bytes).unwrap();
        assert_eq!((shrinks.landed_s, shrinks.actual_bytes), (None, Some(size * M)), "{shrinks:?}");
        assert_eq!(scene.told()[1].len(), usize::from(is_owed), "{outcomes:?}");
        let is_made = |outcome: &Outcome| outcome.step.to_bytes > outcome.step.from_bytes && outcome.is_told;
        assert_eq!(outcomes.iter().any(is_made), is_owed, "{outcomes:?}");
    }
}

#[test]
fn guest_that_has_ended_stops_no_growth() {
    let scene = Scene::new();
    let gone = Guest { pids: vec![ended_pid()], ..scene.shrinks.guest.clone() };
    for guests in [vec![gone, scene.grows.guest.clone()], vec![scene.grows.guest.clone()]] {
        let outcomes = scene.carry_out_for(&guests, false, &enough);
        assert!(!outcomes[0].is_told && outcomes[1].landed_s.is_some(), "{outcomes:?}");
    }
}

#[test]
fn guest_that_ends_in_the_middle_is_not_waited_for() {
    let scene = Scene::new();
    let gone = Guest { pids: vec![ended_pid()], ..scene.shrinks.guest.clone() };
    let step = step(&scene.shrinks, 256 * M, 128 * M, false);
    let (guest, is_told) = (Some(&gone), true);
    let mut going = Going { step: &step, guest, actual_bytes: None, landed_s: None, is_told, problem: None };
    going.look(Instant::now());
    assert_eq!((going.is_open(), going.problem.as_deref()), (false, Some(ENDED)));
}

#[test]
fn guest_has_ended_before_its_parent_collects_it() {
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    let guest = Guest { pids: vec![child.id()], ..Scene::new().grows.guest };
    assert!(!has_ended(&guest));
    child.kill().unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while !has_ended(&guest) {
        assert!(Instant::now() < end, "it was killed");
        std::thread::sleep(PAUSE);
    }
    child.wait().unwrap();
}

#[test]
fn host_below_its_floor_lets_only_guarantees_grow() {
    for is_owed in [false, true] {
        let scene = Scene::new();
        let outcomes = scene.carry_out(is_owed, &|| 49 * M);
        assert_eq!(scene.told().map(|told| told.len()), [1, usize::from(is_owed)], "{outcomes:?}");
    }
}

#[test]
fn wait_ends_when_the_host_falls_below_its_floor() {
    let scene = Scene::new();
    scene.shrinks.state().takes = None;
    let (began, looks) = (Instant::now(), Cell::new(0));
    let falls = || {
        looks.set(looks.get() + 1);
        if looks.get() < 3 { 50 * M } else { 49 * M }
    };
    let outcomes = scene.carry_out(false, &falls);
    assert!(began.elapsed() < WITHIN, "the next round is not late");
    assert!(outcomes[0].landed_s.is_none() && scene.told()[1].is_empty(), "{outcomes:?}");
}

/// If the process is killed at any instant, each size that a guest was told is in the ledger.
#[test]
fn step_is_in_journal_and_ledger_before_the_guest_is_told() {
    let scene = Scene::new();
    scene.carry_out(false, &enough);
    for (qemu, told) in [&scene.shrinks, &scene.grows].into_iter().zip(scene.told()) {
        let (guest, written) = (&qemu.guest.id, &told[0].written);
        let intent = |line: &str| line.contains("\"intent\"") && line.contains(guest.as_str());
        assert!(written.lines().any(intent), "{written}");
        let target = format!("{}]", 128 * M);
        assert!(written.lines().any(|line| line.contains("targets") && line.contains(&target)), "{written}");
    }
    let journal = std::fs::read_to_string(scene.dir.path().join("journal/journal")).unwrap();
    let entry = |line: &str| Some(line.split_once("\"entry\":\"")?.1.split_once('"')?.0.to_owned());
    let entries: Vec<_> = journal.lines().filter_map(entry).collect();
    assert_eq!(entries, ["intent", "outcome", "intent", "outcome"], "{journal}");
}

#[test]
fn reminder_is_in_journal_and_ledger_before_the_guest_is_told() {
    let scene = Scene::new();
    let steps = [step(&scene.shrinks, 256 * M, 77 * M, false)];
    let guests = [scene.shrinks.guest.clone()];
    scene.with(&guests, &enough, &mut Hold::default(), |means| means.remind(&steps).unwrap());
    let [told, _] = scene.told();
    assert_eq!(told.iter().map(|told| told.size_bytes).collect::<Vec<_>>(), [77 * M]);
    assert!(told[0].written.contains("\"reminder\""), "{}", told[0].written);
    let ledger = Ledger::open(scene.dir.path()).unwrap();
    assert_eq!(ledger.target_bytes(&guests[0]), Some(77 * M));
}

/// A guest on hold is resumed with the floor, or when the first phase is over, whichever comes first.
#[test]
fn guest_on_hold_runs_again_by_the_end_of_the_first_phase() {
    for (available, by_the_end) in [(enough(), false), (0, true)] {
        let scene = Scene::in_vain();
        let mut ledger = Ledger::open(scene.dir.path()).unwrap();
        let turn = ledger.take_turn().unwrap();
        let held = &scene.grows;
        let mut hold = Hold::of_paused(&held.guest, &mut ledger, &turn);
        drop(turn);
        held.state().status = "paused";
        let guests = [scene.shrinks.guest.clone(), held.guest.clone()];
        let (frees, began) = ([step(&scene.shrinks, 256 * M, 128 * M, false)], Instant::now());
        scene.with(&guests, &|| available, &mut hold, |means| {
            carry_out((&frees, &[]), means).unwrap();
            // On a busy machine, half a second may be too short for an answer.
            for _ in 0..20 {
                means.hold.resume(|_| false, means.ledger, means.turn).unwrap();
            }
        });
        let after = held.state().cont_at.expect("it is resumed") - began;
        assert_eq!((after >= IN_VAIN, hold.is_empty()), (by_the_end, true), "{after:?}");
    }
}

/// While the guest is paused, its balloon takes nothing, and available memory does not come back to the floor.
#[test]
fn guest_on_hold_that_has_to_shrink_runs_at_once() {
    let scene = Scene::in_vain();
    let mut ledger = Ledger::open(scene.dir.path()).unwrap();
    let turn = ledger.take_turn().unwrap();
    let held = &scene.shrinks;
    let mut hold = Hold::of_paused(&held.guest, &mut ledger, &turn);
    drop(turn);
    held.state().status = "paused";
    let (frees, began) = ([step(held, 256 * M, 128 * M, false)], Instant::now());
    let guests = std::slice::from_ref(&held.guest);
    scene.with(guests, &|| 0, &mut hold, |means| carry_out((&frees, &[]), means).unwrap());
    assert!(held.state().cont_at.expect("it is resumed") - began < IN_VAIN);
}
