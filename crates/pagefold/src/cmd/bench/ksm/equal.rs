//! What there is to merge: two sets of guests that booted alike are never quite alike, so that each turn is measured
//! against its own.

use host::{Mapping, Pagemap, ProcessMemory};
use page::{Fingerprint, HostVirt, PAGE_BYTES, PageRange};
use std::collections::HashSet;

/// A process, and how large a mapping must be to be memory that it asks to be merged, and not a VMM's own.
pub type Guest = (u32, u64);

/// Pages that are read at once.
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

/// Of all pages of these guests, those that are equal to another one: all copies but one of each content.
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
                    // What has gone since is not there any more.
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
