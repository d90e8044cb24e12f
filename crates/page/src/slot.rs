//! Places in a group's pool.

use std::fmt;

/// One page of a group's pool: which of the pool's segments, and which page of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolSlot(u32);

impl PoolSlot {
    const INDEX_BITS: u32 = 24;
    /// How many slots a segment can have (64 GiB).
    pub const PER_SEGMENT: u32 = 1 << Self::INDEX_BITS;

    /// The slot with that index in that segment; `None` where a segment has no such index.
    pub const fn new(segment: u8, index: u32) -> Option<Self> {
        if index < Self::PER_SEGMENT { Some(Self((segment as u32) << Self::INDEX_BITS | index)) } else { None }
    }

    /// The slot whose number is `bits`; every number is one.
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// Segment and index in one number.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// The segment it lies in.
    pub const fn segment(self) -> u8 {
        (self.0 >> Self::INDEX_BITS) as u8
    }

    /// Its place in the segment.
    pub const fn index(self) -> u32 {
        self.0 & (Self::PER_SEGMENT - 1)
    }

    /// The slot `slots` further on, if the segment reaches so far.
    pub const fn add(self, slots: u32) -> Option<Self> {
        match self.index().checked_add(slots) {
            Some(index) => Self::new(self.segment(), index),
            None => None,
        }
    }
}

impl fmt::Display for PoolSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.segment(), self.index())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_ends() {
        let last = PoolSlot::new(3, PoolSlot::PER_SEGMENT - 1).unwrap();
        assert_eq!((last.segment(), last.index()), (3, PoolSlot::PER_SEGMENT - 1));
        assert_eq!(last.add(1), None);
        assert_eq!(last.add(u32::MAX), None);
        assert_eq!(PoolSlot::new(0, PoolSlot::PER_SEGMENT), None);
        assert_eq!(PoolSlot::from_bits(last.bits()), last);
    }
}
