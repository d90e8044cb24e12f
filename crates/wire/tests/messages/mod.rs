//! Every message that an honest peer may send.

use page::{Fingerprint, HostVirt, PageRange, PoolSlot};
use proptest::array::{uniform8, uniform9, uniform24};
use proptest::collection::vec;
use proptest::prelude::*;
use wire::{
    Counters, DONATION_PAGES, FOLD_PAGES, FoldMode, FoldRun, HugePages, MemberState, MemberStats, Outcome, Pace,
    RESTED_PAGES, RestedRun, SlotRun, Stalls, Target, ToAgent, ToWorker, WHY_PAGES, Why, ZeroPages,
};

fn address() -> impl Strategy<Value = HostVirt> {
    (0..1_u64 << 45).prop_map(|page| HostVirt(page << 12))
}

/// Up to `most` pages, and the first of as many slots of one segment.
fn slots(most: u16) -> impl Strategy<Value = (PoolSlot, u16)> {
    (any::<u8>(), 1..=most).prop_flat_map(|(segment, pages)| {
        let index = 0..=PoolSlot::PER_SEGMENT - u32::from(pages);
        (index.prop_map(move |index| PoolSlot::new(segment, index).unwrap()), Just(pages))
    })
}

fn slot_runs() -> impl Strategy<Value = Vec<SlotRun>> {
    vec((address(), slots(u16::MAX)).prop_map(|(start, (slot, pages))| SlotRun { start, slot, pages }), 0..50)
}

fn rested() -> impl Strategy<Value = ToWorker> {
    let plain = (address(), 1..100_u16).prop_map(|(start, pages)| RestedRun { start, pages, huge: false });
    let huge = address().prop_map(|start| RestedRun { start, pages: 512, huge: true });
    (vec(prop_oneof![9 => plain, 1 => huge], 0..40), any::<u64>()).prop_map(|(mut runs, seed)| {
        let mut pages = 0;
        runs.retain(|run: &RestedRun| {
            pages += usize::from(run.pages);
            pages <= RESTED_PAGES
        });
        let pages: u64 = runs.iter().map(|run| u64::from(run.pages)).sum();
        ToWorker::Rested(runs, (0..pages).map(|n| Fingerprint(seed.rotate_left(n as u32) ^ n)).collect())
    })
}

fn stats() -> impl Strategy<Value = MemberStats> {
    use MemberState as S;
    let state = prop::sample::select(vec![
        S::NothingEnrolled,
        S::Folding,
        S::Off,
        S::Unfolded,
        S::NoMove,
        S::Unpinned,
        S::Yielded,
        S::NoVma,
        S::LostTrack,
        S::NotFoldable,
        S::NothingMapped,
    ]);
    let number = 0..1_u64 << 52;
    let numbers = (uniform9(number.clone()), uniform8(number.clone()), uniform24(number));
    (state, "\\PC{0,60}", numbers).prop_map(|(state, detail, ([a, b, c, d, e, f, g, h, i], failed, buckets))| {
        let mut stats = MemberStats {
            state,
            detail,
            enrolled_pages: a,
            folded_pages: b,
            zero_pages: c,
            broken_pages: d,
            done: Counters { pages_scanned: e, pages_hashed: f, agent_cpu_us: g, ..Counters::default() },
            vmas: h,
            agent_bytes: i,
            stalls: Stalls { buckets, longest_us: a ^ i },
        };
        Outcome::ALL.into_iter().zip(failed).for_each(|(outcome, pages)| stats.done.failures.add(outcome, pages));
        stats
    })
}

pub fn to_worker() -> impl Strategy<Value = ToWorker> {
    let outcome = prop::sample::select(Outcome::ALL.to_vec());
    let why = prop::sample::select(Why::ALL.to_vec());
    prop_oneof![
        (any::<u16>(), any::<bool>()).prop_map(|(version, eager)| ToWorker::Hello(wire::Hello { version, eager })),
        slot_runs().prop_map(ToWorker::Held),
        slot_runs().prop_map(ToWorker::Home),
        rested(),
        (any::<u32>(), vec(any::<bool>(), 0..=DONATION_PAGES)).prop_map(|(id, given)| ToWorker::Donated(id, given)),
        (any::<u32>(), vec(outcome, 0..=FOLD_PAGES)).prop_map(|(id, outcomes)| ToWorker::Folded(id, outcomes)),
        slot_runs().prop_map(ToWorker::Released),
        any::<u32>().prop_map(ToWorker::LeaseTaken),
        "[a-z ]{0,200}".prop_map(ToWorker::Bye),
        stats().prop_map(|stats| ToWorker::Stats(Box::new(stats))),
        (any::<u32>(), vec(why, 0..=WHY_PAGES)).prop_map(|(id, reasons)| ToWorker::Because(id, reasons)),
    ]
}

fn pace() -> impl Strategy<Value = Pace> {
    let huge = prop_oneof![Just(HugePages::Keep), (1..=100_u8).prop_map(HugePages::SplitAt)];
    let fold = prop::sample::select(vec![FoldMode::On, FoldMode::Off, FoldMode::Unfold]);
    let zero = prop::sample::select(vec![ZeroPages::Share, ZeroPages::Ignore, ZeroPages::WhenIdle]);
    // The largest number stands for "any rate" on the wire.
    let rate = prop::option::of(0..u32::MAX);
    (rate, fold, zero, huge, any::<(u64, u64)>()).prop_map(
        |(pages_per_s, fold, zero_pages, huge_pages, (first, last))| Pace {
            pages_per_s,
            fold,
            zero_pages,
            huge_pages,
            first: Fingerprint(first),
            last: Fingerprint(last),
        },
    )
}

fn fold_runs() -> impl Strategy<Value = Vec<FoldRun>> {
    let zero = (address(), 1..100_u16).prop_map(|(start, pages)| FoldRun { start, pages, target: Target::Zero });
    let slot =
        (address(), slots(100)).prop_map(|(start, (slot, pages))| FoldRun { start, pages, target: Target::Slot(slot) });
    vec(prop_oneof![zero, slot], 0..=10)
}

pub fn to_agent() -> impl Strategy<Value = ToAgent> {
    let range = || (address(), 1..=25_u64).prop_map(|(start, pages)| PageRange { start, pages });
    prop_oneof![
        any::<u16>().prop_map(ToAgent::Welcome),
        (any::<u8>(), 0..=PoolSlot::PER_SEGMENT).prop_map(|(number, slots)| ToAgent::Segment(number, slots)),
        any::<u32>().prop_map(ToAgent::Lease),
        pace().prop_map(ToAgent::Pace),
        (any::<u32>(), vec(range(), 0..=10)).prop_map(|(id, ranges)| ToAgent::Donate(id, ranges)),
        (any::<u32>(), vec(range(), 0..=100)).prop_map(|(id, ranges)| ToAgent::Why(id, ranges)),
        (any::<u32>(), fold_runs()).prop_map(|(id, runs)| ToAgent::Fold(id, runs)),
        Just(ToAgent::Again),
        Just(ToAgent::Leave),
        any::<u64>().prop_map(ToAgent::Room),
    ]
}
