//! A worker and honest agents: which pages are folded, and which are not.

mod world;

use api::control::{Fold, Order, Settings, ZeroPolicy};
use page::PoolSlot;
use rustix::fs::{OFlags, SealFlags, fcntl_get_seals, fcntl_getfl};
use std::time::{Duration, Instant};
use wire::{FoldMode, MemberState, Target, Why};
use world::{PATIENCE, World, content, serve_until};

#[test]
fn equal_pages_of_two_members_share_slots_in_long_runs() {
    let mut world = World::new(Settings::default());
    let (mut one, mut other) = (world.member("one", 1), world.member("other", 2));
    one.rest(1000, 1..=300);
    other.rest(5000, 1..=300);
    serve_until("folds", &mut [&mut one, &mut other], |a| a.iter().all(|agent| agent.mapped.len() == 300));
    one.check();
    other.check();
    assert_eq!(
        one.mapped.values().collect::<Vec<_>>(),
        other.mapped.values().collect::<Vec<_>>(),
        "equal pages map equal slots"
    );
    assert_eq!(one.donated + other.donated, 300, "every content is asked for once");
    // 300 pages cross a chunk or a donation here and there; they are still few runs.
    assert!(one.folds.len() <= 4 && other.folds.len() <= 4, "{:?} {:?}", one.folds, other.folds);
    // The last answers may still be on their way when the agents have folded everything.
    let mut report = world.report();
    for _ in 0..200 {
        if report.sharing_pages == 600 && report.deferred_slots == 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
        report = world.report();
    }
    assert_eq!((report.slots, report.sharing_pages, report.deferred_slots), (300, 600, 0));
    assert_eq!((report.savings.folded_bytes, report.savings.pool_bytes), (600 << 12, 300 << 12));
    assert!(report.index_bytes > 0 && report.bill.worker_cpu_s > 0.0);
    let frames = report.frames;
    assert_eq!((frames.pool_in_use, frames.pool_idle, frames.slots_by_sharers), (300, 0, [0, 0, 300, 0, 0]));
    assert_eq!(frames.saved, report.savings.saved_bytes() >> 12);
}

/// Pages side by side are folded together, and contents come in an order of their own. A busy machine may take longer for the contents
/// than requests wait: then it is tried again.
#[test]
fn pages_are_folded_once_contents_of_their_neighbours_are_there() {
    const PAGES: u64 = 700;
    let mut is_in_order = |attempt: u64| {
        let mut world = World::new(Settings::default());
        let (mut one, mut other) = (world.member("one", 1), world.member("other", 2));
        one.rest(1000, 1..=PAGES);
        // Of each member, every donation has pages that lie far apart in the other.
        other.rest(5000, (0..PAGES).map(|n| 1 + n * 17 % PAGES));
        serve_until("folds", &mut [&mut one, &mut other], |a| a.iter().all(|a| a.mapped.len() as u64 == PAGES));
        let is_in_order = [&one, &other].map(|agent| agent.folds.is_sorted_by_key(|run| run.start));
        eprintln!("attempt {attempt}: {is_in_order:?}");
        is_in_order == [true; 2]
    };
    assert!((0..20).any(&mut is_in_order));
}

#[test]
fn slots_are_counted_by_the_pages_that_map_them() {
    let mut world = World::new(Settings::default());
    let mut one = world.member("one", 1);
    // Contents that 2, 3, 7, 8 and 20 pages have.
    let pages = [2, 3, 7, 8, 20].iter().enumerate().flat_map(|(n, times)| vec![n as u64 + 1; *times]);
    one.rest(0x100, pages.collect::<Vec<_>>());
    world.wait_for_report("all is folded", &mut [&mut one], |report| report.sharing_pages == 40);
    assert_eq!(world.report().frames.slots_by_sharers, [0, 0, 1, 2, 2]);
    // One page of each content is written: of the first one, one page is left.
    for page in [0x100, 0x102, 0x105, 0x10c, 0x114] {
        one.write(page, [0x999 + page]);
    }
    world.wait_for_report("they are released", &mut [&mut one], |report| report.sharing_pages == 35);
    assert_eq!(world.report().frames.slots_by_sharers, [0, 1, 1, 2, 1]);
}

#[test]
fn member_and_plan_tell_why_pages_are_not_folded() {
    let mut world = World::new(Settings { pool_slots: 2, ..Settings::default() });
    let mut one = world.member("one", 1);
    one.rest(0x100, [1, 2, 1, 2]);
    world.wait_for_report("the pool is full", &mut [&mut one], |report| report.sharing_pages == 4);
    one.rest(0x200, [3, 3, 4]);
    world.wait_for_report("a page gets no slot", &mut [&mut one], |report| report.no_room.is_some());
    let pages = vec![(0x200 << 12, 3), (0x300 << 12, 1)];
    world.order(&Order::Why { question: 7, pid: 1, pages }, &[]);
    let answer = |world: &mut World, agent: &mut world::Agent| {
        let begin = Instant::now();
        while world.because.is_none() && begin.elapsed() < PATIENCE {
            world.listen();
            agent.serve();
            std::thread::sleep(Duration::from_millis(1));
        }
        world.because.take()
    };
    // Which of the two equal pages stands in the index is not told: it waits for the other, and is as any other page.
    let reasons = [Why::Other, Why::NoRoom, Why::Other, Why::Young].map(|why| why as u8);
    assert_eq!(answer(&mut world, &mut one), Some((7, reasons.to_vec())));
    // No such member, and more pages than one question may have.
    for (question, pid, pages) in [(8, 2, 1), (9, 1, u16::MAX)] {
        world.order(&Order::Why { question, pid, pages: vec![(0x200 << 12, pages)] }, &[]);
        assert_eq!(answer(&mut world, &mut one), Some((question, Vec::new())));
    }
}

#[test]
fn third_member_and_equal_pages_of_one_member_use_existing_slots() {
    let mut world = World::new(Settings::default());
    let mut one = world.member("one", 1);
    one.rest(0x10, [7, 7, 8, 7]);
    serve_until("a pair", &mut [&mut one], |a| a[0].mapped.len() == 3);
    let mut other = world.member("other", 2);
    other.rest(0x99, [7, 9]);
    serve_until("a third", &mut [&mut one, &mut other], |a| a[1].mapped.len() == 1);
    assert_eq!((one.donated, other.donated), (1, 0));
    assert_eq!(one.mapped[&0x10], other.mapped[&0x99]);
    other.check();
}

#[test]
fn zero_pages_take_no_slots_and_stay_when_ignored() {
    let mut world = World::new(Settings::default());
    let mut one = world.member("one", 1);
    one.rest(0x100, [0; 100]);
    serve_until("zeros", &mut [&mut one], |a| a[0].zeroed == 100);
    assert_eq!(
        one.folds.iter().map(|run| run.target).collect::<Vec<_>>(),
        [Target::Zero, Target::Zero][..one.folds.len()]
    );
    world.set(Settings { zero_pages: ZeroPolicy::Ignore, ..Settings::default() });
    one.wait_until("the word", |agent| agent.pace.unwrap().zero_pages == wire::ZeroPages::Ignore);
    one.rest(0x200, [0, 5, 5]);
    serve_until("a pair", &mut [&mut one], |a| a[0].mapped.len() == 2);
    assert_eq!((one.zeroed, world.report().slots), (100, 1));
}

#[test]
fn written_pages_release_slots_and_fold_again() {
    let mut world = World::new(Settings::default());
    let (mut one, mut other) = (world.member("one", 1), world.member("other", 2));
    one.rest(1, [4, 5]);
    other.rest(1, [4, 5]);
    serve_until("folds", &mut [&mut one, &mut other], |a| a.iter().all(|agent| agent.mapped.len() == 2));
    one.write(1, [6, 6]);
    one.rest(1, [6, 6]);
    serve_until("folds anew", &mut [&mut one, &mut other], |a| a[0].mapped.len() == 2);
    one.check();
    other.check();
    assert_eq!(one.mapped[&1], one.mapped[&2]);
    other.write(1, [1, 2]);
    // Nobody maps the first two slots any more. They are free when the epoch has ended.
    world.wait_for_report("free slots", &mut [&mut one, &mut other], |report| report.slots == 1);
    other.rest(1, [6, 6]);
    serve_until("the slot that is there", &mut [&mut one, &mut other], |a| a[1].mapped.len() == 2);
    other.check();
}

#[test]
fn page_changed_before_donation_or_fold_is_left_alone() {
    let mut world = World::new(Settings::default());
    let (mut one, mut other) = (world.member("one", 1), world.member("other", 2));
    one.rest(1, [4, 5, 6]);
    one.pages.insert(2, 50);
    other.rest(1, [4, 5, 6]);
    other.pages.insert(3, 60);
    serve_until("what stayed", &mut [&mut one, &mut other], |a| {
        a[0].mapped.contains_key(&1) && a[1].mapped.contains_key(&1)
    });
    world.wait_for_report("the rest is settled", &mut [&mut one, &mut other], |report| report.deferred_slots == 0);
    one.check();
    other.check();
    assert!(!one.mapped.contains_key(&2) && !other.mapped.contains_key(&3));
}

#[test]
fn handed_out_files_cannot_be_written() {
    let mut world = World::new(Settings::default());
    let mut one = world.member("one", 1);
    one.rest(1, [4, 4]);
    serve_until("a pair", &mut [&mut one], |a| a[0].mapped.len() == 2);
    world.listen();
    for (_, file) in one.segments.values().chain(world.segments.values()) {
        assert_eq!(fcntl_getfl(file).unwrap() & OFlags::RWMODE, OFlags::RDONLY);
        let seals = fcntl_get_seals(file).unwrap();
        assert!(seals.contains(SealFlags::FUTURE_WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL));
    }
}

#[test]
fn folding_is_switched_off_undone_and_switched_on() {
    let mut world = World::new(Settings::default());
    let (mut one, mut other) = (world.member("one", 1), world.member("other", 2));
    one.rest(1, 1..=10);
    other.rest(1, 1..=10);
    serve_until("folds", &mut [&mut one, &mut other], |a| a.iter().all(|agent| agent.mapped.len() == 10));
    world.set(Settings { fold: Fold::Off, ..Settings::default() });
    one.wait_until("off", |agent| agent.pace.unwrap().fold == FoldMode::Off);
    one.rest(100, [1, 2, 3]);
    world.report();
    one.serve();
    assert_eq!(one.mapped.len(), 10);
    world.set(Settings { fold: Fold::Unfold, ..Settings::default() });
    world.wait_for_report("nothing shared", &mut [&mut one, &mut other], |report| report.sharing_pages == 0);
    assert!(one.mapped.is_empty());
    world.wait_for_report("nothing kept", &mut [&mut one, &mut other], |report| report.slots == 0);
    world.set(Settings::default());
    serve_until("folds", &mut [&mut one, &mut other], |a| a[0].mapped.len() == 13 && a[1].mapped.len() == 10);
    one.check();
    other.check();
}

#[test]
fn intra_member_only_ends_sharing_between_members() {
    let mut world = World::new(Settings::default());
    let (mut one, mut other) = (world.member("one", 1), world.member("other", 2));
    one.rest(1, [4, 5, 4]);
    other.rest(1, [4, 5, 5]);
    serve_until("folds", &mut [&mut one, &mut other], |a| a.iter().all(|agent| agent.mapped.len() == 3));
    world.set(Settings { intra_member_only: true, ..Settings::default() });
    world.wait_until("word of that", |w| w.has_event("share nothing"));
    world.wait_for_report("pairs", &mut [&mut one, &mut other], |report| report.sharing_pages == 4);
    serve_until("pairs of their own", &mut [&mut one, &mut other], |a| {
        a.iter().all(|agent| agent.mapped.len() == 2 && agent.pace.unwrap().fold == FoldMode::On)
    });
    one.check();
    other.check();
    assert_eq!(one.mapped[&1], one.mapped[&3]);
    assert_eq!(other.mapped[&2], other.mapped[&3]);
    assert!(one.mapped.values().all(|slot| !other.mapped.values().any(|s| s == slot)));
    // Contents that both members have get a slot for each member.
    one.rest(50, [9, 9]);
    other.rest(50, [9, 9]);
    serve_until("pairs of their own", &mut [&mut one, &mut other], |a| a.iter().all(|agent| agent.mapped.len() == 4));
    assert_ne!(one.mapped[&50], other.mapped[&50]);
    world.set(Settings::default());
    serve_until("all again", &mut [&mut one, &mut other], |a| a[0].mapped.len() == 5 && a[1].mapped.len() == 5);
}

#[test]
fn full_pool_folds_nothing_new_and_says_so() {
    // At once, and not when members are next asked for a full report, 5 s after they were refused. On a busy machine,
    // one try may take longer.
    let late: Vec<_> = (0..3).map(|_| fill_pool()).take_while(|took| *took >= Duration::from_secs(3)).collect();
    assert!(late.len() < 3, "{late:?}");
}

/// A pool is full, and gets more room. Returns the time until that is used.
fn fill_pool() -> Duration {
    let mut world = World::new(Settings { pool_slots: 5, ..Settings::default() });
    let (mut one, mut other) = (world.member("one", 1), world.member("other", 2));
    one.rest(1, 1..=10);
    other.rest(1, 1..=10);
    serve_until("folds", &mut [&mut one, &mut other], |a| a.iter().all(|agent| agent.mapped.len() == 5));
    world.wait_until("word of that", |w| w.has_event("all that the pool may hold is in use: 20 KiB"));
    let report = world.report();
    assert!(report.slots == 5 && report.bill.fold_failures["no_room"] >= 5, "{report:?}");
    assert!(report.no_room.is_some_and(|why| why.contains("20 KiB")));
    // Existing slots are still used, and more room allows new ones.
    one.rest(100, [other.pages[other.mapped.keys().next().unwrap()]]);
    serve_until("a fold", &mut [&mut one, &mut other], |a| a[0].mapped.len() == 6);
    world.set(Settings { pool_slots: 50, ..Settings::default() });
    let grown = Instant::now();
    serve_until("the rest", &mut [&mut one, &mut other], |a| a[0].mapped.len() == 11 && a[1].mapped.len() == 10);
    let took = grown.elapsed();
    world::wait_for("room", || world.report().no_room.is_none());
    one.check();
    other.check();
    took
}

/// Waits until the worker has heard everything, and both members have done what it asked.
fn settle(world: &mut World, one: &mut world::Agent, other: &mut world::Agent) {
    for _ in 0..3 {
        // A report is answered before members are heard.
        world.report();
        one.serve();
        other.serve();
    }
}

#[test]
fn huge_page_is_split_only_where_enough_of_it_folds() {
    let mut world = World::new(Settings { split_huge_at_percent: Some(50), ..Settings::default() });
    let (mut one, mut other) = (world.member("one", 1), world.member("other", 2));
    let contents: Vec<u64> = (1..=512).collect();
    let huge = |agent: &mut world::Agent, first: u64, contents: &[u64]| {
        agent.pages.extend((first..).zip(contents.iter().copied()));
        agent.report(first, contents, true);
    };
    huge(&mut one, 512, &contents);
    let mut half = contents.clone();
    half[255..].iter_mut().for_each(|content| *content += 10_000);
    huge(&mut other, 512, &half);
    settle(&mut world, &mut one, &mut other);
    assert_eq!((one.mapped.len(), other.mapped.len()), (0, 0), "255 of 512 are not enough");
    // 256 duplicates, but in two huge pages with 128 each: those would not be worth it, so this one is not either.
    let scattered: Vec<u64> = (257..385).chain(10_300..10_428).chain(50_000..50_256).collect();
    huge(&mut other, 2048, &scattered);
    settle(&mut world, &mut one, &mut other);
    assert_eq!((one.mapped.len(), other.mapped.len(), other.donated), (0, 0, 0));
    half[255] = 256;
    half[256..].iter_mut().for_each(|content| *content += 20_000);
    huge(&mut other, 1024, &half);
    serve_until("256 of both", &mut [&mut one, &mut other], |a| a.iter().all(|agent| agent.mapped.len() == 256));
    one.check();
    other.check();
}

#[test]
fn page_of_member_that_cannot_fold_is_no_duplicate() {
    let mut world = World::new(Settings::default());
    let (mut one, mut other) = (world.member("one", 1), world.member("other", 2));
    one.rest(1, [1, 2, 3]);
    one.stats(MemberState::Unpinned);
    world.wait_for_report("word of that", &mut [&mut one], |report| report.members[0].state == "unpinned");
    other.rest(1, [1, 2, 3]);
    world.report();
    other.serve();
    assert!(other.mapped.is_empty() && world.report().slots == 0);
    one.stats(MemberState::Folding);
    serve_until("folds", &mut [&mut one, &mut other], |a| a.iter().all(|agent| agent.mapped.len() == 3));
    assert_eq!(one.again, 1);
}

#[test]
fn full_index_covers_hash_space_in_passes() {
    let mut world = World::new(Settings { index_pages: 256, ..Settings::default() });
    let mut one = world.member("one", 1);
    one.rest(0, 1..=2000);
    world.wait_until("word of that", |w| w.has_event("passes"));
    let report = world.report();
    assert!(report.pass_permille.is_some());
    one.wait_until("a part to report", |agent| agent.pace.unwrap().last.0 < u64::MAX / 4);
    let last = one.pace.unwrap().last;
    let covered = (1..=2000).filter(|n| page::Fingerprint::of(&content(*n)) <= last).count();
    assert!((1..=256).contains(&covered), "{covered} of 2000 pages are covered");
    one.rest(3000, 1..=2000);
    one.wait_until("duplicates of what is covered", |agent| agent.mapped.len() == 2 * covered);
    let _: Vec<PoolSlot> = one.mapped.values().copied().collect();
    one.check();
}
