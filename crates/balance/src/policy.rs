//! Policies: facts in, the size that each guest should have out. A plan ([`plan`](crate::plan())) limits the changes
//! and puts them in order.

mod entitlement;
mod equal;
mod group;
mod reporting;
mod working_set;

pub use entitlement::Entitlement;
pub use equal::Equal;
pub use group::Group;
pub use reporting::{Reporting, better_by_bytes as reporting_better_by_bytes};
pub use working_set::WorkingSet;

use crate::facts::Facts;
use serde::Serialize;

/// The size that a policy wants a guest to have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Wish {
    /// The size.
    pub size_bytes: u64,
    /// The reason, as a part of a sentence.
    pub reason: String,
}

/// A way to divide memory among guests.
pub trait Policy {
    /// The name by which it is chosen.
    fn name(&self) -> &'static str;

    /// The size of each guest, in the order of the facts, if `lendable_bytes` are dealt out above the guarantees.
    fn sizes(&self, facts: &Facts, lendable_bytes: u64) -> Vec<Wish>;
}

/// Names of the policies that a service can have.
pub const NAMES: [&str; 5] = ["working-set", "group", "entitlement", "equal", "reporting"];

/// The policy of this name.
pub fn named(name: &str) -> Option<&'static dyn Policy> {
    match name {
        "working-set" => Some(&WorkingSet),
        "group" => Some(&Group),
        "entitlement" => Some(&Entitlement),
        "equal" => Some(&Equal),
        "reporting" => Some(&Reporting),
        _ => None,
    }
}

/// For each guest, weight and cap of its loan. The weight of a guest whose size cannot be changed is 0.
fn weighted(facts: &Facts, weight: impl Fn(usize) -> u64) -> Vec<(u64, u64)> {
    let of = |(n, guest): (usize, &crate::GuestFacts)| {
        let cap = guest.ram_bytes.saturating_sub(guest.guaranteed_bytes);
        (if guest.can_balloon() { weight(n) } else { 0 }, cap)
    };
    facts.guests.iter().enumerate().map(of).collect()
}

/// Wishes for guests' sizes: the guarantee and the loan of each. A guest whose size cannot be changed keeps what it
/// has.
fn wishes(facts: &Facts, loans: &[u64], reason: impl Fn(usize) -> String) -> Vec<Wish> {
    let of = |(n, guest): (usize, &crate::GuestFacts)| {
        if !guest.can_balloon() {
            let reason = format!("its balloon is {}", guest.driver.name());
            return Wish { size_bytes: guest.size_bytes(), reason };
        }
        Wish { size_bytes: guest.guaranteed_bytes.saturating_add(loans[n]).min(guest.ram_bytes), reason: reason(n) }
    };
    facts.guests.iter().enumerate().map(of).collect()
}
