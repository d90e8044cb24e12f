//! Broken pages are folded again, while devices have yet to write some of them and threads discard them.

use super::*;
use crate::scarce::with_short_memory;
use crate::section::Section;
use crate::table;
use crate::testing::{
    LateDevice, Member, advise, alone, discard_past_hooks, fold, map_anonymous_over, pool, section, shows_advice, spin,
    traits, witness,
};
use act::PoolView;
use page::{PAGE_BYTES, PoolSlot};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::thread::JoinHandle;

/// Folds a run again with a new witness, and says what became of each page.
fn fold_again(
    witness: &mut Witness,
    following: &Following,
    run: PageRange,
    source: Option<(&PoolView, u32)>,
) -> Vec<Outcome> {
    witness.end();
    fold_again_by(witness, following, run, source)
}

/// The same with the present witness, if it knows these pages.
fn fold_again_by(
    witness: &mut Witness,
    following: &Following,
    run: PageRange,
    source: Option<(&PoolView, u32)>,
) -> Vec<Outcome> {
    let mut outcomes = vec![Outcome::Gone; run.pages as usize];
    let source = source.map(|(pool, first)| Source { pool, first: PoolSlot::new(0, first).unwrap() });
    let (mut table, pagemap) = (table::lock(), Pagemap::open(std::process::id()).unwrap());
    witness.call(&table, &pagemap, &[run]).unwrap();
    let mut reader = SoftReader::new(GROUP_PAGES).unwrap();
    let with = (&pagemap, following, &mut reader, witness);
    let parts = [Part { range: run, source, at: 0 }];
    assert_eq!(fold_group(&mut table, with, &parts, references::generation(), &mut outcomes).0, 1);
    outcomes
}

/// Once, such a page was never folded again, because other processes map it, too. It shows a file that nobody can
/// write, so it needs no witness.
#[test]
fn pages_of_pool_that_nobody_serves_are_folded_without_witness() {
    let Some(mut section) = section() else { return };
    let following = Arc::clone(section.following());
    let (lost, pool, member) = (pool(), pool(), Member::new(8).not_inherited());
    let run = member.run(0, 8);
    assert_eq!(fold(&mut section, run, Some((&lost, 0))), [Outcome::Folded; 8]);
    table::lock().set_orphaned(run);
    let counts = table::lock().counts();
    assert!(counts.folded == 0 && counts.broken >= 8 && table::lock().released().is_empty(), "{counts:?}");
    // This write gives the member a private copy of one page.
    member.word(3, 3).store(0, Ordering::Relaxed);
    let (mut witness, mut reader) = (Witness::new("/nonexistent".into()), SoftReader::new(GROUP_PAGES).unwrap());
    let (mut table, pagemap) = (table::lock(), Pagemap::open(std::process::id()).unwrap());
    let parts: Vec<Part<'_>> = (0..8)
        .map(|n| {
            let source = Some(Source { pool: &pool, first: PoolSlot::new(0, n as u32).unwrap() });
            Part { range: member.run(n, 1), source, at: n as usize }
        })
        .collect();
    let mut outcomes = [Outcome::Gone; 8];
    let with = (&pagemap, &*following, &mut reader, &mut witness);
    fold_group(&mut table, with, &parts, references::generation(), &mut outcomes);
    let expected: Vec<_> = (0..8).map(|n| if n == 3 { Outcome::Busy } else { Outcome::Folded }).collect();
    assert_eq!(outcomes.to_vec(), expected);
    drop(table);
    (0..8).for_each(|n| assert_eq!(member.word(n, 0).load(Ordering::Relaxed), n + 1));
}

/// Writes each page, as its owner, without changing it, and has it known as broken.
fn break_all(member: &Member, pages: u64) {
    (0..pages).for_each(|n| member.word(n, 3).store(0, Ordering::Relaxed));
    table::lock().set_broken(member.run(0, pages));
}

#[test]
fn broken_pages_are_folded_again() {
    let Some(mut section) = section() else { return };
    let (mut witness, following) = (witness(), Arc::clone(section.following()));
    let (pool, member) = (pool(), Member::new(8).not_inherited());
    assert_eq!(fold(&mut section, member.run(0, 8), Some((&pool, 0))), [Outcome::Folded; 8]);
    break_all(&member, 8);
    member.word(3, 100).store(77, Ordering::Relaxed);
    assert_eq!(member.in_pool(), 0);
    let outcomes = fold_again(&mut witness, &following, member.run(0, 8), Some((&pool, 0)));
    let expected: Vec<_> = (0..8).map(|n| if n == 3 { Outcome::Changed } else { Outcome::Folded }).collect();
    assert_eq!((outcomes, member.in_pool()), (expected, 7));
    assert_eq!(member.word(3, 100).load(Ordering::Relaxed), 77);
    (0..8).for_each(|n| assert_eq!(member.word(n, 0).load(Ordering::Relaxed), n + 1));
    // Writing goes on as before.
    member.word(5, 1).store(5, Ordering::Relaxed);
    assert_eq!((member.in_pool(), member.word(5, 0).load(Ordering::Relaxed)), (6, 6));
    // A page of zeros becomes anonymous again.
    table::lock().set_broken(member.run(5, 1));
    (0..PAGE_BYTES / 8).for_each(|i| member.word(5, i).store(0, Ordering::Relaxed));
    assert_eq!(fold_again(&mut witness, &following, member.run(5, 1), None), [Outcome::Folded]);
    member.word(5, 9).store(9, Ordering::Relaxed);
    assert_eq!((member.word(5, 8).load(Ordering::Relaxed), member.word(5, 9).load(Ordering::Relaxed)), (0, 9));
    assert!(table::lock().is_foldable(member.run(5, 1)));
}

#[test]
fn zeros_that_are_folded_again_keep_advice() {
    let Some(mut section) = section() else { return };
    let (mut witness, following) = (witness(), Arc::clone(section.following()));
    let (pool, member) = (pool(), Member::new(4).not_inherited());
    advise(&member);
    let run = member.0.range();
    assert_eq!(fold(&mut section, run, Some((&pool, 0))), [Outcome::Folded; 4]);
    break_all(&member, 4);
    (0..4).for_each(|n| (0..PAGE_BYTES / 8).for_each(|i| member.word(n, i).store(0, Ordering::Relaxed)));
    assert_eq!(fold_again(&mut witness, &following, run, None), [Outcome::Folded; 4]);
    assert!(shows_advice(run), "{:?}", crate::maps::mappings(run, true));
    assert_eq!(member.word(2, 9).load(Ordering::Relaxed), 0);
}

/// A fork probe knows nothing of pages that were broken or written after it was cast. With every fork probe taken for
/// one that knows, the first of these pages was busy.
#[test]
fn write_since_fork_probe_makes_another_probe() {
    let Some(mut section) = section() else { return };
    let (mut witness, following) = (witness(), Arc::clone(section.following()));
    let (pool, member) = (pool(), Member::new(8).not_inherited());
    assert_eq!(fold(&mut section, member.run(0, 8), Some((&pool, 0))), [Outcome::Folded; 8]);
    break_all(&member, 8);
    assert_eq!(fold_again(&mut witness, &following, member.run(0, 4), Some((&pool, 0))), [Outcome::Folded; 4]);
    for n in 0..4 {
        member.word(n, 3).store(0, Ordering::Relaxed);
        table::lock().set_broken(member.run(n, 1));
        witness.may_cast_now();
        let outcomes = fold_again_by(&mut witness, &following, member.run(n, 1), Some((&pool, n as u32)));
        assert_eq!(outcomes, [Outcome::Folded], "page {n}");
    }
    assert_eq!(member.in_pool(), 4);
}

/// Broken pages are folded again while a device has yet to write some of them. With the question to the witness taken
/// out of `refold`, the device's writes to 30 of 30 pinned pages were lost in the first round.
#[test]
fn page_that_device_has_yet_to_write_is_not_folded_again() {
    const PAGES: u64 = 64;
    const TRIES: u64 = 100_000;
    let (Some(mut section), Some(mut device)) = (section(), LateDevice::new()) else { return };
    let (mut witness, following) = (witness(), Arc::clone(section.following()));
    let (pool, member) = (pool(), Member::new(PAGES).not_inherited());
    assert_eq!(fold(&mut section, member.run(0, PAGES), Some((&pool, 0))), [Outcome::Folded; PAGES as usize]);
    let mut random = 1_u64;
    for round in 1..=TRIES / PAGES {
        break_all(&member, PAGES);
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let pinned: Vec<u64> = (0..PAGES).filter(|n| random.rotate_left(*n as u32) & 1 == 0).collect();
        device.begin(&member, &pinned, 7);
        let outcomes = fold_again(&mut witness, &following, member.run(0, PAGES), Some((&pool, 0)));
        device.finish(round);
        let mut lost = Vec::new();
        for page in 0..PAGES {
            let written = if pinned.contains(&page) { round } else { 0 };
            if member.word(page, 7).swap(0, Ordering::Relaxed) != written {
                lost.push(page);
            }
        }
        assert!(lost.is_empty(), "round {round}: lost is what was written to {} of {}", lost.len(), pinned.len());
        let refused: Vec<u64> = (0..PAGES).filter(|page| outcomes[*page as usize] == Outcome::Busy).collect();
        assert_eq!(refused, pinned, "round {round}: {outcomes:?}");
    }
}

/// A page that is discarded while writers are kept out has no content before they are let in again. With the
/// follower's lock let go between the question which pages are left and reading them, this slept for ever within 600
/// rounds.
#[test]
fn discard_during_refold_does_not_hang() {
    const PAGES: u64 = 64;
    const ROUNDS: u64 = 1500;
    const PATIENCE: Duration = Duration::from_secs(60);
    let Some(mut section) = section() else { return };
    let (mut witness, following) = (witness(), Arc::clone(section.following()));
    following.expect_discards();
    let (pool, member) = (pool(), Member::new(PAGES).not_inherited());
    let (begin, end) = (Barrier::new(2), Barrier::new(2));
    let (goes_on, watchdog) = abort_after(PATIENCE);
    let (mut left, took_ns) = ([0; 2], AtomicU64::new(100_000));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..ROUNDS {
                begin.wait();
                // The discard comes at another moment each time, and sometimes after the end of the fold.
                spin(Duration::from_nanos(round * 7919 % 1000 * took_ns.load(Ordering::Relaxed) / 800));
                discard_past_hooks(&member, round % PAGES);
                end.wait();
            }
        });
        for round in 0..ROUNDS {
            fold_all(&mut section, &member, &pool, PAGES);
            break_all(&member, PAGES);
            begin.wait();
            let began = Instant::now();
            let outcomes = fold_again(&mut witness, &following, member.run(0, PAGES), Some((&pool, 0)));
            took_ns.store(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
            end.wait();
            goes_on.send(()).unwrap();
            assert_eq!(member.word(round % PAGES, 0).load(Ordering::Relaxed), 0, "round {round}");
            left[usize::from(outcomes[(round % PAGES) as usize] == Outcome::Folded)] += 1;
        }
    });
    drop(goes_on);
    watchdog.join().unwrap();
    assert!(left.iter().all(|n| *n > 20), "discarded before and after it was folded again: {left:?}");
}

/// A discarded page that became zeros, and was written since, holds what was written. That is so for a thread, too,
/// that touches it while it is folded again.
#[test]
fn page_that_was_discarded_long_ago_is_folded_again_with_its_content() {
    const PAGES: u64 = 512;
    /// Time after which nobody is about to take the zeros away.
    const LONG: Duration = Duration::from_millis(1050);
    let Some(mut section) = section() else { return };
    let (mut witness, following) = (witness(), Arc::clone(section.following()));
    following.expect_discards();
    let (pool, member) = (pool(), Member::new(PAGES).not_inherited());
    for first in (0..PAGES).step_by(64) {
        fold(&mut section, member.run(first, 64), Some((&pool, first as u32)));
    }
    for page in 0..PAGES {
        discard_past_hooks(&member, page);
        assert_eq!(member.word(page, 0).load(Ordering::SeqCst), 0);
    }
    member.write_content();
    table::lock().set_broken(member.run(0, PAGES));
    std::thread::sleep(LONG);
    let (at, is_over) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while is_over.load(Ordering::SeqCst) == 0 {
                let page = at.load(Ordering::SeqCst);
                assert_eq!(member.word(page, 0).load(Ordering::SeqCst), page + 1);
            }
        });
        let (mut folded, over) = (0, Over(&is_over));
        for page in 0..PAGES {
            at.store(page, Ordering::SeqCst);
            let outcomes = fold_again_by(&mut witness, &following, member.run(page, 1), Some((&pool, page as u32)));
            folded += outcomes.iter().filter(|outcome| **outcome == Outcome::Folded).count();
            assert_eq!(member.word(page, 0).load(Ordering::SeqCst), page + 1);
        }
        drop(over);
        assert!(folded > 100, "{folded}");
    });
}

/// Once, fresh memory was lost when its move had failed after the kernel had unmapped the destination.
#[test]
fn memory_that_is_short_while_zeros_are_folded_again_loses_none() {
    if !alone("refold::tests::memory_that_is_short_while_zeros_are_folded_again_loses_none") {
        return;
    }
    let Some(mut section) = section() else { return };
    let (pool, member, following) = (pool(), Member::new(8).not_inherited(), Arc::clone(section.following()));
    assert_eq!(fold(&mut section, member.run(0, 8), Some((&pool, 0))), [Outcome::Folded; 8]);
    let zeros = member.run(2, 4);
    (2..6).for_each(|page| (0..PAGE_BYTES / 8).for_each(|word| member.word(page, word).store(0, Ordering::Relaxed)));
    let placed = with_short_memory(0b11, || place_zeros(&following, zeros, traits()));
    assert_eq!(act::make_present(zeros), Ok(()), "the program's memory is unmapped");
    assert_eq!((placed, member.in_pool()), (Ok(()), 4));
    (0..8).for_each(|page| {
        let expected = if (2..6).contains(&page) { 0 } else { page + 1 };
        assert_eq!(member.word(page, 0).load(Ordering::Relaxed), expected);
    });
}

/// Says that a test is over, also when it fails.
struct Over<'a>(&'a AtomicU64);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(1, Ordering::SeqCst);
    }
}

/// Folds all pages, which nobody else uses. Other tests fork, and their children share pages for a moment, which are
/// busy.
fn fold_all(section: &mut Section, member: &Member, pool: &PoolView, pages: u64) {
    loop {
        // SAFETY: nobody uses it.
        unsafe { map_anonymous_over(member.0.range()) }.unwrap();
        table::lock().discard(member.0.range());
        member.write_content();
        if fold(section, member.run(0, pages), Some((pool, 0))).iter().all(|outcome| *outcome == Outcome::Folded) {
            return;
        }
    }
}

/// Ends the process when nothing is sent for this time, until the sender is dropped.
fn abort_after(time: Duration) -> (mpsc::Sender<()>, JoinHandle<()>) {
    let (goes_on, heard) = mpsc::channel();
    let watchdog = std::thread::spawn(move || {
        loop {
            match heard.recv_timeout(time) {
                Ok(()) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    eprintln!("pages were not folded again within {time:?}");
                    std::process::abort();
                }
            }
        }
    });
    (goes_on, watchdog)
}
