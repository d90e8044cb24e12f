//! Memory that a device is about to be given. VFIO and vDPA pin its pages by a call that does not wait: where a thread
//! that touches the page would sleep, the kernel refuses the pin, and the device is not plugged in. So before such a
//! request goes to the kernel, the hook waits until no section is under way. Then it makes every page private and
//! present, and excludes the memory from folding for good.
//!
//! vDPA's request for memory is no `ioctl`. Its other requests come before and are `ioctl`s: each is taken for a
//! request for all memory.

use super::{State, break_slots, bytes, enter, range, state};
use agent::raw;
use agent::table::{Shut, everything};
use page::PageRange;
use std::ffi::c_ulong;

/// Type of the `ioctl` requests to VFIO and iommufd.
pub const VFIO: c_ulong = 0x3B;
/// Type of the `ioctl` requests to vhost devices.
pub const VHOST: c_ulong = 0xAF;
/// `VFIO_IOMMU_MAP_DMA`
const VFIO_MAP: c_ulong = 0x3B71;
/// `IOMMU_IOAS_MAP`
const IOMMUFD_MAP: c_ulong = 0x3B85;
/// Numbers of vhost requests that only vDPA devices take.
const VDPA: std::ops::RangeInclusive<c_ulong> = 0x70..=0x8F;

/// Prepares the memory that this request may have pinned.
pub fn prepare(request: c_ulong, argument: usize) {
    let Some(range) = memory_of(request, argument) else { return };
    let Some(mut table) = enter().filter(|table| state() == State::Member && table.touches(range)) else { return };
    table.shut(range, Shut::Pinned);
    // Some of these pages may have been discarded, and become zeros only when they are touched.
    for (part, _) in table.pooled_pages(range).into_iter().flat_map(|pooled| table.known(pooled)) {
        let arguments = [part.start.0 as usize, bytes(part), libc::MADV_POPULATE_WRITE as usize, 0, 0, 0];
        // SAFETY: populating for writing changes no contents; it makes the kernel break the mapping of the pool.
        unsafe { raw::call(libc::SYS_madvise, arguments) };
    }
    // If memory is short, the request fails, as it would without the agent.
    let _ = break_slots(&mut table, range);
}

/// The memory that a request may have pinned; `None` if it has none pinned.
fn memory_of(request: c_ulong, argument: usize) -> Option<PageRange> {
    let words = || words_at(argument);
    let (start, length) = match request {
        // `struct vfio_iommu_type1_dma_map`: two numbers in a word, the address, another address, the length.
        VFIO_MAP => words().map(|[_, start, _, length]| (start, length))?,
        // `struct iommu_ioas_map`: four numbers in two words, the address, the length.
        IOMMUFD_MAP => words().map(|[_, _, start, length]| (start, length))?,
        _ if request >> 8 & 0xFF == VHOST && VDPA.contains(&(request & 0xFF)) => return Some(everything()),
        _ => return None,
    };
    range(start, length)
}

/// The words that a request's argument points to; `None` if they cannot be read.
fn words_at(argument: usize) -> Option<[usize; 4]> {
    let mut words = [0; 4];
    let to = libc::iovec { iov_base: words.as_mut_ptr().cast(), iov_len: size_of_val(&words) };
    let from = libc::iovec { iov_base: argument as *mut _, ..to };
    let own = std::process::id() as usize;
    let arguments = [own, &raw const to as usize, 1, &raw const from as usize, 1, 0];
    // SAFETY: the kernel reads what is mapped readable, and writes to the words of this frame.
    let read = unsafe { raw::call(libc::SYS_process_vm_readv, arguments) };
    (read as usize == size_of_val(&words)).then_some(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hooks;
    use crate::testing::{Member, alone, discard_past_hooks, fold, pool, section};
    use agent::table;
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::Ordering;
    use wire::Outcome;

    /// Asks for memory to be pinned, of a file that cannot do that.
    fn ask(request: c_ulong, words: [u64; 4]) {
        let file = File::open("/dev/null").unwrap();
        let argument = words.as_ptr() as usize;
        // SAFETY: the kernel refuses the request, and the words outlive the call.
        assert_eq!(unsafe { hooks::userfault::ioctl(file.as_raw_fd(), request, argument) }, -1);
    }

    /// Whether somebody can write a page who cannot wait. The kernel's own way into the memory of a debugged process
    /// stands for a pin of VFIO: both take pages without `FAULT_FLAG_ALLOW_RETRY`.
    fn can_be_taken(member: &Member, page: u64) -> bool {
        let memory = File::options().write(true).open("/proc/self/mem").unwrap();
        let at = member.run(page, 1).start.0 + 800;
        let written = memory.write_all_at(&77_u64.to_ne_bytes(), at);
        assert!(written.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::EIO)) || written.is_ok(), "{written:?}");
        written.is_ok()
    }

    fn device_is_given_folded_memory(request: c_ulong, words: impl FnOnce(u64, u64) -> [u64; 4]) {
        hooks::init(false);
        let Some(mut section) = section() else { return };
        let (pool, member) = (pool(), Member::new(8));
        let all = member.0.range();
        assert_eq!(fold(&mut section, all, Some((&pool, 0))), [Outcome::Folded; 8]);
        // One page is private, one has been discarded, and writers are kept out of one.
        member.word(5, 9).store(5, Ordering::Relaxed);
        discard_past_hooks(&member, 3);
        assert!(!can_be_taken(&member, 3), "the stand-in waits");
        ask(request, words(all.start.0, bytes(all) as u64));
        assert_eq!((0..8).filter(|page| !can_be_taken(&member, *page)).count(), 0, "pages were not there");
        let expected = |page: u64| if page == 3 { 0 } else { page + 1 };
        let read = |page: u64, word| member.word(page, word).load(Ordering::Relaxed);
        assert!((0..8).all(|page| read(page, 0) == expected(page) && read(page, 100) == 77), "contents have changed");
        let mut table = table::lock();
        table.ask(all);
        let left = (table.slot_runs(all), (0..8).any(|page| table.is_foldable(member.run(page, 1))));
        drop(table);
        assert_eq!(left, (Vec::new(), false), "not left alone");
    }

    #[test]
    fn memory_is_there_when_vfio_pins_it() {
        if alone("hooks::pinning::tests::memory_is_there_when_vfio_pins_it") {
            device_is_given_folded_memory(0x3B71, |start, length| [3 << 32 | 32, start, 1 << 30, length]);
        }
    }

    #[test]
    fn memory_is_there_when_iommufd_pins_it() {
        if alone("hooks::pinning::tests::memory_is_there_when_iommufd_pins_it") {
            device_is_given_folded_memory(0x3B85, |start, length| [7 << 32 | 40, 1, start, length]);
        }
    }

    #[test]
    fn all_memory_is_there_when_vdpa_is_set_up() {
        if alone("hooks::pinning::tests::all_memory_is_there_when_vdpa_is_set_up") {
            // `VHOST_VDPA_SET_STATUS`
            device_is_given_folded_memory(0x4001_AF72, |_, _| [1, 0, 0, 0]);
        }
    }

    /// Other devices may know such a number, and take something else than an address.
    #[test]
    fn argument_that_points_nowhere_is_the_kernels_to_refuse() {
        assert_eq!(memory_of(VFIO_MAP, 3), None);
        assert_eq!(memory_of(0xAE80, 3), None);
        assert_eq!(memory_of(0x4008_AF30, 0), None);
    }

    #[test]
    fn request_waits_for_a_section() {
        if !alone("hooks::pinning::tests::request_waits_for_a_section") {
            return;
        }
        hooks::init(false);
        let member = Member::new(1);
        let all = member.0.range();
        let ask = || ask(VFIO_MAP, [32, all.start.0, 0, bytes(all) as u64]);
        assert!(hooks::tests::waits_for_the_table(ask), "a page may have been out of reach");
    }
}
