//! oVirt's Memory Overcommitment Manager: its balloon rules, as vdsm ships them.
//!
//! A host with less than 20% free shrinks every guest by 5% a round, down to what the guest uses and some free memory.
//! That free memory falls with the host's, and below 5% it is negative: guests are meant to swap. Other hosts let every
//! guest grow. The rules average over ten samples, which is the caller's part.

use super::wishes;
use crate::facts::{Facts, GuestFacts};
use crate::policy::{Policy, Wish};

/// Free part of the host's memory below which guests shrink.
const PRESSURE: f64 = 0.20;
/// Free part of the host's memory at or below which guests are made to swap.
const CRITICAL: f64 = 0.05;
/// Free part of a guest's memory that a guest keeps if the host has plenty.
const GUEST_FREE: f64 = 0.20;
/// Largest change of a balloon in a round, as a part of its size.
const MOST_CHANGE: f64 = 0.05;
/// Change of a guest's size up to which no change is made, as a part of the size.
const LEAST_CHANGE: f64 = 0.0025;

/// MOM's rules: every 10 s, all guests alike.
pub struct Mom;

impl Policy for Mom {
    fn name(&self) -> &'static str {
        "mom"
    }

    fn sizes(&self, facts: &Facts, _lendable_bytes: u64) -> Vec<Wish> {
        let free = facts.host.available_bytes as f64 / facts.host.total_bytes.max(1) as f64;
        wishes(
            facts,
            |_, guest| changed(guest, if free < PRESSURE { shrunk(guest, free) } else { grown(guest) }),
            "MOM",
        )
    }
}

/// The new size; `None` if it differs too little from the present one.
fn changed(guest: &GuestFacts, size: Option<f64>) -> Option<u64> {
    let now = guest.actual_bytes as f64;
    size.filter(|size| (size - now).abs() > LEAST_CHANGE * now).map(|size| size as u64)
}

/// The smallest size that leaves a guest `free_part` of its present size free beside the memory that it uses; its
/// guarantee at least. `None`: it has sent no statistics.
fn least(guest: &GuestFacts, free_part: f64) -> Option<f64> {
    let used = guest.actual_bytes as f64 - guest.claims?.free_bytes as f64;
    Some((used + free_part * guest.actual_bytes as f64).max(guest.guaranteed_bytes as f64))
}

fn shrunk(guest: &GuestFacts, free: f64) -> Option<f64> {
    let free_part = if free <= CRITICAL { free - CRITICAL } else { GUEST_FREE * (free / PRESSURE) };
    let now = guest.actual_bytes as f64;
    let size = (now * (1.0 - MOST_CHANGE)).max(least(guest, free_part)?);
    Some(size).filter(|size| *size <= now)
}

fn grown(guest: &GuestFacts) -> Option<f64> {
    if guest.actual_bytes >= guest.ram_bytes {
        return None;
    }
    let size = (guest.actual_bytes as f64 * (1.0 + MOST_CHANGE)).min(guest.ram_bytes as f64);
    Some(size.max(least(guest, GUEST_FREE)?))
}
