//! Each number of a member's report at the ends of its range.

use wire::{Counters, MemberStats, Outcome, ToWorker};

/// The least number that no member has.
const BOUND: u64 = 1 << 52;

/// The places of all numbers but those of failures.
fn places(stats: &mut MemberStats) -> Vec<&mut u64> {
    let MemberStats { enrolled_pages, folded_pages, zero_pages, broken_pages, vmas, agent_bytes, done, stalls, .. } =
        stats;
    let Counters { folds, refolds, short_folds, pages_scanned, pages_hashed, agent_cpu_us, .. } = done;
    let mut all = vec![enrolled_pages, folded_pages, zero_pages, broken_pages, vmas, agent_bytes];
    all.extend([folds, refolds, short_folds, pages_scanned, pages_hashed, agent_cpu_us, &mut stalls.longest_us]);
    all.extend(&mut stalls.buckets);
    all
}

fn arrives(stats: MemberStats) -> bool {
    let (mut frame, message) = (Vec::new(), ToWorker::Stats(Box::new(stats)));
    message.encode(&mut frame);
    ToWorker::decode(&frame).is_ok_and(|decoded| decoded == message)
}

#[test]
fn numbers_that_no_member_has_are_refused() {
    for number in [0, 1, BOUND - 1, BOUND, u64::MAX] {
        for n in 0..places(&mut MemberStats::default()).len() {
            let mut stats = MemberStats::default();
            *places(&mut stats)[n] = number;
            assert_eq!(arrives(stats), number < BOUND, "number {n} is {number}");
        }
        for outcome in Outcome::ALL {
            let mut stats = MemberStats::default();
            stats.done.failures.add(outcome, number);
            assert_eq!(arrives(stats), number < BOUND, "{outcome:?} {number} times");
        }
    }
    // All members of a group together have a sum.
    assert!((BOUND - 1).checked_mul(1024).is_some());
}
