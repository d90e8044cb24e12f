//! The step `advise` of the pressure ladder: proposes a guest to be moved to another host.
//!
//! Of the guests that can be moved, the one is proposed that frees most memory here for the memory that it takes there.
//! Only guests count that free all that is missing; if none does, the one that frees most is proposed.
//!
//! ```text
//!   proposed -- 15 min --> again, if there is pressure -- 30 min --> again -- 1 h --> ... 6 h at most
//!       ^                                                                |
//!       +---- 15 min again: its guest has gone, or nothing was proposed for 6 h after it was due
//! ```
//!
//! The waits between proposals do not depend on which guests they name, because the effect of one move has to show
//! before the next.

use crate::facts::{Facts, GuestFacts};
use crate::ladder::{Pressure, Rung, relief_bytes};
use serde::{Deserialize, Serialize};

/// Time from the first proposal to the next one, in seconds: 15 minutes. Each further one takes twice as long as the
/// one before.
const FIRST_WAIT_S: u64 = 15 * 60;
/// Longest time between two proposals, in seconds: 6 hours.
const LONGEST_WAIT_S: u64 = 6 * 3600;

/// A guest that should go to another host. Times are in seconds since the host started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proposal {
    /// Its id.
    pub guest: String,
    /// Memory that its going frees, in bytes: what it holds alone, its VMM's memory included.
    pub frees_bytes: u64,
    /// Memory that it takes where nothing of it is folded, in bytes.
    pub costs_bytes: u64,
    /// When it was proposed first; later proposals in a row have the same time.
    pub first_s: u64,
    /// When a guest is proposed next, if there is pressure then.
    pub next_s: u64,
}

/// The last proposal, and the time from it to the next one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Proposals {
    last: Option<Proposal>,
    wait_s: u64,
}

impl Proposals {
    /// The last proposal.
    pub const fn last(&self) -> Option<&Proposal> {
        self.last.as_ref()
    }

    /// Puts measured figures into the last proposal, in bytes: memory that moving the guest frees here, and memory that
    /// it takes on another host. If the second is `None`, the estimate of [`Proposals::see`] stays.
    pub fn measured(&mut self, frees_bytes: u64, costs_bytes: Option<u64>) {
        if let Some(last) = &mut self.last {
            last.frees_bytes = frees_bytes;
            last.costs_bytes = costs_bytes.unwrap_or(last.costs_bytes);
        }
    }

    /// Makes and returns a proposal, if one is due and the host is under pressure. `at_s` is the time in seconds since
    /// the host started. `can_go` tells whether a guest can be moved; it is asked only if a proposal is due.
    pub fn see(&mut self, at_s: u64, facts: &Facts, can_go: &dyn Fn(&GuestFacts) -> bool) -> Option<Proposal> {
        let is_due = self.last.as_ref().is_none_or(|last| at_s >= last.next_s);
        if facts.host.rung < Rung::Advise || Pressure::of(&facts.host) != Pressure::High || !is_due {
            return None;
        }
        let guest = best(facts, can_go)?;
        let before = self.last.take().filter(|last| {
            let is_there = facts.guests.iter().any(|guest| guest.id == last.guest);
            is_there && at_s.saturating_sub(last.next_s) < LONGEST_WAIT_S
        });
        self.wait_s = match before {
            Some(_) => self.wait_s.saturating_mul(2).clamp(FIRST_WAIT_S, LONGEST_WAIT_S),
            None => FIRST_WAIT_S,
        };
        let first_s = before.filter(|last| last.guest == guest.id).map_or(at_s, |last| last.first_s);
        let next_s = at_s.saturating_add(self.wait_s);
        let (frees_bytes, costs_bytes) = (frees(guest), costs(guest));
        self.last = Some(Proposal { guest: guest.id.clone(), frees_bytes, costs_bytes, first_s, next_s });
        self.last.clone()
    }
}

/// Memory that is freed here if a guest is moved away. A folded page frees nothing as long as another guest holds it.
const fn frees(guest: &GuestFacts) -> u64 {
    guest.private_bytes().saturating_add(guest.beside_bytes)
}

/// Memory that a guest takes on another host, before anything of it is folded there. Memory that is in swap here takes
/// frames there.
const fn costs(guest: &GuestFacts) -> u64 {
    guest.resident_bytes.saturating_add(guest.swapped_bytes)
}

/// The guest that frees most memory here for the memory that it takes on another host.
fn best<'a>(facts: &'a Facts, can_go: &dyn Fn(&GuestFacts) -> bool) -> Option<&'a GuestFacts> {
    let all: Vec<&GuestFacts> = facts.guests.iter().filter(|guest| frees(guest) > 0 && can_go(guest)).collect();
    let enough = relief_bytes(&facts.host).min(all.iter().map(|guest| frees(guest)).max()?);
    // Of two, a frees more for its cost than b if frees(a) / costs(a) > frees(b) / costs(b).
    let product = |a: &GuestFacts, b: &GuestFacts| u128::from(frees(a)).saturating_mul(u128::from(costs(b)));
    let by_yield = |a: &&GuestFacts, b: &&GuestFacts| product(a, b).cmp(&product(b, a));
    let alike = |a: &&GuestFacts, b: &&GuestFacts| frees(a).cmp(&frees(b)).then_with(|| b.id.cmp(&a.id));
    let enough = all.into_iter().filter(|guest| frees(guest) >= enough);
    enough.max_by(|a, b| by_yield(a, b).then_with(|| alike(a, b)))
}

#[cfg(test)]
#[path = "proposal_tests.rs"]
mod tests;
