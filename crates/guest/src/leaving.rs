//! Memory of a guest that is to move to another host: what this host gets back, and what the other host needs for it.

use crate::slots::of_nobody_else;
use crate::{Guest, RegionMap, holds_folded_pages};
use host::{Mapping, Pagemap};
use page::{PAGE_BYTES, PageRange, Region, pages_to_bytes};
use std::collections::BTreeSet;
use std::fs;

/// Memory of a guest that is to move to another host. It is measured without reading the content of any page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaving {
    /// Memory that this host gets back, in bytes: private pages of the guest and its VMM, and slots that no other
    /// process maps.
    pub frees_bytes: u64,
    /// Memory that its RAM takes on another host like this one before anything is folded there, in bytes. Each range of
    /// the size of a huge page that has a backed page counts as a whole. `None` if the kernel gives no huge pages: how
    /// much is needed then depends on which pages hold zeros, and contents are not read.
    pub takes_bytes: Option<u64>,
    /// How much of the end of its RAM, whose length the caller chooses, is backed, in bytes.
    pub last_bytes: u64,
}

impl Leaving {
    /// Measures a guest. `last` is the length of the end of its RAM, in bytes. At most `most_pages` page-table entries
    /// of folded pages are read, in the guest and in all other processes together.
    ///
    /// # Errors
    /// The guest has ended or cannot be read, or more pages are folded.
    pub fn of(guest: &Guest, last: u64, most_pages: u64) -> host::Result<Self> {
        let ram = Ram::of(guest)?;
        let takes = |size| ram.pieces_bytes(size).min(guest.ram_bytes.unwrap_or(u64::MAX));
        Ok(Self {
            frees_bytes: private_bytes(guest)? + pages_to_bytes(of_nobody_else(guest, most_pages)?),
            takes_bytes: huge_page_bytes().map(takes),
            last_bytes: ram.held_of_last(last),
        })
    }
}

/// A VM's RAM, in the order in which a migration sends it.
#[derive(Default)]
struct Ram {
    /// The mappings of guest RAM.
    all: Vec<PageRange>,
    /// Guest RAM that is backed: present, folded or in swap.
    held: Vec<PageRange>,
}

impl Ram {
    fn of(guest: &Guest) -> host::Result<Self> {
        let mut ram = Self::default();
        for pid in &guest.pids {
            let (mappings, pagemap) = (Mapping::read_all(*pid)?, Pagemap::open(*pid)?);
            let regions = RegionMap::new(Some(guest), &mappings);
            for (_, mapping) in mappings.iter().enumerate().filter(|(n, _)| regions.region_of(*n) == Region::GuestRam) {
                let whole = PageRange { start: mapping.start, pages: mapping.bytes() / PAGE_BYTES as u64 };
                if holds_folded_pages(mapping) {
                    ram.held.push(whole);
                } else {
                    ram.held.extend(pagemap.present_ranges(mapping.start, mapping.end)?);
                    // Kernels before 6.7 cannot list pages in swap quickly.
                    ram.held.extend(pagemap.swapped_ranges(mapping.start, mapping.end).unwrap_or_default());
                }
                ram.all.push(whole);
            }
        }
        Ok(ram)
    }

    /// Memory that the RAM takes when another host writes it page by page, in bytes: each huge page of `size` bytes
    /// with a backed page.
    fn pieces_bytes(&self, size: u64) -> u64 {
        let pieces = |range: &PageRange| range.start.0 / size..=(range.end().0 - 1) / size;
        self.held.iter().flat_map(pieces).collect::<BTreeSet<_>>().len() as u64 * size
    }

    /// Backed memory in the last `bytes` of the RAM, in bytes.
    fn held_of_last(&self, bytes: u64) -> u64 {
        let mut left = bytes / PAGE_BYTES as u64;
        let mut held = 0;
        for range in self.all.iter().rev() {
            let part = PageRange { start: range.start.add_pages(range.pages - left.min(range.pages)), ..*range };
            let overlap = |one: &PageRange| {
                let (start, end) = (one.start.0.max(part.start.0), one.end().0.min(range.end().0));
                end.saturating_sub(start)
            };
            held += self.held.iter().map(overlap).sum::<u64>();
            left -= left.min(range.pages);
        }
        held
    }
}

/// Size of transparent huge pages, in bytes; `None` if the kernel never gives them. VMMs ask for them by
/// `MADV_HUGEPAGE`.
fn huge_page_bytes() -> Option<u64> {
    let knob = |name: &str| fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{name}")).ok();
    let is_given =
        knob("enabled").is_some_and(|choices| host::chosen(&choices).is_some_and(|choice| choice != "never"));
    let bytes = knob("hpage_pmd_size")?.trim().parse().ok()?;
    (is_given && bytes > 0).then_some(bytes)
}

/// Memory that becomes free when a guest's processes end, in bytes. Pages of files stay in the page cache, and pages
/// merged by ksmd may stay with other processes.
fn private_bytes(guest: &Guest) -> host::Result<u64> {
    let mut sum = 0;
    for pid in &guest.pids {
        let mappings = Mapping::read_all(*pid)?;
        let of = |mapping: &Mapping| {
            let is_memory_alone = mapping.shmem && !holds_folded_pages(mapping);
            let usage = &mapping.usage;
            let bytes = if is_memory_alone { usage.uss_bytes } else { usage.anonymous_bytes };
            bytes.saturating_sub(usage.ksm_bytes.unwrap_or(0))
        };
        sum += mappings.iter().map(of).sum::<u64>();
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use page::HostVirt;

    #[test]
    fn end_of_ram_goes_over_several_mappings_and_has_holes() {
        let range = |page: u64, pages: u64| PageRange { start: HostVirt(page << 12), pages };
        let ram =
            Ram { all: vec![range(100, 10), range(200, 10)], held: vec![range(105, 5), range(200, 3), range(208, 2)] };
        let found = [0, 1, 2, 9, 10, 13, 20, 99].map(|pages| ram.held_of_last(pages << 12) >> 12);
        assert_eq!(found, [0, 1, 2, 4, 5, 8, 10, 10]);
        assert_eq!(ram.pieces_bytes(16 << 12) >> 12, 3 * 16);
    }
}
