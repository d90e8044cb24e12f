use super::*;
use crate::dispatch::Donation;
use crate::plan::Policy;
use crate::pool::Pool;
use crate::upkeep::Inheritance;
use page::{Fingerprint, HostVirt, PAGE_BYTES, PAGE_SHIFT};
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, memfd_create};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};
use wire::{Outcome, RestedRun, Target};

/// Pages of the template; every fourth is empty.
const PAGES: u16 = 200;
const FIRST: u64 = 1000;
pub(crate) const NUMBER: u8 = PoolSlot::FIRST_TEMPLATE;

pub(crate) fn bytes(content: u64) -> Vec<u8> {
    let mut bytes = vec![0; PAGE_BYTES];
    bytes[..8].copy_from_slice(&content.to_ne_bytes());
    bytes
}

fn is_empty(page: u64) -> bool {
    page % 4 == 3
}

fn template() -> OwnedFd {
    let file = memfd_create("pagefold-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    let file = File::from(file);
    file.set_len(u64::from(PAGES) << PAGE_SHIFT).unwrap();
    for page in (0..u64::from(PAGES)).filter(|page| !is_empty(*page)) {
        file.write_all_at(&bytes(page + 1), page << PAGE_SHIFT).unwrap();
    }
    act::Template::seal(&file).unwrap().file
}

/// The plan of a group whose pool has a template. Page `n` of this holds `bytes(n + 1)`, but every fourth is empty.
pub(crate) fn planner() -> Planner {
    let policy =
        Policy { folds: true, intra_member_only: false, zeros: true, split_huge_at: None, index_pages: 1 << 20 };
    let mut planner = Planner::new(Pool::new("test", 1 << 16), policy);
    planner.pool.inherit(NUMBER, PAGES.into(), template()).unwrap();
    let mut inheritance = Inheritance::default();
    inheritance.add(&mut planner, NUMBER).unwrap();
    while !inheritance.is_done() {
        inheritance.go_on(&mut planner).unwrap();
    }
    planner
}

fn slot(page: u64) -> PoolSlot {
    PoolSlot::new(NUMBER, page as u32).unwrap()
}

fn run(page: u64, pages: u16) -> SlotRun {
    SlotRun { start: HostVirt((FIRST + page) << PAGE_SHIFT), slot: slot(page), pages }
}

fn born(planner: &mut Planner) -> MemberId {
    let member = planner.join();
    assert_eq!(planner.at_home(member, run(0, PAGES)), Ok(false));
    member
}

/// Reports a page at rest, folds what is asked for, and returns the targets.
fn rest(planner: &mut Planner, member: MemberId, page: u64, content: &[u8]) -> Vec<Target> {
    let rested = RestedRun { start: run(page, 1).start, pages: 1, huge: false };
    planner.rested(member, &[rested], &[Fingerprint::of(content)]);
    let runs = planner.next_folds(member);
    let pages: usize = runs.iter().map(|run| usize::from(run.pages)).sum();
    planner.folded(member, &runs, &vec![Outcome::Folded; pages]);
    runs.into_iter().map(|run| run.target).collect()
}

const FILLED: u64 = PAGES as u64 / 4 * 3;

#[test]
fn pages_leave_their_homes_and_come_back() {
    let mut planner = planner();
    let members = [born(&mut planner), born(&mut planner)];
    assert_eq!((planner.pool.slots(), planner.pool.by_sharers()), (FILLED, [0, 0, FILLED, 0, 0]));
    let mapped = |planner: &mut Planner| members.map(|member| planner.place(member).mapped);
    // The fourth of these pages shows an empty slot of the template, which counts as mapped by nobody.
    planner.released(members[0], &[run(8, 4)]).unwrap();
    assert_eq!(mapped(&mut planner), [FILLED - 3, FILLED]);
    planner.released(members[0], &[run(8, 1)]).unwrap();
    assert_eq!(mapped(&mut planner), [FILLED - 3, FILLED], "it had left");
    assert_eq!(rest(&mut planner, members[0], 8, &bytes(9)), [Target::Slot(slot(8))]);
    // A page with the content of another page of the template is folded to that page's slot. A page of zeros is folded
    // only if its home is empty.
    assert_eq!(rest(&mut planner, members[0], 9, &bytes(101)), [Target::Slot(slot(100))]);
    assert_eq!(rest(&mut planner, members[0], 10, &bytes(0)), []);
    assert_eq!(rest(&mut planner, members[0], 11, &bytes(0)), [Target::Zero]);
    assert_eq!(mapped(&mut planner), [FILLED - 1, FILLED]);
    assert_eq!(rest(&mut planner, members[0], 12, &bytes(777)), [], "it shows its home");
    planner.released(members[0], &[SlotRun { slot: slot(100), ..run(9, 1) }]).unwrap();
    // The member has discarded its private copies of these pages.
    assert_eq!(planner.at_home(members[0], run(9, 3)), Ok(false));
    assert_eq!(mapped(&mut planner), [FILLED, FILLED]);
    planner.released(members[0], &[run(9, 1)]).unwrap();
    assert_eq!(mapped(&mut planner), [FILLED - 1, FILLED]);
}

#[test]
fn slots_are_held_until_all_who_were_born_with_them_are_gone() {
    let mut planner = planner();
    let members = [born(&mut planner), born(&mut planner)];
    planner.released(members[0], &[run(8, 4)]).unwrap();
    planner.pool.set_loaded(NUMBER, false);
    let idle = |planner: &mut Planner| planner.drop_idle_segment(Instant::now(), Duration::ZERO);
    for member in members {
        assert_eq!(idle(&mut planner), None);
        let left = planner.leave(member, Donation::default());
        assert_eq!(left.len() as u64, FILLED);
        planner.give_back(left);
    }
    assert_eq!((planner.pool.by_sharers()[1..].iter().sum::<u64>(), idle(&mut planner)), (0, Some(NUMBER)));
    assert_eq!(planner.pool.slots(), 0);
}

#[test]
fn template_that_is_loaded_is_kept_without_members() {
    let mut planner = planner();
    assert_eq!(planner.drop_idle_segment(Instant::now(), Duration::ZERO), None);
}

#[test]
fn homes_that_cannot_be_are_refused() {
    let mut planner = planner();
    let member = born(&mut planner);
    let other = planner.join();
    let beyond = SlotRun { slot: slot(u64::from(PAGES) - 1), ..run(0, 2) };
    let own = SlotRun { slot: PoolSlot::new(3, 0).unwrap(), ..run(0, 2) };
    let none = SlotRun { slot: PoolSlot::new(NUMBER + 1, 0).unwrap(), ..run(0, 2) };
    assert_eq!(planner.at_home(member, run(50, 1)), Ok(false), "they are at home already");
    let elsewhere = SlotRun { slot: slot(3), ..run(50, 1) };
    for (member, run) in [(member, elsewhere), (other, beyond), (other, own), (other, none)] {
        assert!(planner.at_home(member, run).is_err(), "{run:?}");
    }
    assert!(planner.held(member, &[run(50, 1)], |_| false).is_err(), "it is counted already");
    assert!(planner.released(other, &[run(50, 1)]).is_err());
    assert_eq!(planner.at_home(other, run(0, PAGES)), Ok(false));
}

#[test]
fn numbers_of_slots_fit_into_the_index() {
    let last = PoolSlot::new(PoolSlot::SEGMENTS - 1, PoolSlot::PER_SEGMENT - 1).unwrap();
    assert_eq!(last.bits() >> 31, 0);
    let mut pool = Pool::new("test", 1 << 16);
    for n in 0..300 {
        let slot = pool.take(n, 0).unwrap();
        assert!(!slot.is_of_template());
        pool.hold(slot);
        pool.unhold(slot);
        pool.drop_segment(slot.segment());
    }
}
