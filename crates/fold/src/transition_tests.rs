//! Holds against the events of several processes with children, which lose connections, die, and lie. After each event,
//! a slot has a hold for each page, donation, lease and departed member with it, and no more. And whatever an honest
//! process or a child of one maps is held.

use crate::dispatch::Donation;
use crate::home::tests::{NUMBER, bytes, planner};
use crate::lease::{DepartedMember, Leases};
use crate::plan::Planner;
use crate::segment::SlotState;
use crate::table::{CHUNK_PAGES, Mark, MemberId, PageRef, State};
use act::{DonationWindow, HeldLease};
use page::{Fingerprint, HostVirt, PAGE_SHIFT, PoolSlot};
use proptest::prelude::*;
use rustix::fd::{AsFd, OwnedFd};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};
use wire::{DONATION_PAGES, FoldRun, Outcome, RestedRun, SlotRun, Target};

const FIRST: u64 = 1000;
/// Pages of a process. The last of them have homes in a template, of which every fourth slot is empty.
const PAGES: u64 = 100;
const HOMES: u64 = 20;
const AT_HOME: u64 = FIRST + PAGES - HOMES;
/// Processes. The last one lies.
const PROCESSES: usize = 3;

#[derive(Clone, Debug)]
enum Step {
    /// Pages that map nothing are reported at rest.
    Rest { first: u64, contents: Vec<u64> },
    /// The bytes that were asked for come, but for one page in so many.
    Donate { but: usize },
    /// The worker does not wait for these bytes any longer.
    Refuse,
    /// The answer to the oldest request to fold: one page in so many is busy, has changed, or is gone.
    Answer { but: usize },
    /// A page of the oldest request is folded, and released before the answer.
    Early,
    /// Mapped pages are released, from this one on.
    Release { first: u64, pages: usize },
    /// A page shows its home again.
    GoHome { page: u64 },
    /// The process forks.
    Fork,
    /// Its youngest child ends.
    ChildEnds,
    /// The process takes the lease that is offered.
    Take,
    /// The connection ends. The process connects again, and claims what it maps.
    Reconnect,
    /// The process ends. Another one takes its place, which was born from the template.
    Die,
    /// Something that may be untrue: of these pages and slots, by the kind of message.
    Lie { kind: u8, page: u64, slot: (u8, u32), pages: u16 },
    /// The time until leases end.
    Wait,
}

fn step() -> impl Strategy<Value = (usize, Step)> {
    // The template has the first ones.
    let contents = prop::collection::vec(prop_oneof![0..4_u64, 1000..1006_u64], 1..20);
    let slot = (prop_oneof![Just(0), Just(1), Just(NUMBER)], 0..60_u32);
    let step = prop_oneof![
        8 => (0..PAGES - 20, contents).prop_map(|(first, contents)| Step::Rest { first, contents }),
        5 => (2..9_usize).prop_map(|but| Step::Donate { but }),
        1 => Just(Step::Refuse),
        6 => (2..9_usize).prop_map(|but| Step::Answer { but }),
        2 => Just(Step::Early),
        5 => (0..PAGES, 1..40_usize).prop_map(|(first, pages)| Step::Release { first, pages }),
        1 => (0..HOMES).prop_map(|page| Step::GoHome { page }),
        2 => Just(Step::Fork),
        1 => Just(Step::ChildEnds),
        2 => Just(Step::Take),
        1 => Just(Step::Reconnect),
        1 => Just(Step::Die),
        2 => (0..3_u8, 0..PAGES, slot, 1..4_u16)
            .prop_map(|(kind, page, slot, pages)| Step::Lie { kind, page, slot, pages }),
        3 => Just(Step::Wait),
    ];
    (0..PROCESSES, step)
}

/// A forked child: the slots that it maps, and the lease.
type Child = (Vec<PoolSlot>, Option<HeldLease>);

struct Process {
    id: MemberId,
    identity: api::control::Identity,
    window: DonationWindow,
    leases: Leases,
    /// The mapped lease, and its file, with which children are made.
    lease: Option<(HeldLease, OwnedFd)>,
    asked: Option<Donation>,
    folds: Vec<Vec<FoldRun>>,
    /// Pages that were folded and released before the answer.
    early: BTreeSet<u64>,
    contents: BTreeMap<u64, u64>,
    mapped: BTreeMap<u64, PoolSlot>,
    children: Vec<Child>,
}

struct World {
    planner: Planner,
    now: Instant,
    processes: Vec<Process>,
    departed: Vec<DepartedMember>,
    /// Children of processes that have ended.
    orphans: Vec<Child>,
}

fn run(page: u64, slot: PoolSlot) -> SlotRun {
    SlotRun { start: HostVirt(page << PAGE_SHIFT), slot, pages: 1 }
}

/// The pages of requests to fold, each with its slot.
fn pages(runs: &[FoldRun]) -> impl Iterator<Item = (u64, Option<PoolSlot>)> {
    let slot = |target, n: u16| match target {
        Target::Zero => None,
        Target::Slot(first) => first.add(n.into()),
    };
    runs.iter().flat_map(move |run| (0..run.pages).map(move |n| (run.start.page() + u64::from(n), slot(run.target, n))))
}

fn born(planner: &mut Planner, pid: u32) -> Process {
    let id = planner.join();
    let first = PoolSlot::new(NUMBER, 0).unwrap();
    planner.at_home(id, SlotRun { pages: HOMES as u16, ..run(AT_HOME, first) }).unwrap();
    let filled = (0..HOMES).map(|page| (AT_HOME + page, first.add(page as u32).unwrap()));
    Process {
        id,
        identity: api::control::Identity { name: String::new(), pid, started: 1 },
        window: DonationWindow::create(DONATION_PAGES).unwrap(),
        leases: Leases::new().unwrap(),
        lease: None,
        asked: None,
        folds: Vec::new(),
        early: BTreeSet::new(),
        contents: BTreeMap::new(),
        mapped: filled.filter(|(_, slot)| planner.pool.state(*slot) == SlotState::Live).collect(),
        children: Vec::new(),
    }
}

impl World {
    fn new() -> Self {
        let mut planner = planner();
        let processes = (0..PROCESSES as u32).map(|pid| born(&mut planner, pid)).collect();
        Self { planner, now: Instant::now(), processes, departed: Vec::new(), orphans: Vec::new() }
    }

    fn step(&mut self, at: usize, step: &Step) {
        let process = &mut self.processes[at];
        match step {
            Step::Rest { first, contents } => self.rest(at, FIRST + first, contents),
            Step::Donate { but } => self.donate(at, *but),
            Step::Refuse => {
                self.planner.gives_nothing(process.id, process.asked.as_ref().unwrap_or(&Donation::default()))
            }
            Step::Answer { but } if !process.folds.is_empty() => self.answer(at, *but),
            Step::Early => {
                let sent = process.folds.first().and_then(|runs| pages(runs).next());
                if let Some((page, Some(slot))) = sent
                    && process.early.insert(page)
                {
                    self.tell(at, |planner, id| planner.released(id, &[run(page, slot)]).is_ok());
                }
            }
            Step::Release { first, pages } => {
                let those = process.mapped.range(FIRST + first..).take(*pages).map(|(page, slot)| (*page, *slot));
                for (page, slot) in those.collect::<Vec<_>>() {
                    self.processes[at].mapped.remove(&page);
                    self.tell(at, |planner, id| planner.released(id, &[run(page, slot)]).is_ok());
                }
            }
            Step::GoHome { page } => self.go_home(at, AT_HOME + page, PoolSlot::new(NUMBER, *page as u32).unwrap()),
            Step::Fork => {
                let lease = process.lease.as_ref().map(|(_, file)| HeldLease::hold(file).unwrap());
                let counts = lease.is_some() && at < PROCESSES - 1;
                let slots = process.mapped.values().copied().filter(|_| counts).collect();
                process.children.push((slots, lease));
            }
            Step::ChildEnds => drop(process.children.pop()),
            Step::Take => self.take(at),
            Step::Reconnect => self.reconnect(at),
            Step::Die => self.die(at),
            Step::Lie { kind, page, slot: (segment, index), pages } if at == PROCESSES - 1 => {
                let slot = PoolSlot::new(*segment, *index).unwrap();
                let run = SlotRun { pages: *pages, ..run(FIRST + page, slot) };
                self.tell(at, |planner, id| match kind {
                    0 => planner.released(id, &[run]).is_ok(),
                    1 => planner.held(id, &[run], |_| false).is_ok(),
                    _ => planner.at_home(id, run).is_ok(),
                });
            }
            Step::Wait | Step::Answer { .. } | Step::Lie { .. } => self.wait(),
        }
    }

    fn rest(&mut self, at: usize, first: u64, contents: &[u64]) {
        let process = &mut self.processes[at];
        for (page, content) in (first..).zip(contents) {
            if at == PROCESSES - 1 || !process.mapped.contains_key(&page) {
                process.contents.insert(page, *content);
                let run = RestedRun { start: HostVirt(page << PAGE_SHIFT), pages: 1, huge: false };
                self.planner.rested(process.id, &[run], &[Fingerprint::of(&bytes(*content))]);
            }
        }
    }

    fn donate(&mut self, at: usize, but: usize) {
        let process = &mut self.processes[at];
        let Some(donation) = process.asked.take() else { return };
        let asked = donation.ranges.iter().flat_map(|r| (0..r.pages).map(|n| r.start.page() + n));
        for (n, page) in asked.enumerate() {
            let bytes = bytes(process.contents[&page]);
            rustix::io::pwrite(&process.window, &bytes, (n as u64) << PAGE_SHIFT).unwrap();
        }
        let given: Vec<bool> = (0..donation.pages()).map(|n| n % but != 1).collect();
        self.planner.place(process.id).may_donate = true;
        self.planner.donated(donation, &given, &process.window).unwrap();
    }

    fn answer(&mut self, at: usize, but: usize) {
        let process = &mut self.processes[at];
        let (runs, mut outcomes) = (process.folds.remove(0), Vec::new());
        for (n, (page, slot)) in pages(&runs).enumerate() {
            let fails = n % but == 1 && !process.early.contains(&page);
            outcomes.push(if fails { Outcome::ALL[1 + n % 3] } else { Outcome::Folded });
            if let Some(slot) = slot.filter(|_| !fails && !process.early.remove(&page)) {
                process.mapped.insert(page, slot);
            }
        }
        self.planner.folded(process.id, &runs, &outcomes);
    }

    fn go_home(&mut self, at: usize, page: u64, slot: PoolSlot) {
        let process = &mut self.processes[at];
        let sent = process.folds.iter().flat_map(|runs| pages(runs)).any(|(sent, _)| sent == page);
        let is_home = self.planner.place(process.id).homes.of(page) == Some(slot);
        if is_home && !sent && !process.mapped.contains_key(&page) {
            let is_live = self.planner.pool.state(slot) == SlotState::Live;
            process.mapped.extend(Some((page, slot)).filter(|_| is_live));
            self.tell(at, |planner, id| planner.at_home(id, run(page, slot)).is_ok());
        }
    }

    fn take(&mut self, at: usize) {
        let process = &mut self.processes[at];
        let Some((epoch, lease)) = process.leases.offered() else { return };
        let file = lease.as_fd().try_clone_to_owned().unwrap();
        process.lease = Some((HeldLease::hold(&file).unwrap(), file));
        process.leases.take(epoch).unwrap();
    }

    fn reconnect(&mut self, at: usize) {
        let process = &mut self.processes[at];
        // The worst case: what was asked for was folded, and the answers are lost.
        for (page, slot) in process.folds.iter().flat_map(|runs| pages(runs)) {
            if let Some(slot) = slot.filter(|_| !process.early.contains(&page)) {
                process.mapped.insert(page, slot);
            }
        }
        self.cut(at);
        let Process { id, identity, mapped, .. } = &mut self.processes[at];
        let departed: Vec<&DepartedMember> = self.departed.iter().filter(|d| d.is_of(identity)).collect();
        for (page, slot) in mapped.clone() {
            let may_have = |slot| departed.iter().any(|departed| departed.holds(slot));
            let is_booked = self.planner.held(*id, &[run(page, slot)], may_have).is_ok();
            assert!(is_booked || at == PROCESSES - 1, "an honest claim is booked");
            mapped.retain(|of, _| is_booked || *of != page);
        }
    }

    fn die(&mut self, at: usize) {
        self.cut(at);
        let pid = self.processes.iter().map(|process| process.identity.pid).max().unwrap() + 1;
        self.planner.leave(self.processes[at].id, Donation::default());
        let ended = std::mem::replace(&mut self.processes[at], born(&mut self.planner, pid));
        self.orphans.extend(ended.children);
    }

    /// A process says something. If that is a lie, its connection ends.
    fn tell(&mut self, at: usize, say: impl FnOnce(&mut Planner, MemberId) -> bool) {
        if !say(&mut self.planner, self.processes[at].id) {
            assert_eq!(at, PROCESSES - 1, "an honest process is believed");
            self.cut(at);
            self.processes[at].mapped.clear();
        }
    }

    /// Ends a connection, and begins another one.
    fn cut(&mut self, at: usize) {
        let Process { id, identity, leases, asked, folds, early, .. } = &mut self.processes[at];
        let left = self.planner.leave(*id, asked.take().unwrap_or_default());
        let leases = std::mem::replace(leases, Leases::new().unwrap());
        self.departed.push(DepartedMember::new(identity.clone(), 0, leases, left));
        (*id, *folds, *early) = (self.planner.join(), Vec::new(), BTreeSet::new());
    }

    /// Ends leases and departed members as `tick.rs` does.
    fn wait(&mut self) {
        (self.now, self.planner.now) = (self.now + Duration::from_secs(3), self.planner.now + 3);
        let (mut slots, mut alive) = (Vec::new(), Vec::new());
        for process in &mut self.processes {
            process.leases.rotate(self.now).unwrap();
            slots.append(&mut process.leases.ended().unwrap());
            self.planner.retry_all(process.id);
        }
        for departed in &mut self.departed {
            let claims = self.processes.iter().any(|p| departed.is_of(&p.identity) && !p.leases.is_taken());
            if claims || alive.iter().any(|id| departed.is_of(id)) || !departed.is_over(&mut slots).unwrap() {
                alive.push(departed.identity.clone());
            }
        }
        let is_over = |departed: &mut DepartedMember| !alive.iter().any(|identity| departed.is_of(identity));
        slots.extend(self.departed.extract_if(.., is_over).flat_map(DepartedMember::into_slots));
        self.planner.give_back(slots);
    }

    /// Hands holds of released slots to leases, and makes the requests that the plan wants, as far as leases were
    /// taken.
    fn ask(&mut self) {
        for process in &mut self.processes {
            let deferred = std::mem::take(&mut self.planner.place(process.id).deferred);
            deferred.into_iter().for_each(|slot| process.leases.released(slot, self.now));
            if process.asked.is_none() {
                process.asked = Some(self.planner.next_donation(process.id)).filter(|asked| asked.pages() > 0);
            }
            let runs = if process.leases.is_taken() { self.planner.next_folds(process.id) } else { Vec::new() };
            process.folds.extend(Some(runs).filter(|runs| !runs.is_empty()));
        }
    }

    fn check(&self) {
        let mut holds: HashMap<PoolSlot, u32> = HashMap::new();
        let mut add = |slot| *holds.entry(slot).or_default() += 1;
        for process in &self.processes {
            let place = self.planner.places[process.id.0 as usize].as_ref().unwrap();
            let all =
                place.chunks.values().flat_map(|chunk| (0..CHUNK_PAGES).map(|n| PageRef::new(*chunk, n as usize)));
            let states: Vec<State> = all.map(|page| self.planner.table.state(page)).collect();
            states.iter().filter_map(|state| state.slot()).for_each(&mut add);
            let is_away = |page: u64| {
                let of = |chunk| PageRef::new(chunk, (page % CHUNK_PAGES) as usize);
                let chunk = place.chunks.get(&(page / CHUNK_PAGES));
                chunk.is_some_and(|chunk| self.planner.table.is(of(*chunk), Mark::Away))
            };
            let at_home = |(first, end, slot): (u64, u64, PoolSlot)| {
                (first..end).filter(|page| !is_away(*page)).filter_map(move |page| slot.add((page - first) as u32))
            };
            let live = |slot: &PoolSlot| self.planner.pool.state(*slot) == SlotState::Live;
            let home: Vec<PoolSlot> = place.homes.ranges().flat_map(at_home).filter(live).collect();
            let mapped = states.iter().filter(|state| matches!(state, State::Mapped(_))).count() + home.len();
            let sent = states.iter().filter(|state| matches!(state, State::Sent(_) | State::Early(_))).count();
            assert_eq!((place.mapped, place.sent), (mapped as u64, sent as u64));
            home.into_iter().for_each(&mut add);
            process.asked.iter().flat_map(|asked| &asked.slots).copied().for_each(&mut add);
            process.leases.slots().for_each(&mut add);
        }
        self.departed.iter().flat_map(DepartedMember::slots).for_each(&mut add);
        let of = |(number, segment): (u8, &crate::segment::Segment)| {
            let held = (0..segment.slots()).filter(|index| segment.holds(*index) > 0);
            held.map(|index| (PoolSlot::new(number, index).unwrap(), segment.holds(index))).collect::<Vec<_>>()
        };
        let counted: HashMap<PoolSlot, u32> = self.planner.pool.segments().flat_map(of).collect();
        assert_eq!(counted, holds);
        let honest = &self.processes[..PROCESSES - 1];
        let maps = honest.iter().flat_map(|process| process.mapped.values().copied());
        let children = honest.iter().flat_map(|process| &process.children).chain(&self.orphans);
        let children = children.flat_map(|child| child.0.iter().copied());
        assert!(maps.chain(children).all(|slot| holds.contains_key(&slot)), "what is mapped is held");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, max_shrink_iters: 500, ..ProptestConfig::default() })]

    #[test]
    fn holds_are_those_of_pages_donations_and_leases(steps in prop::collection::vec(step(), 1..120)) {
        let mut world = World::new();
        (0..PROCESSES).for_each(|at| world.step(at, &Step::Take));
        for (at, step) in &steps {
            world.step(*at, step);
            world.ask();
            world.check();
        }
        // All processes and children end, and with them all leases.
        for at in 0..PROCESSES {
            world.cut(at);
            let process = &mut world.processes[at];
            (process.lease, process.children, process.mapped) = Default::default();
            process.identity.pid = u32::MAX;
        }
        world.orphans.clear();
        world.wait();
        world.check();
        prop_assert!(world.departed.is_empty());
        prop_assert!(world.planner.pool.segments().all(|(_, segment)| segment.held == 0));
    }
}
