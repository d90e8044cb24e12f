//! Contents of synthetic guests' pages: the same kinds of pages as in real guests, in runs of the same lengths. They
//! follow from a seed, so the number of pages that can be merged is known exactly.
//!
//! In real guests, equal pages lie in runs. Half of the runs are a single page long, while 63% of the pages lie in
//! runs of 8 or more.
//!
//! | share of pages | kind |
//! |---|---|
//! | 50% | in every guest, each guest's runs in an order of its own |
//! | 37% | in no other place |
//! | 10% | zeros |
//! | 3% | twice in the same guest |

use std::collections::HashMap;

/// Lengths of runs in pages, and how many of 1000 runs have them: median 1, 63% of pages in runs of 8 or more.
const LENGTHS: [(u64, u64); 8] = [(1, 640), (2, 140), (3, 70), (5, 40), (8, 30), (12, 30), (24, 25), (48, 22)];

/// The content of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Content {
    /// Zeros.
    Zeros,
    /// Made from this number.
    Filled(u64),
}

/// The kind of a run's pages.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Shared,
    Own,
    Twice,
    Zeros,
}

/// Shares of the kinds in thousandths of all pages, before runs are rounded up.
const SHARES: [(Kind, u64); 4] = [(Kind::Shared, 500), (Kind::Own, 370), (Kind::Zeros, 100), (Kind::Twice, 30)];

/// The contents of the pages of the guest with this number, in the order of their addresses.
pub fn contents(guest: u64, pages: u64) -> Vec<Content> {
    let mut runs = Vec::new();
    for (kind, share) in SHARES {
        add_runs(&mut runs, kind, guest, pages * share / 1000);
    }
    // The runs lie in another order in each guest.
    let mut random = Random(guest + 1);
    for n in (1..runs.len()).rev() {
        runs.swap(n, random.below(n as u64 + 1) as usize);
    }
    let mut all: Vec<Content> = runs.into_iter().flatten().collect();
    let own = |n: u64| Content::Filled((guest + 1) << 40 | 1 << 39 | n);
    all.extend((0..pages.saturating_sub(all.len() as u64)).map(own));
    all
}

/// Adds `pages` pages of one kind, in runs.
fn add_runs(runs: &mut Vec<Vec<Content>>, kind: Kind, guest: u64, pages: u64) {
    // The lengths of runs are the same in every guest, so that shared runs are the same, too.
    let mut random = Random(0x5eed);
    let mut next = 0;
    // Of this kind, each content makes two pages.
    let distinct = if kind == Kind::Twice { pages / 2 } else { pages };
    while next < distinct {
        let length = length(&mut random).min(distinct - next);
        let content = |n: u64| match kind {
            Kind::Shared => Content::Filled(n + 1),
            Kind::Own => Content::Filled((guest + 1) << 40 | n),
            Kind::Twice => Content::Filled((guest + 1) << 40 | 1 << 38 | n),
            Kind::Zeros => Content::Zeros,
        };
        let run: Vec<Content> = (next..next + length).map(content).collect();
        if kind == Kind::Twice {
            runs.push(run.clone());
        }
        runs.push(run);
        next += length;
    }
}

fn length(random: &mut Random) -> u64 {
    let mut left = random.below(LENGTHS.iter().map(|(_, share)| share).sum());
    for (length, share) in LENGTHS {
        if left < share {
            return length;
        }
        left -= share;
    }
    1
}

/// Number of pages that merging saves in `guests` guests: of every content all but one.
pub fn superfluous(guests: u64, pages: u64) -> u64 {
    let mut counts: HashMap<Content, u64> = HashMap::new();
    for guest in 0..guests {
        for content in contents(guest, pages) {
            *counts.entry(content).or_default() += 1;
        }
    }
    counts.values().map(|n| n - 1).sum()
}

/// Xorshift, as a source of random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % bound
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn synthetic_runs_resemble_real_ones_and_superfluous_is_exact() {
        let mut random = Random(0x5eed);
        let lengths: Vec<u64> = (0..20_000).map(|_| length(&mut random)).collect();
        let pages: u64 = lengths.iter().sum();
        let long: u64 = lengths.iter().filter(|n| **n >= 8).sum();
        assert!((55..70).contains(&(long * 100 / pages)), "{}%", long * 100 / pages);
        assert!(lengths.iter().filter(|n| **n == 1).count() * 2 > lengths.len());
        let pages = 16_384;
        let (a, b) = (contents(0, pages), contents(1, pages));
        assert_eq!((a.len(), b.len()), (16_384, 16_384));
        assert_ne!(a, b);
        let shared = pages * 500 / 1000;
        let (zeros, twice) = (pages * 100 / 1000, pages * 30 / 1000 / 2);
        assert_eq!(superfluous(3, pages), 2 * shared + (3 * zeros - 1) + 3 * twice);
    }
}
