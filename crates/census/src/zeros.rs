//! Zero pages, counted as they come by. A guest that has just booted may hold little else, and nothing
//! that the index is for - which frame it is, what its neighbours match - is asked of a page of zeros
//! that nobody else maps. So such pages have no entry.

use crate::Layout;
use page::{GuestIndex, GuestPageKind, PageKind, PageSample, Region};
use std::collections::BTreeMap;

/// What is told apart: owner, region, kind, cell of the page map, and kind inside the guest.
type Key = (GuestIndex, Region, PageKind, Option<u32>, Option<GuestPageKind>);

/// Zero pages by owner, region, kind, cell of the page map, and kind inside the guest.
#[derive(Clone, Debug, Default)]
pub struct Zeros {
    counts: BTreeMap<Key, u64>,
    /// Zero pages come in long stretches; those of the present stretch are not in `counts` yet.
    stretch: Option<(Key, u64)>,
}

impl Zeros {
    /// Counts one page.
    pub fn push(&mut self, sample: &PageSample, layout: &Layout) {
        let inside = layout.use_of(sample.owner, sample.position).map(|u| u.kind());
        let key = (sample.owner, sample.region, sample.kind, layout.cell(sample.owner, sample.position), inside);
        match &mut self.stretch {
            Some((last, pages)) if *last == key => *pages += 1,
            _ => {
                self.end_stretch();
                self.stretch = Some((key, 1));
            }
        }
    }

    fn end_stretch(&mut self) {
        if let Some((key, pages)) = self.stretch.take() {
            *self.counts.entry(key).or_default() += pages;
        }
    }

    /// Adds what another thread counted.
    pub fn add(&mut self, mut other: Self) {
        other.end_stretch();
        self.end_stretch();
        for (key, pages) in other.counts {
            *self.counts.entry(key).or_default() += pages;
        }
    }

    /// The counts; call [`Zeros::add`] before, which completes them.
    pub fn iter(&self) -> impl Iterator<Item = ZeroCount> {
        debug_assert!(self.stretch.is_none());
        let count = |(&(owner, region, kind, cell, guest_kind), &pages): (&Key, &u64)| ZeroCount {
            owner,
            region,
            kind,
            cell,
            guest_kind,
            pages,
        };
        self.counts.iter().map(count)
    }
}

/// One count of [`Zeros`].
#[derive(Clone, Copy, Debug)]
pub struct ZeroCount {
    /// Whose.
    pub owner: GuestIndex,
    /// Part of the guest.
    pub region: Region,
    /// What backs them.
    pub kind: PageKind,
    /// Cell of the guest's page map.
    pub cell: Option<u32>,
    /// What they are inside the guest.
    pub guest_kind: Option<GuestPageKind>,
    /// How many.
    pub pages: u64,
}
