//! `/proc/PID/pagemap`: for each page of an address space its presence, its backing and, for root, its page frame.
//!
//! An open pagemap stays with the address space that it was opened on. Once the process has ended or executed another
//! program, reads return nothing, and a scan notices that.
//!
//! See `Documentation/admin-guide/mm/pagemap.rst` in the Linux source.

use crate::memory_files::proc_file;
use crate::{Error, Result};
use linux_raw_sys::general::{page_region, pm_scan_arg};
use page::{HostVirt, PAGE_BYTES, PAGE_SHIFT, PageRange, Pfn};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// `_IOWR('f', 16, struct pm_scan_arg)`
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610_u32 as libc::Ioctl;
const _: () =
    assert!(PAGEMAP_SCAN as u32 as usize == 3 << 30 | size_of::<pm_scan_arg>() << 16 | (b'f' as usize) << 8 | 16);
const _: () = assert!(size_of::<pm_scan_arg>() == 96 && size_of::<page_region>() == 24);

/// Categories of `PAGEMAP_SCAN`.
const PAGE_IS_WPALLOWED: u64 = 1 << 0;
const PAGE_IS_WRITTEN: u64 = 1 << 1;
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
const PAGE_IS_HUGE: u64 = 1 << 6;
/// Flag of `PAGEMAP_SCAN`: write-protects the pages found, so that the kernel notes their next write, and skips
/// mappings in which it does not note writes.
const PM_SCAN_WP_MATCHING: u64 = 1 << 0;

/// The pages that a scan looks for: in all of the categories `all`, and in none of the categories `none`. If there are
/// categories in `any` or `lacks`, a page must be in one of the former, or lack one of the latter.
#[derive(Clone, Copy, Default)]
struct Query {
    flags: u64,
    all: u64,
    none: u64,
    any: u64,
    lacks: u64,
}

/// Present private pages of a process in three lists of ordered ranges; see [`Pagemap::survey`].
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Survey {
    /// As [`Pagemap::unwatched_ranges`].
    pub unwatched: Vec<PageRange>,
    /// As [`Pagemap::written_ranges`], without pages of files.
    pub written: Vec<PageRange>,
    /// As [`Pagemap::huge_ranges`], without pages of files.
    pub huge: Vec<PageRange>,
}

/// Number of entries (one for each page) that are read in one piece on kernels without `PAGEMAP_SCAN`.
const READ_AT_ONCE_PAGES: u64 = 1 << 16;
/// Most regions that one `PAGEMAP_SCAN` returns. The kernel allocates memory for so many in each call.
const REGIONS_A_CALL: usize = 128;

/// The pagemap's entry of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagemapEntry(u64);

impl PagemapEntry {
    /// The entry whose bits, as the kernel writes them, are `bits`.
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Mapped to a page frame.
    pub const fn present(self) -> bool {
        self.0 >> 63 & 1 == 1
    }

    /// Page cache or shared anonymous memory, as opposed to private anonymous.
    pub const fn file_or_shared(self) -> bool {
        self.0 >> 61 & 1 == 1
    }

    /// Mapped by this page table entry and no other.
    pub const fn exclusive(self) -> bool {
        self.0 >> 56 & 1 == 1
    }

    /// Present and write-protected through a userfaultfd: the next write is reported to the userfaultfd, or noted by
    /// the kernel.
    pub const fn write_protected(self) -> bool {
        self.present() && self.0 >> 57 & 1 == 1
    }

    /// In swap. A page that is not present and whose next write the kernel is to note looks the same.
    pub const fn swapped(self) -> bool {
        self.0 >> 62 & 1 == 1
    }

    /// The frame; `None` where the page is not present or the kernel hides frames (no `CAP_SYS_ADMIN`).
    pub const fn pfn(self) -> Option<Pfn> {
        let pfn = self.0 & ((1 << 55) - 1);
        if self.present() && pfn != 0 { Some(Pfn(pfn)) } else { None }
    }
}

/// Whether the kernel has `PAGEMAP_SCAN`.
///
/// # Errors
/// Our own page table cannot be read.
pub fn has_pagemap_scan() -> Result<bool> {
    let here = HostVirt(PAGE_BYTES as u64);
    Ok(Pagemap::open(std::process::id())?.scan_ranges(here, here.add_pages(1))?.is_some())
}

/// Whether the kernel shows page frame numbers to this process (`CAP_SYS_ADMIN`).
pub fn frames_visible() -> bool {
    let something = 0_u8;
    let mut entries = Vec::new();
    let here = HostVirt(&raw const something as u64);
    Pagemap::open(std::process::id()).and_then(|p| p.read(here, 1, &mut entries)).is_ok()
        && entries.first().is_some_and(|e| e.pfn().is_some())
}

/// An open pagemap.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
    path: PathBuf,
}

impl Pagemap {
    /// Opens the pagemap of a process.
    ///
    /// # Errors
    /// The process is gone, or belongs to another user.
    pub fn open(pid: u32) -> Result<Self> {
        let path = proc_file(pid, "pagemap");
        let file = File::open(&path).map_err(|e| Error::file("open", &path, e))?;
        Ok(Self { file, path })
    }

    /// Opens the pagemap of the calling process. It does not go by the pid, which may be another process's in this
    /// `/proc`.
    ///
    /// # Errors
    /// There is no `/proc`, or this process has given up the right to read its pagemap.
    pub fn own() -> Result<Self> {
        let path = PathBuf::from("/proc/thread-self/pagemap");
        let file = File::open(&path).map_err(|e| Error::file("open", &path, e))?;
        Ok(Self { file, path })
    }

    /// A pagemap that another process has opened and handed on to this one.
    pub fn handed(file: OwnedFd) -> Self {
        Self { file: file.into(), path: PathBuf::from("a pagemap that was handed on") }
    }

    /// The open file.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Replaces `entries` by the entries of `pages` pages from `start` on. There are fewer if the address space is gone
    /// or ends before.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn read(&self, start: HostVirt, pages: u64, entries: &mut Vec<PagemapEntry>) -> Result<()> {
        const WORD: usize = size_of::<u64>();
        entries.clear();
        let mut buffer = [0; 512 * WORD];
        let mut left = usize::try_from(pages).unwrap_or(usize::MAX);
        let mut at = start.page() * WORD as u64;
        while left > 0 {
            let want = left.min(buffer.len() / WORD) * WORD;
            let got = self.file.read_at(&mut buffer[..want], at).map_err(|e| Error::file("read", &self.path, e))?;
            entries.extend(buffer[..got].as_chunks::<WORD>().0.iter().map(|w| PagemapEntry(u64::from_ne_bytes(*w))));
            if got < want {
                break;
            }
            left -= got / WORD;
            at += got as u64;
        }
        Ok(())
    }

    /// Whether the address space that this was opened on still exists.
    pub fn is_alive(&self) -> bool {
        // The pagemap of an address space that no process uses any more reads as empty. Otherwise at least the entry of
        // page 1 can be read.
        let mut word = [0; 8];
        matches!(self.file.read_at(&mut word, 8), Ok(8))
    }

    /// The present pages between two addresses.
    ///
    /// Where the kernel has `PAGEMAP_SCAN` (Linux 6.7), the time taken grows with the number of present pages only.
    /// Pages that map the kernel's zero page are then left out. On older kernels every entry is read.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn present_ranges(&self, start: HostVirt, end: HostVirt) -> Result<Vec<PageRange>> {
        match self.scan_ranges(start, end)? {
            Some(ranges) => Ok(ranges),
            None => self.read_ranges(start, end),
        }
    }

    /// [`Pagemap::present_ranges`] by reading every entry.
    fn read_ranges(&self, start: HostVirt, end: HostVirt) -> Result<Vec<PageRange>> {
        let (mut found, mut entries): (Vec<PageRange>, _) = (Vec::new(), Vec::new());
        let mut from = start;
        while from < end {
            let pages = (end.page() - from.page()).min(READ_AT_ONCE_PAGES);
            self.read(from, pages, &mut entries)?;
            for n in (0..entries.len()).filter(|&n| entries[n].present()) {
                let page = from.add_pages(n as u64);
                match found.last_mut() {
                    Some(last) if last.end() == page => last.pages += 1,
                    _ => found.push(PageRange { start: page, pages: 1 }),
                }
            }
            if (entries.len() as u64) < pages {
                break;
            }
            from = from.add_pages(pages);
        }
        Ok(found)
    }

    /// [`Pagemap::present_ranges`] by `PAGEMAP_SCAN`; `None` where the kernel does not have it.
    fn scan_ranges(&self, start: HostVirt, end: HostVirt) -> Result<Option<Vec<PageRange>>> {
        match self.scan(start, end, Query { all: PAGE_IS_PRESENT, none: PAGE_IS_PFNZERO, ..Query::default() }) {
            Ok(ranges) => Ok(Some(ranges)),
            Err(Error::File { cause, .. }) if cause.raw_os_error() == Some(libc::ENOTTY) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Small present pages that were written since the last call, in mappings where a userfaultfd notes writes
    /// (`act::Purpose::Note`). Their next writes are noted anew.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn take_written(&self, start: HostVirt, end: HostVirt) -> Result<Vec<PageRange>> {
        let all = PAGE_IS_WRITTEN | PAGE_IS_PRESENT;
        self.scan(
            start,
            end,
            Query { flags: PM_SCAN_WP_MATCHING, all, none: PAGE_IS_PFNZERO | PAGE_IS_HUGE, ..Query::default() },
        )
    }

    /// The pages that [`Pagemap::take_written`] would return. They are returned by later calls, too.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn written_ranges(&self, start: HostVirt, end: HostVirt) -> Result<Vec<PageRange>> {
        let all = PAGE_IS_WPALLOWED | PAGE_IS_WRITTEN | PAGE_IS_PRESENT;
        self.scan(start, end, Query { all, none: PAGE_IS_PFNZERO | PAGE_IS_HUGE, ..Query::default() })
    }

    /// Pages in swap.
    ///
    /// # Errors
    /// The kernel refused, or has no `PAGEMAP_SCAN`.
    pub fn swapped_ranges(&self, start: HostVirt, end: HostVirt) -> Result<Vec<PageRange>> {
        self.scan(start, end, Query { all: PAGE_IS_SWAPPED, ..Query::default() })
    }

    /// Present private pages in mappings where no userfaultfd notes writes.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn unwatched_ranges(&self, start: HostVirt, end: HostVirt) -> Result<Vec<PageRange>> {
        let none = PAGE_IS_WPALLOWED | PAGE_IS_FILE | PAGE_IS_PFNZERO;
        self.scan(start, end, Query { all: PAGE_IS_PRESENT, none, ..Query::default() })
    }

    /// Small present pages.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn small_ranges(&self, start: HostVirt, end: HostVirt) -> Result<Vec<PageRange>> {
        self.scan(start, end, Query { all: PAGE_IS_PRESENT, none: PAGE_IS_PFNZERO | PAGE_IS_HUGE, ..Query::default() })
    }

    /// Small present pages that are private, and not a file's.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn small_private_ranges(&self, start: HostVirt, end: HostVirt) -> Result<Vec<PageRange>> {
        let none = PAGE_IS_FILE | PAGE_IS_PFNZERO | PAGE_IS_HUGE;
        self.scan(start, end, Query { all: PAGE_IS_PRESENT, none, ..Query::default() })
    }

    /// Pages that map the kernel's zero page.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn zero_ranges(&self, start: HostVirt, end: HostVirt) -> Result<Vec<PageRange>> {
        self.scan(start, end, Query { all: PAGE_IS_PRESENT | PAGE_IS_PFNZERO, ..Query::default() })
    }

    /// Present pages that are part of huge pages.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn huge_ranges(&self, start: HostVirt, end: HostVirt) -> Result<Vec<PageRange>> {
        self.scan(start, end, Query { all: PAGE_IS_PRESENT | PAGE_IS_HUGE, none: PAGE_IS_PFNZERO, ..Query::default() })
    }

    /// Present pages that are private, and not a file's. Pages in swap are left out: in mappings of a file they look
    /// like pages that are not present and whose next write is to be noted.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn private_ranges(&self, start: HostVirt, end: HostVirt) -> Result<Vec<PageRange>> {
        self.scan(start, end, Query { all: PAGE_IS_PRESENT, none: PAGE_IS_FILE | PAGE_IS_PFNZERO, ..Query::default() })
    }

    /// Present private pages that are unwatched, written or huge, by one walk of the page table.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn survey(&self, start: HostVirt, end: HostVirt) -> Result<Survey> {
        let query = Query {
            all: PAGE_IS_PRESENT,
            none: PAGE_IS_FILE | PAGE_IS_PFNZERO,
            any: PAGE_IS_WRITTEN | PAGE_IS_HUGE,
            lacks: PAGE_IS_WPALLOWED,
            ..Query::default()
        };
        let mut survey = Survey::default();
        self.each_region(start, end, query, |region| {
            let has = |category| region.categories & category != 0;
            if !has(PAGE_IS_WPALLOWED) {
                append(&mut survey.unwatched, region);
            } else if has(PAGE_IS_WRITTEN) && !has(PAGE_IS_HUGE) {
                append(&mut survey.written, region);
            }
            if has(PAGE_IS_HUGE) {
                append(&mut survey.huge, region);
            }
        })?;
        Ok(survey)
    }

    fn scan(&self, start: HostVirt, end: HostVirt, query: Query) -> Result<Vec<PageRange>> {
        let mut found = Vec::new();
        self.each_region(start, end, query, |region| append(&mut found, region))?;
        Ok(found)
    }

    /// Calls `each` with every region that the query finds, in order.
    fn each_region(
        &self,
        start: HostVirt,
        end: HostVirt,
        query: Query,
        mut each: impl FnMut(&page_region),
    ) -> Result<()> {
        let mut regions = [page_region { start: 0, end: 0, categories: 0 }; REGIONS_A_CALL];
        let mut from = start.0;
        while from < end.0 {
            let mut arg = pm_scan_arg {
                size: size_of::<pm_scan_arg>() as u64,
                flags: query.flags,
                start: from,
                end: end.0,
                walk_end: 0,
                vec: regions.as_mut_ptr() as u64,
                vec_len: regions.len() as u64,
                max_pages: 0,
                category_inverted: query.none | query.lacks,
                category_mask: query.all | query.none,
                category_anyof_mask: query.any | query.lacks,
                return_mask: query.all | query.any | query.lacks,
            };
            // SAFETY: `arg` has the size that it states, and the kernel's layout (both asserted above). Its vector is
            // `regions`, which is exclusively borrowed, has `vec_len` elements of the kernel's layout and outlives
            // the call.
            let n = unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
            let Ok(n) = usize::try_from(n) else {
                return Err(Error::file("scan", &self.path, std::io::Error::last_os_error()));
            };
            regions[..n].iter().for_each(&mut each);
            if arg.walk_end <= from {
                break;
            }
            from = arg.walk_end;
        }
        Ok(())
    }
}

/// Adds a region to ordered ranges. The region must lie behind all of them.
fn append(ranges: &mut Vec<PageRange>, region: &page_region) {
    let pages = (region.end - region.start) >> PAGE_SHIFT;
    match ranges.last_mut() {
        Some(last) if last.end().0 == region.start => last.pages += pages,
        _ => ranges.push(PageRange { start: HostVirt(region.start), pages }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four fresh pages: the second and third were written, the fourth was only read.
    fn own_pages() -> (fresh::Map, HostVirt) {
        let map = fresh::Map::new(4 * PAGE_BYTES);
        map.write(PAGE_BYTES);
        map.write(2 * PAGE_BYTES);
        map.read(3 * PAGE_BYTES);
        let at = HostVirt(map.address());
        (map, at)
    }

    /// Anonymous memory for these tests.
    mod fresh {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

        pub struct Map(*mut u8, usize);

        impl Map {
            pub fn new(len: usize) -> Self {
                // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
                let p = unsafe {
                    mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
                }
                .unwrap();
                // SAFETY: the range is the mapping just made; the advice changes no content.
                unsafe { madvise(p, len, Advice::LinuxNoHugepage) }.unwrap();
                Self(p.cast(), len)
            }

            pub fn address(&self) -> u64 {
                self.0 as u64
            }

            pub fn write(&self, at: usize) {
                assert!(at < self.1);
                // SAFETY: within the mapping, which lives as long as `self` and is not aliased.
                unsafe { self.0.wrapping_add(at).write_volatile(7) }
            }

            pub fn read(&self, at: usize) -> u8 {
                assert!(at < self.1);
                // SAFETY: as for `write`.
                unsafe { self.0.wrapping_add(at).read_volatile() }
            }
        }

        impl Drop for Map {
            fn drop(&mut self) {
                // SAFETY: the mapping is ours and nothing refers to it any more.
                unsafe { munmap(self.0.cast(), self.1) }.unwrap();
            }
        }
    }

    #[test]
    fn present_ranges_leave_out_untouched_and_zero_pages() {
        let (_map, at) = own_pages();
        let pagemap = Pagemap::open(std::process::id()).unwrap();
        let by_reading = pagemap.read_ranges(at, at.add_pages(4)).unwrap();
        assert_eq!(by_reading, [PageRange { start: at.add_pages(1), pages: 3 }], "entries do not tell the zero page");
        let Some(ranges) = pagemap.scan_ranges(at, at.add_pages(4)).unwrap() else {
            eprintln!("skipped: this kernel has no PAGEMAP_SCAN");
            return;
        };
        assert_eq!(ranges, [PageRange { start: at.add_pages(1), pages: 2 }]);
        let zeros = pagemap.zero_ranges(at, at.add_pages(4)).unwrap();
        assert_eq!(zeros, [PageRange { start: at.add_pages(3), pages: 1 }]);
    }

    #[test]
    fn entries_tell_present_from_absent() {
        let (_map, at) = own_pages();
        let pagemap = Pagemap::open(std::process::id()).unwrap();
        let mut entries = Vec::new();
        pagemap.read(at, 4, &mut entries).unwrap();
        let present: Vec<_> = entries.iter().map(|e| e.present()).collect();
        assert_eq!(present, [false, true, true, true]);
        assert!(entries[1].exclusive() && !entries[1].file_or_shared());
        assert!(pagemap.is_alive());
    }

    #[test]
    fn ended_address_space_reads_as_empty() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pagemap = Pagemap::open(child.id()).unwrap();
        assert!(pagemap.is_alive());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!pagemap.is_alive());
    }
}
