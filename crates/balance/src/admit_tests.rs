//! Tests of admissions, by facts that are made up.

use crate::test_world::guest;
use crate::*;

const M: u64 = 1 << 20;

/// The standing of a host of 4 GiB, of which 100 MiB are never lent. Its guests have 512 MiB and empty balloons; each
/// holds as much memory alone as `private_mib` says.
fn standing(private_mib: &[u64], age_s: u64) -> Standing {
    let of = |(n, private): (usize, &u64)| GuestFacts {
        name: format!("vm{n}"),
        resident_bytes: (private + 100) * M,
        folded_bytes: 100 * M,
        peak_bytes: private * M,
        beside_bytes: 10 * M,
        age_s,
        claims: None,
        withdrawal_bytes_per_s: 0,
        ..guest(&format!("qemu:vm{n}"), 512 * M, 512 * M)
    };
    let guests: Vec<GuestFacts> = private_mib.iter().enumerate().map(of).collect();
    let host = HostFacts {
        total_bytes: 4096 * M,
        available_bytes: 4096 * M - private_mib.iter().sum::<u64>() * M,
        floor_bytes: 100 * M,
        ..HostFacts::default()
    };
    Standing::of(&Facts { host, guests, ..Facts::default() }, &[], &Params::default())
}

fn wanted(assurance: Assurance, guests: u64) -> Wanted {
    Wanted { like: Some("vm0".into()), guests, assurance, ..Wanted::default() }
}

fn decide(standing: &Standing, wanted: &Wanted) -> Admission {
    admit(standing, &[], standing.available_bytes, wanted).unwrap()
}

#[test]
fn strict_admits_as_many_as_fit_if_all_take_everything() {
    let standing = standing(&[100, 150], 1000);
    // 3996 MiB above the floor; the two take 1024 MiB in the worst storm. Each further one takes 522 MiB.
    let two = decide(&standing, &wanted(Assurance::Strict, 2));
    assert_eq!((two.admitted, two.bytes, two.more), (true, 1044 * M, 3), "{two:?}");
    assert_eq!((two.storm_bytes / M, two.reserve_bytes / M), (312 + 262 + 100 + 100 + 1044, 3746), "{two:?}");
    assert!(decide(&standing, &wanted(Assurance::Strict, 5)).admitted);
    let six = decide(&standing, &wanted(Assurance::Strict, 6));
    assert_eq!((six.admitted, six.more, six.again_s), (false, 5, None));
    let reason = six.reason.unwrap();
    assert!(reason.contains("3132 MiB are wanted") && reason.contains("when guests end"), "{reason}");
}

#[test]
fn costs_are_measured_of_guests_of_the_same_group_and_size() {
    let mut standing = standing(&[100, 150, 300], 1000);
    standing.guests[2].group = "other".into();
    let costs = decide(&standing, &wanted(Assurance::Strict, 1)).costs;
    assert_eq!([costs.start_bytes, costs.diverged_bytes, costs.storm_bytes].map(|bytes| bytes / M), [110, 160, 522]);
    assert_eq!((costs.measured_guests, costs.settled_guests), (2, 2));
    let unknown = Wanted { memory_bytes: Some(64 * M), guests: 1, ..Wanted::default() };
    let costs = decide(&standing, &unknown).costs;
    assert_eq!((costs.start_bytes, costs.storm_bytes, costs.measured_guests), (64 * M, 64 * M, 0));
}

#[test]
fn likely_counts_on_the_most_that_was_seen_and_says_how_likely_more_is() {
    let seen = standing(&[100, 150, 120], 1000);
    // 3996 - 370 MiB are left. The three may come to 150 MiB each, 80 MiB more together; each further one takes 160.
    let likely = decide(&seen, &wanted(Assurance::Likely, 1));
    assert_eq!((likely.admitted, likely.bytes, likely.more), (true, 160 * M, (3996 - 370 - 80 - 160) / 160));
    assert_eq!(likely.chance_of_more, Some(0.25));
    let new = decide(&standing(&[100, 150, 120], 10), &wanted(Assurance::Likely, 1));
    assert_eq!((new.bytes, new.chance_of_more), (522 * M, None), "none has run for long enough");
    let none = decide(&seen, &wanted(Assurance::None, 1));
    assert_eq!((none.bytes, none.chance_of_more), (110 * M, None));
}

#[test]
fn promises_and_memory_that_is_gone_since_the_look_count() {
    let standing = standing(&[100], 1000);
    let wanted = wanted(Assurance::Strict, 6);
    let admitted = |held: &[Held], available| admit(&standing, held, available, &wanted).unwrap();
    assert!(admitted(&[], u64::MAX).admitted, "what has become available since the look may be taken again");
    assert!(!admitted(&[], standing.available_bytes - 400 * M).admitted);
    let held = [Held { bytes: 300 * M, left_s: 40 }, Held { bytes: 200 * M, left_s: 20 }];
    let refused = admitted(&held, u64::MAX);
    assert_eq!((refused.admitted, refused.again_s), (false, Some(20)), "one of the two would do: {refused:?}");
    assert!(refused.reason.unwrap().contains("lapse"));
}

#[test]
fn loans_that_would_do_are_named() {
    let mut standing = standing(&[100; 7], 1000);
    let one = wanted(Assurance::Strict, 1);
    assert!(!decide(&standing, &one).admitted);
    standing.guests.iter_mut().for_each(|guest| (guest.untouched_bytes, guest.folded_bytes) = (400 * M, 0));
    standing.withdrawable_bytes = 1000 * M;
    let refused = decide(&standing, &one);
    assert_eq!((refused.admitted, refused.loans_would_do, refused.again_s), (false, true, Some(10)), "{refused:?}");
}

#[test]
fn nothing_is_admitted_while_pressure_lasts() {
    let standing = Standing { rung: Rung::Refuse, ..standing(&[100], 1000) };
    for policy in [Assurance::Strict, Assurance::Likely, Assurance::None] {
        let refused = decide(&standing, &wanted(policy, 1));
        assert_eq!((refused.admitted, refused.more, refused.again_s), (false, 0, Some(60)));
    }
}

/// The admissions are by the sums of the plan.
#[test]
fn strict_promises_what_the_plan_has_spare_and_no_more() {
    for shared in [0, 30, 70] {
        let program = |n: u64| crate::test_world::Program {
            ram: 512,
            guaranteed: 256,
            used: 100 + n * 40,
            shared_percent: shared,
            faults: 0.0,
        };
        let facts = crate::test_world::World::new(4096, 100, (0..5).map(program).collect()).facts();
        let params = Params::default();
        let standing = Standing::of(&facts, &[], &params);
        let available = standing.available_bytes;
        let left = standing.left(&[], available, Assurance::Strict);
        let (budget, reserve) = (Budget::of(&facts), Reserve::of(&facts, &params));
        assert_eq!(left.spare, budget.spare_bytes);
        let cover = reserve.ready_bytes + reserve.withdrawable_bytes;
        assert_eq!(left.cover, cover as i64 - reserve.demand_bytes as i64);
        let fits = |bytes: u64| make_room(&facts, "next", bytes, &params).is_ok_and(|steps| steps.is_empty());
        let admitted = |bytes: u64| {
            let wanted = Wanted { memory_bytes: Some(bytes), guests: 1, ..Wanted::default() };
            admit(&standing, &[], available, &wanted).unwrap().admitted
        };
        let most = u64::try_from(left.spare.min(left.cover)).unwrap();
        assert_eq!([admitted(most), fits(most)], [true; 2]);
        assert_eq!([admitted(most + 1), fits(most + 1)], [false; 2]);
    }
}

#[test]
fn growth_that_a_plan_gives_is_not_promised_again() {
    let host = HostFacts { total_bytes: 2048 * M, available_bytes: 1024 * M, ..HostFacts::default() };
    let guests = vec![GuestFacts { actual_bytes: 256 * M, resident_bytes: 256 * M, ..guest("a", 512 * M, 256 * M) }];
    let facts = Facts { host, guests, ..Facts::default() };
    let step = Step {
        guest: "a".into(),
        from_bytes: 256 * M,
        to_bytes: 384 * M,
        expected_bytes: 128 * M,
        is_owed: false,
        reason: String::new(),
    };
    let more = |grows: &[Step]| {
        let standing = Standing::of(&facts, grows, &Params::default());
        let wanted = Wanted { memory_bytes: Some(M), guests: 1, ..Wanted::default() };
        admit(&standing, &[], u64::MAX, &wanted).unwrap().more
    };
    assert_eq!([more(&[]), more(&[step])], [1023, 1023 - 128]);
}

#[test]
fn unknown_guest_is_told_from_no_memory() {
    let standing = standing(&[100], 1000);
    let of = |wanted: Wanted| admit(&standing, &[], 0, &wanted).unwrap_err();
    let unknown = Wanted { like: Some("x".into()), guests: 1, ..Wanted::default() };
    assert!(of(unknown.clone()).contains("\"x\""));
    assert!(of(Wanted { guests: 1, ..Wanted::default() }).contains("name a guest"));
    assert!(admit(&standing, &[], 0, &Wanted { memory_bytes: Some(M), ..unknown }).is_ok());
}

#[test]
fn extreme_numbers_are_refused_and_overflow_nothing() {
    for extreme in [0, 1, 1 << 52, i64::MAX as u64, u64::MAX] {
        let mut standing = standing(&[100, 100], 1000);
        let guest = &mut standing.guests[0];
        (guest.untouched_bytes, guest.folded_bytes, guest.peak_bytes) = (extreme, extreme, extreme);
        (guest.beside_bytes, standing.withdrawable_bytes, standing.floor_bytes) = (extreme, extreme, extreme);
        for policy in [Assurance::Strict, Assurance::Likely, Assurance::None] {
            let held = [Held { bytes: extreme, left_s: extreme }; 2];
            let like = Wanted { guests: extreme.max(1), ..wanted(policy, 1) };
            let decision = admit(&standing, &held, extreme, &like).unwrap();
            assert!(!decision.admitted || extreme < 1 << 52, "{extreme}: {decision:?}");
            let large = Wanted { memory_bytes: Some(u64::MAX), guests: u64::MAX, ..Wanted::default() };
            assert!(!admit(&standing, &held, u64::MAX, &large).unwrap().admitted);
        }
    }
}

/// Of 500 guests, each with a kind of its own.
#[test]
fn decision_among_many_guests_takes_no_time() {
    let private: Vec<u64> = (0..500).map(|n| n % 4).collect();
    let mut standing = standing(&private, 1000);
    standing.guests.iter_mut().enumerate().for_each(|(n, guest)| guest.ram_bytes += n as u64);
    let began = std::time::Instant::now();
    for _ in 0..100 {
        decide(&standing, &wanted(Assurance::Likely, 1));
    }
    assert!(began.elapsed() < std::time::Duration::from_secs(2), "{:?} for 100", began.elapsed());
}
