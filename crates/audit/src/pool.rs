//! The file of a pool, and the frames of its pages, whether a process has touched them or not.

use host::{CachedFile, PageRange, PagemapEntry};
use page::{HostVirt, PAGE_BYTES, PAGE_SHIFT, Pfn};
use rustix::fs::{SeekFrom, seek};
use std::fs::File;
use std::path::Path;

/// Number of pages that are looked up at once.
const BATCH_PAGES: u64 = 1 << 14;

/// A file of a pool.
#[derive(Debug)]
pub struct PoolFile {
    /// The group that the pool belongs to.
    pub group: u16,
    /// Stretches of the file that hold data, each with the index of its first page in `frames`.
    stretches: Vec<(PageRange, usize)>,
    /// Frame numbers; 0 for a page without a frame.
    frames: Vec<u64>,
}

impl PoolFile {
    /// Looks up the frames of a file. The look-up may give a slot that is freed meanwhile a page of zeros, until the
    /// slot is used again.
    ///
    /// # Errors
    /// It cannot be opened or mapped.
    pub fn read(path: &Path, group: u16) -> host::Result<Self> {
        let file = File::open(path).map_err(|e| host::Error::file("open", path, e))?;
        let cached = CachedFile::open(path)?;
        let mut pool = Self { group, stretches: Vec::new(), frames: Vec::new() };
        let mut entries: Vec<PagemapEntry> = Vec::new();
        let mut at = 0;
        // `SEEK_DATA` fails with ENXIO behind the last data.
        while let Ok(start) = seek(&file, SeekFrom::Data(at)) {
            let end = seek(&file, SeekFrom::Hole(start)).map_err(|e| host::Error::file("look up", path, e))?;
            let pages = (end - start).div_ceil(PAGE_BYTES as u64);
            pool.stretches.push((PageRange { start: HostVirt(start), pages }, pool.frames.len()));
            for first in (0..pages).step_by(BATCH_PAGES as usize) {
                let wanted = BATCH_PAGES.min(pages - first);
                cached.entries(PageRange { start: HostVirt(start).add_pages(first), pages: wanted }, &mut entries)?;
                pool.frames.extend(entries.iter().map(|entry| entry.pfn().map_or(0, |pfn| pfn.0)));
                pool.frames.resize(pool.frames.len() + wanted as usize - entries.len(), 0);
            }
            at = end;
        }
        Ok(pool)
    }

    /// The file's frames, each with its page's offset in the file.
    pub fn frames(&self) -> impl Iterator<Item = (u64, Pfn)> {
        let pages = self.stretches.iter().flat_map(|(range, first)| {
            (0..range.pages).map(|n| (range.start.add_pages(n).0, self.frames[*first + n as usize]))
        });
        pages.filter(|(_, frame)| *frame != 0).map(|(offset, frame)| (offset, Pfn(frame)))
    }

    /// Number of pages that have a frame.
    pub fn pages(&self) -> u64 {
        self.frames().count() as u64
    }

    /// The frame of the page at this offset; `None` if that page has none.
    pub fn frame(&self, offset: u64) -> Option<Pfn> {
        let behind = self.stretches.partition_point(|(range, _)| range.start.0 <= offset);
        let (range, first) = self.stretches.get(behind.checked_sub(1)?)?;
        let page = (offset - range.start.0) >> PAGE_SHIFT;
        let frame = *self.frames.get(first + usize::try_from(page).ok().filter(|_| page < range.pages)?)?;
        (frame != 0).then_some(Pfn(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn unmapped_pages_have_frames_and_holes_have_none() {
        if !host::frames_visible() {
            eprintln!("skipped: page frames are shown to root only");
            return;
        }
        // A place that is memory only, as a pool is.
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("pool");
        let file = File::create(&path).unwrap();
        file.set_len(1 << 30).unwrap();
        for page in [0, 1, 2, 5000, 70_000] {
            file.write_all_at(b"x", page << PAGE_SHIFT).unwrap();
        }
        let pool = PoolFile::read(&path, 0).unwrap();
        assert_eq!(pool.pages(), 5);
        for page in [0, 1, 2, 5000, 70_000] {
            assert!(pool.frame(page << PAGE_SHIFT).is_some(), "{page}");
        }
        for page in [3, 4999, 5001, 69_999, 70_001, 1 << 18] {
            assert!(pool.frame(page << PAGE_SHIFT).is_none(), "{page}");
        }
        drop(PoolFile::read(&path, 0).unwrap());
        let blocks = std::os::unix::fs::MetadataExt::blocks(&path.metadata().unwrap());
        assert_eq!(blocks, 5 * 8, "looking has filled holes");
    }
}
