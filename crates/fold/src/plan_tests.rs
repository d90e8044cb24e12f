//! The plan against a model: members whose pages are numbers. They do what they are asked, sometimes late or not at
//! all, and write in between. After each step, the plan's counts are compared with the model's. When all pages have
//! rested, equal pages must map equal slots.

use crate::dispatch::Donation;
use crate::index::{Entry, Keys};
use crate::plan::{Planner, Policy};
use crate::pool::Pool;
use crate::segment::SlotState;
use crate::table::{CHUNK_PAGES, Mark, MemberId, PageRef, State};
use act::DonationWindow;
use page::{Fingerprint, HostVirt, PAGE_BYTES, PoolSlot};
use proptest::prelude::*;
use std::collections::{BTreeMap, HashMap};
use wire::{DONATION_PAGES, FoldRun, Outcome, RestedRun, SlotRun, Target};

/// Pages of a member: more than a chunk.
const PAGES: u64 = 100;
const FIRST: u64 = 1000;

#[derive(Clone, Debug)]
enum Step {
    /// The member writes pages, and reports them at rest.
    Rest { member: usize, first: u64, contents: Vec<u8> },
    /// The member writes a page, and releases its slot if it maps one.
    Write { member: usize, page: u64, content: u8 },
    /// The member shows the pages it was asked for.
    Donate { member: usize },
    /// The member folds the pages it was asked to, but every `busy_every`th is busy.
    Fold { member: usize, busy_every: usize },
    /// The worker gives up waiting for the pages it asked for.
    Refuse { member: usize },
    /// The connection ends; a new member takes its place.
    Leave { member: usize },
    /// The member sends a full report.
    Again { member: usize },
    /// The setting `intra_member_only` changes.
    Intra(bool),
    /// Time goes by.
    Wait { seconds: u32 },
}

fn step(members: usize) -> impl Strategy<Value = Step> {
    let m = 0..members;
    let contents = prop::collection::vec(0..12_u8, 1..30);
    prop_oneof![
        8 => (m.clone(), 0..PAGES - 30, contents).prop_map(|(member, first, contents)| Step::Rest { member, first, contents }),
        4 => (m.clone(), 0..PAGES, 0..12_u8).prop_map(|(member, page, content)| Step::Write { member, page, content }),
        6 => m.clone().prop_map(|member| Step::Donate { member }),
        6 => (m.clone(), 1..6_usize).prop_map(|(member, busy_every)| Step::Fold { member, busy_every }),
        1 => m.clone().prop_map(|member| Step::Refuse { member }),
        1 => m.clone().prop_map(|member| Step::Leave { member }),
        1 => m.prop_map(|member| Step::Again { member }),
        1 => any::<bool>().prop_map(Step::Intra),
        2 => (1..200_u32).prop_map(|seconds| Step::Wait { seconds }),
    ]
}

struct Member {
    id: MemberId,
    pages: BTreeMap<u64, u8>,
    mapped: BTreeMap<u64, PoolSlot>,
    window: DonationWindow,
    asked: Option<Donation>,
    folds: Vec<Vec<FoldRun>>,
}

struct World {
    planner: Planner,
    members: Vec<Member>,
    /// Released slots, held until the end.
    deferred: Vec<PoolSlot>,
    bytes: HashMap<u8, Vec<u8>>,
    /// Whether members shared nothing at some time: a content folded then has a slot for each member.
    was_intra: bool,
}

fn bytes(content: u8) -> Vec<u8> {
    let mut bytes = vec![0; PAGE_BYTES];
    bytes[17] = content;
    bytes
}

impl World {
    fn new(members: usize) -> Self {
        let policy =
            Policy { folds: true, intra_member_only: false, zeros: true, split_huge_at: None, index_pages: 1 << 20 };
        let mut planner = Planner::new(Pool::new("test", 1 << 16), policy);
        let member = |planner: &mut Planner| Member {
            id: planner.join(),
            pages: BTreeMap::new(),
            mapped: BTreeMap::new(),
            window: DonationWindow::create(DONATION_PAGES).unwrap(),
            asked: None,
            folds: Vec::new(),
        };
        let members = (0..members).map(|_| member(&mut planner)).collect();
        Self {
            planner,
            members,
            deferred: Vec::new(),
            bytes: (0..12).map(|content| (content, bytes(content))).collect(),
            was_intra: false,
        }
    }

    fn rest(&mut self, member: usize, first: u64, contents: &[u8]) {
        let member = &mut self.members[member];
        for (page, content) in (first..).zip(contents) {
            write(&mut self.planner, &mut self.deferred, member, page, *content);
        }
        let fingerprints: Vec<_> = contents.iter().map(|content| Fingerprint::of(&self.bytes[content])).collect();
        let run = RestedRun { start: HostVirt((FIRST + first) << 12), pages: contents.len() as u16, huge: false };
        self.planner.rested(member.id, &[run], &fingerprints);
    }

    fn ask(&mut self, at: usize) {
        let member = &mut self.members[at];
        if member.asked.is_none() {
            let donation = self.planner.next_donation(member.id);
            member.asked = (donation.pages() > 0).then_some(donation);
        }
        let runs = self.planner.next_folds(member.id);
        if !runs.is_empty() {
            member.folds.push(runs);
        }
    }

    fn donate(&mut self, at: usize) {
        let member = &mut self.members[at];
        let Some(donation) = member.asked.take() else { return };
        let pages = donation.ranges.iter().flat_map(|r| (0..r.pages).map(|n| r.start.page() + n - FIRST));
        let mut given = Vec::new();
        for (n, page) in pages.enumerate() {
            let content = member.pages.get(&page).filter(|_| !member.mapped.contains_key(&page));
            if let Some(content) = content {
                rustix::io::pwrite(&member.window, &self.bytes[content], (n as u64) << 12).unwrap();
            }
            given.push(content.is_some());
        }
        self.planner.place(member.id).may_donate = true;
        self.planner.donated(donation, &given, &member.window).unwrap();
    }

    fn fold(&mut self, at: usize, busy_every: usize) {
        let member = &mut self.members[at];
        if member.folds.is_empty() {
            return;
        }
        let runs = member.folds.remove(0);
        let mut outcomes = Vec::new();
        for (run, n) in runs.iter().flat_map(|run| (0..run.pages).map(move |n| (run, n))) {
            let page = run.start.page() + u64::from(n) - FIRST;
            assert!(!member.mapped.contains_key(&page), "page {page} is mapped already");
            let content = member.pages[&page];
            outcomes.push(match run.target {
                _ if busy_every > 1 && outcomes.len() % busy_every == 1 => Outcome::Busy,
                Target::Zero if content == 0 => Outcome::Folded,
                Target::Slot(slot) => {
                    let slot = slot.add(n.into()).unwrap();
                    if self.planner.pool.fingerprint(slot) == Some(Fingerprint::of(&self.bytes[&content]).0) {
                        member.mapped.insert(page, slot);
                        Outcome::Folded
                    } else {
                        Outcome::Changed
                    }
                }
                Target::Zero => Outcome::Changed,
            });
        }
        self.planner.folded(member.id, &runs, &outcomes);
        self.deferred.append(&mut self.planner.place(member.id).deferred);
    }

    fn leave(&mut self, at: usize) {
        let member = &mut self.members[at];
        let left = self.planner.leave(member.id, member.asked.take().unwrap_or_default());
        let mut kept: Vec<PoolSlot> = member.mapped.values().copied().collect();
        for run in member.folds.iter().flatten() {
            if let Target::Slot(slot) = run.target {
                kept.extend((0..run.pages).map(|n| slot.add(n.into()).unwrap()));
            }
        }
        let mut slots = left;
        kept.sort_unstable();
        slots.sort_unstable();
        assert_eq!(slots, kept, "what it maps or was asked to map is kept");
        self.deferred.append(&mut slots);
        member.id = self.planner.join();
        (member.pages, member.mapped, member.folds) = Default::default();
    }

    fn again(&mut self, at: usize) {
        self.planner.forget_reports(self.members[at].id);
        let pages: Vec<(u64, u8)> = self.members[at].pages.iter().map(|(page, content)| (*page, *content)).collect();
        for (page, content) in pages {
            if !self.members[at].mapped.contains_key(&page) {
                self.rest(at, page, &[content]);
            }
        }
    }

    fn intra(&mut self, on: bool) {
        if on && !self.planner.policy.intra_member_only {
            // Members unfold first.
            for at in 0..self.members.len() {
                while !self.members[at].folds.is_empty() {
                    self.fold(at, 1);
                }
                let all: Vec<(u64, u8)> =
                    self.members[at].mapped.keys().map(|p| (*p, self.members[at].pages[p])).collect();
                for (page, content) in all {
                    write(&mut self.planner, &mut self.deferred, &mut self.members[at], page, content);
                }
            }
        }
        self.was_intra |= on;
        let policy = Policy { intra_member_only: on, ..self.planner.policy };
        if self.planner.set_policy(policy) {
            self.planner.start_over();
            (0..self.members.len()).for_each(|at| self.again(at));
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Rest { member, first, contents } => self.rest(*member, *first, contents),
            Step::Write { member, page, content } => {
                write(&mut self.planner, &mut self.deferred, &mut self.members[*member], *page, *content);
            }
            Step::Donate { member } => self.donate(*member),
            Step::Fold { member, busy_every } => self.fold(*member, *busy_every),
            Step::Refuse { member } => {
                if let Some(donation) = self.members[*member].asked.take() {
                    self.planner.gives_nothing(self.members[*member].id, &donation);
                    self.members[*member].asked = Some(donation);
                }
            }
            Step::Leave { member } => self.leave(*member),
            Step::Again { member } => self.again(*member),
            Step::Intra(on) => self.intra(*on),
            Step::Wait { seconds } => self.wait(*seconds),
        }
        (0..self.members.len()).for_each(|at| self.ask(at));
    }

    fn wait(&mut self, seconds: u32) {
        self.planner.now += seconds;
        (0..self.members.len()).for_each(|at| self.planner.retry_all(self.members[at].id));
    }

    /// Compares the plan with the model: holds, marks, index and mapped slots.
    fn check(&self) {
        let mut holds: HashMap<PoolSlot, u32> = HashMap::new();
        let mut indexed = 0;
        for member in &self.members {
            let place = self.planner.places[member.id.0 as usize].as_ref().unwrap();
            let mut mapped = BTreeMap::new();
            for (number, chunk) in &place.chunks {
                for at in 0..CHUNK_PAGES as usize {
                    let page = PageRef::new(*chunk, at);
                    let state = self.planner.table.state(page);
                    state.slot().into_iter().for_each(|slot| *holds.entry(slot).or_default() += 1);
                    if let State::Mapped(slot) = state {
                        mapped.insert(number * CHUNK_PAGES + at as u64 - FIRST, slot);
                    }
                    if self.planner.table.is(page, Mark::Indexed) {
                        indexed += 1;
                        assert_eq!(state, State::Idle);
                        let key = self.planner.keys().key(Entry::Page(page));
                        assert_eq!(self.planner.index.find(key, &self.planner.keys()), Some(Entry::Page(page)));
                    }
                }
            }
            assert_eq!(mapped, member.mapped, "the worker knows what the member maps");
            assert_eq!(place.mapped, mapped.len() as u64);
            member.asked.iter().flat_map(|asked| &asked.slots).for_each(|slot| *holds.entry(*slot).or_default() += 1);
        }
        assert_eq!(self.planner.index.pages(), indexed);
        self.deferred.iter().for_each(|slot| *holds.entry(*slot).or_default() += 1);
        for (slot, holds) in &holds {
            assert_eq!(self.planner.pool.holds(*slot), *holds, "holds of {slot}");
            assert_ne!(self.planner.pool.state(*slot), SlotState::Free);
        }
        assert_eq!(self.planner.pool.slots(), holds.len() as u64, "nothing else is in use");
    }

    /// Lets all members answer until the plan asks for nothing more. All waits are over by then.
    fn settle(&mut self) {
        self.wait(10_000);
        for _ in 0..1000 {
            (0..self.members.len()).for_each(|at| self.planner.retry_all(self.members[at].id));
            (0..self.members.len()).for_each(|at| self.ask(at));
            if self.members.iter().all(|member| member.asked.is_none() && member.folds.is_empty()) {
                return;
            }
            for at in 0..self.members.len() {
                self.donate(at);
                self.fold(at, 1);
            }
        }
        panic!("they ask and answer for ever");
    }

    /// Checks that equal pages map the same slot, and that single pages map none.
    fn check_sharing(&self) {
        let mut places: HashMap<(u8, usize), Vec<Option<PoolSlot>>> = HashMap::new();
        let intra = self.planner.policy.intra_member_only;
        for (at, member) in self.members.iter().enumerate() {
            for (page, content) in member.pages.iter().filter(|(_, content)| **content != 0) {
                let owner = if intra { at } else { 0 };
                places.entry((*content, owner)).or_default().push(member.mapped.get(page).copied());
            }
        }
        if self.was_intra && !intra {
            return;
        }
        for (content, slots) in places {
            let shared = slots.iter().flatten().next();
            assert!(slots.iter().all(|slot| slot.as_ref() == shared), "{content:?}: {slots:?}");
            assert!(shared.is_some() || slots.len() == 1, "{content:?} is not shared: {slots:?}");
        }
    }
}

fn write(planner: &mut Planner, deferred: &mut Vec<PoolSlot>, member: &mut Member, page: u64, content: u8) {
    member.pages.insert(page, content);
    if let Some(slot) = member.mapped.remove(&page) {
        planner.released(member.id, &[SlotRun { start: HostVirt((FIRST + page) << 12), slot, pages: 1 }]).unwrap();
        deferred.append(&mut planner.place(member.id).deferred);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn plan_agrees_with_model(steps in prop::collection::vec(step(3), 1..60)) {
        let mut world = World::new(3);
        for step in &steps {
            world.step(step);
            world.check();
        }
        world.settle();
        world.check();
        // Full reports bring back pages that were written and not reported.
        for at in 0..3 {
            world.planner.place(world.members[at].id).may_donate = true;
        }
        (0..3).for_each(|at| world.again(at));
        world.settle();
        world.check();
        world.check_sharing();
        world.planner.give_back(std::mem::take(&mut world.deferred));
        (0..3).for_each(|at| world.leave(at));
        world.planner.give_back(std::mem::take(&mut world.deferred));
        prop_assert_eq!(world.planner.pool.slots(), 0);
        prop_assert_eq!(world.planner.index.pages(), 0);
        prop_assert_eq!(world.planner.table.len(), 0);
    }
}

#[test]
fn release_before_fold_answer_is_booked_once() {
    let mut world = World::new(1);
    world.rest(0, 0, &[5, 5]);
    world.ask(0);
    world.donate(0);
    world.ask(0);
    let runs = world.members[0].folds[0].clone();
    let Target::Slot(slot) = runs[0].target else { panic!("{runs:?}") };
    let id = world.members[0].id;
    let release = [SlotRun { start: runs[0].start, slot, pages: 1 }];
    world.planner.released(id, &release).unwrap();
    assert!(world.planner.released(id, &release).is_err(), "once");
    world.planner.folded(id, &runs, &[Outcome::Folded; 2]);
    assert_eq!(world.planner.place(id).deferred, [slot]);
    assert_eq!((world.planner.place(id).mapped, world.planner.pool.holds(slot)), (1, 2));
}

#[test]
fn report_before_fold_answer_is_not_lost() {
    let mut world = World::new(1);
    world.rest(0, 0, &[5, 5, 6]);
    world.ask(0);
    world.donate(0);
    world.ask(0);
    world.rest(0, 0, &[6]);
    world.settle();
    world.check();
    world.check_sharing();
}

#[test]
fn short_lived_content_waits() {
    let mut world = World::new(2);
    let fold = |world: &mut World, who: &[usize]| {
        who.iter().for_each(|at| world.rest(*at, 0, &[5]));
        for _ in 0..3 {
            (0..2).for_each(|at| world.ask(at));
            (0..2).for_each(|at| world.donate(at));
            (0..2).for_each(|at| world.fold(at, 1));
        }
        world.check();
        world.members.iter().map(|member| member.mapped.len()).sum::<usize>()
    };
    let write = |world: &mut World, at: usize| {
        write(&mut world.planner, &mut world.deferred, &mut world.members[at], 0, 9 + at as u8);
        world.planner.give_back(std::mem::take(&mut world.deferred));
    };
    assert_eq!(fold(&mut world, &[0, 1]), 2);
    world.wait(59);
    // The content lasts while one member maps its slot.
    write(&mut world, 0);
    assert_eq!(fold(&mut world, &[0]), 2);
    write(&mut world, 0);
    write(&mut world, 1);
    assert_eq!(fold(&mut world, &[0, 1]), 0);
    world.wait(59);
    assert_eq!(fold(&mut world, &[0, 1]), 0);
    // Pages reported before are folded when the wait is over.
    world.wait(1);
    assert_eq!(fold(&mut world, &[]), 2);
    // A slot that lasted longer makes nobody wait.
    world.wait(60);
    write(&mut world, 0);
    write(&mut world, 1);
    assert_eq!(fold(&mut world, &[0, 1]), 2);
}
