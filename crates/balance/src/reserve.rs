//! The two sums of the crate's head (`lib.rs`): what can be lent, and what stands ready if every folded page is
//! written.

use crate::facts::{Facts, GuestFacts};
use crate::params::Params;
use serde::Serialize;

/// Memory that can be lent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Budget {
    /// Memory that no guest has, or may take as its loan or guarantee. Negative if more was lent than there is.
    pub spare_bytes: i64,
    /// Loans of guests whose size can be changed.
    pub lent_bytes: u64,
}

/// Memory for the worst break storm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reserve {
    /// Memory that guests may take at any instant: all that is untouched, every folded page, and reservations.
    pub demand_bytes: u64,
    /// Memory of the host above its floor.
    pub ready_bytes: u64,
    /// Loans that can be withdrawn within 10 s, and that their guests do not need.
    pub withdrawable_bytes: u64,
}

impl Budget {
    /// The budget by these facts. What a guest lacks to its guarantee, or has yet to grow, counts as taken.
    pub fn of(facts: &Facts) -> Self {
        let guests = &facts.guests;
        let untouched = sum(guests, GuestFacts::untouched_bytes);
        let expected = sum(guests, expected_bytes);
        let lent_bytes = sum(guests, |guest| if guest.can_balloon() { guest.loan_bytes() } else { 0 });
        let taken = untouched.saturating_add(expected).saturating_add(reserved_bytes(facts));
        let ready = facts.host.available_bytes.saturating_sub(facts.host.floor_bytes);
        // Below its floor the host lacks memory before any guest takes some.
        let below = facts.host.floor_bytes.saturating_sub(facts.host.available_bytes);
        Self { spare_bytes: signed(ready).saturating_sub(signed(taken.saturating_add(below))), lent_bytes }
    }

    /// All memory that can be lent if every loan is given out anew and `kept_bytes` stay spare.
    pub fn lendable_bytes(&self, kept_bytes: u64) -> u64 {
        let spare = self.spare_bytes;
        let above = if spare > 0 { spare.saturating_sub(signed(kept_bytes)).max(0) } else { spare };
        u64::try_from(signed(self.lent_bytes).saturating_add(above)).unwrap_or(0)
    }
}

impl Reserve {
    /// The reserve by these facts.
    pub fn of(facts: &Facts, params: &Params) -> Self {
        let may_take = |guest: &GuestFacts| {
            guest.untouched_bytes().saturating_add(guest.folded_bytes).saturating_add(expected_bytes(guest))
        };
        Self {
            demand_bytes: sum(&facts.guests, may_take).saturating_add(reserved_bytes(facts)),
            ready_bytes: facts.host.available_bytes.saturating_sub(facts.host.floor_bytes),
            withdrawable_bytes: sum(&facts.guests, |guest| withdrawable_bytes(guest, params)),
        }
    }

    /// Whether everything that guests may take is covered.
    pub const fn holds(&self) -> bool {
        self.demand_bytes <= self.ready_bytes.saturating_add(self.withdrawable_bytes)
    }

    /// The part of a guest's growth (`growth_bytes`) that the reserve covers. The guest may use all of its growth; the
    /// part of it that could be withdrawn in time counts as covered.
    pub(crate) fn bears(&self, guest: &GuestFacts, growth_bytes: u64, params: &Params) -> u64 {
        let cover = self.ready_bytes.saturating_add(self.withdrawable_bytes);
        let Some(left) = cover.checked_sub(self.demand_bytes) else { return 0 };
        let room = self.withdrawable_with_growth(guest, params).saturating_sub(self.withdrawable_bytes);
        growth_bytes.min(left.saturating_add(room))
    }

    /// Memory that could be withdrawn in time if this guest had grown, and did not need its growth.
    pub(crate) fn withdrawable_with_growth(&self, guest: &GuestFacts, params: &Params) -> u64 {
        let room = most_withdrawable(guest, params).saturating_sub(withdrawable_bytes(guest, params));
        self.withdrawable_bytes.saturating_add(room)
    }

    /// The reserve after a guest has grown by `growth_bytes`.
    pub(crate) fn after(mut self, guest: &GuestFacts, growth_bytes: u64, params: &Params) -> Self {
        let mut grown = guest.clone();
        grown.actual_bytes = guest.size_bytes().saturating_add(growth_bytes).min(guest.ram_bytes);
        // The guest does not use its growth yet, so the growth counts as free.
        if let Some(claims) = &mut grown.claims {
            claims.free_bytes = claims.free_bytes.saturating_add(growth_bytes);
            claims.available_bytes = claims.available_bytes.saturating_add(growth_bytes);
        }
        let more = withdrawable_bytes(&grown, params).saturating_sub(withdrawable_bytes(guest, params));
        self.demand_bytes = self.demand_bytes.saturating_add(growth_bytes.saturating_sub(owed_bytes(guest)));
        self.withdrawable_bytes = self.withdrawable_bytes.saturating_add(more);
        self
    }
}

/// The part of a guest's loan that can be withdrawn in time, and that the guest does not need.
fn withdrawable_bytes(guest: &GuestFacts, params: &Params) -> u64 {
    guest.loan_bytes().min(guest.idle_bytes()).min(most_withdrawable(guest, params))
}

/// The most that a guest's balloon can take within the time for withdrawals (10 s); 0 if its driver does not do as it
/// is told.
fn most_withdrawable(guest: &GuestFacts, params: &Params) -> u64 {
    if guest.can_balloon() { guest.withdrawal_bytes_per_s.saturating_mul(params.withdrawal.as_secs()) } else { 0 }
}

/// Memory that a guest lacks to its guarantee.
pub(crate) fn owed_bytes(guest: &GuestFacts) -> u64 {
    guest.guaranteed_bytes.saturating_sub(guest.size_bytes())
}

/// Memory that a guest is about to get: growth that it was told, or what it lacks to its guarantee, whichever is more.
pub(crate) fn expected_bytes(guest: &GuestFacts) -> u64 {
    owed_bytes(guest).max(guest.coming_bytes())
}

fn reserved_bytes(facts: &Facts) -> u64 {
    facts.reservations.iter().fold(0, |sum, reservation| sum.saturating_add(reservation.bytes))
}

fn sum(guests: &[GuestFacts], bytes: impl Fn(&GuestFacts) -> u64) -> u64 {
    guests.iter().map(bytes).fold(0, u64::saturating_add)
}

/// Bytes with a sign; no host has as many as do not fit.
pub(crate) fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
