//! The place of each guest's pages in the order of the scan.

use page::{FrameUse, GuestIndex};
use std::ops::Range;

/// The positions ([`page::PageSample::position`]) of every guest, and the number of cells of its page map.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// Positions of each guest; neighbouring guests need not touch.
    pub guests: Vec<Range<u32>>,
    /// Cells of each guest's page map; 0 for no map.
    pub map_cells: u32,
    /// By guest, and by position within its range: the page's use inside the guest, where it is known. Empty for a
    /// guest without such knowledge.
    pub uses: Vec<Vec<Option<FrameUse>>>,
    /// Whether memory of the host itself is counted too.
    pub with_host: bool,
}

impl Layout {
    /// One past the last position of any guest.
    pub fn end(&self) -> u32 {
        self.guests.iter().map(|r| r.end).max().unwrap_or(0)
    }

    /// The page's use inside its guest, where it is known.
    pub fn use_of(&self, owner: GuestIndex, position: u32) -> Option<FrameUse> {
        let uses = self.uses.get(usize::from(owner.0))?;
        let first = self.guests.get(usize::from(owner.0))?.start;
        *uses.get(position.checked_sub(first)? as usize)?
    }

    /// Number of cells in the map of a guest: no more than it has pages.
    pub fn cells_of(&self, owner: GuestIndex) -> u32 {
        self.guests.get(usize::from(owner.0)).map_or(0, |r| self.map_cells.min(r.end - r.start))
    }

    /// The cell of a guest's page; `None` without a map, and for pages of the host.
    pub fn cell(&self, owner: GuestIndex, position: u32) -> Option<u32> {
        let range = self.guests.get(usize::from(owner.0))?;
        let (cells, offset) = (self.cells_of(owner), position.checked_sub(range.start)?);
        if cells == 0 || position >= range.end {
            return None;
        }
        let cell = u64::from(offset) * u64::from(cells) / u64::from(range.end - range.start);
        u32::try_from(cell).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_divide_a_guest_evenly_and_nothing_else() {
        let layout = Layout { guests: vec![0..10, 10..10, 20..120], map_cells: 20, uses: Vec::new(), with_host: false };
        assert_eq!(layout.cells_of(GuestIndex(0)), 10);
        assert_eq!(layout.cell(GuestIndex(0), 9), Some(9));
        assert_eq!(layout.cell(GuestIndex(0), 10), None);
        assert_eq!(layout.cell(GuestIndex(1), 10), None);
        let cells: Vec<_> = (20..120).map(|p| layout.cell(GuestIndex(2), p).unwrap()).collect();
        assert!((0..20).all(|c| cells.iter().filter(|&&x| x == c).count() == 5));
        assert_eq!(layout.cell(GuestIndex::HOST, 25), None);
    }
}
