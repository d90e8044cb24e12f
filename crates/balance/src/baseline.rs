//! Rules by which other programs balance memory, for comparison: only the bench uses them.
//!
//! They follow the original rules, with their constants. None of them knows which pages are shared.

mod mom;
mod proxmox;
mod squeezed;
#[cfg(test)]
mod tests;

pub use mom::Mom;
pub use proxmox::Proxmox;
pub use squeezed::Squeezed;

use crate::facts::{Facts, GuestFacts};
use crate::policy::{Policy, Wish};

/// Names of the baselines.
pub const NAMES: [&str; 3] = ["mom", "proxmox", "squeezed"];

/// The baseline of this name.
pub fn named(name: &str) -> Option<&'static dyn Policy> {
    match name {
        "mom" => Some(&Mom),
        "proxmox" => Some(&Proxmox),
        "squeezed" => Some(&Squeezed),
        _ => None,
    }
}

/// A wish for each guest: the given size, or the size that it has.
fn wishes(facts: &Facts, size: impl Fn(usize, &GuestFacts) -> Option<u64>, rule: &str) -> Vec<Wish> {
    let of = |(n, guest): (usize, &GuestFacts)| {
        let size_bytes = size(n, guest).unwrap_or(guest.actual_bytes);
        Wish { size_bytes, reason: format!("by the rules of {rule}") }
    };
    facts.guests.iter().enumerate().map(of).collect()
}
