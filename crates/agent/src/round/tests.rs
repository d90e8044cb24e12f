//! Rounds over memory of this process.

use super::*;
use act::{MemberMemory, Purpose};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use wire::Why;

fn ranges(list: &[(u64, u64)]) -> Vec<PageRange> {
    list.iter().map(|&(page, pages)| PageRange { start: HostVirt(page << 12), pages }).collect()
}

#[test]
fn costly_rounds_are_rare_also_while_much_changes() {
    let seconds = |cost: u64| {
        [TODAY.busiest, TODAY.busy, TODAY.seldom]
            .map(|cadence| apart(Duration::from_millis(cost), cadence).as_secs_f32())
    };
    assert_eq!(seconds(0), [1.0, 0.1, 0.1]);
    assert_eq!(seconds(20), [1.0, 2.0, 8.0]);
    assert_eq!(seconds(200), [5.0, 10.0, 10.0]);
}

#[test]
fn rounds_come_ever_more_rarely_while_nothing_changes() {
    let seconds = [0, 1, 8, 80, 800].map(|unchanged| rest(Duration::from_secs(unchanged)).as_secs_f32());
    assert_eq!(seconds, [0.0, 0.125, 1.0, 10.0, 10.0]);
}

/// Has a long time pass since the last change, after a round that is just over.
fn rest_long(rounds: &mut Rounds) {
    let now = Instant::now();
    rounds.clock.last_change = now.checked_sub(Duration::from_secs(60)).unwrap();
    rounds.clock.next = now + rest(now - rounds.clock.last_change);
}

#[test]
fn change_ends_rest() {
    // Other tests of this process change the table meanwhile.
    if !crate::testing::alone("round::tests::change_ends_rest") {
        return;
    }
    let Ok(guard) = Userfault::open(Purpose::Note) else { return eprintln!("skipped: no userfaultfd") };
    table::lock().follow_forks(true);
    let (memory, mut rounds) = (written(2), Rounds::new(true, true).unwrap());
    rounds.notice_changes(Instant::now());
    let is_at_rest = |rounds: &Rounds| rounds.due_in(Instant::now()) > Duration::from_secs(5);
    (0..2).for_each(|_| drop(round(&mut rounds, &guard, &memory, None)));
    rest_long(&mut rounds);
    assert!(is_at_rest(&rounds));
    // The program asks for memory.
    let more = written(1);
    assert!(!rounds.has_noticed_all());
    rounds.notice_changes(Instant::now());
    assert!(!is_at_rest(&rounds));
    // The member writes, and a round finds the written page.
    rest_long(&mut rounds);
    rounds.clock.next = Instant::now();
    write(&memory, 1, 7);
    round(&mut rounds, &guard, &memory, None);
    assert!(!is_at_rest(&rounds));
    // The worker asks for a full report.
    rest_long(&mut rounds);
    rounds.again(&Pagemap::open(std::process::id()).unwrap()).unwrap();
    assert!(!is_at_rest(&rounds));
    [memory.range(), more.range()].into_iter().for_each(|range| table::lock().forget(range));
}

/// Agents of MariaDB made two rounds a second, because some pages are written all the time.
#[test]
fn few_writes_do_not_end_rest() {
    // Other tests of this process change the table meanwhile.
    if !crate::testing::alone("round::tests::few_writes_do_not_end_rest") {
        return;
    }
    let Ok(guard) = Userfault::open(Purpose::Note) else { return eprintln!("skipped: no userfaultfd") };
    table::lock().follow_forks(true);
    let (memory, mut rounds) = (written(256), Rounds::new(true, false).unwrap());
    // A burst that goes on however slow this is: no page is worth folding.
    rounds.policy = Policy::new(&TODAY, false, Instant::now() + Duration::from_secs(3600));
    rounds.notice_changes(Instant::now());
    (0..2).for_each(|_| drop(round(&mut rounds, &guard, &memory, None)));
    let mut is_at_rest_after = |pages: u64| {
        rest_long(&mut rounds);
        rounds.clock.next = Instant::now();
        (0..pages).for_each(|page| write(&memory, page, 7));
        round(&mut rounds, &guard, &memory, None);
        rounds.due_in(Instant::now()) > Duration::from_secs(5)
    };
    let (share, least, most) = FEW_CHANGE;
    assert_eq!([1, least / 2, 4 * least].map(&mut is_at_rest_after), [true, true, false]);
    // In a large member, more changed pages count as few.
    let may = [0, share * least, 10_000 * share, u64::MAX].map(|pages| rounds.may_change(pages));
    assert_eq!(may, [least, least, most, most]);
    table::lock().forget(memory.range());
}

/// Agents of idle guests made four rounds a second for their first minutes: every few seconds, huge pages were looked
/// at again.
#[test]
fn pages_that_are_looked_at_again_and_again_do_not_end_rest() {
    // Other tests of this process change the table meanwhile.
    if !crate::testing::alone("round::tests::pages_that_are_looked_at_again_and_again_do_not_end_rest") {
        return;
    }
    let Ok(guard) = Userfault::open(Purpose::Note) else { return eprintln!("skipped: no userfaultfd") };
    table::lock().follow_forks(true);
    let (huge, shut) = (MemberMemory::huge_page(Some(true)).unwrap(), written(2));
    let pagemap = Pagemap::open(std::process::id()).unwrap();
    if pagemap.huge_ranges(huge.range().start, huge.range().end()).unwrap().is_empty() {
        return eprintln!("skipped: no huge page is free");
    }
    table::lock().ask(huge.range());
    // These pages are present, and not watched, because the program has locked them.
    table::lock().shut(shut.range(), table::Shut::Locked);
    let mut rounds = Rounds::new(true, false).unwrap();
    rounds.policy = Policy::new(&TODAY, false, Instant::now() + Duration::from_secs(3600));
    let mut look = || {
        rounds.notice_changes(Instant::now());
        rest_long(&mut rounds);
        (rounds.clock.next, rounds.watching.armed) = (Instant::now(), Instant::now());
        rounds.huge.make_due(Instant::now());
        rounds.look(&pagemap, Some(&guard), None, true).unwrap();
        let looked_at: u64 = rounds.rested.iter().map(|rested| rested.range.pages).sum();
        rounds.rested.clear();
        (looked_at, rounds.due_in(Instant::now()) > Duration::from_secs(5))
    };
    look();
    assert_eq!([look(), look()], [(HUGE_PAGES, true); 2]);
    [huge.range(), shut.range()].into_iter().for_each(|range| table::lock().forget(range));
}

/// Fresh enrolled pages, each with its own content.
fn written(pages: u64) -> MemberMemory {
    let memory = MemberMemory::new(pages).unwrap();
    table::lock().ask(memory.range());
    (0..pages).for_each(|n| write(&memory, n, n + 1));
    memory
}

fn write(memory: &MemberMemory, page: u64, word: u64) {
    let at = memory.range().start.add_pages(page).0 as usize as *mut u64;
    // SAFETY: aligned and within the mapping, which lives as long as `memory`.
    unsafe { at.write_volatile(word) };
}

/// The pages that one round reports, of this memory.
fn round(rounds: &mut Rounds, guard: &Userfault, memory: &MemberMemory, rate: Option<u32>) -> Vec<u64> {
    let pagemap = Pagemap::open(std::process::id()).unwrap();
    while !rounds.due_in(Instant::now()).is_zero() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let notes = rounds.notes_writes.then_some(guard);
    rounds.look(&pagemap, notes, rate, false).unwrap();
    let (mut found, all) = (Vec::new(), memory.range());
    while rounds.due_in(Instant::now()).is_zero() {
        rounds.fingerprint(notes, u64::MAX, |rested, fingerprints| {
            assert_eq!(rested.range.pages, fingerprints.len() as u64);
            let pages = (0..rested.range.pages).map(|n| rested.range.start.add_pages(n));
            found.extend(pages.filter(|at| (all.start..all.end()).contains(at)).map(|at| at.page() - all.start.page()));
        });
        if rounds.rested.is_empty() {
            break;
        }
    }
    found.sort_unstable();
    found
}

#[test]
fn pages_that_were_not_written_for_a_round_are_reported_once() {
    // Other tests of this process change the table meanwhile.
    if !crate::testing::alone("round::tests::pages_that_were_not_written_for_a_round_are_reported_once") {
        return;
    }
    let Ok(guard) = Userfault::open(Purpose::Note) else { return eprintln!("skipped: no userfaultfd") };
    table::lock().follow_forks(true);
    for notes_writes in [true, false] {
        let memory = written(8);
        // Eager, because writes to so few pages make the process busy.
        let mut rounds = Rounds::new(notes_writes, true).unwrap();
        assert_eq!(round(&mut rounds, &guard, &memory, None), []);
        write(&memory, 5, 50);
        assert_eq!(round(&mut rounds, &guard, &memory, None), [0, 1, 2, 3, 4, 6, 7]);
        assert_eq!(round(&mut rounds, &guard, &memory, None), [5]);
        assert_eq!(round(&mut rounds, &guard, &memory, None), []);
        write(&memory, 0, 10);
        assert_eq!(round(&mut rounds, &guard, &memory, None), []);
        assert_eq!(round(&mut rounds, &guard, &memory, None), [0]);
        // Pages that could not be made use of are reported until they can be.
        let range = PageRange { start: memory.range().start.add_pages(3), pages: 2 };
        for _ in 0..2 {
            rounds.take_back(&[Rested { range, kind: Kind::Small }]);
            let twice = [(); 2].map(|()| round(&mut rounds, &guard, &memory, None));
            assert_eq!(twice.concat(), [3, 4], "{notes_writes}");
        }
        table::lock().forget(memory.range());
    }
}

/// Once, the process that parks guests took such pages for pages that are never folded.
#[test]
fn pages_that_no_round_has_seen_are_young_and_asking_brings_a_round() {
    if !crate::testing::alone("round::tests::pages_that_no_round_has_seen_are_young_and_asking_brings_a_round") {
        return;
    }
    let Ok(guard) = Userfault::open(Purpose::Note) else { return eprintln!("skipped: no userfaultfd") };
    table::lock().follow_forks(true);
    let pagemap = Pagemap::open(std::process::id()).unwrap();
    let (memory, mut rounds) = (written(3), Rounds::new(true, true).unwrap());
    let why = |rounds: &mut Rounds| rounds.why(&pagemap, &[memory.range()]);
    assert_eq!(why(&mut rounds), [Why::Young; 3], "nobody watches them");
    round(&mut rounds, &guard, &memory, None);
    assert_eq!(why(&mut rounds), [Why::Young; 3]);
    while !rounds.due_in(Instant::now()).is_zero() {
        std::thread::sleep(Duration::from_millis(5));
    }
    rounds.look(&pagemap, Some(&guard), None, false).unwrap();
    assert_eq!(why(&mut rounds), [Why::Young; 3], "they are still to be fingerprinted");
    assert_eq!(round(&mut rounds, &guard, &memory, None), [0, 1, 2]);
    assert_eq!(why(&mut rounds), [Why::Other; 3]);
    write(&memory, 1, 50);
    rest_long(&mut rounds);
    assert!(rounds.due_in(Instant::now()) > Duration::from_secs(5));
    assert_eq!(why(&mut rounds), [Why::Other, Why::Young, Why::Other]);
    assert!(rounds.due_in(Instant::now()) < Duration::from_secs(5));
    table::lock().forget(memory.range());
}

/// MariaDB reserves eight terabytes. A round looked at each of its two million pieces by a call of its own.
#[test]
fn round_costs_nothing_for_memory_that_is_only_reserved() {
    const RESERVED: usize = 8 << 40;
    if !crate::testing::alone("round::tests::round_costs_nothing_for_memory_that_is_only_reserved") {
        return;
    }
    let Ok(guard) = Userfault::open(Purpose::Note) else { return eprintln!("skipped: no userfaultfd") };
    table::lock().follow_forks(true);
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: a new mapping at a place that the kernel chooses.
    let reserved = unsafe { mmap_anonymous(std::ptr::null_mut(), RESERVED, access, flags) };
    let Ok(reserved) = reserved else { return eprintln!("skipped: the kernel reserves no eight terabytes") };
    let range = PageRange { start: HostVirt(reserved as u64), pages: (RESERVED >> PAGE_SHIFT) as u64 };
    table::lock().ask(range);
    let (memory, mut rounds) = (written(2), Rounds::new(true, true).unwrap());
    let before = cpu_time(ClockId::ThreadCPUTime);
    assert_eq!([(); 2].map(|()| round(&mut rounds, &guard, &memory, None)), [vec![], vec![0, 1]]);
    let used = cpu_time(ClockId::ThreadCPUTime).saturating_sub(before);
    [memory.range(), range].into_iter().for_each(|range| table::lock().forget(range));
    // SAFETY: the mapping was made above, and nothing refers to it.
    unsafe { munmap(reserved, RESERVED) }.unwrap();
    assert!(used < Duration::from_millis(200), "{used:?}");
}

#[test]
fn budget_goes_round() {
    let mut rounds = Rounds::new(false, false).unwrap();
    let all = ranges(&[(0, 10), (20, 4)]);
    let mut seen = BTreeMap::<u64, u32>::new();
    for _ in 0..6 {
        let part = rounds.within(&all, 7);
        assert_eq!(part.iter().map(|range| range.pages).sum::<u64>(), 7);
        part.iter().flat_map(|r| r.start.page()..r.end().page()).for_each(|page| *seen.entry(page).or_default() += 1);
    }
    assert_eq!(seen.len(), 14);
    assert!(seen.values().all(|times| *times == 3), "{seen:?}");
}
