//! Memory in which each page has a content of its own, or one that other pages have too.

use host::Pagemap;
use page::HostVirt;
use std::io;

const PAGE: usize = 4096;

/// Private anonymous memory in small pages. It is never unmapped.
pub struct Area {
    start: *mut u8,
    pages: usize,
}

impl Area {
    /// Maps memory, and fills each page from its seed. Pages with the same seed are equal.
    pub fn filled(pages: usize, seed: impl Fn(usize) -> u64) -> io::Result<Self> {
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, access, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mut area = Self { start: start.cast(), pages };
        area.advise(0, pages, libc::MADV_NOHUGEPAGE)?;
        (0..pages).for_each(|n| area.fill(n, seed(n)));
        Ok(area)
    }

    /// Number of its pages.
    pub const fn pages(&self) -> usize {
        self.pages
    }

    /// The bytes of a page.
    pub fn page(&mut self, n: usize) -> &mut [u8; PAGE] {
        assert!(n < self.pages);
        // SAFETY: within a mapping that is never unmapped, to which only this area refers, and which is borrowed.
        unsafe { &mut *self.start.wrapping_add(n * PAGE).cast() }
    }

    /// Fills a page by Xorshift from a seed: pages of different seeds differ.
    pub fn fill(&mut self, n: usize, seed: u64) {
        let mut x = (seed << 1 | 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for word in self.page(n).as_chunks_mut::<8>().0 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            *word = x.to_ne_bytes();
        }
    }

    /// `madvise`, of the C library.
    pub fn advise(&mut self, from: usize, pages: usize, advice: libc::c_int) -> io::Result<()> {
        assert!(from + pages <= self.pages);
        // SAFETY: a range of this mapping, which is exclusively borrowed; every content of its bytes is valid.
        let answer = unsafe { libc::madvise(self.start.wrapping_add(from * PAGE).cast(), pages * PAGE, advice) };
        if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Number of pages that map a file, as folded pages do.
    pub fn folded_pages(&self) -> host::Result<u64> {
        let (mut entries, start) = (Vec::new(), HostVirt(self.start as u64));
        Pagemap::open(std::process::id())?.read(start, self.pages as u64, &mut entries)?;
        Ok(entries.iter().filter(|entry| entry.present() && entry.file_or_shared()).count() as u64)
    }
}
