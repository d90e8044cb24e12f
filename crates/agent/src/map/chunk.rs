//! What the map knows about single pages, by chunks.

use page::{Bits, CHUNK_PAGES, PoolSlot};

/// What a page is. Exactly one of these holds for each page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact {
    /// Private anonymous memory, or no page at all.
    Private,
    /// The page was folded as zeros, and was not seen written since.
    Zeroed,
    /// The page maps this slot.
    Mapped(PoolSlot),
    /// The page is private, and lies in a mapping of the pool.
    Broken,
}

/// The pages of a chunk. Bits of pages that were never enrolled are never set.
#[derive(Debug)]
pub struct Chunk {
    /// Pages that were found written, or new, by the last scan.
    pub pending: Bits,
    /// Among the pending pages, those that the scan being recorded has found; empty between scans.
    pub fresh: Bits,
    zeroed: Bits,
    broken: Bits,
    mapped: Bits,
    slots: [u32; CHUNK_PAGES as usize],
    /// What is known of pages with homes; `None` if there is nothing to note.
    at_home: Option<Box<AtHome>>,
}

/// What is known of the chunk's pages with homes ([`crate::home`]). Few members have any.
#[derive(Clone, Copy, Debug, Default)]
pub struct AtHome {
    /// Pages in mappings of the pool that were placed over the program's own mapping.
    pub placed: Bits,
    /// Pages of which the worker was told that they do not show their homes.
    pub told_away: Bits,
}

impl Chunk {
    pub fn new() -> Box<Self> {
        let none = Bits::default();
        let slots = [0; CHUNK_PAGES as usize];
        Box::new(Self { pending: none, fresh: none, zeroed: none, broken: none, mapped: none, slots, at_home: None })
    }

    /// What a page is.
    pub fn fact(&self, page: u64) -> Fact {
        match self.slots.get(page as usize) {
            Some(slot) if self.mapped.has(page) => Fact::Mapped(PoolSlot::from_bits(*slot)),
            _ if self.broken.has(page) => Fact::Broken,
            _ if self.zeroed.has(page) => Fact::Zeroed,
            _ => Fact::Private,
        }
    }

    /// Notes what these pages are. `Fact::Mapped` names the slot of the first page; each further page maps the next
    /// slot.
    pub fn set(&mut self, pages: Bits, fact: Fact) {
        for (bits, is_so) in [
            (&mut self.zeroed, fact == Fact::Zeroed),
            (&mut self.broken, fact == Fact::Broken),
            (&mut self.mapped, matches!(fact, Fact::Mapped(_))),
        ] {
            *bits = if is_so { bits.or(pages) } else { bits.without(pages) };
        }
        if let Fact::Mapped(slot) = fact {
            for (page, next) in pages.pages().zip(0..) {
                self.slots[page as usize] = slot.bits().wrapping_add(next);
            }
        }
    }

    /// Pages that were folded as zeros, and were not seen written since.
    pub const fn zeroed(&self) -> Bits {
        self.zeroed
    }

    /// Private pages inside a mapping of the pool.
    pub const fn broken(&self) -> Bits {
        self.broken
    }

    /// Pages that map slots.
    pub const fn mapped(&self) -> Bits {
        self.mapped
    }

    /// Pages that lie in mappings of the pool, private or not.
    pub fn pooled(&self) -> Bits {
        self.mapped.or(self.broken)
    }

    /// See [`AtHome::placed`].
    pub fn placed(&self) -> Bits {
        self.at_home.as_ref().map_or(Bits::default(), |at_home| at_home.placed)
    }

    /// See [`AtHome::told_away`].
    pub fn told_away(&self) -> Bits {
        self.at_home.as_ref().map_or(Bits::default(), |at_home| at_home.told_away)
    }

    /// Changes what is known of the chunk's pages with homes.
    pub fn change_at_home(&mut self, change: impl FnOnce(&mut AtHome)) {
        let mut at_home = self.at_home.as_deref().copied().unwrap_or_default();
        change(&mut at_home);
        if at_home.placed.or(at_home.told_away).is_empty() {
            self.at_home = None;
        } else {
            **self.at_home.get_or_insert_default() = at_home;
        }
    }

    /// Whether there are no notes about any page of the chunk.
    pub fn is_empty(&self) -> bool {
        self.pending.or(self.fresh).or(self.zeroed).or(self.pooled()).is_empty() && self.at_home.is_none()
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
            let slot = |page| match self.fact(page) {
                Fact::Mapped(slot) => Some(slot),
                _ => None,
            };
            let start = slot(at).filter(|_| at < end)?;
            let first = at;
            at += 1;
            while at < end && slot(at) == start.add((at - first) as u32) {
                at += 1;
            }
            Some((first, at - first, start))
        })
    }
}
