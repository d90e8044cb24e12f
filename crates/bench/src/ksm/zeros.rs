//! Pages of zeros that the kernel has folded by itself.
//!
//! When the kernel splits a huge page, it maps the pages of zeros in it to its one zero page. That saves them as well as merging does,
//! and neither merger's own count has them.

use super::equal::{Guest, memory_of};
use host::{Mapping, Pagemap};

/// The guests' memory, and how many of its pages were mapped to the kernel's zero page before merging.
#[derive(Default)]
pub struct Zeros {
    memory: Vec<(Pagemap, Vec<Mapping>)>,
    before: u64,
}

impl Zeros {
    /// Counts for these guests, before merging. Those that have ended are left out: a container's processes come and
    /// go.
    ///
    /// # Errors
    /// Page tables cannot be read.
    pub fn of(guests: &[Guest]) -> anyhow::Result<Self> {
        let of = |guest: Guest| Ok((Pagemap::open(guest.0)?, memory_of(guest)?));
        let is_gone = |e: &anyhow::Error| e.downcast_ref().is_some_and(host::Error::is_gone);
        let found = guests.iter().map(|guest| of(*guest)).filter(|found| !found.as_ref().is_err_and(is_gone));
        let mut zeros = Self { memory: found.collect::<anyhow::Result<_>>()?, before: 0 };
        zeros.before = zeros.since()?;
        Ok(zeros)
    }

    /// Number of pages that have been mapped to the kernel's zero page since. A process that has ended has none.
    ///
    /// # Errors
    /// The kernel refused to look.
    pub fn since(&self) -> host::Result<u64> {
        let mut pages = 0;
        for (pagemap, mappings) in &self.memory {
            let mut of_guest = 0;
            for mapping in mappings {
                match pagemap.zero_ranges(mapping.start, mapping.end) {
                    Err(e) if e.is_gone() => {
                        of_guest = 0;
                        break;
                    }
                    found => of_guest += found?.iter().map(|range| range.pages).sum::<u64>(),
                }
            }
            pages += of_guest;
        }
        Ok(pages.saturating_sub(self.before))
    }

    /// The mappings that may be guest memory, of the guest with this number among those counted.
    pub fn mappings_of(&self, guest: usize) -> Option<&[Mapping]> {
        self.memory.get(guest).map(|(_, mappings)| &mappings[..])
    }
}
