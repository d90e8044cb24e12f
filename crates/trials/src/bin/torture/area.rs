//! Private anonymous memory, and all operations that a program can apply to it.
//!
//! All accesses to the bytes are atomic. Several threads use neighbouring pages, and the kernel may replace a page at
//! any time, so the program never holds a plain reference to them.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

pub const PAGE: usize = 4096;
pub const WORDS: usize = PAGE / 8;

const PRIVATE: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

/// A mapping. The caller of a function that changes pages ensures that no other thread uses those pages meanwhile.
#[derive(Debug)]
pub struct Area {
    start: usize,
    pages: usize,
}

fn done(answer: libc::c_int) -> io::Result<()> {
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn map(at: usize, pages: usize, flags: libc::c_int) -> io::Result<usize> {
    // SAFETY: the address is either of the kernel's choice, or with MAP_FIXED within an area of the caller's.
    let start = unsafe { libc::mmap(at as *mut _, pages * PAGE, READ_WRITE, PRIVATE | flags, -1, 0) };
    if start == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(start as usize) }
}

/// Whether areas are advised `MADV_DONTFORK`, so that children do not inherit them.
pub static KEPT_FROM_CHILDREN: AtomicBool = AtomicBool::new(false);

impl Area {
    /// Memory in small pages that may be merged.
    pub fn mergeable(pages: usize) -> Self {
        let area = Self::plain(pages);
        area.mergeable_again(0, pages);
        area
    }

    /// Memory without any advice.
    pub fn plain(pages: usize) -> Self {
        Self { start: map(0, pages, 0).expect("mmap"), pages }
    }

    /// A file, mapped privately and writable.
    pub fn of_file(file: &File, pages: usize) -> Self {
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { libc::mmap(null_mut(), pages * PAGE, READ_WRITE, libc::MAP_PRIVATE, file.as_raw_fd(), 0) };
        assert_ne!(start, libc::MAP_FAILED, "mmap: {}", io::Error::last_os_error());
        Self { start: start as usize, pages }
    }

    /// Gives up the contents of pages by a direct system call, which the agent's hooks of the C library do not see.
    pub fn discard_past_hooks(&self, from: usize, pages: usize) -> io::Result<()> {
        let (start, bytes) = self.range(from, pages);
        let arguments = [start as usize, bytes, libc::MADV_DONTNEED as usize, 0, 0, 0];
        // SAFETY: as for `advise`.
        let answer = unsafe { act::raw::call(libc::SYS_madvise, arguments) };
        act::raw::error(answer).map_or(Ok(()), |number| Err(io::Error::from_raw_os_error(number)))
    }

    pub const fn pages(&self) -> usize {
        self.pages
    }

    pub const fn address(&self, page: usize) -> usize {
        self.start + page * PAGE
    }

    pub fn word(&self, page: usize, n: usize) -> &AtomicU64 {
        assert!(page < self.pages && n < WORDS, "page {page} word {n} of {} pages", self.pages);
        let address = self.address(page) + n * 8;
        // SAFETY: aligned, and within this mapping, which lives as long as the area. Every bit pattern is a number.
        // All other accesses are atomic or the kernel's.
        unsafe { &*(address as *const AtomicU64) }
    }

    fn range(&self, from: usize, pages: usize) -> (*mut libc::c_void, usize) {
        assert!(from + pages <= self.pages, "{from} + {pages} of {} pages", self.pages);
        (self.address(from) as *mut libc::c_void, pages * PAGE)
    }

    pub fn advise(&self, from: usize, pages: usize, advice: libc::c_int) -> io::Result<()> {
        let (start, bytes) = self.range(from, pages);
        // SAFETY: within this mapping. The caller keeps account of the contents, and nobody has a plain reference to
        // them.
        done(unsafe { libc::madvise(start, bytes, advice) })
    }

    pub fn protect(&self, from: usize, pages: usize, protection: libc::c_int) -> io::Result<()> {
        let (start, bytes) = self.range(from, pages);
        // SAFETY: within this mapping; the caller does not use the pages until the protection allows it again.
        done(unsafe { libc::mprotect(start, bytes, protection) })
    }

    pub fn unprotect(&self, from: usize, pages: usize) -> io::Result<()> {
        self.protect(from, pages, READ_WRITE)
    }

    pub fn lock(&self, from: usize, pages: usize) -> io::Result<()> {
        let (start, bytes) = self.range(from, pages);
        // SAFETY: changes no contents.
        done(unsafe { libc::mlock(start, bytes) })
    }

    pub fn unlock(&self, from: usize, pages: usize) -> io::Result<()> {
        let (start, bytes) = self.range(from, pages);
        // SAFETY: changes no contents.
        done(unsafe { libc::munlock(start, bytes) })
    }

    /// Maps new memory over a part, which then holds zeros.
    pub fn replace(&self, from: usize, pages: usize) -> io::Result<()> {
        let (start, _) = self.range(from, pages);
        map(start as usize, pages, libc::MAP_FIXED).map(|_| self.mergeable_again(from, pages))
    }

    /// Maps new memory over a part in two calls, with a hole in between. Returns `false` if another thread has mapped
    /// something there: all other mappings of the program must be made at given addresses.
    pub fn unmap_and_map(&self, from: usize, pages: usize) -> io::Result<bool> {
        let (start, bytes) = self.range(from, pages);
        // SAFETY: a part of this mapping, which nobody uses until there is memory again.
        done(unsafe { libc::munmap(start, bytes) })?;
        match map(start as usize, pages, libc::MAP_FIXED_NOREPLACE) {
            Ok(_) => self.mergeable_again(from, pages),
            // Another thread has mapped something at this place: the area has lost the part.
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => return Ok(false),
            Err(e) => return Err(e),
        }
        Ok(true)
    }

    pub fn mergeable_again(&self, from: usize, pages: usize) {
        if KEPT_FROM_CHILDREN.load(Relaxed) {
            self.advise(from, pages, libc::MADV_DONTFORK).expect("MADV_DONTFORK");
        }
        self.advise(from, pages, libc::MADV_NOHUGEPAGE).expect("MADV_NOHUGEPAGE");
        self.advise(from, pages, libc::MADV_MERGEABLE).expect("MADV_MERGEABLE");
    }

    /// Grows or shrinks the whole area, which may move. New pages hold zeros.
    pub fn resize(&mut self, pages: usize) -> io::Result<()> {
        self.remap(pages, libc::MREMAP_MAYMOVE, 0)
    }

    /// Moves the whole area to another place.
    pub fn relocate(&mut self) -> io::Result<()> {
        let to = map(0, self.pages, 0)?;
        self.remap(self.pages, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, to)
    }

    /// Moves the contents to another place, and returns the old one, which then holds zeros.
    pub fn move_out(&mut self) -> io::Result<Self> {
        let old = Self { start: self.start, pages: self.pages };
        match self.remap(self.pages, libc::MREMAP_MAYMOVE | libc::MREMAP_DONTUNMAP, 0) {
            Ok(()) => Ok(old),
            Err(e) => {
                // Nothing was moved: the mapping still belongs to this area.
                std::mem::forget(old);
                Err(e)
            }
        }
    }

    fn remap(&mut self, pages: usize, flags: libc::c_int, to: usize) -> io::Result<()> {
        let (start, bytes) = self.range(0, self.pages);
        // SAFETY: the whole mapping. It is borrowed mutably, so nobody has an address in it. With MREMAP_FIXED, `to`
        // is a mapping of the same size that was made for this.
        let new = unsafe { libc::mremap(start, bytes, pages * PAGE, flags, to as *mut libc::c_void) };
        if new == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        (self.start, self.pages) = (new as usize, pages);
        Ok(())
    }

    /// Has the kernel write a part of a page, by `read` from a file.
    pub fn read_from(&self, page: usize, bytes: usize, from: &impl AsRawFd) -> io::Result<usize> {
        let (start, room) = self.range(page, 1);
        // SAFETY: at most as many bytes as there are, within this mapping.
        let count = unsafe { libc::read(from.as_raw_fd(), start, bytes.min(room)) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Reads pages of a file into pages.
    pub fn pread(&self, page: usize, pages: usize, from: &impl AsRawFd, file_page: usize) -> io::Result<usize> {
        let (start, bytes) = self.range(page, pages);
        // SAFETY: as many bytes as there are, within this mapping.
        let count = unsafe { libc::pread(from.as_raw_fd(), start, bytes, (file_page * PAGE) as libc::off_t) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Reads pages of a file by `preadv`, with the first page and the others as two buffers.
    pub fn preadv(&self, page: usize, pages: usize, from: &impl AsRawFd, file_page: usize) -> io::Result<usize> {
        let (start, bytes) = self.range(page, pages);
        let second = self.address(page + 1) as *mut libc::c_void;
        let parts =
            [libc::iovec { iov_base: start, iov_len: PAGE }, libc::iovec { iov_base: second, iov_len: bytes - PAGE }];
        let offset = (file_page * PAGE) as libc::off_t;
        // SAFETY: as many bytes as there are, within this mapping.
        let count = unsafe { libc::preadv(from.as_raw_fd(), parts.as_ptr(), 2, offset) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Has the kernel read a part of a page, by `write` to a file.
    pub fn write_to(&self, page: usize, bytes: usize, to: &impl AsRawFd) -> io::Result<usize> {
        let (start, room) = self.range(page, 1);
        // SAFETY: at most as many bytes as there are, within this mapping.
        let count = unsafe { libc::write(to.as_raw_fd(), start, bytes.min(room)) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        let (start, bytes) = self.range(0, self.pages);
        // SAFETY: nobody refers to this area any more.
        let _ = unsafe { libc::munmap(start, bytes) };
    }
}

/// The page tables of this process.
pub struct Pagemap {
    file: File,
    entries: Vec<u8>,
}

/// Whether the page table has private memory for a page. A page that has a content and no private memory is folded, or
/// is just being folded: it maps a slot of the pool, or will when it is next accessed.
pub type IsPrivate = bool;

impl Pagemap {
    pub fn open() -> Self {
        Self { file: File::open("/proc/self/pagemap").expect("open the page map"), entries: Vec::new() }
    }

    /// The state of these pages, read one after the other while they may change.
    pub fn look(&mut self, area: &Area, from: usize, pages: usize) -> impl Iterator<Item = IsPrivate> {
        self.entries.resize(pages * 8, 0);
        let at = (area.address(from) / PAGE * 8) as u64;
        self.file.read_exact_at(&mut self.entries, at).expect("read the page map");
        self.entries.as_chunks::<8>().0.iter().map(|entry| {
            let entry = u64::from_ne_bytes(*entry);
            entry >> 63 == 1 && entry >> 61 & 1 == 0
        })
    }
}

/// Number of folded pages in a part of an area, all of which hold a content.
pub fn folded(area: &Area, from: usize, pages: usize) -> usize {
    Pagemap::open().look(area, from, pages).filter(|is_private| !is_private).count()
}

/// A pipe: its reading end and its writing end.
pub fn pipe() -> (File, File) {
    let (from, to) = io::pipe().expect("a pipe");
    (File::from(std::os::fd::OwnedFd::from(from)), File::from(std::os::fd::OwnedFd::from(to)))
}

/// Ends the whole process at once; no more of its code runs.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: takes a number and does not return.
    unsafe { libc::_exit(code) }
}

/// Has the allocator give memory back to the kernel.
pub fn trim_heap() {
    // SAFETY: the allocator may be asked this at any time.
    let _ = unsafe { libc::malloc_trim(0) };
}

/// A null address, which leaves the choice to the kernel.
pub const fn nowhere() -> *mut libc::c_void {
    null_mut()
}
