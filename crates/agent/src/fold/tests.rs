//! Zeros of a huge page that is split, donations, and a prover that is silent while pieces are collapsed.

use super::*;
use crate::testing::Member;
use act::MemberMemory;
use rustix::fd::OwnedFd;
use std::sync::atomic::Ordering;

#[test]
fn zeros_that_kernel_maps_already_count_as_folded() {
    let member = Member::of(MemberMemory::huge_page(Some(true)).unwrap());
    let (all, pagemap) = (member.0.range(), Pagemap::open(std::process::id()).unwrap());
    for page in 8..16 {
        [0, page::PAGE_BYTES / 8 - 1].iter().for_each(|word| member.word(page, *word).store(0, Ordering::Relaxed));
    }
    if pagemap.huge_ranges(all.start, all.end()).unwrap() != [all] {
        return eprintln!("skipped: no huge page is to be had");
    }
    split(all.start);
    if pagemap.zero_ranges(all.start, all.end()).unwrap().is_empty() {
        return eprintln!("skipped: this kernel leaves zeros where they are");
    }
    let take = |range| take_zeros(&mut table::lock(), &pagemap, range);
    assert_eq!(take(all), [member.run(8, 8)]);
    member.word(9, 0).store(7, Ordering::Relaxed);
    assert_eq!(take(all), [member.run(8, 1), member.run(10, 6)]);
    assert_eq!(take(member.run(9, 1)), []);
    let words = [8, 9, 15, 16].map(|page| member.word(page, 0).load(Ordering::Relaxed));
    assert_eq!(words, [0, 7, 0, 17]);
    let zeroed = table::lock().zeroed_pages(all);
    assert_eq!(zeroed, [member.run(8, 8)], "the written one is found later");
}

/// The worker may ask for pages that were there a moment ago. A read of a missing page calls the handler of the
/// program's own userfaultfd. Here nobody answers, and without the check the read sleeps for ever.
#[test]
fn memory_of_programs_own_userfaultfd_is_neither_read_nor_donated() {
    let Some(section) = crate::testing::section() else { return };
    let programs = act::Userfault::open(act::Purpose::Follow).unwrap();
    let (fresh, member) = (MemberMemory::new(4).unwrap(), Member::new(4));
    table::lock().ask(fresh.range());
    programs.register(fresh.range(), act::Watch::Missing).unwrap();
    let window = OwnedFd::from(tempfile::tempfile().unwrap());
    let (runs, (done, is_done)) = ([fresh.range(), member.run(1, 2)], std::sync::mpsc::channel());
    std::thread::scope(|scope| {
        let donating = scope.spawn(|| {
            let given = donate(&section, &window, &runs);
            done.send(()).unwrap();
            given
        });
        if is_done.recv_timeout(Duration::from_secs(20)).is_err() {
            programs.unregister(fresh.range()).unwrap();
        }
        assert_eq!(donating.join().unwrap(), [false, false, false, false, true, true]);
    });
    let mut rounds = crate::round::Rounds::new(true, true).unwrap();
    rounds.rest(fresh.range());
    assert_eq!(rounds.fingerprint(section.notes(), 8, |_, _| panic!("a page was read")), 4, "all were tried");
    programs.unregister(fresh.range()).unwrap();
    assert_eq!(donate(&section, &window, &[fresh.range()]), [true; 4]);
    table::lock().unask(member.run(1, 2));
    assert_eq!(donate(&section, &window, &[member.run(0, 3)]), [true, false, false], "not to be folded any more");
    table::lock().forget(fresh.range());
}

/// A device that was opened since the survey may pin pages by calls that do not wait, so no page may be out then.
#[test]
fn nothing_is_out_of_reach_once_something_was_opened() {
    if !crate::testing::alone("fold::tests::nothing_is_out_of_reach_once_something_was_opened") {
        return;
    }
    let Some(section) = crate::testing::section() else { return };
    let mut folder = Folder::new(section, Some(10_000), PathBuf::from("/nonexistent")).unwrap();
    let (member, pool, pagemap) = (Member::new(4), Pool::default(), Pagemap::open(std::process::id()).unwrap());
    let mut rounds = crate::round::Rounds::new(true, true).unwrap();
    let mut fold = |folder: &mut Folder| {
        let (mut stats, mut all, mut again) = (MemberStats::default(), vec![Outcome::Gone; 4], Vec::new());
        let with = (&pool, &pagemap, &mut rounds);
        let run = Wanted { range: member.run(0, 4), target: Target::Zero, at: 0 };
        folder.fold_stretch(&[run], with, &mut stats, (&mut all, &mut again));
        (all, stats.stalls.buckets.iter().sum::<u64>())
    };
    folder.surveyed = Ok(references::generation());
    assert_eq!(fold(&mut folder), (vec![Outcome::Changed; 4], 1));
    folder.surveyed = Ok(references::generation().wrapping_sub(1));
    assert_eq!(fold(&mut folder), (vec![Outcome::Unpinned; 4], 0));
}

/// Sections cost as much as some pages.
#[test]
fn neighbouring_runs_are_folded_together_and_each_has_its_outcomes() {
    let name = "fold::tests::neighbouring_runs_are_folded_together_and_each_has_its_outcomes";
    if !crate::testing::alone(name) {
        return;
    }
    let Some(section) = crate::testing::section() else { return };
    let mut folder = Folder::new(section, Some(10_000), PathBuf::from("/nonexistent")).unwrap();
    let (member, pool, pagemap) = (Member::new(100), Pool::default(), Pagemap::open(std::process::id()).unwrap());
    (0..page::PAGE_BYTES / 8).for_each(|word| member.word(2, word).store(0, Ordering::Relaxed));
    let mut rounds = crate::round::Rounds::new(true, true).unwrap();
    let mut fold = |runs: &[(u64, u16)]| {
        let run = |(first, pages): &(u64, u16)| FoldRun {
            start: member.run(*first, 1).start,
            pages: *pages,
            target: Target::Zero,
        };
        let (runs, mut stats) = (runs.iter().map(run).collect::<Vec<_>>(), MemberStats::default());
        let outcomes = folder.fold(&runs, &pool, (&pagemap, &mut rounds), &mut stats);
        (outcomes, stats.stalls.buckets.iter().sum::<u64>())
    };
    let (same, other) = (Outcome::Folded, Outcome::Changed);
    assert_eq!(fold(&[(0, 2), (2, 1), (3, 1), (7, 2)]), (vec![other, other, same, other, other, other], 2));
    // No more at once than a section may have: pages, and parts.
    assert_eq!(fold(&[(10, 40), (50, 40)]).1, 2);
    let one_by_one: Vec<_> = (20..20 + RUN_PARTS as u64 + 1).map(|page| (page, 1)).collect();
    assert_eq!(fold(&one_by_one).1, 2);
}

/// Threads of the member may wait for each of these pages.
#[test]
fn at_most_64_pages_are_out_of_reach_at_once() {
    if !crate::testing::alone("fold::tests::at_most_64_pages_are_out_of_reach_at_once") {
        return;
    }
    let Some(section) = crate::testing::section() else { return };
    let mut folder = Folder::new(section, Some(10_000), PathBuf::from("/nonexistent")).unwrap();
    let (member, pool, pagemap) = (Member::new(500), Pool::default(), Pagemap::open(std::process::id()).unwrap());
    let mut rounds = crate::round::Rounds::new(true, true).unwrap();
    let (mut stats, range) = (MemberStats::default(), member.0.range());
    let run = FoldRun { start: range.start, pages: 500, target: Target::Zero };
    let outcomes = folder.fold(&[run], &pool, (&pagemap, &mut rounds), &mut stats);
    assert_eq!(outcomes, [Outcome::Changed; 500]);
    assert_eq!(stats.stalls.buckets.iter().sum::<u64>(), 8, "times for which pages were out of reach");
}

/// Each piece that is not collapsed has lost its folded pages for nothing.
#[test]
fn pieces_after_the_first_are_collapsed_without_silent_prover() {
    if !crate::testing::alone("fold::tests::pieces_after_the_first_are_collapsed_without_silent_prover") {
        return;
    }
    let Some(section) = crate::testing::section() else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("prove.sock");
    // No process accepts the connection, but the kernel does, as for a process that is stopped.
    let _listener = host::SeqpacketListener::bind(&path, host::Files::Refused).unwrap();
    let mut folder = Folder::new(section, Some(10_000), path).unwrap();
    let members = [0; 2].map(|_| Member::of(MemberMemory::huge_page(Some(true)).unwrap()).not_inherited());
    let (pool, pagemap) = (Pool::default(), Pagemap::open(std::process::id()).unwrap());
    for range in members.each_ref().map(|member| member.0.range()) {
        if pagemap.huge_ranges(range.start, range.end()).unwrap() != [range] {
            return eprintln!("skipped: no huge page is to be had");
        }
        act::split_huge_page(range.start);
        table::lock().advise(range, |advice| advice.huge = Some(true));
    }
    let mut rounds = crate::round::Rounds::new(true, true).unwrap();
    let collapse = |member: &Member| {
        let (piece, with) = (member.0.range(), (&pagemap, &pool, &mut rounds));
        let traits = table::lock().traits(piece).unwrap();
        folder.collapse_piece(with, (piece, traits), 0, &mut MemberStats::default()).unwrap()
    };
    assert_eq!(members.each_ref().map(collapse), [false, true]);
}

/// Each fork copies every mapping, so short runs are given up where forks are many.
#[test]
fn withdrawn_piece_is_one_private_mapping_with_its_contents() {
    if !crate::testing::alone("fold::tests::withdrawn_piece_is_one_private_mapping_with_its_contents") {
        return;
    }
    let Some(mut section) = crate::testing::section() else { return };
    // Two aligned megabytes of its own are another piece.
    let few = Member::of(MemberMemory::huge_page(Some(false)).unwrap()).not_inherited();
    let (pool, member) = (crate::testing::pool(), Member::new(64).not_inherited());
    for (member, pages) in [(&member, 32), (&few, 4)] {
        for page in (0..2 * pages).step_by(2) {
            let outcome = crate::testing::fold(&mut section, member.run(page, 1), Some((&pool, page as u32)));
            assert_eq!(outcome, [Outcome::Folded], "page {page}");
        }
    }
    member.word(4, 9).store(9, Ordering::Relaxed);
    let mappings = |member: &Member| table::lock().mappings(member.0.range());
    assert_eq!([mappings(&member), mappings(&few)], [64, 8]);
    let mut folder = Folder::new(section, Some(10_000), PathBuf::from("/nonexistent")).unwrap();
    let (no_pool, pagemap) = (Pool::default(), Pagemap::open(std::process::id()).unwrap());
    // Nothing becomes private if there is no memory for it.
    assert!(folder.withdraw((&pagemap, &no_pool), (8, 63), &mut MemberStats::default()));
    assert_eq!([mappings(&member), member.in_pool() as u64], [64, 31]);
    let end = Instant::now() + Duration::from_secs(20);
    // The worst piece is enough.
    while !folder.withdraw((&pagemap, &no_pool), (8, 64), &mut MemberStats::default()) {
        assert!(Instant::now() < end, "the piece is still {} mappings", mappings(&member));
    }
    assert_eq!([mappings(&member), mappings(&few), member.in_pool() as u64, few.in_pool() as u64], [0, 8, 0, 4]);
    for page in 0..64 {
        let words = [0, 9, page::PAGE_BYTES / 8 - 1].map(|word| member.word(page, word).load(Ordering::Relaxed));
        assert_eq!(words, [page + 1, if page == 4 { 9 } else { 0 }, page * 7 + 1]);
    }
    let is_foldable = table::lock().is_foldable(member.0.range());
    assert!(is_foldable);
}

/// Forks past the C library, which would hold malloc's locks. The child tells the last byte of a page's first word.
fn child_says(member: &Member, page: u64) -> i32 {
    // SAFETY: the child makes one system call and nothing else.
    let child = unsafe { crate::raw::call(libc::SYS_fork, [0; 6]) };
    if child == 0 {
        let word = member.word(page, 0).load(Ordering::Relaxed);
        // SAFETY: ends the child.
        unsafe { libc::_exit((word & 0xff) as i32) };
    }
    let mut status = 0;
    // SAFETY: writes one number.
    assert_eq!(unsafe { libc::waitpid(child as i32, &raw mut status, 0) }, child as i32);
    libc::WEXITSTATUS(status)
}

/// A child is forked with a mapping of the pool, in which a page was discarded. Its parent maps anonymous memory there
/// before it has read the message of the fork. Once, the child got the slot's content back.
#[test]
fn discards_are_known_of_children_whose_birth_is_read_late() {
    if !crate::testing::alone("fold::tests::discards_are_known_of_children_whose_birth_is_read_late") {
        return;
    }
    let Some(mut section) = crate::testing::section() else { return };
    let (pool, pagemap) = (crate::testing::pool(), Pagemap::open(std::process::id()).unwrap());
    let following = Arc::clone(section.following());
    let members: Vec<Member> = (0..200).map(|_| Member::new(4)).collect();
    for member in &members {
        assert_eq!(crate::testing::fold(&mut section, member.run(0, 4), Some((&pool, 0))), [Outcome::Folded; 4]);
    }
    let mut folder = Folder::new(section, Some(10_000), PathBuf::from("/nonexistent")).unwrap();
    for member in &members {
        crate::testing::discard_past_hooks(member, 1);
        let held = following.hold();
        std::thread::scope(|scope| {
            let says = scope.spawn(|| child_says(member, 1));
            // Waits until the message of the fork is there to be read.
            let end = Instant::now() + Duration::from_secs(20);
            while following.watch().protect(member.run(0, 4), false) != Err(rustix::io::Errno::AGAIN) {
                assert!(Instant::now() < end, "nobody forks");
                std::thread::yield_now();
            }
            let settling = scope.spawn(|| folder.settle_discards(&pagemap).unwrap());
            std::thread::sleep(Duration::from_millis(1));
            drop(held);
            settling.join().unwrap();
            assert_eq!(says.join().unwrap(), 0);
        });
        assert!(following.hold().all_discarded().is_empty(), "something is left to be settled");
    }
}
