use crate::extents::Extents;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// Length of the longest run of neighbours.
fn longest(free: &BTreeSet<u32>) -> u32 {
    let (mut longest, mut run) = (0, 0);
    for place in free {
        run = if place.checked_sub(1).is_some_and(|before| free.contains(&before)) { run + 1 } else { 1 };
        longest = longest.max(run);
    }
    longest
}

proptest! {
    #[test]
    fn neighbours_join_and_longest_extent_is_taken_first(steps in prop::collection::vec((prop::option::weighted(0.9, 0..60_u32), 1..60_u32), 1..200)) {
        let (mut extents, mut free) = (Extents::default(), BTreeSet::new());
        for (step, most) in steps {
            match step {
                Some(place) => {
                    if free.insert(place) {
                        extents.insert(place);
                    }
                }
                None => {
                    let expected = longest(&free).min(most);
                    let taken = extents.take(most);
                    prop_assert_eq!(taken.as_ref().map_or(0, |range| range.end - range.start), expected);
                    for place in taken.into_iter().flatten() {
                        prop_assert!(free.remove(&place));
                    }
                }
            }
            prop_assert_eq!((extents.free() as usize, extents.longest()), (free.len(), longest(&free)));
        }
    }
}
