//! Reads this process's memory while another thread may unmap it. At a page that is not mapped any more, the read ends
//! without harm.
//!
//! The kernel copies the pages to a memory file (`pwrite`). Where nothing is mapped, the call stops with `EFAULT` and
//! no signal is sent. This takes as much time as a copy made by the process itself.

use crate::apart::map_apart;
use crate::member_memory::write_pages;
use page::{HostVirt, PAGE_BYTES, PageRange, pages_to_bytes};
use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::io;

/// A buffer for copies of pages.
#[derive(Debug)]
pub struct SoftReader {
    file: OwnedFd,
    map: PageRange,
}

impl SoftReader {
    /// A buffer of `pages` pages.
    ///
    /// # Errors
    /// Memory, mappings or descriptors are short.
    pub fn new(pages: u64) -> io::Result<Self> {
        let bytes = pages_to_bytes(pages);
        let file = memfd_create("own-copies", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, bytes)?;
        let at = map_apart(bytes as usize, |at, more| {
            // SAFETY: a new mapping where nothing is mapped.
            unsafe { mmap(at, bytes as usize, ProtFlags::READ, MapFlags::SHARED | more, &file, 0) }
        })?;
        // Children have no use for the mapping.
        // SAFETY: the mapping is ours and new, and the advice does not change what this process finds in it.
        let _ = unsafe { madvise(at, bytes as usize, Advice::LinuxDontFork) };
        Ok(Self { file, map: PageRange { start: HostVirt(at as u64), pages } })
    }

    /// Copies pages into the buffer, as many as it holds, up to the first page that cannot be read. Returns their
    /// number.
    pub fn read(&mut self, range: PageRange) -> usize {
        let range = PageRange { pages: range.pages.min(self.map.pages), ..range };
        write_pages(&self.file, 0, range) as usize
    }

    /// Page `n` of the buffer.
    ///
    /// # Panics
    /// The buffer has no page `n`.
    pub fn page(&self, n: usize) -> &[u8; PAGE_BYTES] {
        assert!((n as u64) < self.map.pages, "page {n} of {}", self.map.pages);
        let at = self.map.start.add_pages(n as u64).0 as usize as *const [u8; PAGE_BYTES];
        // SAFETY: the address is that of a page of the mapping, which lives as long as `self`. Only `read` writes the
        // file, and it borrows `self` exclusively. A hole in the file reads as zeros, so the page is always
        // initialized.
        unsafe { &*at }
    }
}

impl Drop for SoftReader {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and references to it have borrowed `self`.
        let _ = unsafe { munmap(self.map.start.0 as usize as *mut _, pages_to_bytes(self.map.pages) as usize) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemberMemory;

    #[test]
    fn reading_stops_at_first_unmapped_page() {
        let (mut reader, memory) = (SoftReader::new(4).unwrap(), MemberMemory::new(4).unwrap());
        let range = memory.range();
        (0..4).for_each(|n| {
            let at = range.start.add_pages(n).0 as usize as *mut u64;
            // SAFETY: the address is that of the first word of a page of the test's own.
            unsafe { at.write_volatile(n + 1) };
        });
        let first = |reader: &SoftReader, n: usize| u64::from_ne_bytes(reader.page(n)[..8].try_into().unwrap());
        assert_eq!(reader.read(range), 4);
        assert_eq!([0, 1, 2, 3].map(|n| first(&reader, n)), [1, 2, 3, 4]);
        // SAFETY: the page is the test's own, and nothing refers to it.
        unsafe { rustix::mm::munmap(range.start.add_pages(2).0 as usize as *mut _, PAGE_BYTES) }.unwrap();
        assert_eq!(reader.read(PageRange { start: range.start.add_pages(1), pages: 3 }), 1);
        assert_eq!(first(&reader, 0), 2);
        assert_eq!(reader.read(PageRange { start: range.start.add_pages(2), pages: 1 }), 0);
    }
}
