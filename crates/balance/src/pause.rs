//! Decides which guests are paused while loans are withdrawn, because memory would run out before the loans are back.
//!
//! | condition | reason |
//! |---|---|
//! | less than the floor is available: less than half of it, or it falls such that nothing is left in 2 s | withdrawals take seconds |
//! | the guest's size is above its guarantee | what is guaranteed, a guest may use at any time |
//! | it may take 1/64 of its RAM or more: untouched memory and folded pages. Where more frames than its driver's size show that its balloon holds nothing, the rest of its RAM is untouched memory, too | a pause of another one spares nothing |
//! | it has run for a minute since its last pause | no guest stands still for more than 10 s of each minute |
//! | it keeps back what it was told to give, as its frames show, or its driver. Of the others, memory does not bear all that they may take | no guest stands still for another one that lies |
//!
//! Guests that may take least memory go on running, as far as memory allows. The memory that other guests may take,
//! which cannot be paused, counts first, unless these give nothing back either.
//!
//! A paused guest gives nothing back, since its driver does not run. So guests that have to shrink are resumed first:
//! one of them, and others as long as the available memory is enough if each takes all that it may. Further ones follow
//! when balloons have given memory back. A guest that keeps memory back comes last.

use crate::driver::DriverState;
use crate::facts::{Facts, GuestFacts, HostFacts};
use crate::params::Params;
use serde::Serialize;

/// Part of the floor below which guests are paused, and memory is taken at any price: 1/2.
pub(crate) const DANGER: u64 = 2;

/// Guests are paused if, at its present speed, available memory falls to nothing within this time, in seconds: 2 s.
const RUNS_OUT_S: u64 = 2;

/// A guest to be paused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Pause {
    /// The guest.
    pub guest: String,
    /// The reason.
    pub reason: String,
}

/// Paused guests (of `held`, in that order) that can be resumed: the available memory is enough for all that they may
/// take, and for all that the guests `running` may take, which have not given their memory back yet. Guests that keep
/// back what they were told to give come last. If `running` is empty, one guest is resumed in any case.
pub fn resumable<'a>(facts: &Facts, held: &[&'a str], running: &[&str], available_bytes: u64) -> Vec<&'a str> {
    let of = |id: &str| facts.guests.iter().find(|guest| guest.id == id);
    let takes = |id: &str| of(id).map_or(0, GuestFacts::may_take_bytes);
    let mut taken = running.iter().map(|id| takes(id)).fold(0, u64::saturating_add);
    let mut resumed = Vec::new();
    let (first, last): (Vec<&str>, Vec<&str>) = held.iter().partition(|id| of(id).is_none_or(GuestFacts::gives_back));
    for id in first.into_iter().chain(last) {
        taken = taken.saturating_add(takes(id));
        if taken > available_bytes && !(running.is_empty() && resumed.is_empty()) {
            break;
        }
        resumed.push(id);
    }
    resumed
}

/// Guests that are to be paused. `has_run` tells whether a guest has run long enough since its last pause.
pub fn pauses(facts: &Facts, params: &Params, has_run: impl Fn(&str) -> bool) -> Vec<Pause> {
    let host = &facts.host;
    let runs_out = host.available_bytes < host.falling_bytes_per_s.saturating_mul(RUNS_OUT_S);
    let is_short = host.available_bytes < host.floor_bytes;
    if !is_short || !(runs_out || host.available_bytes < host.floor_bytes / DANGER) {
        return Vec::new();
    }
    let is_danger = |guest: &&GuestFacts| {
        // A guest whose QEMU does not answer is left out: asking it would only take time.
        guest.driver != DriverState::Silent
            && guest.loan_bytes() > 0
            && guest.may_take_bytes() >= params.least_change_bytes(guest.ram_bytes)
            && has_run(&guest.id)
    };
    let (mut wanted, run): (Vec<&GuestFacts>, Vec<&GuestFacts>) = facts.guests.iter().partition(is_danger);
    let mut taken =
        run.iter().filter(|guest| guest.gives_back()).fold(0, |sum: u64, one| sum.saturating_add(one.may_take_bytes()));
    wanted.sort_by_key(|guest| guest.may_take_bytes());
    wanted.retain(|guest| {
        let beside = taken.saturating_add(guest.may_take_bytes());
        let is_borne = guest.gives_back() && beside <= host.available_bytes;
        taken = if is_borne { beside } else { taken };
        !is_borne
    });
    wanted.sort_by_key(|guest| guest.gives_back());
    wanted.into_iter().map(|guest| Pause { guest: guest.id.clone(), reason: reason(host, guest) }).collect()
}

fn reason(host: &HostFacts, guest: &GuestFacts) -> String {
    let keeps_back = if guest.gives_back() {
        ""
    } else {
        ". Its frames or its driver show that it keeps back what it was told to give"
    };
    format!(
        "{} MiB are available, {} of them never lent; it has {} MiB above its guarantee, and may take {} MiB more{keeps_back}",
        host.available_bytes >> 20,
        host.floor_bytes >> 20,
        guest.loan_bytes() >> 20,
        guest.may_take_bytes() >> 20
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_world::guest;

    const M: u64 = 1 << 20;

    fn paused(available: u64, change: impl Fn(&mut GuestFacts), has_run: bool) -> Vec<String> {
        let mut one = guest("a", 256 * M, 128 * M);
        one.folded_bytes = 64 * M;
        change(&mut one);
        let facts = Facts { host: host(available, 0), guests: vec![one], ..Facts::default() };
        pauses(&facts, &Params::default(), |_| has_run).into_iter().map(|pause| pause.guest).collect()
    }

    fn host(available: u64, falling: u64) -> HostFacts {
        HostFacts {
            available_bytes: available * M,
            floor_bytes: 100 * M,
            falling_bytes_per_s: falling * M,
            ..HostFacts::default()
        }
    }

    #[test]
    fn guest_is_paused_below_the_floor_where_memory_runs_out() {
        let guests = vec![GuestFacts { folded_bytes: 128 * M, ..guest("a", 256 * M, 128 * M) }];
        let is_paused = |(available, falling)| {
            let facts = Facts { host: host(available, falling), guests: guests.clone(), ..Facts::default() };
            !pauses(&facts, &Params::default(), |_| true).is_empty()
        };
        assert_eq!([(90, 45), (90, 46), (100, 500)].map(is_paused), [false, true, false]);
    }

    #[test]
    fn guest_is_paused_below_half_of_the_floor() {
        assert_eq!(paused(49, |_| {}, true), ["a"]);
        assert!(paused(50, |_| {}, true).is_empty());
    }

    #[test]
    fn guest_within_its_guarantee_is_never_paused() {
        assert!(paused(0, |guest| guest.guaranteed_bytes = 256 * M, true).is_empty());
        assert!(paused(0, |guest| (guest.actual_bytes, guest.resident_bytes) = (128 * M, 128 * M), true).is_empty());
    }

    #[test]
    fn guest_that_can_take_nothing_is_not_paused() {
        assert!(paused(0, |guest| guest.folded_bytes = 3 * M, true).is_empty());
        assert_eq!(paused(0, |guest| (guest.folded_bytes, guest.resident_bytes) = (0, 200 * M), true), ["a"]);
    }

    /// Root inside a guest can write the size that the guest was told into the balloon device, and go on taking memory.
    #[test]
    fn guest_whose_balloon_holds_nothing_is_paused() {
        let of = |resident: u64, driver| {
            paused(
                0,
                |guest| {
                    (guest.folded_bytes, guest.guaranteed_bytes, guest.driver) = (0, 64 * M, driver);
                    (guest.actual_bytes, guest.resident_bytes) = (100 * M, resident * M);
                },
                true,
            )
        };
        use DriverState as D;
        assert_eq!([of(116, D::Works), of(116, D::Lies), of(116, D::Deflated)].concat(), ["a", "a"], "by its driver");
        assert_eq!(of(117, D::Works), ["a"], "by its frames, before the driver is flagged");
        assert!(of(253, D::Lies).is_empty(), "it has nearly all that it can take");
    }

    #[test]
    fn guests_are_resumed_one_after_the_other_unless_memory_bears_more() {
        let of = |id: &str, folded: u64| GuestFacts { folded_bytes: folded * M, ..guest(id, 256 * M, 128 * M) };
        let facts = Facts { guests: vec![of("a", 60), of("b", 30), of("c", 30)], ..Facts::default() };
        let all = ["a", "b", "c"];
        let next = |held: &[&'static str], running: &[&str], available: u64| {
            resumable(&facts, held, running, available * M).concat()
        };
        assert_eq!([next(&all, &[], 0), next(&all, &[], 119), next(&all, &[], 120)], ["a", "ab", "abc"]);
        assert_eq!([next(&all[1..], &["a"], 89), next(&all[1..], &["a"], 90)], ["", "b"]);
        assert_eq!(next(&all[1..], &[], 0), "b", "the first one has given its memory back");
    }

    #[test]
    fn guest_that_was_paused_lately_runs() {
        assert!(paused(0, |_| {}, false).is_empty());
    }

    /// A guest of which this many MiB may be taken.
    fn takes(id: &str, folded: u64) -> GuestFacts {
        GuestFacts { folded_bytes: folded * M, ..guest(id, 256 * M, 128 * M) }
    }

    /// Its driver tells 128 MiB, and it holds 200 MiB of frames.
    fn liar(id: &str) -> GuestFacts {
        GuestFacts { actual_bytes: 128 * M, resident_bytes: 200 * M, ..guest(id, 256 * M, 128 * M) }
    }

    fn who(guests: &[GuestFacts], available: u64, has_run: impl Fn(&str) -> bool) -> String {
        let facts = Facts { host: host(available, 0), guests: guests.to_vec(), ..Facts::default() };
        pauses(&facts, &Params::default(), has_run).into_iter().map(|pause| pause.guest).collect()
    }

    /// Once, these were paused because of a guest that gave nothing back.
    #[test]
    fn guests_that_give_back_run_on_as_far_as_memory_bears_it() {
        let guests = [takes("a", 20), takes("b", 10), liar("z"), takes("c", 30)];
        let by_available = [49, 30, 29, 9].map(|available| who(&guests, available, |_| true));
        assert_eq!(by_available, ["zc", "zc", "zac", "zbac"], "it comes first");
        assert_eq!(who(&guests, 30, |id| id != "z"), "c", "it may not be paused, and does not count");
        assert_eq!(who(&guests, 30, |id| id != "a"), "zc", "an honest one that runs counts");
        assert_eq!(who(&guests, 29, |id| id != "a"), "zbc");
        for driver in [DriverState::Stuck, DriverState::Lies, DriverState::Deflated] {
            assert_eq!(
                who(&[takes("a", 20), GuestFacts { driver, ..takes("z", 10) }], 40, |_| true),
                "z",
                "{driver:?}"
            );
        }
    }

    #[test]
    fn guest_that_keeps_back_is_resumed_last() {
        let facts = Facts { guests: vec![liar("z"), takes("a", 60)], ..Facts::default() };
        let next = |available: u64| resumable(&facts, &["z", "a"], &[], available * M).concat();
        assert_eq!([next(0), next(115), next(116)], ["a", "a", "az"]);
    }
}
