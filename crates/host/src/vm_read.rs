//! Reading the memory of another process, without changing it.
//!
//! There are two ways, and the fast one has a side effect: `process_vm_readv` *pins* the pages that it copies. A
//! private page may be shared by several processes (after `fork`, or through KSM). To pin it, the kernel first gives
//! the process a copy of its own (`FAULT_FLAG_UNSHARE`, since Linux 5.19). Reading would then undo the sharing that a
//! census wants to see, and cost the host memory.
//!
//! | | `process_vm_readv` | `/proc/PID/mem` |
//! |---|---|---|
//! | speed | full | about half |
//! | holds the page by | a pin | a reference |
//! | shared private page | unshares it | leaves it shared |
//! | private page no longer shared | marks it as the process's own, which spares its next write a fault | leaves it |
//! | memory that the process itself may not read (`PROT_NONE`) | an error | reads it |
//! | page just gone, whose faults a userfaultfd serves | waits for an answer that may never come | an error |
//!
//! Shared private pages are therefore read through `/proc/PID/mem` ([`ProcessMemory::read`]), others by
//! `process_vm_readv` ([`ProcessMemory::read_unshared`]).

use crate::memory_files::{file_of, thread_with_memory};
use crate::{Error, PageRange, Result};
use page::{HostVirt, PAGE_BYTES};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

/// The memory of one process.
///
/// [`ProcessMemory::read`] stays with the address space that it was opened on. [`ProcessMemory::read_unshared`] goes
/// by the pid. A caller that must know that the process did not end or execute another program meanwhile asks
/// [`crate::Pagemap::is_alive`] afterwards.
#[derive(Debug)]
pub struct ProcessMemory {
    pid: libc::pid_t,
    file: File,
    path: PathBuf,
}

impl ProcessMemory {
    /// Opens the memory of process `pid`.
    ///
    /// # Errors
    /// The process is gone, or belongs to another user.
    pub fn open(pid: u32) -> Result<Self> {
        let thread = thread_with_memory(pid);
        let path = file_of(pid, thread, "mem");
        let file = File::open(&path).map_err(|e| Error::file("open", &path, e))?;
        Ok(Self { pid: libc::pid_t::try_from(thread).unwrap_or(libc::pid_t::MAX), file, path })
    }

    /// Copies `ranges`, one behind the other, to the beginning of `out`, and returns the number of whole pages
    /// copied. If that is less than asked for, the first page not copied is one that could not be read.
    ///
    /// Not for private pages that other processes map too: the kernel would unshare them (see the module). It takes
    /// at most 1024 ranges.
    ///
    /// # Errors
    /// Nothing could be read at all: the first page does not exist ([`Error::is_bad_address`]), the process
    /// is gone, or rights are missing.
    pub fn read_unshared(&self, ranges: &[PageRange], out: &mut [u8]) -> Result<usize> {
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

    /// Copies `bytes_each` bytes from each address in `at`, one piece behind the other. Returns the number of pieces
    /// copied before the first that could not be read whole. For the same pages as [`ProcessMemory::read_unshared`];
    /// at most 1024 pieces.
    ///
    /// # Errors
    /// Nothing could be read at all.
    pub fn read_pieces_unshared(&self, at: &[HostVirt], bytes_each: usize, out: &mut [u8]) -> Result<usize> {
        let wanted = at.len() * bytes_each;
        assert!(wanted <= out.len() && bytes_each > 0, "buffer of {} bytes for {wanted}", out.len());
        let remote: Vec<_> = at.iter().map(|a| libc::iovec { iov_base: a.0 as *mut _, iov_len: bytes_each }).collect();
        let local = libc::iovec { iov_base: out.as_mut_ptr().cast(), iov_len: wanted };
        // SAFETY: the local side is `out`, exclusively borrowed and at least `wanted` bytes long (asserted); any
        // byte is a valid u8. The remote side is checked by the kernel, which returns EFAULT for bad addresses.
        let n = unsafe {
            libc::process_vm_readv(self.pid, &raw const local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0)
        };
        match usize::try_from(n) {
            Ok(bytes) => Ok(bytes / bytes_each),
            Err(_) => Err(Error::file("read", &self.path, io::Error::last_os_error())),
        }
    }

    /// Copies bytes from any address, shared private pages included. An absent page is faulted in, as for any reader,
    /// or is an error. To avoid both, ask the page table first.
    ///
    /// # Errors
    /// Not all bytes could be read.
    pub fn read_bytes(&self, at: HostVirt, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, at.0).map_err(|e| Error::file("read", &self.path, e))
    }

    /// Copies pages as [`ProcessMemory::read_unshared`] does, but leaves shared private pages shared.
    ///
    /// # Errors
    /// As for [`ProcessMemory::read_unshared`].
    pub fn read(&self, ranges: &[PageRange], out: &mut [u8]) -> Result<usize> {
        let mut pages = 0;
        for range in ranges {
            let bytes = range.pages as usize * PAGE_BYTES;
            let into = &mut out[pages * PAGE_BYTES..][..bytes];
            let got = match self.file.read_at(into, range.start.0) {
                // Only a gone address space reads as empty; the file stays with the one that it was opened for.
                Ok(0) if pages == 0 && bytes > 0 => {
                    return Err(Error::file("read", &self.path, io::Error::from_raw_os_error(libc::ESRCH)));
                }
                Ok(got) => got,
                Err(_) if pages > 0 => 0,
                Err(e) => return Err(Error::file("read", &self.path, e)),
            };
            pages += got / PAGE_BYTES;
            if got < bytes {
                break;
            }
        }
        Ok(pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Eight pages of the test's own, each full of its number.
    fn numbered_pages() -> (Vec<u8>, impl Fn(u64) -> PageRange) {
        let mut data = vec![0; 9 * PAGE_BYTES];
        let first = (data.as_ptr() as usize).next_multiple_of(PAGE_BYTES);
        let offset = first - data.as_ptr() as usize;
        for (n, page) in data[offset..][..8 * PAGE_BYTES].chunks_exact_mut(PAGE_BYTES).enumerate() {
            page.fill(n as u8);
        }
        (data, move |n| PageRange { start: HostVirt(first as u64).add_pages(n), pages: 1 })
    }

    #[test]
    fn scattered_ranges_are_copied_in_order_up_to_first_hole() {
        let (_data, at) = numbered_pages();
        let memory = ProcessMemory::open(std::process::id()).unwrap();
        let hole = PageRange { start: HostVirt(PAGE_BYTES as u64), pages: 1 };
        for read in [ProcessMemory::read, ProcessMemory::read_unshared] {
            let mut out = vec![0xff; 4 * PAGE_BYTES];
            assert_eq!(read(&memory, &[at(5), at(2)], &mut out).unwrap(), 2);
            assert!(out[..PAGE_BYTES].iter().all(|&b| b == 5));
            assert!(out[PAGE_BYTES..2 * PAGE_BYTES].iter().all(|&b| b == 2));
            assert_eq!(read(&memory, &[at(1), hole, at(2)], &mut out).unwrap(), 1);
            assert!(read(&memory, &[hole], &mut out).unwrap_err().is_bad_address());
        }
    }

    #[test]
    fn pieces_are_copied_from_any_offset_in_a_page() {
        let (_data, at) = numbered_pages();
        let memory = ProcessMemory::open(std::process::id()).unwrap();
        let places = [HostVirt(at(3).start.0 + 100), at(1).start, HostVirt(PAGE_BYTES as u64), at(2).start];
        let mut out = [0xff; 4 * 8];
        assert_eq!(memory.read_pieces_unshared(&places, 8, &mut out).unwrap(), 2);
        assert!(out[..8] == [3; 8] && out[8..16] == [1; 8]);
        assert!(memory.read_pieces_unshared(&places[2..], 8, &mut out).is_err());
        let mut bytes = [0; 5];
        memory.read_bytes(HostVirt(at(7).start.0 - 2), &mut bytes).unwrap();
        assert_eq!(bytes, [6, 6, 7, 7, 7]);
    }

    #[test]
    fn reading_gone_process_is_told_from_denied_one() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let memory = ProcessMemory::open(child.id()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let range = PageRange { start: HostVirt(0x1000), pages: 1 };
        for read in [ProcessMemory::read, ProcessMemory::read_unshared] {
            let error = read(&memory, &[range], &mut [0; PAGE_BYTES]).unwrap_err();
            assert!(error.is_gone() && !error.is_denied(), "{error}");
        }
        assert!(ProcessMemory::open(child.id()).unwrap_err().is_gone());
    }
}
