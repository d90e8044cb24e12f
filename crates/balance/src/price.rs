//! The price of a balloon: frames that the host gets for each byte that a guest gives up.
//!
//! A balloon takes free pages first, then page cache, then the rest. Each tier of a guest is one offer:
//!
//! | tier | frees | hurts |
//! |---|---|---|
//! | free in the guest | a frame, or the right to take one | nobody |
//! | page cache | the part that is not shared | a read from disk, at worst |
//! | the rest | the part that is not shared | swapping inside the guest |
//!
//! A page that is shared frees nothing. Offers that yield little are not taken. Shared pages are taken to be page cache first, since
//! guests that run the same programs read the same files. A balloon cannot pass page cache by. Where that yields little, it is one
//! offer with the rest.

use crate::facts::{Facts, GuestFacts};
use serde::Serialize;

/// Least yield of an offer: 1/8 of a byte for each byte.
const LEAST_YIELD: f64 = 0.125;
/// Free memory that a guest keeps, as a part of its size: 1/32.
const KEPT_FREE: u64 = 32;

/// The memory that a balloon takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// Pages that are free in the guest.
    Free,
    /// Page cache.
    Cache,
    /// Everything else, or memory of which the guest tells nothing.
    InUse,
}

impl Tier {
    /// The name used in reasons.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Free => "free pages",
            Self::Cache => "page cache",
            Self::InUse => "memory in use",
        }
    }
}

/// Memory that a guest could give up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Offer {
    /// Index of the guest in the facts.
    pub guest: usize,
    /// Its tier.
    pub tier: Tier,
    /// Bytes by which the guest would shrink.
    pub bytes: u64,
    /// Bytes that the host gets for each byte.
    pub part_freed: f64,
}

/// Memory that a guest gives up, and the host's gain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Index of the guest in the facts.
    pub guest: usize,
    /// Bytes by which the guest shrinks.
    pub bytes: u64,
    /// Bytes that the host gets.
    pub freed_bytes: u64,
    /// The dearest tier that was touched.
    pub tier: Tier,
}

/// All offers of all loans, the best first: by tier, then by yield.
pub fn offers(facts: &Facts) -> Vec<Offer> {
    let of_guest = |(n, guest): (usize, &GuestFacts)| of_guest(n, guest);
    let mut offers: Vec<Offer> = facts.guests.iter().enumerate().flat_map(of_guest).collect();
    offers.sort_by(|a, b| a.tier.cmp(&b.tier).then(b.part_freed.total_cmp(&a.part_freed)).then(a.guest.cmp(&b.guest)));
    offers
}

fn of_guest(n: usize, guest: &GuestFacts) -> Vec<Offer> {
    if !guest.can_balloon() {
        return Vec::new();
    }
    let loan = guest.loan_bytes();
    let kept = guest.size_bytes() / KEPT_FREE;
    let (free, cache) = guest.claims.map_or((0, 0), |claims| (claims.free_bytes, claims.cache_bytes));
    // The guest never used memory that has no frame. That much is free, whatever it says.
    let free = free.max(guest.untouched_bytes());
    let (cache_part, rest_part) = unshared_parts(guest, free, cache);
    let free_bytes = free.saturating_sub(kept).min(loan);
    let cache_bytes = cache.min(loan - free_bytes);
    let rest_bytes = loan - free_bytes - cache_bytes;
    // Frames that nobody has touched yield as much: the host need not keep them ready.
    let known = if cache_part >= LEAST_YIELD {
        [(Tier::Free, free_bytes, 1.0), (Tier::Cache, cache_bytes, cache_part), (Tier::InUse, rest_bytes, rest_part)]
    } else {
        let both = (cache_bytes + rest_bytes).max(1) as f64;
        let part = (cache_bytes as f64 * cache_part + rest_bytes as f64 * rest_part) / both;
        [(Tier::Free, free_bytes, 1.0), (Tier::Cache, 0, 0.0), (Tier::InUse, cache_bytes + rest_bytes, part)]
    };
    let mut offers = Vec::new();
    for (tier, bytes, part_freed) in known {
        if bytes > 0 && part_freed >= LEAST_YIELD {
            offers.push(Offer { guest: n, tier, bytes, part_freed });
        }
    }
    offers
}

/// Parts of page cache, and of the rest, whose frames the guest holds alone, of 1.
fn unshared_parts(guest: &GuestFacts, free: u64, cache: u64) -> (f64, f64) {
    let in_cache = guest.folded_bytes.min(cache);
    let in_rest = guest.folded_bytes - in_cache;
    let rest = guest.size_bytes().saturating_sub(free).saturating_sub(cache);
    let unshared = |shared: u64, all: u64| if all == 0 { 1.0 } else { (1.0 - shared as f64 / all as f64).max(0.0) };
    (unshared(in_cache, cache), unshared(in_rest, rest))
}

/// The cheapest way to free `needed_bytes`, or as much of it as loans yield. `most` bounds by how much each guest may
/// shrink.
pub fn take(facts: &Facts, needed_bytes: u64, most: impl Fn(usize) -> u64) -> Vec<Taken> {
    let mut taken: Vec<Taken> = Vec::new();
    let mut left = needed_bytes;
    for offer in offers(facts) {
        let already = taken.iter().find(|t| t.guest == offer.guest).map_or(0, |t| t.bytes);
        let room = most(offer.guest).saturating_sub(already);
        let wanted = (left as f64 / offer.part_freed).ceil() as u64;
        let bytes = offer.bytes.min(room).min(wanted);
        if left == 0 || bytes == 0 {
            continue;
        }
        let freed_bytes = ((bytes as f64 * offer.part_freed) as u64).min(bytes);
        left = left.saturating_sub(freed_bytes.max(1));
        match taken.iter_mut().find(|t| t.guest == offer.guest) {
            Some(t) => {
                (t.bytes, t.freed_bytes) = (t.bytes + bytes, t.freed_bytes + freed_bytes);
                t.tier = offer.tier;
            }
            None => taken.push(Taken { guest: offer.guest, bytes, freed_bytes, tier: offer.tier }),
        }
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Claims;
    use crate::test_world::guest;

    const M: u64 = 1 << 20;

    /// Two guests of 256 MiB, half of them lent: all of the second's memory is shared.
    fn facts() -> Facts {
        let mut unshared = guest("a", 256 * M, 128 * M);
        let mut shared = guest("b", 256 * M, 128 * M);
        unshared.claims = Some(Claims { total_bytes: 256 * M, cache_bytes: 40 * M, ..Claims::default() });
        shared.folded_bytes = shared.resident_bytes;
        shared.claims = Some(Claims { free_bytes: 18 * M, ..unshared.claims.unwrap() });
        Facts { guests: vec![unshared, shared], ..Facts::default() }
    }

    #[test]
    fn shared_memory_is_left_alone() {
        let taken = take(&facts(), 1 << 40, |_| u64::MAX);
        let all: Vec<_> = taken.iter().map(|t| (t.guest, t.bytes / M, t.freed_bytes / M)).collect();
        assert_eq!(all, [(1, 10, 10), (0, 128, 128)], "of the shared guest, free pages only");
    }

    #[test]
    fn free_pages_go_before_cache_and_cache_before_the_rest() {
        let taken = take(&facts(), 30 * M, |_| u64::MAX);
        assert_eq!(
            taken.iter().map(|t| (t.guest, t.bytes / M, t.tier)).collect::<Vec<_>>(),
            [(1, 10, Tier::Free), (0, 20, Tier::Cache)]
        );
    }

    #[test]
    fn shared_cache_is_left_alone_unless_the_rest_yields_enough() {
        let mut facts = facts();
        facts.guests.pop();
        facts.guests[0].folded_bytes = 40 * M;
        let of = |facts: &Facts| {
            take(facts, 1 << 40, |_| u64::MAX).iter().map(|t| (t.bytes / M, t.tier)).collect::<Vec<_>>()
        };
        assert_eq!(of(&facts), [(128, Tier::InUse)], "all of the loan, since 88 MiB of it are not shared");
        facts.guests[0].guaranteed_bytes = 216 * M;
        assert_eq!(of(&facts), [], "the loan is as large as the page cache, which frees nothing");
    }

    #[test]
    fn half_shared_guest_gives_twice_as_much_for_the_same_frames() {
        let mut facts = facts();
        facts.guests.pop();
        facts.guests[0].claims = None;
        facts.guests[0].folded_bytes = facts.guests[0].resident_bytes / 2;
        let taken = take(&facts, 10 * M, |_| u64::MAX);
        assert_eq!((taken[0].bytes, taken[0].freed_bytes), (20 * M, 10 * M));
        let bounded = take(&facts, 10 * M, |_| 8 * M);
        assert_eq!((bounded[0].bytes, bounded[0].freed_bytes), (8 * M, 4 * M));
    }
}
