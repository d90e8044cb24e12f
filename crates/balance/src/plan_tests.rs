//! Properties of plans that hold for all claims of guests and all policies.

use crate::facts::{Claims, Facts, GuestFacts, HostFacts, Reservation};
use crate::policy::{self, Policy, Wish};
use crate::test_world::{Program, World, guest};
use crate::{Budget, DriverState, History, Params, Plan, Reserve, Rung, Step, baseline, make_room, plan};
use proptest::prelude::*;
use std::time::Duration;

const M: u64 = 1 << 20;

/// Sizes that a real host may see, and sizes that only a guest that lies can tell.
fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0..512 * M, 1 => any::<u64>(), 1 => Just(0), 1 => Just(u64::MAX)]
}

fn claims() -> impl Strategy<Value = Option<Claims>> {
    let rate = prop_oneof![0.0..1e4, Just(f64::NAN), Just(f64::INFINITY), Just(-1.0)];
    let numbers = (bytes(), bytes(), bytes(), bytes(), rate);
    proptest::option::of(numbers.prop_map(|(total_bytes, free_bytes, available_bytes, cache_bytes, faults_per_s)| {
        Claims { total_bytes, free_bytes, available_bytes, cache_bytes, faults_per_s, ..Claims::default() }
    }))
}

prop_compose! {
    fn any_guest()(
        ram in 1..1024_u64, guaranteed in bytes(), actual in bytes(), resident in bytes(), folded in bytes(),
        saved in any::<i64>(), driver in 0..5, swapped in bytes(), target in proptest::option::of(bytes()), rate in prop_oneof![0..32 * M, bytes()], claims in claims(),
        curve in proptest::collection::vec((bytes(), any::<f64>()), 0..4), group in 0..3,
    ) -> GuestFacts {
        let mut curve = curve;
        curve.sort_by_key(|point| point.0);
        GuestFacts {
            id: String::new(), group: format!("g{group}"), ram_bytes: ram * M, guaranteed_bytes: guaranteed,
            actual_bytes: actual, target_bytes: target, cgroup_left_bytes: None, resident_bytes: resident, folded_bytes: folded,
            swapped_bytes: swapped, saved_bytes: saved,
            driver: if driver < 4 { DriverState::Works } else { DriverState::Lies }, withdrawal_bytes_per_s: rate, claims,
            faults_by_size: curve, reports_free_pages: group == 1,
            ..GuestFacts::default()
        }
    }
}

prop_compose! {
    fn any_facts()(
        total in 1..8192_u64, available in prop_oneof![0..8192 * M, bytes()], floor in prop_oneof![0..64 * M, bytes()],
        guests in proptest::collection::vec(any_guest(), 0..6), reserved in proptest::option::weighted(0.3, bytes()),
    ) -> Facts {
        let host = HostFacts { total_bytes: total * M, available_bytes: available, floor_bytes: floor, ..HostFacts::default() };
        let mut facts = Facts { host, guests, ..Facts::default() };
        facts.guests.iter_mut().enumerate().for_each(|(n, guest)| guest.id = format!("vm{n}"));
        facts.reservations.extend(reserved.map(|bytes| Reservation { name: "next".into(), bytes }));
        facts.bounded()
    }
}

/// Every policy, and every baseline.
fn policies() -> Vec<&'static dyn Policy> {
    let own = policy::NAMES.iter().map(|name| policy::named(name).expect("a policy of this name"));
    own.chain(baseline::NAMES.iter().map(|name| baseline::named(name).expect("a baseline of this name"))).collect()
}

fn plan_of(facts: &Facts, policy: &dyn Policy) -> Plan {
    plan(facts, policy, &History::default(), Duration::ZERO, &Params::default())
}

/// The facts after guests have grown as planned, and do not use their growth yet: nothing else has changed.
fn after_growth(facts: &Facts, plan: &Plan) -> Facts {
    let mut after = facts.clone();
    for step in &plan.grows {
        let guest = after.guests.iter_mut().find(|guest| guest.id == step.guest).expect("a guest of these facts");
        guest.actual_bytes = step.to_bytes;
        if let Some(claims) = &mut guest.claims {
            let growth = step.to_bytes - step.from_bytes;
            claims.free_bytes = claims.free_bytes.saturating_add(growth);
            claims.available_bytes = claims.available_bytes.saturating_add(growth);
        }
    }
    after
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// No plan takes a guest below its guarantee, or above its RAM, by any claims of guests.
    #[test]
    fn guarantees_hold_whatever_guests_claim(facts in any_facts()) {
        for policy in policies() {
            let plan = plan_of(&facts, policy);
            for step in plan.frees.iter().chain(&plan.grows) {
                let guest = facts.guests.iter().find(|guest| guest.id == step.guest).expect("a guest of these facts");
                prop_assert!(guest.can_balloon());
                prop_assert!(step.to_bytes <= guest.ram_bytes, "{step:?}");
                prop_assert!(step.to_bytes >= guest.guaranteed_bytes, "{}: {step:?}", policy.name());
                prop_assert_ne!(step.to_bytes, step.from_bytes);
            }
            prop_assert!(plan.frees.iter().all(|step| step.to_bytes < step.from_bytes && step.expected_bytes <= step.from_bytes));
            prop_assert!(plan.grows.iter().all(|step| step.to_bytes > step.from_bytes));
            let size = |step: &Step| facts.guests.iter().find(|guest| guest.id == step.guest).map(|guest| guest.actual_bytes);
            prop_assert!(plan.frees.iter().all(|step| Some(step.to_bytes) < size(step)), "a balloon would shrink: {:?}", plan.frees);
        }
    }

    /// A reserve that held holds after all growth, if every guest takes all that it may.
    #[test]
    fn no_plan_eats_the_reserve(facts in any_facts()) {
        let params = Params::default();
        for policy in policies() {
            let plan = plan_of(&facts, policy);
            let (before, after) = (Reserve::of(&facts, &params), Reserve::of(&after_growth(&facts, &plan), &params));
            prop_assert!(!before.holds() || after.holds(), "{}: {before:?} {after:?}", policy.name());
        }
    }

    /// Loans are withdrawn by price alone, whichever policy has lent them.
    #[test]
    fn under_pressure_all_policies_plan_the_same(facts in any_facts(), stalled in 0.0..20.0) {
        let mut facts = facts;
        (facts.host.rung, facts.host.stalled_percent) = (Rung::Withdraw, Some(stalled));
        let plans: Vec<Plan> = policies().into_iter().map(|policy| Plan { policy: "any", ..plan_of(&facts, policy) }).collect();
        prop_assert!(plans.windows(2).all(|two| two[0] == two[1]), "{:?}", plans);
    }

    /// Guests grow into spare memory only, except up to their guarantees.
    #[test]
    fn no_growth_lends_more_than_is_spare(facts in any_facts()) {
        for policy in policies() {
            let plan = plan_of(&facts, policy);
            let after = Budget::of(&after_growth(&facts, &plan));
            prop_assert!(after.spare_bytes >= plan.budget.spare_bytes.min(0), "{}: {:?}", policy.name(), plan);
        }
    }

    /// A reservation is refused, or leaves the reserve and all guarantees in place.
    #[test]
    fn reservation_frees_enough_or_is_refused(facts in any_facts(), wanted in bytes()) {
        let params = Params::default();
        if let Ok(steps) = make_room(&facts, "next", wanted, &params) {
            let freed: i128 = steps.iter().map(|step| i128::from(step.expected_bytes)).sum();
            prop_assert!(i128::from(Budget::of(&facts).spare_bytes) + freed >= i128::from(wanted.min(i64::MAX as u64)));
        }
    }

    /// While no guest uses more or less memory than before, their sizes come to rest. Until then no guest goes from
    /// growing to shrinking, or back, more than three times.
    #[test]
    fn no_plan_oscillates(
        total in 512..2048_u64, floor in 16..64_u64,
        programs in proptest::collection::vec((64..512_u64, 16..64_u64, 8..512_u64, 0..90_u64, 0.0..1000.0), 1..6),
    ) {
        let programs: Vec<Program> = programs.into_iter()
            .map(|(ram, guaranteed, used, shared_percent, faults)| Program { ram, guaranteed, used, shared_percent, faults })
            .collect();
        for name in policy::NAMES {
            let policy = policy::named(name).expect("a policy of this name");
            let mut world = World::new(total, floor, programs.clone());
            let (mut history, mut turns, mut last) = (History::default(), vec![0; programs.len()], vec![None; programs.len()]);
            let mut steps = 0;
            for round in 0..80_u64 {
                let (facts, at) = (world.facts(), Duration::from_secs(10 * round));
                let plan = plan(&facts, policy, &history, at, &Params::default());
                steps = 0;
                for step in plan.frees.iter().chain(&plan.grows) {
                    history.note(step, at);
                    let n = facts.guests.iter().position(|guest| guest.id == step.guest).expect("a guest");
                    let grows = Some(step.to_bytes > step.from_bytes);
                    turns[n] += u32::from(last[n].is_some() && last[n] != grows);
                    last[n] = grows;
                    steps += 1;
                }
                world.apply(&plan);
            }
            prop_assert_eq!(steps, 0, "{} does not come to rest: {:?}", name, &world);
            prop_assert!(turns.iter().all(|turns| *turns <= 3), "{}: {:?}", name, turns);
        }
    }
}

#[test]
fn overlent_host_withdraws_the_cheapest_loans_first() {
    let (mut shared, unshared) = (guest("shared", 256 * M, 64 * M), guest("unshared", 256 * M, 64 * M));
    shared.folded_bytes = 230 * M;
    let host =
        HostFacts { total_bytes: 1024 * M, available_bytes: 10 * M, floor_bytes: 50 * M, ..HostFacts::default() };
    let facts = Facts { host, guests: vec![shared, unshared], ..Facts::default() };
    let plan = plan_of(&facts, &policy::Equal);
    let taken: Vec<_> = plan.frees.iter().map(|step| (&*step.guest, step.expected_bytes / M)).collect();
    assert_eq!(taken, [("unshared", 44)], "40 MiB, and half of what is kept spare");
    assert!(plan.grows.is_empty());
}

/// Three quarters of the guest's memory are shared.
#[test]
fn shared_memory_is_left_alone_until_half_of_the_floor_is_gone() {
    let mut shared = guest("shared", 256 * M, 64 * M);
    shared.folded_bytes = 192 * M;
    let freed = |available: u64| {
        let host = HostFacts {
            total_bytes: 1024 * M,
            available_bytes: available * M,
            floor_bytes: 100 * M,
            rung: Rung::Withdraw,
            ..HostFacts::default()
        };
        let plan = plan_of(&Facts { host, guests: vec![shared.clone()], ..Facts::default() }, &policy::Equal);
        plan.frees.iter().map(|step| (step.from_bytes - step.to_bytes) / M).sum::<u64>()
    };
    assert_eq!([freed(90), freed(50), freed(40)], [0, 0, 40], "10 MiB are missing, a quarter of what is taken");
}

#[test]
fn growth_that_reserve_does_not_bear_is_refused_with_its_reason() {
    let mut slow = guest("slow", 256 * M, 64 * M);
    (slow.actual_bytes, slow.resident_bytes, slow.folded_bytes) = (128 * M, 128 * M, 100 * M);
    slow.withdrawal_bytes_per_s = 0;
    let host =
        HostFacts { total_bytes: 1024 * M, available_bytes: 140 * M, floor_bytes: 50 * M, ..HostFacts::default() };
    let mut facts = Facts { host, guests: vec![slow], ..Facts::default() };
    let plan = plan_of(&facts, &policy::Equal);
    assert!(plan.grows.is_empty() && !plan.reserve.holds());
    let sum = "the reserve would be eaten: guests may take 100 MiB, 164 MiB with this growth, against which 90 MiB are free and 0 MiB \
               could be withdrawn in 10 s";
    assert_eq!(plan.refused[0].reason, sum, "{plan:?}");
    facts.guests[0].withdrawal_bytes_per_s = 100 * M;
    assert_eq!(plan_of(&facts, &policy::Equal).grows.len(), 1, "a quick balloon stands for its loan");
}

#[test]
fn guest_does_not_grow_beyond_limit_of_its_control_group() {
    let mut limited = guest("limited", 256 * M, 64 * M);
    (limited.actual_bytes, limited.resident_bytes) = (100 * M, 80 * M);
    let host =
        HostFacts { total_bytes: 1024 * M, available_bytes: 900 * M, floor_bytes: 50 * M, ..HostFacts::default() };
    let facts = |left: Option<u64>| {
        let guest = GuestFacts { cgroup_left_bytes: left, ..limited.clone() };
        Facts { host, guests: vec![guest], ..Facts::default() }
    };
    let grown = |left| plan_of(&facts(left), &policy::Equal).grows.first().map(|step| step.expected_bytes / M);
    assert_eq!([grown(None), grown(Some(50 * M)), grown(Some(22 * M))], [Some(64), Some(30), None]);
}

/// All folded pages may be written, and the guest cannot give its loan back then.
#[test]
fn loan_that_its_guest_needs_stands_against_no_storm() {
    let reserve = |available_bytes| {
        let mut one = guest("a", 256 * M, 128 * M);
        one.claims = one.claims.map(|claims| Claims { available_bytes, ..claims });
        Reserve::of(&Facts { guests: vec![one], ..Facts::default() }, &Params::default()).withdrawable_bytes / M
    };
    assert_eq!([256, 128, 20, 0].map(|idle| reserve(idle * M)), [128, 128, 20, 0]);
}

#[test]
fn guest_below_its_guarantee_grows_even_on_a_full_host() {
    let mut small = guest("small", 256 * M, 128 * M);
    (small.actual_bytes, small.resident_bytes) = (100 * M, 90 * M);
    let facts = Facts { guests: vec![small], ..Facts::default() };
    let plan = plan_of(&facts, &policy::Equal);
    assert_eq!((plan.grows[0].to_bytes, &*plan.grows[0].reason), (128 * M, "it has less than it is guaranteed"));
    assert!(plan.grows[0].is_owed, "whatever others do");
}

#[test]
fn reservation_is_refused_with_the_numbers() {
    let host =
        HostFacts { total_bytes: 1024 * M, available_bytes: 150 * M, floor_bytes: 50 * M, ..HostFacts::default() };
    let facts = Facts { host, guests: vec![guest("a", 256 * M, 128 * M)], ..Facts::default() };
    let steps = make_room(&facts, "next", 200 * M, &Params::default()).unwrap();
    assert_eq!((steps.len(), steps[0].to_bytes), (1, 156 * M));
    let refusal = make_room(&facts, "next", 300 * M, &Params::default()).unwrap_err();
    assert_eq!(
        refusal.reason,
        "300 MiB are wanted: 100 MiB are spare, and withdrawing all of the loans that guests do not need would free 128 MiB"
    );
    // More is lent than there is: what is missing is part of the sum.
    let mut short = facts;
    short.host.available_bytes = 30 * M;
    let refusal = make_room(&short, "next", 120 * M, &Params::default()).unwrap_err();
    assert!(refusal.reason.starts_with("120 MiB are wanted: -20 MiB are spare"), "{}", refusal.reason);
}

/// The guest's driver tells a size of 80 MiB, of which the balloon can take 16 MiB, while the guest holds 256 MiB.
#[test]
fn reservation_counts_no_more_than_balloons_will_free() {
    let host =
        HostFacts { total_bytes: 1024 * M, available_bytes: 50 * M, floor_bytes: 50 * M, ..HostFacts::default() };
    let liar = GuestFacts { actual_bytes: 80 * M, ..guest("a", 256 * M, 64 * M) };
    let facts = Facts { host, guests: vec![liar], ..Facts::default() };
    let refusal = make_room(&facts, "next", 60 * M, &Params::default()).unwrap_err();
    assert!(refusal.reason.contains("would free 16 MiB"), "{}", refusal.reason);
}

/// Two groups, as in the paper of Kim and others: what one saves, the other does not get.
#[test]
fn savings_of_a_group_stay_in_it() {
    let mut world = World::new(
        1024,
        32,
        vec![
            Program { ram: 512, guaranteed: 64, used: 64, shared_percent: 80, faults: 0.0 },
            Program { ram: 512, guaranteed: 64, used: 64, shared_percent: 0, faults: 900.0 },
        ],
    );
    world.total = 32 + 64 + 64 + 1;
    let facts = world.facts();
    let loans = |policy: &dyn Policy| {
        policy.sizes(&facts, 40 * M).iter().map(|wish| wish.size_bytes / M - 64).collect::<Vec<_>>()
    };
    assert_eq!(loans(&policy::Group), [40, 0]);
    assert_eq!(loans(&policy::Entitlement), [40, 0]);
    assert_eq!(loans(&policy::Equal), [20, 20]);
    assert_eq!(loans(&policy::WorkingSet), [0, 40]);
}

/// Guests with loans, on a host with memory for more, and then with less than twice its floor. Under pressure they
/// shrink by as much as ends it, and nobody grows.
#[test]
fn pressure_withdraws_loans_and_stops_growth_and_reservations() {
    let mut world =
        World::new(6400, 100, vec![Program { ram: 256, guaranteed: 64, used: 200, shared_percent: 0, faults: 9.0 }; 3]);
    world.sizes = vec![200 * M; 3];
    let mut facts = world.facts();
    let planned = |facts: &Facts| {
        plan(facts, policy::named("equal").unwrap(), &History::default(), Duration::ZERO, &Params::default())
    };
    assert!(!planned(&facts).grows.is_empty() && planned(&facts).frees.is_empty());
    facts.host.rung = Rung::Withdraw;
    assert!(planned(&facts).grows.is_empty() && planned(&facts).frees.is_empty(), "the pressure is over");
    (facts.host.available_bytes, facts.host.stalled_percent) = (199 * M, Some(20.0));
    let under = planned(&facts);
    let freed: u64 = under.frees.iter().map(|step| step.expected_bytes).sum();
    assert!(under.grows.is_empty() && freed.abs_diff(100 * M) < M, "{under:?}");
    assert!(make_room(&facts, "next", M, &Params::default()).is_ok());
    facts.host.rung = Rung::Refuse;
    let refused = make_room(&facts, "next", M, &Params::default()).unwrap_err();
    assert!(refused.reason.contains("short of memory"), "{}", refused.reason);
}

/// A policy that wants the same size for each guest.
struct Wants(u64);

impl Policy for Wants {
    fn name(&self) -> &'static str {
        "wants"
    }

    fn sizes(&self, facts: &Facts, _: u64) -> Vec<Wish> {
        facts.guests.iter().map(|_| Wish { size_bytes: self.0, reason: "a test".into() }).collect()
    }
}

/// Two guests of 256 MiB that have half of it, and use all of that. The floor is 50 MiB.
fn two_guests(available: u64) -> Facts {
    let guests = ["a", "b"].map(|id| {
        let mut guest = guest(id, 256 * M, 64 * M);
        (guest.actual_bytes, guest.resident_bytes) = (128 * M, 128 * M);
        guest
    });
    let host = HostFacts {
        total_bytes: 1024 * M,
        available_bytes: available * M,
        floor_bytes: 50 * M,
        ..HostFacts::default()
    };
    Facts { host, guests: guests.to_vec(), ..Facts::default() }
}

fn growth(plan: &Plan) -> u64 {
    plan.grows.iter().map(|step| (step.to_bytes - step.from_bytes) / M).sum()
}

#[test]
fn memory_is_lent_once_though_every_guest_is_to_have_it() {
    let plan = plan_of(&two_guests(150), &Wants(256 * M));
    assert_eq!(growth(&plan), 100 - 8, "all that is spare, but for 4 MiB a guest: {plan:?}");
}

/// Once, when a guest had grown by half of what it was told, the other half was lent to another guest, too.
#[test]
fn growth_that_is_still_to_come_is_not_lent_to_another() {
    let mut facts = two_guests(150);
    facts.guests[1].target_bytes = Some(192 * M);
    let plan = plan_of(&facts, &Wants(256 * M));
    assert_eq!(growth(&plan), 100 - 8 - 64, "{plan:?}");
    let step = plan.grows.iter().find(|step| step.guest == "b");
    assert!(step.is_none_or(|step| step.to_bytes > 192 * M), "it would be told to stop: {plan:?}");
    let room = |mib: u64| make_room(&facts, "next", mib * M, &Params::default()).map(|steps| steps.len());
    assert_eq!(room(36), Ok(0));
    assert!(room(37) != Ok(0), "the rest is on its way to a guest");
    facts.guests[1].driver = DriverState::Stuck;
    assert_eq!(
        growth(&plan_of(&facts, &Wants(256 * M))),
        64,
        "nobody waits for it: the other one grows by a quarter of its RAM"
    );
}

#[test]
fn reserve_bears_all_growth_of_a_round_together() {
    let mut facts = two_guests(300);
    for guest in &mut facts.guests {
        (guest.folded_bytes, guest.withdrawal_bytes_per_s) = (90 * M, 0);
    }
    let plan = plan_of(&facts, &Wants(256 * M));
    assert_eq!(growth(&plan), 250 - 180, "what is ready, less what may break: {plan:?}");
    assert!(Reserve::of(&after_growth(&facts, &plan), &Params::default()).holds());
}

#[test]
fn guest_that_shrank_does_not_grow_for_a_minute_and_the_reverse() {
    let (facts, params) = (two_guests(900), Params::default());
    let turned = |from_bytes: u64, to_bytes: u64, wanted: u64, second: u64| {
        let mut history = History::default();
        let of = |id: &str| Step {
            guest: id.into(),
            from_bytes,
            to_bytes,
            expected_bytes: 0,
            is_owed: false,
            reason: "a test".into(),
        };
        ["a", "b"].iter().for_each(|id| history.note(&of(id), Duration::ZERO));
        growth(&plan(&facts, &Wants(wanted), &history, Duration::from_secs(second), &params))
    };
    let (small, large) = (64 * M, 128 * M);
    assert_eq!([turned(large, small, 256 * M, 59), turned(large, small, 256 * M, 60)], [0, 128]);
    assert_eq!(turned(small, large, 256 * M, 1), 128, "it may go on as before");
}

#[test]
fn loan_is_moved_as_far_as_the_policy_wants_and_not_back_at_once() {
    let mut facts = two_guests(58);
    facts.guests[0].actual_bytes = 240 * M;
    facts.guests[0].resident_bytes = 240 * M;
    let moved = |grew: bool| {
        let mut history = History::default();
        let (from_bytes, to_bytes) = if grew { (128 * M, 240 * M) } else { (250 * M, 240 * M) };
        let (expected_bytes, is_owed, reason) = (0, false, "a test".into());
        history
            .note(&Step { guest: "a".into(), from_bytes, to_bytes, expected_bytes, is_owed, reason }, Duration::ZERO);
        let plan = plan(&facts, &Wants(192 * M), &history, Duration::ZERO, &Params::default());
        assert_eq!(growth(&plan), 0, "the memory is not there yet: {plan:?}");
        plan.frees.iter().map(|step| (step.guest.clone(), step.to_bytes / M)).collect::<Vec<_>>()
    };
    assert_eq!((moved(false), moved(true)), (vec![("a".into(), 192)], Vec::new()), "the other one lacks 64 MiB");
}

#[test]
fn loan_of_a_driver_that_does_not_as_told_stands_for_nothing() {
    use DriverState::{Absent, Deflated, Lies, Silent, Stuck};
    let sums = |driver| {
        let mut facts = two_guests(10);
        facts.guests.truncate(1);
        facts.guests[0].driver = driver;
        let reserve = Reserve::of(&facts, &Params::default());
        let plan = plan_of(&facts, &policy::Equal);
        let steps = plan.frees.len() + plan.grows.len();
        (reserve.withdrawable_bytes / M, plan.budget.lent_bytes / M, plan.budget.lendable_bytes(0) / M, steps)
    };
    assert_eq!(sums(DriverState::Works), (64, 64, 24, 1), "40 MiB are missing to the floor");
    assert_eq!([Absent, Stuck, Lies, Deflated, Silent].map(sums), [(0, 0, 0, 0); 5]);
}

#[test]
fn reservations_are_neither_lent_nor_left_out_of_the_reserve() {
    let mut facts = two_guests(150);
    let sums = |facts: &Facts| {
        let reserve = Reserve::of(facts, &Params::default());
        (Budget::of(facts).spare_bytes >> 20, reserve.demand_bytes / M)
    };
    assert_eq!(sums(&facts), (100, 0));
    facts.reservations = [30, 40].map(|mib| Reservation { name: "next".into(), bytes: mib * M }).to_vec();
    assert_eq!(sums(&facts), (30, 70));
}

#[test]
fn reservation_that_would_eat_the_reserve_is_refused() {
    let mut facts = two_guests(150);
    for guest in &mut facts.guests {
        (guest.folded_bytes, guest.withdrawal_bytes_per_s) = (40 * M, 0);
    }
    let of = |mib: u64| make_room(&facts, "next", mib * M, &Params::default());
    assert!(of(20).is_ok());
    let refusal = of(21).unwrap_err();
    assert!(refusal.reason.starts_with("the reserve would be eaten"), "{}", refusal.reason);
}
