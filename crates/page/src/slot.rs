//! Slots: the pages of a group's pool.

use std::fmt;

/// Names of Pagefold's memory files that are not a pool. No group may have one of these names.
pub const NOT_GROUPS: [&str; 3] = ["donation", "lease", "probe"];

/// One page of a group's pool: the number of a segment, and the index of the page in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolSlot(u32);

impl PoolSlot {
    const INDEX_BITS: u32 = 24;
    /// Most slots of a segment, which then has 64 GiB.
    pub const PER_SEGMENT: u32 = 1 << Self::INDEX_BITS;
    /// Segments are numbered below this: 128. The worker's index uses the highest bit of a slot's number for itself.
    pub const SEGMENTS: u8 = 128;
    /// Segments from this number on are templates: each was made of a saved guest's memory, in the order of that
    /// memory. Segments with lower numbers are filled by workers.
    pub const FIRST_TEMPLATE: u8 = 112;

    /// The slot with this index in this segment; `None` if the index is too large for any segment.
    pub const fn new(segment: u8, index: u32) -> Option<Self> {
        if index < Self::PER_SEGMENT { Some(Self((segment as u32) << Self::INDEX_BITS | index)) } else { None }
    }

    /// The slot whose number is `bits`; every number is valid.
    pub const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    /// Segment and index in one number.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Whether it is a page of a template.
    pub const fn is_of_template(self) -> bool {
        self.segment() >= Self::FIRST_TEMPLATE
    }

    /// The number of its segment.
    pub const fn segment(self) -> u8 {
        (self.0 >> Self::INDEX_BITS) as u8
    }

    /// Its index in the segment.
    pub const fn index(self) -> u32 {
        self.0 & (Self::PER_SEGMENT - 1)
    }

    /// The slot that is `slots` further on; `None` if that is beyond the largest possible segment.
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
    fn slots_end_with_their_segment() {
        let last = PoolSlot::new(3, PoolSlot::PER_SEGMENT - 1).unwrap();
        assert_eq!((last.segment(), last.index()), (3, PoolSlot::PER_SEGMENT - 1));
        assert_eq!(last.add(1), None);
        assert_eq!(last.add(u32::MAX), None);
        assert_eq!(PoolSlot::new(0, PoolSlot::PER_SEGMENT), None);
        assert_eq!(PoolSlot::from_bits(last.bits()), last);
    }
}
