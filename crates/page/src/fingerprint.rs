//! Fingerprints of pages' contents. Equal fingerprints only suggest that two pages are identical. Before pages are
//! merged, their bytes must be compared. For *counting*, fingerprints suffice: with 64 bits, a census of 2^28 pages (1
//! TiB) expects 0.002 chance matches.

use serde::Serialize;
use std::fmt;
use twox_hash::XxHash3_64;

/// XXH3-64 of a page's bytes, seed 0, so that fingerprints compare across runs and hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Fingerprint(pub u64);

impl Fingerprint {
    /// The fingerprint of a page of zeros.
    pub const ZERO_PAGE: Self = Self(0x93d7_6fe1_48c6_89ba);

    /// Fingerprints `page`.
    pub fn of(page: &[u8]) -> Self {
        Self(XxHash3_64::oneshot(page))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE_BYTES;

    #[test]
    fn zero_page_constant_is_fingerprint_of_zeros() {
        assert_eq!(Fingerprint::of(&[0; PAGE_BYTES]), Fingerprint::ZERO_PAGE);
    }

    /// The reference vector of the xxHash repository: XXH3-64 of nothing, seed 0.
    #[test]
    fn hash_is_xxh3() {
        assert_eq!(Fingerprint::of(b""), Fingerprint(0x2d06_8005_38d3_94c2));
    }
}
