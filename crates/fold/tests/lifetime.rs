//! Ends of members, their children, workers and supervisors: the others go on, and no mapped slot is lost.

mod world;

use api::control::{Order, Settings};
use host::{Received, Seqpacket};
use page::{PAGE_BYTES, PoolSlot};
use rustix::pipe::SpliceFlags;
use std::collections::BTreeSet;
use std::io::Read;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};
use wire::prove::{ANSWER_BYTES, Kind, Proof, QUESTION_BYTES, Question, encode_answer};
use wire::{DONATION_PAGES, ToWorker};
use world::{Agent, PATIENCE, World, content, serve_until, wait_for};

/// Two members that share the contents 1 to 4.
fn sharing() -> (World, Agent, Agent) {
    let mut world = World::new(Settings::default());
    let (mut one, mut other) = (world.member("one", 1), world.member("other", 2));
    one.rest(1, 1..=4);
    other.rest(1, 1..=4);
    serve_until("folds", &mut [&mut one, &mut other], |a| a.iter().all(|agent| agent.mapped.len() == 4));
    (world, one, other)
}

#[test]
fn mapped_slots_are_kept_until_process_ends() {
    let (mut world, one, mut other) = sharing();
    let Agent { socket, lease, .. } = one;
    drop(socket);
    world.wait_until("word of that", |w| w.has_event("ended, or closed its connection"));
    other.write(1, [11, 12, 13, 14]);
    std::thread::sleep(Duration::from_secs(4));
    world.wait_for_report("slots that the process may map", &mut [&mut other], |report| {
        (report.slots, report.sharing_pages, report.deferred_slots) == (4, 0, 4)
    });
    let report = world.report();
    assert_eq!(report.slots, 4);
    assert!(report.members.iter().any(|member| member.name == "one" && !member.connected));
    drop(lease);
    world.wait_for_report("free slots", &mut [&mut other], |report| report.slots == 0 && report.members.len() == 1);
}

#[test]
fn released_slots_are_kept_until_forked_child_ends() {
    let (mut world, mut one, mut other) = sharing();
    one.kept_leases = Some(Vec::new());
    one.write(1, [11, 12, 13, 14]);
    other.write(1, [11, 12, 13, 14]);
    serve_until("a new epoch", &mut [&mut one, &mut other], |a| !a[0].kept_leases.as_ref().unwrap().is_empty());
    std::thread::sleep(Duration::from_secs(1));
    // A child of the first epoch may map them.
    world.wait_for_report("kept slots", &mut [&mut one, &mut other], |report| report.deferred_slots == 4);
    // It goes on: other slots come and go meanwhile.
    one.rest(10, [9, 9]);
    serve_until("a pair", &mut [&mut one, &mut other], |a| a[0].mapped.len() == 2);
    drop(one.kept_leases.take());
    world.wait_for_report("free slots", &mut [&mut one, &mut other], |report| report.slots == 1);
    one.check();
}

#[test]
fn reconnected_member_claims_its_slots() {
    let (mut world, one, mut other) = sharing();
    let Agent { socket, lease, mapped, pages, .. } = one;
    drop(socket);
    let mut back = world.admit("one", 1);
    back.pages = pages;
    back.mapped = mapped;
    back.hello();
    let held = back.held();
    // It claims its slots before it lets the old lease go.
    back.say(&ToWorker::Held(held));
    back.wait_until("a lease", |agent| agent.lease.is_some());
    drop(lease);
    other.write(1, [11, 12, 13, 14]);
    std::thread::sleep(Duration::from_secs(3));
    world.wait_for_report("the claims", &mut [&mut back, &mut other], |report| {
        (report.slots, report.sharing_pages, report.members.len()) == (4, 4, 2)
    });
    back.check();
    back.write(1, [0; 4]);
    world.wait_for_report("free slots", &mut [&mut back, &mut other], |report| report.slots == 0);
}

/// The old lease ends before the worker has heard the claim.
#[test]
fn worker_waits_for_claim_under_way() {
    let (mut world, one, mut other) = sharing();
    let Agent { socket, lease, mapped, pages, .. } = one;
    let mut back = world.admit("one", 1);
    (back.pages, back.mapped) = (pages, mapped);
    back.hello();
    drop((socket, lease));
    other.write(1, [11, 12, 13, 14]);
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(world.report().slots, 4, "it has not said yet that it took its new lease");
    let held = back.held();
    back.say(&ToWorker::Held(held));
    back.wait_until("a lease", |agent| agent.lease.is_some());
    std::thread::sleep(Duration::from_secs(1));
    world.wait_for_report("the claims", &mut [&mut back, &mut other], |report| report.sharing_pages == 4);
    assert!(!back.closed);
    back.check();
}

/// A second connection ends before its claims are heard: only the first one tells what the process maps.
#[test]
fn unheard_claims_lose_no_slots() {
    let (mut world, one, mut other) = sharing();
    let Agent { socket, lease, mapped, pages, .. } = one;
    drop(socket);
    let mut second = world.member("one", 1);
    drop(lease);
    second.say_bytes(b"a lie");
    second.wait_until("the end", |agent| agent.closed);
    other.write(1, [11, 12, 13, 14]);
    std::thread::sleep(Duration::from_secs(4));
    other.serve();
    assert_eq!(world.report().slots, 4, "the process may map them: it holds the second lease");
    let mut third = world.admit("one", 1);
    (third.pages, third.mapped) = (pages, mapped);
    third.hello();
    let held = third.held();
    third.say(&ToWorker::Held(held));
    third.wait_until("a lease", |agent| agent.lease.is_some());
    drop(second.lease.take());
    std::thread::sleep(Duration::from_secs(1));
    world.wait_for_report("the claims", &mut [&mut third, &mut other], |report| report.sharing_pages == 4);
    assert!(!third.closed);
    third.check();
    third.write(1, [0; 4]);
    world.wait_for_report("free slots", &mut [&mut third, &mut other], |report| report.slots == 0);
}

#[test]
fn new_worker_takes_over_mapped_slots() {
    let (mut before, one, other) = sharing();
    before.listen();
    let mut world = World::successor(Settings::default(), &before.segments);
    let mut back = Vec::new();
    for (n, agent) in [one, other].into_iter().enumerate() {
        let mut again = world.admit(["one", "other"][n], n as u32 + 1);
        (again.pages, again.mapped) = (agent.pages, agent.mapped);
        again.hello();
        let held = again.held();
        again.say(&ToWorker::Held(held));
        back.push(again);
    }
    let mut third = world.member("third", 3);
    third.rest(77, 1..=4);
    let [one, other] = &mut back[..] else { unreachable!() };
    serve_until("folds on old slots", &mut [one, other, &mut third], |a| a[2].mapped.len() == 4);
    third.check();
    assert_eq!(third.mapped.values().collect::<Vec<_>>(), back[0].mapped.values().collect::<Vec<_>>());
    assert_eq!(third.donated, 0, "nothing is asked for that is there");
    world.wait_for_report("all of it", &mut [&mut third], |report| (report.slots, report.sharing_pages) == (4, 12));
    // New contents go to a segment of its own.
    third.rest(100, [5, 5]);
    serve_until("a pair", &mut [&mut third], |a| a[0].mapped.len() == 6);
    third.check();
    assert_ne!(third.mapped[&100].segment(), third.mapped[&77].segment());
    // Nobody maps the old slots any more: the worker drops the whole segment after half a minute.
    let mut back: Vec<_> = back.into_iter().collect();
    back.iter_mut().for_each(|agent| agent.write(1, [0; 4]));
    third.write(77, [0; 4]);
    let start = std::time::Instant::now();
    while world.dropped.is_empty() {
        assert!(start.elapsed() < Duration::from_secs(120));
        std::thread::sleep(Duration::from_millis(50));
        back.iter_mut().for_each(Agent::serve);
        third.serve();
        world.listen();
    }
    assert_eq!(world.report().slots, 1);
    world.wait_for_report("word of that", &mut [&mut third], |_| true);
    let numbers: Vec<(u8, u32)> = third.segments.iter().map(|(number, (slots, _))| (*number, *slots)).collect();
    assert!(numbers.contains(&(world.dropped[0], 1)), "members are given an empty file for it: {numbers:?}");
}

#[test]
fn new_supervisor_learns_members_and_segments() {
    let (mut world, mut one, mut other) = sharing();
    world.reconnect();
    let (members, segments, begun) = world.adopted.clone().unwrap();
    assert_eq!(members.iter().map(|m| m.name.as_str()).collect::<Vec<_>>(), ["one", "other"]);
    assert_eq!((segments.len(), world.segments.len(), begun), (1, 1, true));
    // Members did not notice, and go on.
    one.rest(10, [9, 9]);
    serve_until("a pair", &mut [&mut one, &mut other], |a| a[0].mapped.len() == 6);
    // `Take` changes the settings of a worker that has begun, and nothing else.
    world
        .order(&Order::Take { settings: Settings { pool_slots: 1, ..Settings::default() }, segments: Vec::new() }, &[]);
    world.report();
    other.rest(20, [8, 8]);
    world.wait_until("word of that", |w| w.has_event("in use: 4 KiB"));
    one.check();
}

/// A reader that needs no mapping, as a device does: a pipe that a slot was lent to.
fn lend(agent: &Agent, page: u64) -> std::io::PipeReader {
    let slot = agent.mapped[&page];
    let (reader, writer) = std::io::pipe().unwrap();
    let mut at = u64::from(slot.index()) << 12;
    let file = &agent.segments[&slot.segment()].1;
    let lent = rustix::pipe::splice(file, Some(&mut at), &writer, None, PAGE_BYTES, SpliceFlags::empty());
    assert_eq!(lent, Ok(PAGE_BYTES));
    reader
}

/// Contents of as many pages as one donation takes, the next of them at each call.
fn contents(time: u64) -> RangeInclusive<u64> {
    let pages = DONATION_PAGES as u64;
    time * pages + 1..=(time + 1) * pages
}

/// Both members have these contents in their pages, each in a slot.
fn fold_all(one: &mut Agent, other: &mut Agent, contents: RangeInclusive<u64>) {
    for agent in [&mut *one, &mut *other] {
        agent.write(1, contents.clone());
        agent.rest(1, contents.clone());
    }
    serve_until("folds", &mut [one, other], |a| a.iter().all(|agent| agent.mapped.len() == DONATION_PAGES));
    one.check();
}

/// Both members write their pages, and all slots are free.
fn free_all(world: &mut World, one: &mut Agent, other: &mut Agent) {
    for agent in [&mut *one, &mut *other] {
        agent.write(1, 900_001..=900_000 + DONATION_PAGES as u64);
    }
    world.wait_for_report("free slots", &mut [one, other], |report| report.slots == 0);
}

/// Fails with a worker that takes a lease's end for the end of all readers: the pipe then gives other bytes.
#[test]
fn slot_is_not_filled_again_while_pipe_holds_it() {
    let mut world = World::new(Settings::default());
    let (mut one, mut other) = (world.member("one", 1), world.member("other", 2));
    fold_all(&mut one, &mut other, contents(0));
    let mut reader = lend(&one, 1);
    free_all(&mut world, &mut one, &mut other);
    fold_all(&mut one, &mut other, contents(1));
    let mut bytes = vec![0; PAGE_BYTES];
    reader.read_exact(&mut bytes).unwrap();
    assert!(bytes == content(1), "what was lent has changed");
}

/// Answers the worker's questions with this proof until `done` is true; returns the number of slots asked about.
fn prove_until(world: &mut World, socket: &Seqpacket, proof: Proof, done: impl Fn(usize) -> bool) -> usize {
    let (start, mut slots) = (Instant::now(), 0);
    while !done(slots) {
        assert!(start.elapsed() < PATIENCE, "asked about {slots} slots; events: {:#?}", world.events);
        world.listen();
        let mut frame = [0; QUESTION_BYTES];
        if let Ok(Received::Frame(bytes)) = socket.receive(&mut frame, &mut Vec::new()) {
            let question = Question::decode(&frame[..bytes]).unwrap();
            assert_eq!(question.kind, Kind::Slot);
            let mut answer = [0; ANSWER_BYTES];
            let bytes = encode_answer(question.id, (0..question.pages).map(|_| proof), &mut answer);
            assert!(socket.send(&answer[..bytes], &[]).unwrap());
            slots += question.pages;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    slots
}

/// Fails with a worker that takes every answer for `Free`, and with one that asks only once.
#[test]
fn slots_are_filled_again_when_prover_calls_them_free() {
    let mut world = World::new(Settings::default());
    let prover = world.prover();
    let (mut one, mut other) = (world.member("one", 1), world.member("other", 2));
    fold_all(&mut one, &mut other, contents(0));
    let first: BTreeSet<PoolSlot> = one.mapped.values().copied().collect();
    free_all(&mut world, &mut one, &mut other);
    let mut socket = None;
    wait_for("the worker connects", || {
        socket = prover.accept().unwrap();
        socket.is_some()
    });
    let socket = socket.unwrap();
    assert_eq!(prove_until(&mut world, &socket, Proof::Referenced, |slots| slots > 0), DONATION_PAGES);
    fold_all(&mut one, &mut other, contents(1));
    assert!(one.mapped.values().all(|slot| !first.contains(slot)), "somebody reads those");
    // It asks again after a while, about the slots that have come free meanwhile too.
    free_all(&mut world, &mut one, &mut other);
    prove_until(&mut world, &socket, Proof::Free, |slots| slots >= 2 * DONATION_PAGES);
    fold_all(&mut one, &mut other, contents(2));
    assert!(one.mapped.values().all(|slot| slot.index() < 2 * DONATION_PAGES as u32), "{:?}", one.mapped);
}

/// Where nobody answers for free slots, they take memory, and the pool's bound is for all of them.
#[test]
fn pool_without_prover_keeps_to_its_bound() {
    let most = DONATION_PAGES as u32 + 40;
    let mut world = World::new(Settings { pool_slots: most, ..Settings::default() });
    let (mut one, mut other) = (world.member("one", 1), world.member("other", 2));
    fold_all(&mut one, &mut other, contents(0));
    free_all(&mut world, &mut one, &mut other);
    for agent in [&mut one, &mut other] {
        agent.rest(1, contents(1));
    }
    serve_until("some folds", &mut [&mut one, &mut other], |a| a.iter().all(|agent| agent.mapped.len() == 40));
    world.wait_until("word of the bound", |w| w.has_event("256 slots are free and may still be read"));
    one.check();
}

/// Fails where reports may take all the room that claims need: the member is then cut off, as a liar.
#[test]
fn claims_find_room_when_reports_have_filled_the_table() {
    let mut world = World::new(Settings { index_pages: 64, ..Settings::default() });
    let (mut one, mut other) = (world.member("one", 1), world.member("other", std::process::id()));
    one.rest(1, 1..=4);
    other.rest(1, 1..=4);
    serve_until("folds", &mut [&mut one, &mut other], |a| a.iter().all(|agent| agent.mapped.len() == 4));
    let Agent { socket, lease: _lease, mapped, pages, .. } = one;
    drop(socket);
    // Of each chunk one page: more than there may be.
    (100..1300).for_each(|chunk| other.rest(64 * chunk, [chunk]));
    other.rest(64 * 2000, [1]);
    let mut back = world.admit("one", 1);
    (back.pages, back.mapped) = (pages, mapped);
    back.hello();
    let held = back.held();
    back.say(&ToWorker::Held(held));
    world.wait_for_report("claims", &mut [&mut back, &mut other], |report| report.sharing_pages == 8);
    back.wait_until("the segment", |agent| !agent.segments.is_empty());
    assert!(!back.closed && !other.mapped.contains_key(&(64 * 2000)), "{:?}", world.events);
    // The worker may have booked the claims before the pool's file has come.
    serve_until("the pool", &mut [&mut back], |agents| !agents[0].segments.is_empty());
    back.check();
}
