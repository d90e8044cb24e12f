//! Free slots of a segment (places), as extents of neighbours. A slot that becomes free joins the free extents beside
//! it. The longest extent is taken first, so that slots taken one after the other lie side by side.

use std::collections::{BTreeMap, BTreeSet};

/// The free places of a segment, as extents.
#[derive(Debug, Default)]
pub struct Extents {
    by_start: BTreeMap<u32, u32>,
    by_length: BTreeSet<(u32, u32)>,
    free: u32,
}

impl Extents {
    /// Adds a place that has become free.
    pub fn insert(&mut self, place: u32) {
        let (mut start, mut length) = (place, 1);
        if let Some((&before, &n)) = self.by_start.range(..place).next_back() {
            debug_assert!(before + n <= place, "{place} is free already");
            if before + n == place {
                self.forget(before, n);
                (start, length) = (before, n + 1);
            }
        }
        if let Some(&n) = self.by_start.get(&(place + 1)) {
            self.forget(place + 1, n);
            length += n;
        }
        self.remember(start, length);
        self.free += 1;
    }

    fn remember(&mut self, start: u32, length: u32) {
        self.by_start.insert(start, length);
        self.by_length.insert((length, start));
    }

    fn forget(&mut self, start: u32, length: u32) {
        self.by_start.remove(&start);
        self.by_length.remove(&(length, start));
    }

    /// Takes the longest extent, or its first `most` places; `None` if no place is free.
    pub fn take(&mut self, most: u32) -> Option<std::ops::Range<u32>> {
        let (length, start) = *self.by_length.last()?;
        self.forget(start, length);
        let taken = length.min(most);
        if taken < length {
            self.remember(start + taken, length - taken);
        }
        self.free -= taken;
        Some(start..start + taken)
    }

    /// Length of the longest extent.
    pub fn longest(&self) -> u32 {
        self.by_length.last().map_or(0, |(length, _)| *length)
    }

    /// Number of free places.
    pub const fn free(&self) -> u32 {
        self.free
    }

    /// Bytes of memory that the extents take, about.
    pub fn bytes(&self) -> u64 {
        self.by_start.len() as u64 * 32
    }
}
