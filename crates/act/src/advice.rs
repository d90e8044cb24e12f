//! Advice to the kernel (`madvise`) about memory of the caller, and of the processes of parked guests.

use host::{Error, ProcessId, Result};
use rustix::mm::Advice;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io::ErrorKind;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::AsRawFd;

/// Asks for transparent huge pages in `memory`, as VMMs do for guest RAM. Without this, memory has small pages, or huge
/// ones if the host's policy is `always`.
///
/// # Errors
/// The kernel has no transparent huge pages.
pub fn prefer_huge_pages<T>(memory: &mut [MaybeUninit<T>]) -> Result<()> {
    let (start, end) = whole_pages(memory);
    // SAFETY: the advice changes how the range is backed, not its content. The range is rounded inwards to whole pages,
    // all of which `memory` owns.
    let advised = unsafe { rustix::mm::madvise(start as *mut _, end.saturating_sub(start), Advice::LinuxHugepage) };
    advised.map_err(|e| Error::file("prefer huge pages in", "own memory", e))
}

/// Asks for identical pages in `memory` to be merged (`MADV_MERGEABLE`), as VMMs do for guest RAM. ksmd merges them. If
/// a preloaded library replaces `madvise` in this process, as the agent does, that library gets the request instead.
///
/// # Errors
/// The kernel has no KSM, and no library replaces `madvise`.
pub fn ask_to_merge<T>(memory: &mut [MaybeUninit<T>]) -> Result<()> {
    let (start, end) = whole_pages(memory);
    // The C library's function is called, because only that one can be replaced by a preloaded library.
    // SAFETY: the advice changes the frames that back the range, not its content. The range is rounded inwards to whole
    // pages, all of which `memory` owns.
    let answer = unsafe { libc::madvise(start as *mut _, end.saturating_sub(start), libc::MADV_MERGEABLE) };
    if answer == 0 { Ok(()) } else { Err(Error::file("merge pages of", "own memory", std::io::Error::last_os_error())) }
}

/// Asks the kernel to write private pages of another process to swap (`MADV_PAGEOUT`), range by range. Returns the
/// bytes of the ranges that it went through. Pages that are locked, shared or in use stay, as do all where there is no
/// swap.
///
/// # Errors
/// The process has ended, or the caller may not change its memory.
pub fn page_out(process: &ProcessId, ranges: &[Range<u64>]) -> Result<u64> {
    let cannot = |e: std::io::Error| Error::file("page out memory of", format!("process {}", process.pid), e);
    let pid = process.pid.try_into().ok().and_then(Pid::from_raw).ok_or_else(|| cannot(ErrorKind::NotFound.into()))?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|e| cannot(e.into()))?;
    // The pidfd is that process's if the process is alive now: otherwise its pid may have been given to another one.
    if !process.is_alive() {
        return Err(cannot(ErrorKind::NotFound.into()));
    }
    let mut advised = 0_u64;
    for range in ranges {
        let bytes = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(0);
        let vector = libc::iovec { iov_base: range.start as *mut libc::c_void, iov_len: bytes };
        // SAFETY: the kernel reads one vector, which outlives the call. The addresses are of another process, and the
        // advice changes no contents there.
        let done = unsafe {
            libc::syscall(libc::SYS_process_madvise, pidfd.as_raw_fd(), &raw const vector, 1, libc::MADV_PAGEOUT, 0)
        };
        match u64::try_from(done) {
            Ok(done) => advised = advised.saturating_add(done),
            Err(_) => match std::io::Error::last_os_error() {
                // The range was unmapped meanwhile, or is memory that is never paged out.
                e if matches!(e.raw_os_error(), Some(libc::ENOMEM | libc::EINVAL)) => {}
                e => return Err(cannot(e)),
            },
        }
    }
    Ok(advised)
}

/// Addresses of the first and the last page boundary within a slice.
fn whole_pages<T>(memory: &[MaybeUninit<T>]) -> (usize, usize) {
    let start = (memory.as_ptr() as usize).next_multiple_of(page::PAGE_BYTES);
    let end = (memory.as_ptr() as usize + size_of_val(memory)) / page::PAGE_BYTES * page::PAGE_BYTES;
    (start, end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::Usage;

    #[test]
    fn memory_is_mergeable_after_advice() {
        if host::Ksm::read().is_none() {
            eprintln!("skipped: this kernel has no KSM");
            return;
        }
        let mut memory: Vec<u8> = Vec::with_capacity(1 << 20);
        ask_to_merge(memory.spare_capacity_mut()).unwrap();
        memory.resize(1 << 20, 1);
        let at = memory.as_ptr() as u64 + (1 << 19);
        let mappings = host::Mapping::read_all(std::process::id()).unwrap();
        let here = mappings.iter().find(|m| m.start.0 <= at && at < m.end.0).unwrap();
        assert!(here.has_flag(b"mg"), "{here:?}");
    }

    #[test]
    fn memory_of_another_process_is_paged_out_or_stays_and_has_its_contents() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = ProcessId::of(child.id()).unwrap();
        let stack = |mapping: &host::Mapping| mapping.name == "[stack]";
        let mapping = host::Mapping::list(child.id()).unwrap().into_iter().find(stack).unwrap();
        let range = mapping.start.0..mapping.end.0;
        assert!(page_out(&process, &[range.clone(), 0..4096]).unwrap() <= mapping.bytes());
        assert!(process.is_alive());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(page_out(&process, &[range]).is_err(), "it has ended");
    }

    #[test]
    fn memory_written_after_advice_is_in_huge_pages() {
        let mode = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
        if !mode.contains("[madvise]") && !mode.contains("[always]") {
            eprintln!("skipped: transparent huge pages are off");
            return;
        }
        let before = Usage::of(std::process::id()).unwrap().thp_bytes;
        let mut memory: Vec<u8> = Vec::with_capacity(64 << 20);
        prefer_huge_pages(memory.spare_capacity_mut()).unwrap();
        memory.resize(64 << 20, 1);
        let after = Usage::of(std::process::id()).unwrap().thp_bytes;
        assert!(after - before >= 32 << 20, "{before} {after}");
        prefer_huge_pages::<u8>(&mut []).unwrap();
    }
}
