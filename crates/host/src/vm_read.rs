//! Reading the memory of another process: `process_vm_readv`, and `/proc/PID/mem` for mappings that the
//! process itself may not read.

use crate::{Error, PageRange, Result};
use page::PAGE_BYTES;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// The memory of one process.
#[derive(Debug)]
pub struct ProcessMemory {
    pid: libc::pid_t,
    /// Open only where it was asked for; see [`ProcessMemory::read_forced`].
    path: PathBuf,
}

impl ProcessMemory {
    /// The memory of process `pid`. Rights are checked when it is read.
    pub fn new(pid: u32) -> Self {
        let path = PathBuf::from(format!("/proc/{pid}/mem"));
        Self { pid: libc::pid_t::try_from(pid).unwrap_or(libc::pid_t::MAX), path }
    }

    /// Copies `ranges`, one behind the other, to the beginning of `out` and returns how many whole pages
    /// arrived: fewer than asked when a page could not be read, and then the first one missing is it.
    ///
    /// # Errors
    /// Nothing could be read at all: the first page is not there (`EFAULT`), the process is gone, or rights
    /// are missing.
    pub fn read(&self, ranges: &[PageRange], out: &mut [u8]) -> Result<usize> {
        let wanted: usize = ranges.iter().map(|r| r.pages as usize * PAGE_BYTES).sum();
        assert!(wanted <= out.len(), "buffer of {} bytes for {wanted}", out.len());
        let remote: Vec<_> = ranges
            .iter()
            .map(|r| libc::iovec { iov_base: r.start.0 as *mut _, iov_len: r.pages as usize * PAGE_BYTES })
            .collect();
        let local = libc::iovec { iov_base: out.as_mut_ptr().cast(), iov_len: wanted };
        // SAFETY: the local side is `out`, exclusively borrowed and at least `wanted` bytes long (asserted); any
        // byte is a valid u8. The remote side is checked by the kernel, which returns EFAULT for bad addresses.
        let n = unsafe {
            libc::process_vm_readv(self.pid, &raw const local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0)
        };
        match usize::try_from(n) {
            Ok(bytes) => Ok(bytes / PAGE_BYTES),
            Err(_) => Err(Error::file("read", &self.path, io::Error::last_os_error())),
        }
    }

    /// Copies one range although the process itself may not read it (`PROT_NONE`); slower than
    /// [`ProcessMemory::read`].
    ///
    /// # Errors
    /// As for [`ProcessMemory::read`].
    pub fn read_forced(&self, range: PageRange, out: &mut [u8]) -> Result<usize> {
        let out = &mut out[..range.pages as usize * PAGE_BYTES];
        let read = File::open(&self.path).and_then(|file| file.read_at(out, range.start.0));
        read.map(|bytes| bytes / PAGE_BYTES).map_err(|e| Error::file("read", &self.path, e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use page::HostVirt;

    #[test]
    fn scattered_ranges_arrive_in_order_and_a_hole_ends_them() {
        let data: Vec<u8> = (0..8 * PAGE_BYTES).map(|i| (i / PAGE_BYTES) as u8).collect();
        let first_page = (data.as_ptr() as u64).next_multiple_of(PAGE_BYTES as u64);
        let at = |n: u64| PageRange { start: HostVirt(first_page).add_pages(n), pages: 1 };
        let memory = ProcessMemory::new(std::process::id());
        let mut out = vec![0; 4 * PAGE_BYTES];
        assert_eq!(memory.read(&[at(5), at(2)], &mut out).unwrap(), 2);
        let offset = (first_page - data.as_ptr() as u64) as usize;
        assert_eq!(out[..PAGE_BYTES], data[offset + 5 * PAGE_BYTES..][..PAGE_BYTES]);
        assert_eq!(out[PAGE_BYTES..2 * PAGE_BYTES], data[offset + 2 * PAGE_BYTES..][..PAGE_BYTES]);
        let hole = PageRange { start: HostVirt(PAGE_BYTES as u64), pages: 1 };
        assert_eq!(memory.read(&[at(1), hole, at(2)], &mut out).unwrap(), 1);
        assert!(memory.read(&[hole], &mut out).is_err());
    }

    #[test]
    fn a_process_that_is_gone_is_told_from_one_that_is_denied() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let range = PageRange { start: HostVirt(0x1000), pages: 1 };
        let error = ProcessMemory::new(child.id()).read(&[range], &mut [0; PAGE_BYTES]).unwrap_err();
        assert!(error.is_gone() && !error.is_denied(), "{error}");
    }
}
