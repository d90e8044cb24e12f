//! A file mapped only so that its pages are resident. The lab's guests use it to hold pages of the page cache.

use crate::error::{Error, Result};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::fs::File;
use std::path::Path;
use std::ptr::{NonNull, null_mut};

/// A whole file, mapped readable and shared, with its pages brought in. This type gives no access to the file's bytes.
/// Other processes may therefore write or truncate the file without harm to the process that maps it.
#[derive(Debug)]
pub struct FileMap {
    address: NonNull<c_void>,
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and nothing is ever read or written through it.
unsafe impl Send for FileMap {}

impl FileMap {
    /// Maps a file and has the kernel bring its pages in.
    ///
    /// # Errors
    /// The file cannot be opened or mapped; an empty file cannot be mapped.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::file("open", path, e))?;
        let len = file.metadata().map_err(|e| Error::file("stat", path, e))?.len();
        let len = usize::try_from(len).map_err(|_| Error::file("map", path, rustix::io::Errno::FBIG))?;
        // SAFETY: the kernel chooses an address where nothing is mapped, so no memory of ours is replaced.
        let mapped = unsafe { mmap(null_mut(), len, ProtFlags::READ, MapFlags::SHARED | MapFlags::POPULATE, &file, 0) };
        let address = mapped.map_err(|e| Error::file("map", path, e))?;
        let address = NonNull::new(address).ok_or_else(|| Error::file("map", path, rustix::io::Errno::NOMEM))?;
        Ok(Self { address, len })
    }
}

impl Drop for FileMap {
    fn drop(&mut self) {
        // SAFETY: exactly the range that mmap returned; nothing else has its address.
        let unmapped = unsafe { munmap(self.address.as_ptr(), self.len) };
        debug_assert!(unmapped.is_ok(), "unmapping a mapping of our own: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mappings_of(path: &Path) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("read our own maps");
        maps.lines().filter(|line| line.ends_with(path.to_str().expect("a plain path"))).count()
    }

    #[test]
    fn file_stays_mapped_until_dropped_and_may_shrink_meanwhile() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("data");
        std::fs::write(&path, vec![7_u8; 3 * 4096 + 1]).expect("write the file");
        let map = FileMap::open(&path).expect("map the file");
        assert_eq!((map.len, mappings_of(&path)), (3 * 4096 + 1, 1));
        std::fs::write(&path, b"short").expect("truncate the file");
        drop(map);
        assert_eq!(mappings_of(&path), 0);
    }

    #[test]
    fn error_names_file_that_cannot_be_mapped() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("empty");
        std::fs::write(&path, b"").expect("write the file");
        let error = FileMap::open(&path).expect_err("an empty file has no pages");
        assert!(error.to_string().starts_with("cannot map ") && error.to_string().contains("empty"), "{error}");
    }
}
