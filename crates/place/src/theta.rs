//! Theta sketches of sets of contents: each holds the least hashes of its set, all below a threshold, *theta*.
//!
//! Of sets that were hashed alike, the hashes below the least theta are a sample of them all. So a union's size is the
//! number of different hashes in the sample, by the sample's part of the hash space. Contents that two sets have in
//! common are estimated in the same way.
//!
//! Sketches are made, read and written by the library of Apache DataSketches. Plans of a fleet make millions of unions:
//! here they are merges of sorted lists, which may be cut short to fit into memory. The estimates are the library's.

use anyhow::anyhow;
use datasketches::theta::{CompactThetaSketch, ThetaSketch, ThetaSketchBuilder};
use std::iter::Peekable;

/// Size of a sketch for the fleet: 2^10 hashes, 8 KiB, an error of 3%.
pub const FLEET_LG_K: u8 = 10;
/// Size of a fine sketch, for comparing few guests or groups: 2^13 hashes, 64 KiB, an error of 1%.
pub const FINE_LG_K: u8 = 13;
/// Greatest length of a serialized sketch, in bytes.
pub const MOST_BYTES: usize = 24 + (8 << FINE_LG_K);
/// The end of the hash space.
const END: u64 = i64::MAX as u64;
/// Half the length of an error bar, in standard deviations.
const DEVIATIONS: f64 = 2.0;

/// Begins a sketch.
pub fn begin(lg_k: u8) -> ThetaSketch {
    ThetaSketchBuilder::default().lg_k(lg_k).build().expect("the library takes these sizes")
}

/// A sketch that is complete, as every engine reads it: compact, ordered, with the default seed.
pub fn finish(mut sketch: ThetaSketch) -> Vec<u8> {
    sketch.trim();
    sketch.compact(true).serialize()
}

/// A set of contents, of which only the least hashes are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sketch {
    theta: u64,
    /// Hashes of contents in ascending order, all below theta.
    hashes: Vec<u64>,
}

/// An estimate and its error bar.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    /// The estimated number of contents, each of a page.
    pub pages: f64,
    /// Error bar of `pages`: two standard deviations.
    pub error: f64,
}

impl Estimate {
    /// A number that is known exactly.
    pub const fn exact(pages: f64) -> Self {
        Self { pages, error: 0.0 }
    }

    /// The sum of two estimates whose errors are independent.
    pub fn plus(self, other: Self) -> Self {
        Self { pages: self.pages + other.pages, error: self.error.hypot(other.error) }
    }

    /// The difference of two estimates whose errors are independent.
    pub fn minus(self, other: Self) -> Self {
        Self { pages: self.pages - other.pages, error: self.error.hypot(other.error) }
    }
}

impl Default for Sketch {
    /// A sketch of the empty set.
    fn default() -> Self {
        Self { theta: END, hashes: Vec::new() }
    }
}

impl Sketch {
    /// Reads a compact sketch, and keeps its `most` least hashes.
    ///
    /// # Errors
    /// These bytes are no compact sketch.
    pub fn read(bytes: &[u8], most: usize) -> anyhow::Result<Self> {
        anyhow::ensure!(bytes.len() <= MOST_BYTES, "a sketch of {} bytes: there are {MOST_BYTES} at most", bytes.len());
        let compact = CompactThetaSketch::deserialize(bytes).map_err(|e| anyhow!("{e}"))?;
        Ok(Self::sample(compact.theta64(), compact.iter().map(|entry| entry.hash()).collect()).cut(most))
    }

    /// A sample of a set: the hashes of its members below `theta`.
    pub fn sample(theta: u64, mut hashes: Vec<u64>) -> Self {
        hashes.sort_unstable();
        hashes.dedup();
        hashes.retain(|hash| *hash < theta);
        Self { theta, hashes }
    }

    /// The sketch as [`finish`] writes it.
    pub fn bytes(&self) -> Vec<u8> {
        // Preamble of 3 words, version 3, theta; two bytes that are not used; read-only, compact, ordered; hash of the
        // default seed.
        let mut bytes = vec![3, 3, 3, 0, 0, 0x1a, 0xcc, 0x93];
        bytes.extend((self.hashes.len() as u64).to_le_bytes());
        bytes.extend(self.theta.to_le_bytes());
        self.hashes.iter().for_each(|hash| bytes.extend(hash.to_le_bytes()));
        bytes
    }

    /// The same set, by at most `most` hashes.
    pub fn cut(mut self, most: usize) -> Self {
        if let Some(first_out) = self.hashes.get(most) {
            self.theta = *first_out;
            self.hashes.truncate(most);
            self.hashes.shrink_to_fit();
        }
        self
    }

    /// A sketch of the union of these sets.
    pub fn union_of<'a>(sets: impl Iterator<Item = &'a Self> + Clone) -> Self {
        let theta = sets.clone().map(|set| set.theta).min().unwrap_or(END);
        let mut hashes: Vec<u64> = sets.flat_map(|set| set.below(theta)).copied().collect();
        hashes.sort_unstable();
        hashes.dedup();
        Self { theta, hashes }
    }

    /// A sketch of the union of this set and another.
    pub fn union(&self, other: &Self) -> Self {
        let theta = self.theta.min(other.theta);
        let (mut a, mut b) = (self.below(theta).iter().peekable(), other.below(theta).iter().peekable());
        let mut hashes = Vec::with_capacity(a.len() + b.len());
        while let Some(next) = least(&mut a, &mut b) {
            hashes.push(next.0);
        }
        Self { theta, hashes }
    }

    /// Number of contents that two sets have in common.
    pub fn common(&self, other: &Self) -> Estimate {
        let theta = self.theta.min(other.theta);
        let (mut a, mut b) = (self.below(theta).iter().peekable(), other.below(theta).iter().peekable());
        let mut common = 0;
        while let Some((_, in_both)) = least(&mut a, &mut b) {
            common += usize::from(in_both);
        }
        estimate(common, theta)
    }

    /// Part of the union that two sets have in common, by their `most` least hashes: Jaccard's index.
    pub fn likeness(&self, other: &Self, most: usize) -> f64 {
        let (mut a, mut b) = (self.hashes.iter().peekable(), other.hashes.iter().peekable());
        let (mut looked_at, mut common) = (0, 0);
        while looked_at < most
            && let Some((hash, in_both)) = least(&mut a, &mut b)
            && hash < self.theta.min(other.theta)
        {
            looked_at += 1;
            common += usize::from(in_both);
        }
        if looked_at == 0 { 0.0 } else { common as f64 / looked_at as f64 }
    }

    /// Estimated number of contents of the set.
    pub fn size(&self) -> Estimate {
        estimate(self.hashes.len(), self.theta)
    }

    fn below(&self, theta: u64) -> &[u64] {
        &self.hashes[..self.hashes.partition_point(|hash| *hash < theta)]
    }
}

/// Takes the next hash of two ascending lists, and tells whether both have it.
fn least<'a>(
    a: &mut Peekable<impl Iterator<Item = &'a u64>>,
    b: &mut Peekable<impl Iterator<Item = &'a u64>>,
) -> Option<(u64, bool)> {
    let next = match (a.peek(), b.peek()) {
        (Some(a), Some(b)) => **a.min(b),
        (Some(one), None) | (None, Some(one)) => **one,
        (None, None) => return None,
    };
    let in_a = a.next_if(|hash| **hash == next).is_some();
    let in_b = b.next_if(|hash| **hash == next).is_some();
    Some((next, in_a && in_b))
}

/// Size of a set of which a sample has `found` members. Each member is in the sample with probability `theta / END`.
fn estimate(found: usize, theta: u64) -> Estimate {
    let part = theta as f64 / END as f64;
    let found = found as f64;
    Estimate { pages: found / part, error: DEVIATIONS * (found * (1.0 - part)).sqrt() / part }
}

/// The theta with which a sketch of `contents` contents keeps about `hashes` hashes.
pub fn theta_for(contents: f64, hashes: usize) -> u64 {
    if contents <= hashes as f64 { END } else { (END as f64 * (hashes as f64 / contents)) as u64 }
}

#[cfg(test)]
#[path = "theta_tests.rs"]
mod tests;
