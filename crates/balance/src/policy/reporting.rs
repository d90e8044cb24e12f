//! For guests that report free pages to the host by themselves: their balloons stay empty.

use super::{Policy, Wish, weighted, wishes};
use crate::facts::Facts;
use crate::ladder::Rung;
use crate::reserve::Budget;
use crate::share_out::share_out;

/// A guest that reports free pages has all its RAM. Its host takes what it frees, and it waits for no balloon when it
/// writes again. Others get equal parts of what can be lent.
pub struct Reporting;

impl Policy for Reporting {
    fn name(&self) -> &'static str {
        "reporting"
    }

    fn sizes(&self, facts: &Facts, lendable_bytes: u64) -> Vec<Wish> {
        let weights = weighted(facts, |n| u64::from(!facts.guests[n].reports_free_pages));
        let loans = share_out(lendable_bytes, &weights);
        let mut all =
            wishes(facts, &loans, |_| "an equal part of what can be lent: it does not report free pages".into());
        for (guest, wish) in facts.guests.iter().zip(&mut all) {
            if guest.can_balloon() && guest.reports_free_pages {
                let reason = "it reports free pages by itself, so its balloon stays empty".into();
                *wish = Wish { size_bytes: guest.ram_bytes, reason };
            }
        }
        all
    }
}

/// Bytes that balloons keep from guests that report free pages, if this policy would be the better one: the host can
/// spare those bytes, and is not short of memory. Then these balloons free only what the guests would report anyway,
/// and delay the guests when they need memory. Otherwise `None`.
pub fn better_by_bytes(facts: &Facts) -> Option<u64> {
    let reporting = facts.guests.iter().filter(|guest| guest.can_balloon() && guest.reports_free_pages);
    let kept =
        reporting.fold(0, |sum: u64, guest| sum.saturating_add(guest.ram_bytes.saturating_sub(guest.size_bytes())));
    let spare = Budget::of(facts).spare_bytes.max(0).unsigned_abs();
    (kept > 0 && kept <= spare && facts.host.rung < Rung::Withdraw).then_some(kept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::DriverState;
    use crate::facts::HostFacts;
    use crate::test_world::guest;

    const M: u64 = 1 << 20;

    #[test]
    fn guests_that_report_free_pages_have_all_their_ram_and_others_share_what_is_lent() {
        let mut guests = ["a", "b", "c", "d"].map(|id| guest(id, 256 * M, 64 * M));
        [0, 3].into_iter().for_each(|n| guests[n].reports_free_pages = true);
        guests[3].driver = DriverState::Stuck;
        (guests[3].actual_bytes, guests[3].resident_bytes) = (100 * M, 100 * M);
        let facts = Facts { guests: guests.into(), ..Facts::default() };
        let wishes = Reporting.sizes(&facts, 80 * M);
        let sizes: Vec<u64> = wishes.iter().map(|wish| wish.size_bytes / M).collect();
        assert_eq!(sizes, [256, 104, 104, 100], "one whose balloon is stuck keeps its size");
        assert!(wishes[0].reason.contains("its balloon stays empty"));
    }

    #[test]
    fn policy_is_better_while_host_bears_all_that_balloons_keep() {
        let mut one = guest("a", 256 * M, 64 * M);
        (one.reports_free_pages, one.actual_bytes, one.resident_bytes) = (true, 156 * M, 156 * M);
        let of = |one: &crate::GuestFacts, available_bytes, rung| {
            let host = HostFacts { total_bytes: 1024 * M, available_bytes, rung, ..HostFacts::default() };
            better_by_bytes(&Facts { host, guests: vec![one.clone()], ..Facts::default() })
        };
        assert_eq!(of(&one, 800 * M, Rung::Idle), Some(100 * M));
        assert_eq!(of(&one, 50 * M, Rung::Idle), None, "balloons free what is needed");
        assert_eq!(of(&one, 800 * M, Rung::Withdraw), None);
        one.reports_free_pages = false;
        assert_eq!(of(&one, 800 * M, Rung::Idle), None, "its host gets nothing of what it frees");
    }
}
