//! Contents of pages: one of a few that all processes know, and the numbers that writers put into them.

use crate::area::WORDS;

/// The content of all zeros.
pub const ZERO: u32 = 0;

/// Mixes a number (splitmix64).
pub const fn mix(number: u64) -> u64 {
    let mut x = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Word `n` of every page of this class.
pub const fn word(class: u32, n: usize) -> u64 {
    if class == ZERO { 0 } else { mix((class as u64) << 16 | n as u64) }
}

/// Index of the word of a page in which its owner counts its writes.
pub const fn place(page: usize) -> usize {
    (mix(page as u64 | 1 << 40) % WORDS as u64) as usize
}

/// The number that the owner writes into that word the `sequence`th time. No content of a class has such a number.
pub const fn mark(page: usize, sequence: u32) -> u64 {
    mix((page as u64) << 33 | (sequence as u64) << 1 | 1) | 1 << 63 >> (page % 8)
}

/// Random numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub const fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    /// A seed that differs from run to run.
    #[expect(clippy::disallowed_methods, reason = "a seed, not a time")]
    pub fn unforeseen() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock");
        Self::new(now.as_nanos() as u64 ^ u64::from(std::process::id()) << 32)
    }

    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0)
    }

    /// A number less than `bound`.
    pub const fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub const fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}
