//! The proportional policy of squeezed, from the Xen project.
//!
//! Every guest is at the same part of the way from its minimum to its maximum. That part is the one at which the host
//! has as much free as it should. Drivers that are stuck are left out. The order of squeezed's changes is part of our
//! own plan: memory is freed before any guest grows.

use super::wishes;
use crate::facts::{Facts, GuestFacts};
use crate::policy::{Policy, Wish};

/// Distance from the target that counts as reached: 4 KiB.
const INACCURACY_BYTES: u64 = 4096;

/// Squeezed's proportional share.
pub struct Squeezed;

impl Policy for Squeezed {
    fn name(&self) -> &'static str {
        "squeezed"
    }

    fn sizes(&self, facts: &Facts, _lendable_bytes: u64) -> Vec<Wish> {
        let part = part(facts);
        let size = |guest: &GuestFacts| guest.guaranteed_bytes.saturating_add((part * range(guest) as f64) as u64);
        wishes(facts, |_, guest| guest.can_balloon().then(|| size(guest)), "squeezed")
    }
}

/// The part of their ranges that guests have above their minimum.
fn part(facts: &Facts) -> f64 {
    let active = || facts.guests.iter().filter(|guest| guest.can_balloon());
    let freeable =
        |g: &GuestFacts| g.actual_bytes.saturating_sub(g.guaranteed_bytes.saturating_add(2 * INACCURACY_BYTES));
    let most_free = active().map(freeable).fold(facts.host.available_bytes, u64::saturating_add);
    let surplus = most_free.saturating_sub(facts.host.floor_bytes);
    let ranges = active().map(range).fold(0, u64::saturating_add);
    if ranges == 0 { 0.0 } else { (surplus as f64 / ranges as f64).clamp(0.0, 1.0) }
}

const fn range(guest: &GuestFacts) -> u64 {
    guest.ram_bytes.saturating_sub(guest.guaranteed_bytes)
}
