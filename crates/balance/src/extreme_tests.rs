//! Tests with facts at the numbers at which sums overflow, one field after the other: nothing overflows, and no memory
//! is promised because of such a number.

use crate::policy::{NAMES, named};
use crate::test_world::guest;
use crate::*;
use std::time::Duration;

const M: u64 = 1 << 20;
const EXTREMES: [u64; 6] = [0, 1, (1 << 52) - 1, 1 << 52, i64::MAX as u64, u64::MAX];

/// Accessors of all numbers about a guest.
const OF_GUEST: [fn(&mut GuestFacts) -> &mut u64; 16] = [
    |g| &mut g.ram_bytes,
    |g| &mut g.guaranteed_bytes,
    |g| &mut g.actual_bytes,
    |g| g.target_bytes.insert(0),
    |g| g.cgroup_left_bytes.insert(0),
    |g| &mut g.resident_bytes,
    |g| &mut g.swapped_bytes,
    |g| &mut g.folded_bytes,
    |g| &mut g.withdrawal_bytes_per_s,
    |g| &mut g.claims.as_mut().expect("claims").total_bytes,
    |g| &mut g.claims.as_mut().expect("claims").free_bytes,
    |g| &mut g.claims.as_mut().expect("claims").available_bytes,
    |g| &mut g.claims.as_mut().expect("claims").cache_bytes,
    |g| g.claims.as_mut().expect("claims").stalls.insert(0),
    |g| g.claims.as_mut().expect("claims").oom_kills.insert(0),
    |g| &mut g.faults_by_size[0].0,
];

/// Accessors of all numbers about the host.
const OF_HOST: [fn(&mut HostFacts) -> &mut u64; 6] = [
    |h| &mut h.total_bytes,
    |h| &mut h.available_bytes,
    |h| &mut h.falling_bytes_per_s,
    |h| &mut h.floor_bytes,
    |h| &mut h.swap_used_bytes,
    |h| &mut h.swap_total_bytes,
];

/// A host that has lent memory to two guests of group g.
fn facts() -> Facts {
    let one = GuestFacts {
        actual_bytes: 200 * M,
        resident_bytes: 150 * M,
        folded_bytes: 60 * M,
        faults_by_size: vec![(100 * M, 9.0), (200 * M, 3.0)],
        ..guest("a", 256 * M, 128 * M)
    };
    let mut facts = Facts { guests: vec![one.clone(), GuestFacts { id: "b".into(), ..one }], ..Facts::default() };
    facts.host =
        HostFacts { total_bytes: 1024 * M, available_bytes: 300 * M, floor_bytes: 50 * M, ..HostFacts::default() };
    facts.groups.insert("g".into(), GroupFacts { saved_bytes: 100 << 20, ..GroupFacts::default() });
    facts.reservations.push(Reservation { name: "next".into(), bytes: 10 * M });
    facts
}

/// Makes all decisions that are made by facts.
fn decide(facts: Facts) {
    let params = Params::default();
    for rung in [Rung::Idle, Rung::Refuse] {
        let mut facts = facts.clone().bounded();
        facts.host.rung = rung;
        for name in NAMES {
            let policy = named(name).expect("a policy");
            let plan = plan(&facts, policy, &History::default(), Duration::ZERO, &params);
            let most =
                |step: &Step| facts.guests.iter().find(|guest| guest.id == step.guest).expect("it is there").ram_bytes;
            assert!(plan.grows.iter().all(|step| step.to_bytes <= most(step)), "{plan:?}");
        }
        let _ = make_room(&facts, "next", u64::MAX, &params);
        let paused = pauses(&facts, &params, |_| true);
        let held: Vec<&str> = paused.iter().map(|pause| pause.guest.as_str()).collect();
        resumable(&facts, &held, &["a"], facts.host.available_bytes);
        Ladder::default().see(Duration::ZERO, &facts);
        Proposals::default().see(u64::MAX, &facts, &|_| true);
        let mut paces = Paces::default();
        paces.see(Duration::ZERO, &Facts { groups: [("g".to_owned(), GroupFacts::default())].into(), ..facts.clone() });
        paces.see(Duration::from_secs(10), &facts);
        facts.guests.iter().for_each(|guest| drop(reminder(&facts.host, guest)));
    }
}

#[test]
fn extreme_numbers_overflow_nothing() {
    for extreme in EXTREMES {
        for place in OF_GUEST {
            for (both, ram_bytes) in [(false, 256 * M), (true, 256 * M), (true, u64::MAX)] {
                let mut facts = facts();
                facts.guests.iter_mut().for_each(|guest| guest.ram_bytes = ram_bytes);
                facts.guests.iter_mut().skip(usize::from(!both)).for_each(|guest| *place(guest) = extreme);
                decide(facts);
            }
        }
        for place in OF_HOST {
            let mut facts = facts();
            *place(&mut facts.host) = extreme;
            decide(facts);
        }
        for rate in [f64::NAN, f64::INFINITY, -1.0, f64::MAX] {
            let mut facts = facts();
            facts.guests[0].claims.as_mut().expect("claims").faults_per_s = rate;
            facts.guests[1].faults_by_size = vec![(extreme, rate); 2];
            facts.host.stalled_percent = Some(rate);
            decide(facts);
        }
        let mut facts = facts();
        facts.reservations = vec![Reservation { name: "large".into(), bytes: extreme }; 2];
        for signed in [i64::MIN, -1, 0, i64::MAX] {
            facts.guests.iter_mut().for_each(|guest| guest.saved_bytes = signed);
            let figures =
                GroupFacts { saved_bytes: signed, pages_hashed: extreme, folds: extreme, ..GroupFacts::default() };
            facts.groups.insert("g".into(), figures);
            decide(facts.clone());
        }
        let mut driver = Driver::default();
        for ms in [0, 100, 10_000] {
            driver.landed(extreme, 0.0);
            let sighting = Sighting {
                ram_bytes: extreme,
                target_bytes: Some(1),
                actual_bytes: Some(extreme),
                resident_bytes: 0,
                had_arrived: false,
            };
            driver.see(Duration::from_millis(ms), sighting);
            driver.see(Duration::from_millis(ms + 100), Sighting { ram_bytes: 1, resident_bytes: extreme, ..sighting });
        }
    }
}

/// Savings that a member reports, and its worker passes on, count only as far as the kernel shows folded pages.
#[test]
fn savings_that_a_member_names_move_no_loan() {
    for name in ["group", "entitlement"] {
        let sizes = |lie: bool| {
            let mut facts = facts();
            facts.guests[1].group = "liars".into();
            (facts.guests[0].saved_bytes, facts.guests[1].saved_bytes) = (60 << 20, 60 << 20);
            facts.groups.get_mut("g").expect("a group").saved_bytes = 60 << 20;
            let told = if lie { 1 << 50 } else { 60 << 20 };
            facts.guests[1].saved_bytes = told;
            facts.groups.insert("liars".into(), GroupFacts { saved_bytes: told, ..GroupFacts::default() });
            let facts = facts.bounded();
            named(name).expect("a policy").sizes(&facts, 150 * M).iter().map(|wish| wish.size_bytes).collect::<Vec<_>>()
        };
        assert_eq!(sizes(true), sizes(false), "by the policy {name}");
    }
}
