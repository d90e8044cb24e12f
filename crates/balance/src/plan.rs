//! The plan of one round: guests that shrink, then guests that grow.
//!
//! ```text
//!   spare < 0      loans are withdrawn, the cheapest first; nobody grows but up to a guarantee
//!   pressure       the same, as far as it takes to end the pressure (ladder.rs)
//!   spare >= 0     the policy's sizes: growth from spare memory, then from guests that the policy wants smaller
//! ```
//!
//! [`Plan::grows`] has only growth for which memory is available now. Growth that has to wait until other guests have
//! shrunk is planned in a later round. Growth that the reserve does not cover is refused with its reason.
//!
//! Small changes are left out. A guest that has grown shrinks only after a cooldown, and the reverse. Withdrawals and
//! guarantees have no cooldown.

use crate::facts::{Facts, GuestFacts};
use crate::ladder::{self, Rung};
use crate::params::Params;
use crate::policy::{Policy, Wish};
use crate::price::{self, Need, Taken};
use crate::reserve::{Budget, Reserve, owed_bytes, signed};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// A change of one guest's size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// The guest.
    pub guest: String,
    /// Its size.
    pub from_bytes: u64,
    /// Its size afterwards.
    pub to_bytes: u64,
    /// For a guest that shrinks: memory that the host is expected to get. For a guest that grows: memory that it may
    /// take.
    pub expected_bytes: u64,
    /// Whether the guest grows to its guarantee, which it gets even if others do not shrink.
    pub is_owed: bool,
    /// The reason.
    pub reason: String,
}

/// A growth that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// The guest, or the name of a reservation.
    pub guest: String,
    /// Bytes that it would have got.
    pub bytes: u64,
    /// The reason.
    pub reason: String,
}

/// The plan of one round.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The policy's name.
    pub policy: &'static str,
    /// Memory that can be lent.
    pub budget: Budget,
    /// Memory for the worst break storm.
    pub reserve: Reserve,
    /// First phase: guests that shrink.
    pub frees: Vec<Step>,
    /// Second phase: guests that grow, once the first has landed.
    pub grows: Vec<Step>,
    /// Growth that is not made.
    pub refused: Vec<Refusal>,
}

/// Direction and time of each guest's last change.
#[derive(Clone, Debug, Default)]
pub struct History(BTreeMap<String, (bool, Duration)>);

impl History {
    /// Notes that a step was made at this time.
    pub fn note(&mut self, step: &Step, at: Duration) {
        self.0.insert(step.guest.clone(), (step.to_bytes > step.from_bytes, at));
    }

    /// Forgets guests that are gone.
    pub fn keep(&mut self, facts: &Facts) {
        self.0.retain(|id, _| facts.guests.iter().any(|guest| guest.id == *id));
    }

    /// Whether a guest may grow, or shrink if not `grow`: its last change was in the same direction, or the cooldown is
    /// over.
    fn may(&self, guest: &GuestFacts, grow: bool, at: Duration, params: &Params) -> bool {
        let last = self.0.get(&guest.id);
        last.is_none_or(|(grew, when)| *grew == grow || at.saturating_sub(*when) >= params.cooldown)
    }
}

/// Bytes of a mebibyte.
const MIB: u64 = 1 << 20;

/// A plan under way.
struct Draft<'a> {
    facts: &'a Facts,
    params: &'a Params,
    plan: Plan,
}

/// Plans a round.
pub fn plan(facts: &Facts, policy: &dyn Policy, history: &History, at: Duration, params: &Params) -> Plan {
    let (budget, reserve) = (Budget::of(facts), Reserve::of(facts, params));
    let (frees, grows, refused) = (Vec::new(), Vec::new(), Vec::new());
    let plan = Plan { policy: policy.name(), budget, reserve, frees, grows, refused };
    let mut draft = Draft { facts, params, plan };
    draft.keep_guarantees();
    let is_short = facts.host.rung >= Rung::Withdraw;
    let frames_bytes = if is_short { ladder::relief_bytes(&facts.host) } else { 0 };
    let last_frames_bytes = if is_short { ladder::last_resort_bytes(&facts.host) } else { 0 };
    let need = |spare_bytes| Need { spare_bytes, frames_bytes, last_frames_bytes };
    match budget.spare_bytes {
        // A little more than is missing is withdrawn, so that not a few bytes are missing again in each round.
        spare if spare < 0 => {
            let needed = spare.unsigned_abs().saturating_add(kept_spare(facts, params) / 2);
            draft.withdraw(need(needed), "more is lent than there is");
        }
        _ if is_short => {
            draft.withdraw(need(0), "the host is short of memory");
        }
        _ => {
            let wishes = policy.sizes(facts, budget.lendable_bytes(kept_spare(facts, params)));
            draft.follow(&wishes, history, at);
        }
    }
    draft.plan
}

/// Plans to have `bytes` spare for a guest that has not started. Returns the guests that have to shrink, or a refusal
/// if there cannot be that much.
///
/// # Errors
/// All loans together free too little, the reserve does not cover the guest, or the host is short of memory.
pub fn make_room(facts: &Facts, name: &str, bytes: u64, params: &Params) -> Result<Vec<Step>, Refusal> {
    let (budget, reserve) = (Budget::of(facts), Reserve::of(facts, params));
    let lacking = signed(bytes).saturating_sub(budget.spare_bytes).max(0).unsigned_abs();
    let taken = price::take(facts, Need { spare_bytes: lacking, ..Need::default() }, |_| u64::MAX);
    // A guest that holds more memory than its driver tells gives less than its offers said.
    let steps: Vec<Step> = taken.iter().filter_map(|taken| shrink(facts, taken, &format!("room for {name}"))).collect();
    let freed = steps.iter().fold(0, |sum: u64, step| sum.saturating_add(step.expected_bytes));
    let refuse = |reason| Err(Refusal { guest: name.into(), bytes, reason });
    if facts.host.rung >= Rung::Refuse {
        return refuse("the host has been short of memory, and withdrawing loans did not help".into());
    }
    if freed < lacking {
        return refuse(format!(
            "{} MiB are wanted: {} MiB are spare, and withdrawing all of the loans that guests do not need would free {} MiB",
            bytes.div_ceil(MIB),
            // The shift rounds down, for negative numbers, too.
            budget.spare_bytes >> 20,
            freed >> 20
        ));
    }
    let cover = reserve.ready_bytes.saturating_add(reserve.withdrawable_bytes);
    if reserve.demand_bytes.saturating_add(bytes) > cover {
        return refuse(format!(
            "the reserve would be eaten: guests may take {} MiB, this one {} MiB, and {} MiB stand against it",
            reserve.demand_bytes.div_ceil(MIB),
            bytes.div_ceil(MIB),
            cover >> 20
        ));
    }
    Ok(steps)
}

/// Memory that stays spare, so that loans are not withdrawn as soon as they are given: the least change of all guests
/// together.
fn kept_spare(facts: &Facts, params: &Params) -> u64 {
    facts.guests.iter().map(|guest| params.least_change_bytes(guest.ram_bytes)).fold(0, u64::saturating_add)
}

/// The step by which a guest gives this memory up; `None` if the guest has nothing to give. The step begins at the size
/// that the guest's driver tells, even if frames show that the guest holds more: a driver that is told the larger size
/// would let the guest grow.
fn shrink(facts: &Facts, taken: &Taken, why: &str) -> Option<Step> {
    let guest = &facts.guests[taken.guest];
    let size = guest.actual_bytes;
    let to_bytes = size.saturating_sub(taken.bytes).max(guest.guaranteed_bytes);
    (to_bytes < size).then(|| Step {
        guest: guest.id.clone(),
        from_bytes: size,
        to_bytes,
        expected_bytes: taken.freed_bytes.min(size.saturating_sub(to_bytes)),
        is_owed: false,
        reason: format!("{why}; its balloon takes {}", taken.tier.name()),
    })
}

impl Draft<'_> {
    /// Plans growth of guests below their guaranteed size, up to that size.
    fn keep_guarantees(&mut self) {
        for guest in self.facts.guests.iter().filter(|guest| guest.can_balloon()) {
            if owed_bytes(guest) > 0 {
                self.plan.grows.push(Step {
                    guest: guest.id.clone(),
                    from_bytes: guest.size_bytes(),
                    to_bytes: guest.guaranteed_bytes,
                    expected_bytes: owed_bytes(guest),
                    is_owed: true,
                    reason: "it has less than it is guaranteed".into(),
                });
            }
        }
    }

    /// Plans to withdraw the cheapest loans that free what is needed.
    fn withdraw(&mut self, need: Need, why: &str) {
        let taken = price::take(self.facts, need, |_| u64::MAX);
        self.plan.frees.extend(taken.iter().filter_map(|taken| shrink(self.facts, taken, why)));
    }

    /// Plans growth as the policy wants it, as far as spare memory, reserve and cooldown allow; and guests that shrink
    /// for growth that has to wait.
    fn follow(&mut self, wishes: &[Wish], history: &History, at: Duration) {
        let spare = self.plan.budget.spare_bytes.max(0).unsigned_abs();
        let mut from_spare = spare.saturating_sub(kept_spare(self.facts, self.params));
        let mut waiting = 0_u64;
        let mut reserve = self.plan.reserve;
        for (guest, wish) in self.facts.guests.iter().zip(wishes) {
            let wanted = self.growth(guest, wish, history, at);
            if wanted == 0 {
                continue;
            }
            let borne = reserve.bears(guest, wanted, self.params);
            if borne < self.params.least_change_bytes(guest.ram_bytes) {
                self.refuse(guest, wanted, &reserve);
                continue;
            }
            let given = borne.min(from_spare);
            waiting = waiting.saturating_add(borne.saturating_sub(given));
            if given >= self.params.least_change_bytes(guest.ram_bytes) {
                from_spare = from_spare.saturating_sub(given);
                reserve = reserve.after(guest, given, self.params);
                let size = guest.size_bytes();
                let to_bytes = size.saturating_add(guest.coming_bytes()).saturating_add(given);
                let (guest, reason) = (guest.id.clone(), wish.reason.clone());
                let step = Step { guest, from_bytes: size, to_bytes, expected_bytes: given, is_owed: false, reason };
                self.plan.grows.push(step);
            }
        }
        self.move_loans(wishes, waiting, history, at);
    }

    /// Shrinks guests that the policy wants smaller, as far as others wait for that memory (`waiting` bytes).
    fn move_loans(&mut self, wishes: &[Wish], waiting: u64, history: &History, at: Duration) {
        let (facts, params) = (self.facts, self.params);
        let most = |n: usize| {
            let guest = &facts.guests[n];
            let surplus = guest.size_bytes().saturating_sub(wishes[n].size_bytes);
            let large = surplus >= params.least_change_bytes(guest.ram_bytes);
            if large && history.may(guest, false, at, params) { surplus } else { 0 }
        };
        let large = |taken: &&Taken| taken.bytes >= params.least_change_bytes(facts.guests[taken.guest].ram_bytes);
        let taken = price::take(facts, Need { spare_bytes: waiting, ..Need::default() }, most);
        let steps = taken.iter().filter(large).filter_map(|taken| shrink(facts, taken, "others get more out of it"));
        self.plan.frees.extend(steps);
    }

    /// Bytes by which a guest may grow in this round to follow a wish.
    fn growth(&self, guest: &GuestFacts, wish: &Wish, history: &History, at: Duration) -> u64 {
        let size = guest.size_bytes();
        let wanted = wish.size_bytes.min(guest.ram_bytes).saturating_sub(size.saturating_add(guest.coming_bytes()));
        let least = self.params.least_change_bytes(guest.ram_bytes);
        let owed = owed_bytes(guest) > 0;
        if owed || !guest.can_balloon() || wanted < least || !history.may(guest, true, at, self.params) {
            return 0;
        }
        // Memory that a guest has not touched counts against its limit, too.
        let left = guest.cgroup_left_bytes.map_or(u64::MAX, |left| left.saturating_sub(guest.untouched_bytes()));
        let most = guest.ram_bytes.checked_div(self.params.most_growth_part).unwrap_or(0).max(least).min(left);
        if most < least { 0 } else { wanted.min(most) }
    }

    /// Refuses a growth that the reserve does not cover. The reason has the sums.
    fn refuse(&mut self, guest: &GuestFacts, bytes: u64, reserve: &Reserve) {
        let reason = format!(
            "the reserve would be eaten: guests may take {} MiB, {} MiB with this growth, against which {} MiB are free and {} MiB \
             could be withdrawn in 10 s",
            reserve.demand_bytes.div_ceil(MIB),
            reserve.demand_bytes.saturating_add(bytes).div_ceil(MIB),
            reserve.ready_bytes >> 20,
            reserve.withdrawable_with_growth(guest, self.params) >> 20
        );
        self.plan.refused.push(Refusal { guest: guest.id.clone(), bytes, reason });
    }
}
