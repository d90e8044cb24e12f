//! The page cache of a file: which of its pages are in memory, in which frames, and what they hold -
//! without bringing in any that are not.

use crate::{Error, PageRange, Pagemap, PagemapEntry, Result};
use page::{HostVirt, PAGE_BYTES};
use rustix::io::ReadWriteFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::fs::File;
use std::io::IoSliceMut;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A file whose page cache is looked at. Addresses of its pages are offsets in the file.
#[derive(Debug)]
pub struct CachedFile {
    file: File,
    path: PathBuf,
    /// Device, as `st_dev` encodes it.
    pub device: u64,
    /// Inode.
    pub inode: u64,
    /// The whole file, mapped; touched only where its pages are resident.
    map: *mut c_void,
    bytes: usize,
    pagemap: Pagemap,
}

// SAFETY: the mapping is only handed to the kernel as a range of addresses; no byte of it is read or written here.
unsafe impl Send for CachedFile {}
// SAFETY: as above; the other fields are `Sync`.
unsafe impl Sync for CachedFile {}

impl CachedFile {
    /// Opens a file of at least one byte.
    ///
    /// # Errors
    /// It cannot be opened or mapped.
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |attempted| move |e: std::io::Error| Error::file(attempted, path, e);
        let file = File::open(path).map_err(failed("open"))?;
        let metadata = file.metadata().map_err(failed("stat"))?;
        let bytes = usize::try_from(metadata.len()).map_err(|e| failed("map")(std::io::Error::other(e)))?;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let map = unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, &file, 0) };
        let map = map.map_err(|e| failed("map")(e.into()))?;
        let pagemap = Pagemap::open(std::process::id())?;
        Ok(Self { file, path: path.into(), device: metadata.dev(), inode: metadata.ino(), map, bytes, pagemap })
    }

    /// The pages that are in memory.
    ///
    /// # Errors
    /// The kernel refused. It tells everything to root and to a file's owner, to others that all of it is.
    pub fn cached_ranges(&self) -> Result<Vec<PageRange>> {
        let mut resident = vec![0_u8; self.bytes.div_ceil(PAGE_BYTES)];
        // SAFETY: the range is the mapping made in `open`, the vector has a byte for each of its pages.
        let answer = unsafe { libc::mincore(self.map, self.bytes, resident.as_mut_ptr()) };
        if answer != 0 {
            return Err(Error::file("look up the page cache of", &self.path, std::io::Error::last_os_error()));
        }
        let mut ranges = Vec::new();
        let mut page = 0;
        for run in resident.chunk_by(|a, b| a & 1 == b & 1) {
            if run[0] & 1 == 1 {
                ranges.push(PageRange { start: HostVirt(page * PAGE_BYTES as u64), pages: run.len() as u64 });
            }
            page += run.len() as u64;
        }
        Ok(ranges)
    }

    /// The frames of some pages that are in memory: pagemap entries, not present where the page has gone.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn entries(&self, range: PageRange, entries: &mut Vec<PagemapEntry>) -> Result<()> {
        let start = self.map.wrapping_byte_add(range.start.0 as usize);
        // Only the pages in memory are mapped by this, or a page that has just been evicted is read again: harmless.
        // SAFETY: the range lies in the mapping made in `open`; the advice reads, and changes no content.
        let advised = unsafe { libc::madvise(start, range.pages as usize * PAGE_BYTES, libc::MADV_POPULATE_READ) };
        if advised != 0 {
            entries.clear();
            return Ok(());
        }
        self.pagemap.read(HostVirt(start as u64), range.pages, entries)
    }

    /// Copies one page, if it is still in memory; its last bytes are zeros where the file ends in it.
    ///
    /// # Errors
    /// The file cannot be read, or the page is no longer cached.
    pub fn read(&self, at: HostVirt, out: &mut [u8]) -> Result<()> {
        let failed = |e: rustix::io::Errno| Error::file("read the page cache of", &self.path, e);
        let mut got = 0;
        while got < out.len() {
            let mut rest = [IoSliceMut::new(&mut out[got..])];
            match rustix::io::preadv2(&self.file, &mut rest, at.0 + got as u64, ReadWriteFlags::NOWAIT) {
                Ok(0) => break,
                Ok(n) => got += n,
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(failed(e)),
            }
        }
        out[got..].fill(0);
        Ok(())
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
    use std::os::fd::AsRawFd;

    #[test]
    fn only_what_is_cached_is_listed_and_it_stays_that_way() {
        // Not in /tmp, which may be a tmpfs: those pages cannot be dropped.
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("image");
        let data: Vec<u8> = (0..64 * PAGE_BYTES + 100).map(|i| (i / PAGE_BYTES) as u8).collect();
        std::fs::write(&path, &data).unwrap();
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        // SAFETY: plain advice on an open descriptor; RANDOM switches read-ahead off.
        assert_eq!(unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) }, 0);
        let cached = CachedFile::open(&path).unwrap();
        assert_eq!(cached.cached_ranges().unwrap(), []);
        let mut page = vec![1; PAGE_BYTES];
        assert!(cached.read(HostVirt(0), &mut page).is_err());
        assert_eq!(cached.cached_ranges().unwrap(), [], "looking brought pages in");

        let _all = std::fs::read(&path).unwrap();
        let ranges = cached.cached_ranges().unwrap();
        assert_eq!(ranges, [PageRange { start: HostVirt(0), pages: 65 }]);
        let mut entries = Vec::new();
        cached.entries(ranges[0], &mut entries).unwrap();
        assert!(entries.len() == 65 && entries.iter().all(|e| e.present() && e.file_or_shared()));
        cached.read(HostVirt(3 * PAGE_BYTES as u64), &mut page).unwrap();
        assert_eq!(page, [3; PAGE_BYTES]);
        cached.read(HostVirt(64 * PAGE_BYTES as u64), &mut page).unwrap();
        assert!(page[..100].iter().all(|&b| b == 64) && page[100..].iter().all(|&b| b == 0));
    }
}
