//! What there is to merge: two sets of guests that booted alike are never quite alike, so that each turn is measured
//! against its own.

use host::{Mapping, Pagemap, ProcessMemory};
use page::{Fingerprint, HostVirt, PAGE_BYTES, PageRange};
use std::collections::HashSet;

/// Mappings smaller than this are not a guest's memory.
const LEAST_BYTES: u64 = 1 << 20;
/// Pages that are read at once.
const AT_ONCE: u64 = 64;

/// The mappings of a process that may be a guest's memory: private, writable, without a file.
///
/// # Errors
/// The process has ended.
pub fn memory_of(pid: u32) -> anyhow::Result<Vec<Mapping>> {
    let mut mappings = Mapping::list(pid)?;
    mappings.retain(|m| m.write && !m.execute && !m.shared && !m.has_file() && m.bytes() >= LEAST_BYTES);
    Ok(mappings)
}

/// Pages in memory that are equal to another one, of all such pages of these processes: all copies but one of each content.
///
/// # Errors
/// A process has ended.
pub fn equal_pages(pids: &[u32]) -> anyhow::Result<u64> {
    let mut contents: HashSet<Fingerprint> = HashSet::new();
    let mut pages = 0;
    let mut buffer = vec![0; AT_ONCE as usize * PAGE_BYTES];
    for pid in pids {
        let (pagemap, memory) = (Pagemap::open(*pid)?, ProcessMemory::open(*pid)?);
        for mapping in memory_of(*pid)? {
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
