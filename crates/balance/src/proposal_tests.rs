use super::*;
use crate::facts::HostFacts;

const M: u64 = 1 << 20;
const MINUTE: u64 = 60;

/// A guest, by MiB that it holds alone, and by MiB that it shares.
fn guest(id: &str, alone: u64, folded: u64) -> GuestFacts {
    GuestFacts {
        id: id.into(),
        resident_bytes: (alone + folded) * M,
        folded_bytes: folded * M,
        ..GuestFacts::default()
    }
}

/// A host on the rung `advise`, with a floor of 1000 MiB. Pressure ends at 1250 MiB.
fn host(available: u64, guests: Vec<GuestFacts>) -> Facts {
    let host = HostFacts {
        total_bytes: 6400 * M,
        available_bytes: available * M,
        floor_bytes: 1000 * M,
        rung: Rung::Advise,
        ..HostFacts::default()
    };
    Facts { host, guests, ..Facts::default() }
}

fn two() -> Facts {
    host(900, vec![guest("a", 400, 0), guest("b", 400, 100)])
}

/// The minutes, up to `end`, at which proposals are made while the pressure does not end.
fn proposed_until(end: u64, proposals: &mut Proposals) -> Vec<u64> {
    let is_made = |at_s: &u64| proposals.see(*at_s, &two(), &|_| true).is_some();
    (0..end * MINUTE).step_by(30).filter(is_made).map(|at_s| at_s / MINUTE).collect()
}

#[test]
fn proposals_are_15_minutes_apart_then_twice_as_long_and_6_hours_at_most() {
    let mut proposals = Proposals::default();
    let found = proposed_until(2000, &mut proposals);
    assert_eq!(found, [0, 15, 45, 105, 225, 465, 825, 1185, 1545, 1905]);
    let last = proposals.last().expect("the last one");
    assert_eq!((last.first_s, last.next_s), (0, (1905 + 360) * MINUTE));
}

#[test]
fn nothing_is_proposed_without_pressure_or_below_the_rung() {
    let mut proposals = Proposals::default();
    let mut below = two();
    below.host.rung = Rung::Pace;
    assert_eq!(proposals.see(0, &below, &|_| true), None);
    for available in [1000, 1249, 3000] {
        assert_eq!(proposals.see(0, &host(available, two().guests), &|_| true), None, "{available} MiB");
    }
    let mut above = two();
    above.host.rung = Rung::Refuse;
    assert!(proposals.see(0, &above, &|_| true).is_some());
}

/// A guest that has become the best one is not proposed before the wait is over.
#[test]
fn another_guest_waits_for_as_long_and_has_a_time_of_its_own() {
    let mut proposals = Proposals::default();
    let turned = host(900, vec![guest("a", 400, 100), guest("b", 400, 0)]);
    let mut see = |minute: u64, facts: &Facts| {
        let made = proposals.see(minute * MINUTE, facts, &|_| true)?;
        Some((made.guest, made.first_s / MINUTE, made.next_s / MINUTE))
    };
    assert_eq!(see(1, &two()), Some(("a".into(), 1, 16)));
    assert_eq!(see(15, &turned), None);
    assert_eq!(see(16, &turned), Some(("b".into(), 16, 46)));
    assert_eq!(see(46, &turned), Some(("b".into(), 16, 106)));
}

#[test]
fn wait_begins_anew_when_the_guest_has_gone_and_after_6_quiet_hours() {
    let waits = |next: u64, facts: &Facts| {
        let mut proposals = Proposals::default();
        assert_eq!(proposed_until(46, &mut proposals), [0, 15, 45]);
        let made = proposals.see(next * MINUTE, facts, &|_| true)?;
        Some((made.guest, made.first_s / MINUTE, made.next_s / MINUTE - next))
    };
    let gone = host(900, vec![guest("b", 400, 100)]);
    assert_eq!(waits(104, &gone), None, "its going has to show");
    assert_eq!(waits(105, &gone), Some(("b".into(), 105, 15)));
    assert_eq!(waits(105 + 359, &two()), Some(("a".into(), 0, 120)));
    assert_eq!(waits(105 + 360, &two()), Some(("a".into(), 105 + 360, 15)));
}

#[test]
fn guest_is_proposed_that_frees_most_for_its_cost_among_those_that_free_enough() {
    // 350 MiB are missing.
    let of = |guests: Vec<GuestFacts>| {
        let made = Proposals::default().see(0, &host(900, guests), &|guest| guest.id != "stays");
        made.map(|made| (made.guest, made.frees_bytes / M, made.costs_bytes / M))
    };
    let found = |guest: &str, frees, costs| Some((guest.to_owned(), frees, costs));
    assert_eq!(of(vec![guest("shares", 900, 600), guest("alone", 500, 10)]), found("alone", 500, 510));
    assert_eq!(of(vec![guest("shares", 900, 600), guest("small", 300, 0)]), found("shares", 900, 1500));
    assert_eq!(of(vec![guest("less", 200, 0), guest("most", 300, 900)]), found("most", 300, 1200), "none frees enough");
    assert_eq!(of(vec![guest("less", 400, 0), guest("more", 500, 0)]), found("more", 500, 500), "the same yield");
    assert_eq!(of(vec![guest("x", 400, 0), guest("w", 400, 0)]), found("w", 400, 400), "the same guest each time");
    assert_eq!(of(vec![guest("stays", 900, 0), guest("goes", 400, 300)]), found("goes", 400, 700));
    assert_eq!(of(vec![guest("stays", 900, 0), guest("holds nothing", 0, 9)]), None);
    let swapped = GuestFacts { swapped_bytes: 50 * M, beside_bytes: 60 * M, ..guest("swapped", 400, 0) };
    assert_eq!(of(vec![swapped]), found("swapped", 460, 450));
}
