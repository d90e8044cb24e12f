//! Broken pages that are folded again, while devices have yet to write some.

use super::*;
use crate::table;
use crate::testing::{LateDevice, Member, fold, pool, section, witness};
use host::PoolView;
use page::{PAGE_BYTES, PoolSlot};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Refolds a run with a new witness, and says what became of each page.
fn fold_again(
    witness: &mut Witness,
    following: &Following,
    run: PageRange,
    source: Option<(&PoolView, u32)>,
) -> Vec<Outcome> {
    witness.end();
    fold_again_by(witness, following, run, source)
}

/// The same with the witness there is, if it will do.
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
    assert_eq!(some(&mut table, with, &parts, references::generation(), &mut outcomes).0, 1);
    outcomes
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
    let (pool, member) = (pool(), Member::new(8));
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

/// A shadow knows nothing of what was broken or written since it was cast. With every shadow taken for one that does, the first of
/// these pages was busy.
#[test]
fn what_was_written_since_the_shadow_was_cast_has_another_cast() {
    let Some(mut section) = section() else { return };
    let (mut witness, following) = (witness(), Arc::clone(section.following()));
    let (pool, member) = (pool(), Member::new(8));
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

/// Pages that were broken are folded again while a device has yet to write some of them. Seen with the look at what is shared
/// taken out of `Refold`: what was written to 30 of 30 pinned pages was lost in the first round.
#[test]
fn what_a_device_has_yet_to_write_is_not_folded_again() {
    const PAGES: u64 = 64;
    const TRIES: u64 = 100_000;
    let (Some(mut section), Some(mut device)) = (section(), LateDevice::new()) else { return };
    let (mut witness, following) = (witness(), Arc::clone(section.following()));
    let (pool, member) = (pool(), Member::new(PAGES));
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
