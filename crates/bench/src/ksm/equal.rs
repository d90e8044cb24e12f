//! Counts the pages that could be merged. Two sets of guests that booted in the same way still differ, so each turn is
//! measured against a count of its own guests.

use host::{Mapping, Pagemap, ProcessMemory};
use page::{Fingerprint, HostVirt, PAGE_BYTES, PageRange};
use std::collections::HashSet;

/// A process of a guest, and the least size in bytes of its mappings that are guest memory. Smaller mappings are the
/// VMM's own.
pub type Guest = (u32, u64);

/// Number of pages that are read at once.
const AT_ONCE: u64 = 64;

/// The mappings of a process that are a guest's memory: private, writable, without a file, large.
///
/// # Errors
/// The process has ended.
pub fn memory_of((pid, least_bytes): Guest) -> anyhow::Result<Vec<Mapping>> {
    let mut mappings = Mapping::list(pid)?;
    mappings.retain(|m| m.write && !m.execute && !m.shared && !m.has_file() && m.bytes() >= least_bytes);
    Ok(mappings)
}

/// The number of these guests' pages that are superfluous: of every content all copies but one.
///
/// # Errors
/// A process has ended.
pub fn equal_pages(guests: &[Guest]) -> anyhow::Result<u64> {
    let mut contents: HashSet<Fingerprint> = HashSet::new();
    let mut pages = 0;
    let mut buffer = vec![0; AT_ONCE as usize * PAGE_BYTES];
    for guest in guests {
        let (pagemap, memory) = (Pagemap::open(guest.0)?, ProcessMemory::open(guest.0)?);
        for mapping in memory_of(*guest)? {
            for range in pagemap.present_ranges(mapping.start, mapping.end)? {
                let mut from: HostVirt = range.start;
                while from < range.end() {
                    let wanted = (range.end().page() - from.page()).min(AT_ONCE);
                    // Pages that went away meanwhile are not counted.
                    let read = memory.read(&[PageRange { start: from, pages: wanted }], &mut buffer).unwrap_or(0);
                    contents
                        .extend(buffer.as_chunks::<PAGE_BYTES>().0[..read].iter().map(|page| Fingerprint::of(page)));
                    pages += read as u64;
                    from = from.add_pages(wanted);
                }
            }
        }
    }
    Ok(pages - contents.len() as u64)
}
