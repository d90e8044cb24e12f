//! Zero pages, counted as they come by. A guest that has just booted may hold little else. The index tells which frame
//! a page is and what its neighbours match. For a zero page that only its owner maps, neither matters. So such a page
//! has no entry in the index.

use crate::Layout;
use page::{GuestIndex, GuestPageKind, PageKind, PageSample, Region};
use std::collections::BTreeMap;

/// Properties by which zero pages are counted: owner, region, kind, cell of the page map, and kind inside the guest.
type Key = (GuestIndex, Region, PageKind, Option<u32>, Option<GuestPageKind>);

/// Numbers of zero pages by `Key`.
#[derive(Clone, Debug, Default)]
pub struct Zeros {
    counts: BTreeMap<Key, u64>,
    /// Key and length of the current stretch of zero pages with one key, which is not yet in `counts`.
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

    /// Adds the counts of another thread.
    pub fn add(&mut self, mut other: Self) {
        other.end_stretch();
        self.end_stretch();
        for (key, pages) in other.counts {
            *self.counts.entry(key).or_default() += pages;
        }
    }

    /// The counts. [`Zeros::add`] must have been called last, as it adds the current stretch.
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
    /// Guest that the pages belong to.
    pub owner: GuestIndex,
    /// Part of the guest's footprint in which the pages lie.
    pub region: Region,
    /// What backs the pages, such as anonymous memory or a file.
    pub kind: PageKind,
    /// Cell of the guest's page map in which the pages lie.
    pub cell: Option<u32>,
    /// The kind of the pages inside the guest.
    pub guest_kind: Option<GuestPageKind>,
    /// Number of pages.
    pub pages: u64,
}
