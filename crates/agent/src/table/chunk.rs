//! What is known of the single pages of a chunk.

use super::bits::{Bits, CHUNK_PAGES};
use page::PoolSlot;

/// The pages of a chunk. Bits of pages that were never asked in are never set.
#[derive(Debug)]
pub struct Chunk {
    /// Written when they were last looked at.
    pub pending: Bits,
    /// Written according to the look that is being taken in; clear between looks.
    pub fresh: Bits,
    /// Folded as zeros, and not seen written since.
    pub zeroed: Bits,
    /// Private pages inside a mapping of the pool.
    pub broken: Bits,
    /// They map `slots`.
    pub mapped: Bits,
    slots: [u32; CHUNK_PAGES as usize],
}

impl Chunk {
    pub fn new() -> Box<Self> {
        let none = Bits::default();
        Box::new(Self {
            pending: none,
            fresh: none,
            zeroed: none,
            broken: none,
            mapped: none,
            slots: [0; CHUNK_PAGES as usize],
        })
    }

    /// Whether nothing is known of any page.
    pub fn is_empty(&self) -> bool {
        self.pending.or(self.fresh).or(self.zeroed).or(self.broken).or(self.mapped).is_empty()
    }

    /// Pages that lie in mappings of the pool, private or not.
    pub fn pooled(&self) -> Bits {
        self.mapped.or(self.broken)
    }

    /// The slot that `page` maps.
    pub fn slot(&self, page: u64) -> Option<PoolSlot> {
        let bits = *self.slots.get(page as usize)?;
        self.mapped.has(page).then_some(PoolSlot::from_bits(bits))
    }

    /// Notes that the pages from `first` on map the slots from `slot` on.
    pub fn map(&mut self, first: u64, count: u64, slot: PoolSlot) {
        let pages = Bits::span(first, count);
        self.mapped = self.mapped.or(pages);
        for (next, place) in self.slots.iter_mut().skip(first as usize).take(count as usize).enumerate() {
            *place = slot.bits().wrapping_add(next as u32);
        }
    }

    /// Runs of consecutive pages in `within` that map consecutive slots: first page, count, slot.
    pub fn slot_runs(&self, within: Bits) -> impl Iterator<Item = (u64, u64, PoolSlot)> {
        self.mapped.and(within).runs().flat_map(|(first, count)| self.cut(first, count))
    }

    /// Cuts a run of mapped pages where the slots are not consecutive.
    fn cut(&self, first: u64, count: u64) -> impl Iterator<Item = (u64, u64, PoolSlot)> {
        let mut at = first;
        let end = first + count;
        std::iter::from_fn(move || {
            let start = self.slot(at).filter(|_| at < end)?;
            let first = at;
            at += 1;
            while at < end && self.slot(at) == start.add((at - first) as u32) {
                at += 1;
            }
            Some((first, at - first, start))
        })
    }
}
