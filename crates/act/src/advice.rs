//! Advice to the kernel (`madvise`) about memory of the caller.

use host::{Error, Result};
use rustix::mm::Advice;
use std::mem::MaybeUninit;

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

/// Asks for identical pages in `memory` to be merged (`MADV_MERGEABLE`), as VMMs do for guest RAM. ksmd merges them. If a
/// preloaded library replaces `madvise` in this process, as the agent does, that library gets the request instead.
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
