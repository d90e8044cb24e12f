//! Runs whose parts have slots apart from each other, or hold zeros.

use super::*;
use crate::references;
use crate::table;
use crate::testing::{Member, pool, section};
use std::sync::atomic::Ordering;

/// Folds a run whose parts have so many pages each, from these slots on.
fn fold(section: &mut Section, pool: &PoolView, run: PageRange, parts: &[(u64, Option<u32>)]) -> Vec<Outcome> {
    let source = |first| Source { pool, first: PoolSlot::new(0, first).unwrap() };
    let parts: Vec<_> = parts.iter().map(|(pages, first)| Part { pages: *pages, source: first.map(source) }).collect();
    let mut outcomes = vec![Outcome::Busy; run.pages as usize];
    section.fold(&mut table::lock(), run, &parts, references::generation(), &mut outcomes);
    outcomes
}

fn write_zeros(member: &Member, page: u64) {
    (0..PAGE_BYTES / 8).for_each(|word| member.word(page, word).store(0, Ordering::Relaxed));
}

#[test]
fn each_part_is_compared_with_its_own_slots_or_zeros() {
    let Some(mut section) = section() else { return };
    let (pool, member) = (pool(), Member::new(10));
    [2, 9].into_iter().for_each(|page| write_zeros(&member, page));
    let parts = [(2, Some(0)), (1, None), (1, Some(5)), (3, Some(4)), (2, None), (1, Some(9))];
    let outcomes = fold(&mut section, &pool, member.run(0, 10), &parts);
    let (same, other) = (Outcome::Folded, Outcome::Changed);
    assert_eq!(outcomes, [same, same, same, other, same, same, same, other, other, other]);
    assert_eq!((member.in_pool(), table::lock().slot_runs(member.0.range()).len()), (5, 2));
    for n in 0..10 {
        let expected = if [2, 9].contains(&n) { 0 } else { n + 1 };
        assert_eq!(member.word(n, 0).load(Ordering::Relaxed), expected, "page {n}");
        // Every page can be written.
        member.word(n, 7).store(n, Ordering::Relaxed);
        assert_eq!(member.word(n, 7).load(Ordering::Relaxed), n);
    }
    // Those that went back can be folded.
    write_zeros(&member, 9);
    assert_eq!(fold(&mut section, &pool, member.run(9, 1), &[(1, None)]), [same]);
}

/// The kernel moves no range that lies in two mappings.
#[test]
fn run_over_two_mappings_is_folded() {
    let Some(mut section) = section() else { return };
    let (pool, member) = (pool(), Member::new(4));
    let second = member.run(2, 2);
    // SAFETY: the advice changes no content.
    let advised = unsafe { libc::madvise(second.start.0 as usize as *mut _, 2 * PAGE_BYTES, libc::MADV_DONTDUMP) };
    assert_eq!(advised, 0);
    let outcomes = fold(&mut section, &pool, member.run(0, 4), &[(2, Some(0)), (2, Some(2))]);
    assert_eq!(outcomes, [Outcome::Folded; 4]);
    assert_eq!(member.in_pool(), 4);
}

/// The program may have registered a part with its own userfaultfd.
#[test]
fn part_that_cannot_be_registered_leaves_others_alone() {
    let Some(mut section) = section() else { return };
    let (pool, member) = (pool(), Member::new(4));
    let theirs = Userfault::open(act::Purpose::Note).unwrap();
    theirs.register(member.run(2, 2), Watch::Writes).unwrap();
    let outcomes = fold(&mut section, &pool, member.run(0, 4), &[(2, Some(0)), (2, Some(2))]);
    assert_eq!(outcomes, [Outcome::Folded, Outcome::Folded, Outcome::Gone, Outcome::Gone]);
    assert_eq!((member.in_pool(), member.word(3, 0).load(Ordering::Relaxed)), (2, 4));
}
