//! What memory costs that a balloon takes from a guest: the frames that the host gets for each byte that the guest
//! gives up.
//!
//! A balloon takes free pages first, then page cache, then the rest. Each tier of a guest is one offer:
//!
//! | tier | frees | hurts |
//! |---|---|---|
//! | free in the guest | a frame, or the right to take one | nobody |
//! | page cache | the part that is not shared | a read from disk, at worst |
//! | what its kernel keeps free | the part that is not shared | its kernel looks for free pages sooner |
//! | the rest | the part that is not shared | swapping inside the guest; without swap, its processes are killed |
//!
//! So memory of the last tier is taken only if the host itself runs out of memory, when some program is hurt in any
//! case.
//!
//! A free page that the guest never touched has no frame. Taking it frees no frame, but the host need not keep one
//! ready for it any more: that is spare memory. A host under pressure lacks frames. So each offer has two yields, and
//! [`Need`] has sums of both.
//!
//! Taking a shared page frees nothing, and its sharing is lost: a guest that reads the same data again takes a new
//! frame for it, so that the host has less than before. So an offer must free at least half of the bytes that it takes.
//! If memory runs out, an eighth is enough.
//!
//! Shared pages are assumed to be page cache first, since guests that run the same programs read the same files. A
//! balloon takes page cache before other memory in use. So if page cache yields little, it is one offer with the memory
//! that the kernel keeps free.

use crate::facts::{Facts, GuestFacts};
use serde::Serialize;

/// Smallest part of its bytes that an offer must free: 1/2. Of memory that frees only an eighth, seven eighths would be
/// lost sharing.
const GOOD_YIELD: f64 = 0.5;
/// The same where memory runs out and better offers are used up: 1/8.
const LEAST_YIELD: f64 = 0.125;
/// Part of a guest's RAM that its kernel keeps free: 3/16. With less free memory, Linux frees some, out of page cache.
/// With huge pages, `min_free_kbytes` is 5% of RAM, and does not follow the balloon. `high` in `/proc/zoneinfo` is 3/2
/// of that. A balloon that takes pages out of blocks of another kind raises `high` by another 3/2 of itself
/// (`watermark_boost_factor`).
const KEPT_FREE: (u64, u64) = (3, 16);
/// Most memory that a guest's kernel keeps free: 250 MiB. That is the same sum with three zones of memory, the most
/// that guests have.
const MOST_KEPT_FREE: u64 = 250 << 20;
/// Smallest amount of free memory that makes an offer of tier [`Tier::Free`], as a part of RAM: 1/64. A kernel that
/// frees memory time and again has a little each time. Less is priced like memory that the kernel keeps free, so that
/// no loan is too small to be withdrawn.
const LEAST_FREE: u64 = 64;

/// Kinds of a guest's memory, in the order in which a balloon takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// Pages that are free in the guest.
    Free,
    /// Page cache.
    Cache,
    /// Other memory that it says it could free: its kernel keeps it free.
    Kept,
    /// Everything else, or memory of which the guest tells nothing.
    InUse,
}

impl Tier {
    /// The name used in reasons.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Free => "free pages",
            Self::Cache => "page cache",
            Self::Kept => "memory that its kernel keeps free",
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
    /// Bytes that the host gets for each byte: frames, or frames that it need not keep ready any more.
    pub part_freed: f64,
    /// Bytes of frames that the host gets for each byte.
    pub part_in_frames: f64,
}

/// Memory that the host lacks. Each of the sums is to be freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Spare memory: frames, or frames that the host need not keep ready any more.
    pub spare_bytes: u64,
    /// Frames.
    pub frames_bytes: u64,
    /// Frames that are to be freed at any price.
    pub last_frames_bytes: u64,
}

impl Need {
    /// Bytes of an offer that free what is needed; 0 if the offer frees too little for its size. They may be more than
    /// the offer has.
    fn wanted_of(self, offer: &Offer) -> u64 {
        let last = wanted(self.last_frames_bytes, offer.part_in_frames, GOOD_YIELD);
        if offer.tier == Tier::InUse {
            return last;
        }
        let spare = wanted(self.spare_bytes, offer.part_freed, GOOD_YIELD);
        spare.max(wanted(self.frames_bytes, offer.part_in_frames, GOOD_YIELD)).max(last)
    }

    /// As [`Self::wanted_of`], for offers that free less than half of their bytes. They are taken only for the frames
    /// that are needed at any price.
    fn wanted_of_dear(self, offer: &Offer) -> u64 {
        wanted(self.last_frames_bytes, offer.part_in_frames, LEAST_YIELD)
    }
}

/// Bytes that a guest must give up so that the host gets `bytes`, if the part `part` of each byte is freed. 0 if `part`
/// is below `least`: the offer is not worth it.
fn wanted(bytes: u64, part: f64, least: f64) -> u64 {
    if part < least { 0 } else { (bytes as f64 / part).ceil() as u64 }
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
    /// The last tier that the balloon reaches, which costs the guest most.
    pub tier: Tier,
}

/// What all guests could give back, the best first: by tier, then by the share of the bytes that frees page frames.
pub fn offers(facts: &Facts) -> Vec<Offer> {
    let of_guest = |(n, guest): (usize, &GuestFacts)| of_guest(n, guest);
    let mut offers: Vec<Offer> = facts.guests.iter().enumerate().flat_map(of_guest).collect();
    offers.sort_by(|a, b| {
        a.tier.cmp(&b.tier).then(b.part_in_frames.total_cmp(&a.part_in_frames)).then(a.guest.cmp(&b.guest))
    });
    offers
}

fn of_guest(n: usize, guest: &GuestFacts) -> Vec<Offer> {
    if !guest.can_balloon() {
        return Vec::new();
    }
    let loan = guest.loan_bytes();
    let kept = guest.ram_bytes.checked_div(KEPT_FREE.1).unwrap_or(0).saturating_mul(KEPT_FREE.0).min(MOST_KEPT_FREE);
    let (free, cache) = guest.claims.map_or((0, 0), |claims| (claims.free_bytes, claims.cache_bytes));
    // The guest never used memory that has neither a frame nor swap. That much is free, even if the guest claims less.
    let free = free.max(guest.never_used_bytes());
    let (cache_part, rest_part) = unshared_parts(guest, free, cache);
    let free_bytes = Some(free.saturating_sub(kept).min(loan)).filter(|bytes| *bytes >= guest.ram_bytes / LEAST_FREE);
    let free_bytes = free_bytes.unwrap_or(0);
    let harmless_bytes = guest.harmless_bytes().min(loan);
    let cache_bytes = cache.min(harmless_bytes.saturating_sub(free_bytes));
    let kept_bytes = harmless_bytes.saturating_sub(free_bytes).saturating_sub(cache_bytes);
    let rest_bytes = loan.saturating_sub(free_bytes).saturating_sub(cache_bytes).saturating_sub(kept_bytes);
    // Which of the guest's free pages the balloon takes is not known. Of those without a frame, the host gains that it
    // need not keep a frame ready for them.
    let in_frames = 1.0 - guest.never_used_bytes() as f64 / free.max(1) as f64;
    let (cache_offer, kept_offer) = if cache_part >= GOOD_YIELD || cache_part >= rest_part {
        ((cache_bytes, cache_part), (kept_bytes, rest_part))
    } else {
        let both = cache_bytes.saturating_add(kept_bytes);
        let part = (cache_bytes as f64 * cache_part + kept_bytes as f64 * rest_part) / both.max(1) as f64;
        ((0, 0.0), (both, part))
    };
    let known = [
        (Tier::Free, (free_bytes, 1.0)),
        (Tier::Cache, cache_offer),
        (Tier::Kept, kept_offer),
        (Tier::InUse, (rest_bytes, rest_part)),
    ];
    let mut offers = Vec::new();
    for (tier, (bytes, part_freed)) in known {
        if bytes > 0 && part_freed >= LEAST_YIELD {
            let part_in_frames = if tier == Tier::Free { in_frames } else { part_freed };
            offers.push(Offer { guest: n, tier, bytes, part_freed, part_in_frames });
        }
    }
    offers
}

/// The parts (0 to 1) of the guest's page cache, and of its other memory in use, whose frames the guest does not share.
fn unshared_parts(guest: &GuestFacts, free: u64, cache: u64) -> (f64, f64) {
    let in_cache = guest.folded_bytes.min(cache);
    let in_rest = guest.folded_bytes.saturating_sub(in_cache);
    let rest = guest.size_bytes().saturating_sub(free).saturating_sub(cache);
    let unshared = |shared: u64, all: u64| if all == 0 { 1.0 } else { (1.0 - shared as f64 / all as f64).max(0.0) };
    (unshared(in_cache, cache), unshared(in_rest, rest))
}

/// The cheapest way to free what is needed, or as much of it as loans can free. `most` limits by how many bytes each
/// guest may shrink.
pub fn take(facts: &Facts, need: Need, most: impl Fn(usize) -> u64) -> Vec<Taken> {
    let mut taking = Taking { need, taken: Vec::new() };
    let mut offers = offers(facts);
    for wanted_of in [Need::wanted_of, Need::wanted_of_dear] {
        for n in 0..offers.len() {
            let offer = offers[n];
            let wanted = offer.bytes.min(wanted_of(taking.need, &offer));
            if wanted == 0 {
                continue;
            }
            // A balloon takes page cache only after all free pages, and other memory only after page cache.
            for cheaper in offers[..n].iter_mut().filter(|cheaper| cheaper.guest == offer.guest) {
                let bytes = std::mem::take(&mut cheaper.bytes);
                taking.take(cheaper, bytes, most(offer.guest));
            }
            taking.take(&offer, wanted, most(offer.guest));
            offers[n].bytes = offers[n].bytes.saturating_sub(wanted);
        }
    }
    taking.taken
}

/// A selection of offers under way: what is still needed, and what was taken.
struct Taking {
    need: Need,
    taken: Vec<Taken>,
}

impl Taking {
    /// Takes `bytes` of an offer, or less: a guest shrinks by `most` bytes at most, over all of its offers.
    fn take(&mut self, offer: &Offer, bytes: u64, most: u64) {
        let already = self.taken.iter().position(|taken| taken.guest == offer.guest);
        let bytes = bytes.min(most.saturating_sub(already.map_or(0, |n| self.taken[n].bytes)));
        if bytes == 0 {
            return;
        }
        let yields = |part: f64| ((bytes as f64 * part) as u64).min(bytes);
        let freed_bytes = yields(offer.part_freed);
        self.need.spare_bytes = self.need.spare_bytes.saturating_sub(freed_bytes);
        let frames = yields(offer.part_in_frames);
        self.need.frames_bytes = self.need.frames_bytes.saturating_sub(frames);
        self.need.last_frames_bytes = self.need.last_frames_bytes.saturating_sub(frames);
        match already.map(|n| &mut self.taken[n]) {
            Some(taken) => {
                taken.bytes = taken.bytes.saturating_add(bytes);
                taken.freed_bytes = taken.freed_bytes.saturating_add(freed_bytes);
                taken.tier = offer.tier;
            }
            None => self.taken.push(Taken { guest: offer.guest, bytes, freed_bytes, tier: offer.tier }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Claims;
    use crate::test_world::guest;

    const M: u64 = 1 << 20;

    fn spare(spare_bytes: u64) -> Need {
        Need { spare_bytes, ..Need::default() }
    }

    /// Once, memory that the host had swapped was the first that a guest was to give up.
    #[test]
    fn memory_in_the_hosts_swap_is_not_free() {
        let mut one = guest("a", 240 * M, 60 * M);
        one.resident_bytes = 150 * M;
        one.claims = Some(Claims { available_bytes: 15 * M, free_bytes: 5 * M, ..one.claims.unwrap() });
        let free = |swapped_bytes| {
            let guests = vec![GuestFacts { swapped_bytes, ..one.clone() }];
            let offers = offers(&Facts { guests, ..Facts::default() });
            offers.iter().filter(|offer| offer.tier == Tier::Free).map(|offer| offer.bytes).sum::<u64>()
        };
        assert_eq!([free(0), free(40 * M), free(90 * M)], [45 * M, 5 * M, 0]);
        let untold = GuestFacts { claims: None, swapped_bytes: 90 * M, ..one.clone() };
        assert_eq!((untold.untouched_bytes(), untold.idle_bytes()), (90 * M, 0), "it may touch them again");
    }

    /// Two guests of 240 MiB, half of them lent: all of the second's memory is shared. Each keeps 45 MiB free.
    fn facts() -> Facts {
        let mut unshared = guest("a", 240 * M, 120 * M);
        let mut shared = guest("b", 240 * M, 120 * M);
        unshared.claims = Some(Claims { available_bytes: 240 * M, cache_bytes: 40 * M, ..Claims::default() });
        shared.folded_bytes = shared.resident_bytes;
        shared.claims = Some(Claims { free_bytes: 55 * M, ..unshared.claims.unwrap() });
        Facts { guests: vec![unshared, shared], ..Facts::default() }
    }

    #[test]
    fn shared_memory_is_left_alone() {
        let taken = take(&facts(), spare(1 << 40), |_| u64::MAX);
        let all: Vec<_> = taken.iter().map(|t| (t.guest, t.bytes / M, t.freed_bytes / M)).collect();
        assert_eq!(all, [(1, 10, 10), (0, 120, 120)], "of the shared guest, free pages only");
    }

    #[test]
    fn free_pages_go_before_cache_and_cache_before_the_rest() {
        let taken = take(&facts(), spare(30 * M), |_| u64::MAX);
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
            take(facts, spare(1 << 40), |_| u64::MAX).iter().map(|t| (t.bytes / M, t.tier)).collect::<Vec<_>>()
        };
        assert_eq!(of(&facts), [(120, Tier::Kept)], "all of the loan, since 80 MiB of it are not shared");
        facts.guests[0].guaranteed_bytes = 200 * M;
        assert_eq!(of(&facts), [], "the loan is as large as the page cache, which frees nothing");
    }

    #[test]
    fn half_shared_guest_gives_twice_as_much_for_the_same_frames() {
        let mut facts = facts();
        facts.guests.pop();
        facts.guests[0].claims = Some(Claims { available_bytes: 240 * M, ..Claims::default() });
        facts.guests[0].folded_bytes = facts.guests[0].resident_bytes / 2;
        let taken = take(&facts, spare(10 * M), |_| u64::MAX);
        assert_eq!((taken[0].bytes, taken[0].freed_bytes), (20 * M, 10 * M));
        let bounded = take(&facts, spare(10 * M), |_| 8 * M);
        assert_eq!((bounded[0].bytes, bounded[0].freed_bytes), (8 * M, 4 * M));
    }

    #[test]
    fn offer_that_loses_more_sharing_than_it_frees_is_taken_where_memory_runs_out() {
        let mut facts = facts();
        facts.guests.pop();
        facts.guests[0].claims = None;
        facts.guests[0].folded_bytes = 180 * M;
        let of = |need: Need| {
            take(&facts, need, |_| u64::MAX).iter().map(|t| (t.bytes / M, t.freed_bytes / M)).collect::<Vec<_>>()
        };
        assert_eq!(of(spare(10 * M)), [], "a quarter is not shared");
        assert_eq!(of(Need { frames_bytes: 10 * M, ..Need::default() }), []);
        assert_eq!(of(Need { last_frames_bytes: 10 * M, ..Need::default() }), [(40, 10)]);
        let mut with_better = facts.clone();
        with_better.guests.push(GuestFacts { folded_bytes: 60 * M, ..with_better.guests[0].clone() });
        let taken = take(&with_better, Need { last_frames_bytes: 95 * M, ..Need::default() }, |_| u64::MAX);
        let all: Vec<_> = taken.iter().map(|t| (t.guest, t.bytes / M)).collect();
        assert_eq!(all, [(1, 120), (0, 20)], "the one that frees three quarters gives all first");
    }

    #[test]
    fn memory_in_use_is_taken_only_where_the_host_runs_out_of_it() {
        let mut facts = facts();
        facts.guests.pop();
        facts.guests[0].claims = Some(Claims { available_bytes: 60 * M, cache_bytes: 20 * M, ..Claims::default() });
        let of = |facts: &Facts, need: Need| {
            take(facts, need, |_| u64::MAX).iter().map(|t| t.bytes * 2 / M).collect::<Vec<_>>()
        };
        let all = Need { spare_bytes: 1 << 40, frames_bytes: 1 << 40, last_frames_bytes: 0 };
        assert_eq!(of(&facts, all), [90], "of 60 MiB, all but 1/16 of its RAM");
        assert_eq!(of(&facts, Need { last_frames_bytes: 100 * M, ..all }), [200]);
        facts.guests[0].claims = None;
        assert_eq!(of(&facts, all), [0; 0], "it tells nothing");
        assert_eq!(of(&facts, Need { last_frames_bytes: 100 * M, ..all }), [200]);
        facts.guests[0].resident_bytes = 180 * M;
        assert_eq!(of(&facts, all), [90], "what it never touched, it does not need");
    }

    #[test]
    fn little_free_memory_has_the_price_of_the_rest() {
        let mut facts = facts();
        facts.guests.remove(0);
        let tiers = |facts: &Facts| offers(facts).iter().map(|offer| (offer.tier, offer.bytes / M)).collect::<Vec<_>>();
        assert_eq!(tiers(&facts), [(Tier::Free, 10)]);
        facts.guests[0].claims = facts.guests[0].claims.map(|claims| Claims { free_bytes: 48 * M, ..claims });
        assert_eq!(tiers(&facts), [], "all of the rest is shared");
        (facts.guests[0].folded_bytes, facts.guests[0].guaranteed_bytes) = (0, 239 * M);
        assert_eq!(tiers(&facts), [(Tier::Cache, 1)], "a small loan can be withdrawn");
    }

    #[test]
    fn memory_without_frames_is_spare_but_frees_no_frame() {
        let (mut untouched, mut touched) = (guest("a", 240 * M, 112 * M), guest("b", 240 * M, 112 * M));
        untouched.resident_bytes = 67 * M;
        touched.claims = Some(Claims { free_bytes: 145 * M, ..Claims::default() });
        let facts = Facts { guests: vec![untouched, touched], ..Facts::default() };
        let of =
            |need: Need| take(&facts, need, |_| u64::MAX).iter().map(|t| (t.guest, t.bytes / M)).collect::<Vec<_>>();
        assert_eq!(of(spare(120 * M)), [(1, 100), (0, 20)], "frames go first");
        let frames = Need { frames_bytes: 120 * M, ..Need::default() };
        assert_eq!(of(frames), [(1, 120)], "free memory and 20 MiB of what is kept, before memory that has no frames");
        assert_eq!(of(Need { spare_bytes: 150 * M, ..frames }), [(1, 120), (0, 50)], "both sums");
        let mut alone = Facts { guests: facts.guests[..1].to_vec(), ..Facts::default() };
        alone.guests[0].guaranteed_bytes = 64 * M;
        let taken = take(&alone, Need { frames_bytes: 10 * M, ..Need::default() }, |_| u64::MAX);
        assert_eq!((taken[0].bytes / M, taken[0].tier), (128 + 10, Tier::Kept), "its balloon takes free pages before");
    }
}
