//! A worker whose loop is run turn by turn, with simulated agents: how much of its time a member gets that floods it
//! with messages.

#[path = "../tests/world/agent.rs"]
mod agent;

use super::*;
use agent::Agent;
use api::control::{Identity, Settings};
use page::{Fingerprint, HostVirt};
use wire::{RestedRun, ToWorker};

/// Pages of each of the two members that fold. Both members hold the same contents.
const PAGES: u64 = 4096;
/// Pages that each of these members reports in one frame.
const REPORTED: u64 = 512;
/// Processor time that the flooding member has taken before the test: 10 s. Only a bounded part of it counts against
/// the member.
const LONG: Duration = Duration::from_secs(10);
/// Most processor time that the worker may take while two members fold beside a flood, as a multiple of the part that
/// was not spent on the flood.
const BAR: f64 = 1.1;

struct Scene {
    worker: Worker,
    agents: Vec<(MemberId, Agent)>,
    next_frame: u64,
    _dir: tempfile::TempDir,
}

impl Scene {
    /// A worker with so many members.
    fn new(members: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = SeqpacketListener::bind(&dir.path().join("worker"), host::Files::Taken).unwrap();
        let group = Group::new("acme", dir.path().join("prover"), Instant::now());
        let mut scene = Self { worker: Worker::new(listener, group, 0), agents: Vec::new(), next_frame: 0, _dir: dir };
        let settings = Settings::default();
        scene.worker.group.obey(Order::Take { settings, segments: Vec::new() }, Vec::new(), Instant::now());
        (0..members).for_each(|n| scene.admit(900_000 + n));
        scene
    }

    /// Admits a connection of this process, and has it greet.
    fn admit(&mut self, pid: u32) {
        let (ours, theirs) = Seqpacket::pair().unwrap();
        let identity = Identity { name: pid.to_string(), pid, started: 1 };
        self.worker.group.obey(Order::Admit(identity), vec![theirs.into()], Instant::now());
        let mut agent = Agent::new(ours);
        agent.hello();
        while agent.lease.is_none() || agent.pace.is_none() {
            self.worker.turn().unwrap();
            agent.serve();
        }
        let id = *self.worker.group.members.last_key_value().expect("a member").0;
        self.agents.push((id, agent));
    }

    fn taken(&self, n: usize) -> Duration {
        self.worker.group.members[&self.agents[n].0].taken
    }

    /// Fills a member's connection with reports of so many pages each, which nobody else has.
    fn flood(&mut self, n: usize, pages: u16) {
        loop {
            let (first, mut frame) = (self.next_frame * 4096, Vec::new());
            let run = RestedRun { start: HostVirt((1 << 40) + (first << 12)), pages, huge: false };
            let print = |page: u64| Fingerprint((first + page).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
            ToWorker::Rested(vec![run], (0..pages.into()).map(print).collect()).encode(&mut frame);
            if !matches!(self.agents[n].1.socket.send(&frame, &[]), Ok(true)) {
                return;
            }
            self.next_frame += 1;
        }
    }

    /// Has the first two members fold beside the third one, which floods. Returns the worker's processor time, and the
    /// part of it that the third member's frames took.
    fn fold_beside_flood(&mut self) -> (Duration, Duration) {
        let (mut reported, mut all, mut of_flood) = (0, Duration::ZERO, Duration::ZERO);
        while self.agents[..2].iter().any(|(_, agent)| (agent.mapped.len() as u64) < PAGES) {
            for (_, agent) in self.agents[..2].iter_mut().filter(|_| reported < PAGES) {
                agent.rest(1 + reported, 1 + reported..=reported + REPORTED);
            }
            reported += REPORTED;
            self.flood(2, 4096);
            let (before, heard) = (host::own_thread_cpu_time(), self.taken(2));
            self.worker.turn().unwrap();
            all += host::own_thread_cpu_time() - before;
            of_flood += self.taken(2).saturating_sub(heard);
            self.agents[..2].iter_mut().for_each(|(_, agent)| agent.serve());
        }
        self.agents[..2].iter().for_each(|(_, agent)| agent.check());
        (all, of_flood)
    }
}

/// Regression: members were heard in turn, eight frames each. A flood with 4096 pages in each frame was no exception.
#[test]
fn flood_has_little_of_the_time_in_which_others_fold() {
    let mut scene = Scene::new(3);
    let flood = scene.agents[2].0;
    scene.worker.group.took(flood, LONG);
    scene.flood(2, 4096);
    scene.worker.turn().unwrap();
    assert!(scene.taken(2) < LONG / 10, "{:?}", scene.taken(2));
    let (all, of_flood) = scene.fold_beside_flood();
    assert!(of_flood > Duration::ZERO, "it is heard now and then");
    let part = all.as_secs_f64() / (all - of_flood).as_secs_f64();
    assert!(part <= BAR, "{of_flood:?} of {all:?} are the flood's");
}

/// Regression: frames that had come already waited during the worker's pause of a quarter of a second, and only eight
/// were read after each pause.
#[test]
fn no_pause_follows_while_frames_wait() {
    let mut scene = Scene::new(1);
    scene.worker.turn().unwrap();
    for _ in 0..10 {
        scene.flood(0, 512);
        scene.worker.turn().unwrap();
        assert_eq!(scene.worker.pause, Duration::ZERO);
    }
}

fn members_of(group: &Group) -> Vec<MemberId> {
    group.members.keys().copied().collect()
}

#[test]
fn others_have_a_small_part_while_those_speak_that_have_taken_least() {
    let mut scene = Scene::new(4);
    let group = &mut scene.worker.group;
    let ids = members_of(group);
    ids[1..].iter().for_each(|id| group.took(*id, LONG));
    group.turn(ids[1..].to_vec());
    let (mut first, mut others) = (Duration::ZERO, [0; 4]);
    while first < Duration::from_millis(150) {
        let turn = group.turn(ids.clone());
        assert_eq!((&turn.first[..], turn.others_wait), (&ids[..1], true));
        group.took_in_turn(ids[0], Duration::from_micros(100), &turn);
        first += Duration::from_micros(100);
        if let Some(id) = turn.other {
            group.took_in_turn(id, Duration::from_micros(300), &turn);
            others[ids.iter().position(|one| *one == id).unwrap()] += 1;
        }
    }
    assert!(others[0] == 0 && others[1..].iter().all(|times| (4..=6).contains(times)), "{others:?}");
}

/// A new member is heard first for 250 ms of processor time at most. Then it counts as equal to members that send all
/// the time.
#[test]
fn new_member_that_speaks_all_the_time_is_alike_after_a_quarter_of_a_second() {
    let mut scene = Scene::new(3);
    let group = &mut scene.worker.group;
    let (ids, step) = (members_of(group), Duration::from_millis(1));
    ids[..2].iter().for_each(|id| group.took(*id, LONG));
    group.turn(ids[..2].to_vec());
    let mut alone = Duration::ZERO;
    loop {
        let turn = group.turn(ids.clone());
        if turn.first.len() == 3 {
            break;
        }
        group.took_in_turn(ids[2], step, &turn);
        alone += step;
    }
    assert!((100..250).contains(&alone.as_millis()), "{alone:?}");
}

#[test]
fn members_that_speak_all_the_time_have_equal_parts() {
    let mut scene = Scene::new(3);
    let group = &mut scene.worker.group;
    let (ids, costs, mut taken) = (members_of(group), [1, 4, 9], [0; 3]);
    for _ in 0..20_000 {
        let turn = group.turn(ids.clone());
        for id in turn.first.iter().chain(&turn.other) {
            let n = ids.iter().position(|one| one == id).unwrap();
            group.took_in_turn(*id, Duration::from_millis(costs[n]), &turn);
            taken[n] += costs[n];
        }
    }
    let (most, least) = (taken.iter().max().unwrap(), taken.iter().min().unwrap());
    assert!(*least > 10_000 && most - least < 1000, "{taken:?} ms");
}

#[test]
fn time_is_forgiven_and_stays_with_a_process_that_connects_anew() {
    let mut scene = Scene::new(1);
    let id = scene.agents[0].0;
    let taken = Duration::from_millis(200);
    scene.worker.group.took(id, taken);
    scene.admit(900_000);
    assert!(scene.agents[1].0 != id && scene.taken(1) >= taken, "{:?}", scene.taken(1));
    let before = scene.taken(1);
    let later = Instant::now() + 2 * LONG;
    scene.worker.group.tick_turns(later);
    scene.worker.group.tick_turns(later);
    assert_eq!(scene.taken(1), before / 2, "once in a half-life");
}
