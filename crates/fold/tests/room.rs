//! Nothing becomes private before the supervisor has promised memory for it.

mod world;

use api::control::{Fold, Settings};
use std::time::{Duration, Instant};
use wire::{FoldMode, MemberState};
use world::{Agent, World, serve_until};

/// Pages of which one is folded to each slot in each of two members.
const SHARED: u64 = 40;

/// Two members that share the contents 1 to [`SHARED`].
fn sharing() -> (World, Agent, Agent) {
    let mut world = World::new(Settings::default());
    let (mut one, mut other) = (world.member("one", 1), world.member("other", 2));
    one.rest(1, 1..=SHARED);
    other.rest(1, 1..=SHARED);
    serve_until("folds", &mut [&mut one, &mut other], |a| a.iter().all(|a| a.mapped.len() as u64 == SHARED));
    (world, one, other)
}

/// Most pages that a member can name.
const MOST: u64 = (1 << 52) - 1;

fn unfolded(agents: &[&mut Agent]) -> u64 {
    agents.iter().map(|agent| agent.unfolded).sum()
}

/// Serves both for a while in which members could have unfolded.
fn serve_for(time: Duration, world: &mut World, agents: &mut [&mut Agent]) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        world.listen();
        agents.iter_mut().for_each(|agent| agent.serve());
        std::thread::sleep(Duration::from_millis(2));
    }
}

const UNFOLD: Settings = Settings {
    scan_rate: None,
    scan_budget_percent: None,
    zero_pages: api::control::ZeroPolicy::Share,
    split_huge_at_percent: Some(50),
    fold: Fold::Unfold,
    intra_member_only: false,
    pool_slots: 1 << 20,
    index_pages: 1 << 20,
    latency: api::control::Latency::Quiet,
};

/// A worker whose supervisor is gone waits, and asks the next one.
#[test]
fn nothing_is_unfolded_without_an_answer() {
    let (mut world, mut one, mut other) = sharing();
    world.room = None;
    world.set(UNFOLD);
    world.wait_until("a question", |world| !world.needs.is_empty());
    let needs = world.needs[0].clone();
    let of = |pid| needs.members.iter().find(|room| room.pid == pid).map(|room| room.bytes);
    assert_eq!((of(1), of(2), needs.whole), (Some(SHARED << 12), Some(SHARED << 12), false));
    serve_for(Duration::from_secs(2), &mut world, &mut [&mut one, &mut other]);
    assert_eq!(one.pace.unwrap().fold, FoldMode::Unfold);
    assert_eq!(unfolded(&[&mut one, &mut other]), 0);
    world.room = Some(u64::MAX);
    let asked = world.needs.len();
    world.reconnect();
    world.wait_for_report("all is private", &mut [&mut one, &mut other], |report| report.sharing_pages == 0);
    assert!(world.needs.len() > asked && unfolded(&[&mut one, &mut other]) == 2 * SHARED);
}

/// Each part is used before the next one is asked for. Nothing is folded meanwhile.
#[test]
fn members_are_separated_in_parts_as_there_is_room() {
    let (mut world, mut one, mut other) = sharing();
    world.room = Some(0);
    world.set(Settings { intra_member_only: true, ..Settings::default() });
    world.wait_for_report("a reason", &mut [&mut one, &mut other], |report| report.waits_for_room.is_some());
    let why = world.report().waits_for_room.unwrap();
    assert!(why.contains("share nothing") && why.contains("the test has no room"), "{why}");
    assert!(world.has_event("waits for room: members are to share nothing"), "{:?}", world.events);
    one.rest(100, [7, 7]);
    one.rest(200, [3, 3]);
    serve_for(Duration::from_secs(1), &mut world, &mut [&mut one, &mut other]);
    assert_eq!((one.mapped.len() as u64, unfolded(&[&mut one, &mut other])), (SHARED, 0));
    world.room = Some(30);
    world.needs.clear();
    let (mut promised, mut agents) = (0, [&mut one, &mut other]);
    while world.report().sharing_pages > 0 {
        world.listen();
        agents.iter_mut().for_each(|agent| agent.serve());
        let asked: Vec<u64> =
            world.needs.iter().map(|needs| needs.members.iter().map(|room| room.bytes >> 12).sum()).collect();
        promised = asked.iter().map(|pages| u64::min(*pages, 30)).sum();
        assert!(unfolded(&agents) <= promised, "{} of {promised} promised", unfolded(&agents));
        assert!(asked.windows(2).all(|pair| pair[1] + 30 == pair[0] || pair[1] == 0), "{asked:?}");
    }
    assert_eq!((promised, unfolded(&agents)), (2 * SHARED, 2 * SHARED));
    serve_until("sevens and threes", &mut [&mut one, &mut other], |a| a[0].mapped.len() == 6);
    one.check();
}

/// Pages of zeros take memory, too, when they become private. A member that names more of them than there can be keeps
/// little room from others.
#[test]
fn zeros_need_room_and_a_liar_gets_little() {
    let (mut world, mut one, mut other) = sharing();
    let zeros = |agent: &mut Agent, state, zero_pages| {
        let stats = wire::MemberStats { state, zero_pages, ..wire::MemberStats::default() };
        agent.say(&wire::ToWorker::Stats(Box::new(stats)));
    };
    zeros(&mut one, MemberState::Folding, 5);
    zeros(&mut other, MemberState::Folding, MOST);
    world.wait_for_report("zeros", &mut [&mut one, &mut other], |report| report.zero_pages >= MOST);
    world.room = None;
    world.set(UNFOLD);
    world.wait_until("a question", |world| !world.needs.is_empty());
    let pages: Vec<u64> = world.needs[0].members.iter().map(|room| room.bytes >> 12).collect();
    assert_eq!(pages, [SHARED + 5, SHARED + (1 << 16) - 5]);
    zeros(&mut other, MemberState::Unfolded, MOST);
    world.reconnect();
    world.wait_until("another question", |world| world.needs.last().unwrap().members[1].bytes == SHARED << 12);
}

/// More slots than may lie waste.
const WASTE: u64 = 16384 + 1000;

/// A pool without a prover, of which most is waste, and two members that share a few pages in it.
fn wasted() -> (World, Agent, Agent) {
    let (mut world, mut one, mut other) = sharing();
    for agent in [&mut one, &mut other] {
        agent.rest(1000, 1000..1000 + WASTE);
    }
    let all = (SHARED + WASTE) as usize;
    serve_until("folds", &mut [&mut one, &mut other], |a| a.iter().all(|agent| agent.mapped.len() == all));
    world.room = Some(0);
    for agent in [&mut one, &mut other] {
        // A message has room for so many.
        (0..WASTE).step_by(1000).for_each(|n| agent.write(1000 + n, (n..WASTE.min(n + 1000)).map(|_| 0)));
    }
    world.wait_for_report("waste", &mut [&mut one, &mut other], |report| report.idle_slots >= WASTE);
    (world, one, other)
}

/// Fails with a worker that makes its pool anew every ten minutes, whatever memory there is.
#[test]
fn renewal_waits_for_all_of_its_room_and_folding_goes_on() {
    let (mut world, mut one, mut other) = wasted();
    world.room = Some(SHARED);
    world.wait_for_report("a reason", &mut [&mut one, &mut other], |report| report.waits_for_room.is_some());
    assert!(world.needs.iter().all(|needs| needs.whole), "a part is of no use: {:?}", world.needs);
    one.rest(100, [3]);
    serve_until("a fold to a slot that is there", &mut [&mut one, &mut other], |a| a[0].mapped.contains_key(&100));
    assert_eq!((one.pace.unwrap().fold, unfolded(&[&mut one, &mut other])), (FoldMode::On, 0));
    world.room = Some(u64::MAX);
    let private = |w: &World| w.has_event("everything is private; folding begins again");
    let begin = Instant::now();
    while !private(&world) {
        assert!(begin.elapsed() < world::PATIENCE, "{:?}", world.events);
        serve_for(Duration::from_millis(10), &mut world, &mut [&mut one, &mut other]);
    }
    assert_eq!(unfolded(&[&mut one, &mut other]), 2 * SHARED + 1);
    serve_until("folds", &mut [&mut one, &mut other], |a| a.iter().all(|a| a.mapped.len() as u64 >= SHARED));
    assert!(world.report().waits_for_room.is_none());
    one.check();
}

/// Fails with a worker whose group folds nothing for as long as one member does not unfold.
#[test]
fn renewal_that_is_not_done_in_time_is_given_up() {
    let (mut world, mut one, mut other) = wasted();
    (world.room, world.room_s) = (Some(u64::MAX), 2);
    let begin = Instant::now();
    while !world.has_event("could not be made anew in the time") {
        assert!(begin.elapsed() < world::PATIENCE, "{:?}", world.events);
        // Pages may soon be folded again, so it takes one message at a time. The other member is stopped.
        match one.hear() {
            Some((message, files)) => one.obey(message, files),
            None => std::thread::sleep(Duration::from_millis(1)),
        }
        world.listen();
    }
    assert_eq!((one.unfolded, one.mapped.len()), (SHARED, 0));
    serve_until("folds", &mut [&mut one], |a| a[0].mapped.len() as u64 == SHARED);
    assert_eq!(one.pace.unwrap().fold, FoldMode::On);
    other.serve();
    assert!(other.room == 0 && other.unfolded <= SHARED);
}
