//! Moves, folds and discards while memory is short.

use crate::scarce::{MAP, MOVE, with_short_memory, with_short_memory_for};
use crate::testing::{Member, advise, alone, fold, pool, section, traits};
use crate::{calls, table, unfold::Unfold};
use host::Pagemap;
use page::PoolSlot;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use wire::Outcome;

#[test]
fn memory_that_is_short_in_the_middle_of_a_move_loses_no_page() {
    if !alone("scarce_tests::memory_that_is_short_in_the_middle_of_a_move_loses_no_page") {
        return;
    }
    let Some(mut section) = section() else { return };
    let (pool, member) = (pool(), Member::new(8));
    let run = member.run(2, 4);
    assert_eq!(fold(&mut section, run, Some((&pool, 2))), [Outcome::Folded; 4]);
    let mut unfold = Unfold::new(Arc::clone(section.following()));
    let pagemap = Pagemap::open(std::process::id()).unwrap();
    let slot = (&pool, PoolSlot::new(0, 2).unwrap());
    assert_holds(&member);
    let unfolded = with_short_memory(0b11, || unfold.run(&mut table::lock(), &pagemap, run, slot, traits()));
    assert_eq!(act::make_present(run), Ok(()), "the program's memory is unmapped");
    assert_eq!(unfolded, Ok(()));
    assert_eq!(member.in_pool(), 0);
    assert_holds(&member);
}

fn assert_holds(member: &Member) {
    for page in 0..8 {
        assert_eq!(member.word(page, 0).load(Ordering::Relaxed), page + 1);
    }
}

/// Slots are mapped in place by old kernels' way, or moved there: pages are out of reach meanwhile.
#[test]
fn memory_that_is_short_while_pages_are_folded_loses_none() {
    if !alone("scarce_tests::memory_that_is_short_while_pages_are_folded_loses_none") {
        return;
    }
    for (call, expects_discards, is_advised) in [(MAP, false, false), (MOVE, true, false), (MOVE, false, true)] {
        let Some(mut section) = section() else { return };
        if expects_discards {
            section.following().expect_discards();
        }
        let (pool, member) = (pool(), Member::new(8));
        if is_advised {
            // Children do not get it.
            advise(&member);
        }
        // Opens the stage.
        assert_eq!(fold(&mut section, member.run(0, 1), None), [Outcome::Changed]);
        let run = member.run(2, 4);
        let folded = with_short_memory_for(call, 0b11, || fold(&mut section, run, Some((&pool, 2))));
        assert_eq!(act::make_present(run), Ok(()), "the program's memory is unmapped: {call:?}");
        assert_eq!((folded.as_slice(), member.in_pool()), (&[Outcome::Folded; 4][..], 4), "{call:?}");
        assert_holds(&member);
    }
}

/// Once, on old kernels, memory that the program had discarded stayed unmapped when fresh memory could not take its
/// place.
#[test]
fn memory_that_is_short_while_discarded_pages_are_replaced_leaves_no_gap() {
    if !alone("scarce_tests::memory_that_is_short_while_discarded_pages_are_replaced_leaves_no_gap") {
        return;
    }
    let member = Member::new(8);
    let run = member.run(2, 4);
    let mapped = with_short_memory_for(MAP, 0b11, || calls::map_fresh(run, traits()));
    assert_eq!(act::make_present(run), Ok(()), "the program's memory is unmapped");
    assert_eq!(mapped as u64, run.start.0);
    assert_eq!(
        (0..8).map(|page| member.word(page, 0).load(Ordering::Relaxed)).collect::<Vec<_>>(),
        [1, 2, 0, 0, 0, 0, 7, 8]
    );
}
