//! The page cache of a file: its pages in memory, their frames and their content. Looking at them brings no further
//! pages of the file into memory.
//!
//! The kernel reads ahead. A read or a touch of a missing page, or of one that the kernel has marked, makes it read
//! more of the file. `preadv2(RWF_NOWAIT)` does so too, although it does not wait for the result. The file is
//! therefore mapped, and the mapping is advised as accessed at random (`MADV_RANDOM`), which ends reading ahead.
//! Pages are copied out of this mapping only.

use crate::{Error, PageRange, Pagemap, PagemapEntry, ProcessMemory, Result, open_plain_file};
use page::{HostVirt, PAGE_BYTES};
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use rustix::process::geteuid;
use std::ffi::c_void;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Pages that one `mincore` looks up: 2^18, or 1 GiB. It takes a byte for each, and a disk image may have terabytes of
/// which little is cached.
const PIECE_PAGES: usize = 1 << 18;

/// A file, opened to look at its page cache. The addresses of its pages are offsets in the file.
#[derive(Debug)]
pub struct CachedFile {
    path: PathBuf,
    /// Device, as `st_dev` encodes it.
    pub device: u64,
    /// Inode.
    pub inode: u64,
    /// The user that owns the file.
    owner: u32,
    /// The mapping of the whole file. It is touched only where the file's pages are in memory.
    map: *mut c_void,
    bytes: usize,
    pagemap: Pagemap,
    memory: ProcessMemory,
}

// SAFETY: the mapping is only handed to the kernel as a range of addresses; no byte of it is read or written here.
unsafe impl Send for CachedFile {}
// SAFETY: as above; the other fields are `Sync`.
unsafe impl Sync for CachedFile {}

impl CachedFile {
    /// Opens a plain file of at least one byte.
    ///
    /// # Errors
    /// It cannot be opened or mapped, or is no plain file.
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |attempted| move |e: std::io::Error| Error::file(attempted, path, e);
        let (file, metadata) = open_plain_file(path)?;
        let bytes = usize::try_from(metadata.len()).map_err(|e| failed("map")(std::io::Error::other(e)))?;
        let own = std::process::id();
        let (pagemap, memory) = (Pagemap::open(own)?, ProcessMemory::open(own)?);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let map = unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, &file, 0) };
        let map = map.map_err(|e| failed("map")(e.into()))?;
        let (device, inode, owner) = (metadata.dev(), metadata.ino(), metadata.uid());
        let cached = Self { path: path.into(), device, inode, owner, map, bytes, pagemap, memory };
        // SAFETY: the range is the mapping just made; the advice changes no content.
        let advised = unsafe { madvise(cached.map, bytes, Advice::Random) };
        advised.map_err(|e| failed("map")(e.into()))?;
        Ok(cached)
    }

    /// The path that the file was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The pages that are in memory.
    ///
    /// # Errors
    /// The kernel refused, or would not tell the truth ([`Error::is_denied`]). It reports every page as cached if the
    /// file belongs to another user and the caller may not write to it.
    pub fn cached_ranges(&self) -> Result<Vec<PageRange>> {
        if !self.is_told() {
            return Err(self.failed(Errno::ACCESS));
        }
        self.cached_ranges_by(PIECE_PAGES)
    }

    fn cached_ranges_by(&self, piece_pages: usize) -> Result<Vec<PageRange>> {
        let pages = self.bytes.div_ceil(PAGE_BYTES);
        let mut resident = vec![0_u8; pages.min(piece_pages)];
        let mut ranges: Vec<PageRange> = Vec::new();
        for first in (0..pages).step_by(piece_pages) {
            let piece = &mut resident[..(pages - first).min(piece_pages)];
            let mut at = HostVirt((first * PAGE_BYTES) as u64);
            self.look_up(at, piece)?;
            for run in piece.chunk_by(|a, b| a & 1 == b & 1) {
                let run_pages = run.len() as u64;
                match ranges.last_mut() {
                    _ if run[0] & 1 == 0 => {}
                    Some(last) if last.end() == at => last.pages += run_pages,
                    _ => ranges.push(PageRange { start: at, pages: run_pages }),
                }
                at = at.add_pages(run_pages);
            }
        }
        Ok(ranges)
    }

    /// Replaces `entries` by the pagemap entries of some cached pages. A page evicted meanwhile has an entry that is
    /// not present; `entries` stays empty if the pages cannot be mapped.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn entries(&self, range: PageRange, entries: &mut Vec<PagemapEntry>) -> Result<()> {
        let start = self.map.wrapping_byte_add(range.start.0 as usize);
        // The caller names cached pages, so this brings in nothing. At most it reads a page again that has just been
        // evicted, which is harmless.
        // SAFETY: the range lies in the mapping made in `open`; the advice reads, and changes no content.
        let advised = unsafe { libc::madvise(start, range.pages as usize * PAGE_BYTES, libc::MADV_POPULATE_READ) };
        if advised != 0 {
            entries.clear();
            return Ok(());
        }
        self.pagemap.read(HostVirt(start as u64), range.pages, entries)
    }

    /// Copies one page, if it is still in memory. The bytes behind the file's end in its last page are copied too: they
    /// are zeros, unless a process has written there through a mapping.
    ///
    /// # Errors
    /// The page is no longer cached, or no longer part of the file.
    pub fn read(&self, at: HostVirt, out: &mut [u8]) -> Result<()> {
        let mut resident = [0];
        self.look_up(at, &mut resident)?;
        if resident[0] & 1 == 0 {
            return Err(self.failed(Errno::AGAIN));
        }
        let start = HostVirt(self.map.wrapping_byte_add(at.0 as usize) as u64);
        match self.memory.read_unshared(&[PageRange { start, pages: 1 }], out)? {
            0 => Err(self.failed(Errno::FAULT)),
            _ => Ok(()),
        }
    }

    /// Sets the lowest bit of each byte of `resident` if its page is in memory; the first byte is for the page at `at`.
    fn look_up(&self, at: HostVirt, resident: &mut [u8]) -> Result<()> {
        let start = self.map.wrapping_byte_add(at.0 as usize);
        // SAFETY: the kernel writes one byte for each page of the range to `resident`, which has as many bytes and is
        // exclusively borrowed. It looks at the range without touching it, and refuses a range that is not mapped.
        let answer = unsafe { libc::mincore(start, resident.len() * PAGE_BYTES, resident.as_mut_ptr()) };
        if answer == 0 { Ok(()) } else { Err(self.failed(std::io::Error::last_os_error())) }
    }

    /// Whether `mincore` tells the caller the truth. It does so to root, to the file's owner, and to a user who may
    /// write to the file.
    fn is_told(&self) -> bool {
        let user = geteuid();
        user.is_root()
            || user.as_raw() == self.owner
            || accessat(CWD, &self.path, Access::WRITE_OK, AtFlags::EACCESS).is_ok()
    }

    fn failed(&self, e: impl Into<std::io::Error>) -> Error {
        Error::file("look up the page cache of", &self.path, e)
    }
}

impl Drop for CachedFile {
    fn drop(&mut self) {
        // SAFETY: exactly the range mapped in `open`; nothing refers to it any more.
        let unmapped = unsafe { munmap(self.map, self.bytes) };
        debug_assert!(unmapped.is_ok(), "unmapping a mapping of our own: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{Advice as FileAdvice, fadvise};
    use std::fs::File;
    use std::io::Read;
    use std::time::{Duration, Instant};

    /// A file of which nothing is cached. It is not in /tmp, which may be a tmpfs, whose pages cannot be dropped.
    fn uncached(bytes: usize) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("image");
        let data: Vec<u8> = (0..bytes).map(|i| (i / PAGE_BYTES) as u8).collect();
        std::fs::write(&path, &data).unwrap();
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        fadvise(&file, 0, None, FileAdvice::DontNeed).unwrap();
        (dir, path)
    }

    #[test]
    fn only_cached_pages_are_listed_and_looking_caches_no_more() {
        let (_dir, path) = uncached(64 * PAGE_BYTES + 100);
        let cached = CachedFile::open(&path).unwrap();
        assert_eq!(cached.cached_ranges().unwrap(), []);
        let mut page = [1; PAGE_BYTES];
        assert!(cached.read(HostVirt(0), &mut page).is_err());
        assert_eq!(cached.cached_ranges().unwrap(), [], "looking brought pages in");

        let _all = std::fs::read(&path).unwrap();
        let ranges = cached.cached_ranges().unwrap();
        assert_eq!(ranges, [PageRange { start: HostVirt(0), pages: 65 }]);
        assert_eq!(cached.cached_ranges_by(7).unwrap(), ranges, "looked up in pieces");
        let mut entries = Vec::new();
        cached.entries(ranges[0], &mut entries).unwrap();
        assert!(entries.len() == 65 && entries.iter().all(|e| e.present() && e.file_or_shared()));
        cached.read(HostVirt(3 * PAGE_BYTES as u64), &mut page).unwrap();
        assert_eq!(page, [3; PAGE_BYTES]);
        cached.read(HostVirt(64 * PAGE_BYTES as u64), &mut page).unwrap();
        assert!(page[..100].iter().all(|&b| b == 64) && page[100..].iter().all(|&b| b == 0));
    }

    /// The pages that are in memory, once the kernel reads no further ahead.
    fn settled(cached: &CachedFile) -> Vec<PageRange> {
        let end = Instant::now() + Duration::from_secs(20);
        let mut before = cached.cached_ranges().unwrap();
        loop {
            std::thread::sleep(Duration::from_millis(200));
            let now = cached.cached_ranges().unwrap();
            if now == before || Instant::now() >= end {
                return now;
            }
            before = now;
        }
    }

    /// The kernel marks one of the pages that it has read ahead. A touch of the marked page makes it read on.
    #[test]
    fn looking_at_file_that_is_being_read_does_not_read_ahead() {
        let (_dir, path) = uncached(16 << 20);
        let mut file = File::open(&path).unwrap();
        for _ in 0..8 {
            file.read_exact(&mut [0; 16 << 10]).unwrap();
        }
        let cached = CachedFile::open(&path).unwrap();
        let before = settled(&cached);
        let pages: u64 = before.iter().map(|r| r.pages).sum();
        assert!(pages >= 32 && pages < (16 << 20) / PAGE_BYTES as u64, "{before:?}");
        let (mut entries, mut page) = (Vec::new(), [0; PAGE_BYTES]);
        for range in &before {
            cached.entries(*range, &mut entries).unwrap();
            for n in 0..range.pages {
                cached.read(range.start.add_pages(n), &mut page).unwrap();
            }
        }
        assert_eq!(settled(&cached), before);
    }

    #[test]
    fn caller_that_kernel_does_not_tell_gets_error() {
        if !geteuid().is_root() {
            eprintln!("skipped: only root can become somebody else");
            return;
        }
        let (_dir, path) = uncached(PAGE_BYTES);
        let cached = CachedFile::open(&path).unwrap();
        assert_eq!(cached.cached_ranges().unwrap(), []);
        std::thread::scope(|threads| {
            let as_nobody = threads.spawn(|| {
                let nobody = rustix::process::Uid::from_raw(65534);
                // The user is changed for this thread alone, which ends with this test.
                rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
                cached.cached_ranges()
            });
            assert!(as_nobody.join().unwrap().unwrap_err().is_denied());
        });
    }

    #[test]
    fn page_beyond_end_of_shrunk_file_is_error() {
        let (_dir, path) = uncached(4 * PAGE_BYTES);
        let cached = CachedFile::open(&path).unwrap();
        std::fs::write(&path, b"short").unwrap();
        let mut page = [1; PAGE_BYTES];
        cached.read(HostVirt(0), &mut page).unwrap();
        assert!(page.starts_with(b"short\0"));
        assert!(cached.read(HostVirt(2 * PAGE_BYTES as u64), &mut page).is_err());
    }
}
