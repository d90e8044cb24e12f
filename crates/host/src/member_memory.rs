//! The mappings that a folding process changes in its own address space.
//!
//! Everything here is about memory that the rest of the process uses at the same time, so nothing is a reference:
//! addresses are numbers, contents are copied out or compared by the processor's string instructions and libc,
//! and what the caller must see to is said in each `Safety` section. Errors are bare numbers, because most of these
//! calls are made where nothing may be allocated.

use page::{HostVirt, PAGE_BYTES, PAGE_SHIFT, PageRange, PoolSlot, pages_to_bytes};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags};
use std::ffi::c_void;

/// Pages of a huge page.
pub const HUGE_PAGES: u64 = 512;

/// What a mapping is to have that mappings have not by themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inherit {
    /// Not given to forked children (`MADV_DONTFORK`).
    pub dont_fork: bool,
    /// Not in core dumps (`MADV_DONTDUMP`).
    pub dont_dump: bool,
}

/// Anonymous memory of our own, unmapped when dropped.
#[derive(Debug)]
pub struct MemberMemory(PageRange);

impl MemberMemory {
    /// Maps memory that nobody has touched.
    ///
    /// # Errors
    /// Memory or mappings are short.
    pub fn new(pages: u64) -> Result<Self, Errno> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let at = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length(pages), protection, flags) }?;
        Ok(Self(PageRange { start: HostVirt(at as u64), pages }))
    }

    /// Maps memory that pages can be moved to one by one: never huge pages, and not given to children, who have no
    /// use for it.
    ///
    /// # Errors
    /// Memory or mappings are short.
    pub fn stage(pages: u64) -> Result<Self, Errno> {
        let this = Self::new(pages)?;
        // A kernel without huge pages refuses the first, and needs it not.
        for advice in [Advice::LinuxNoHugepage, Advice::LinuxDontFork] {
            // SAFETY: the mapping is ours and new; neither advice changes what this process finds in it.
            let _ = unsafe { rustix::mm::madvise(pointer(this.0.start), length(pages), advice) };
        }
        Ok(this)
    }

    /// Maps two megabytes where a huge page fits, all of it present: as one, where huge pages are `wanted` (or, if nobody said,
    /// usual here) and the kernel has one to spare. Not given to children, with whom a huge page would be shared and then cut up.
    ///
    /// # Errors
    /// Memory or mappings are short.
    pub fn huge_page(wanted: Option<bool>) -> Result<Self, Errno> {
        let room = Self::new(2 * HUGE_PAGES - 1)?;
        let (start, end) = (room.0.start.page(), room.0.end().page());
        let first = start.next_multiple_of(HUGE_PAGES);
        for (from, to) in [(start, first), (first + HUGE_PAGES, end)].into_iter().filter(|(from, to)| from < to) {
            // SAFETY: a part of the mapping just made, which nothing refers to.
            unsafe { rustix::mm::munmap(pointer(HostVirt(from << PAGE_SHIFT)), length(to - from)) }?;
        }
        room.forget();
        let this = Self(PageRange { start: HostVirt(first << PAGE_SHIFT), pages: HUGE_PAGES });
        if let Some(wanted) = wanted {
            let advice = if wanted { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
            // A kernel without huge pages refuses.
            // SAFETY: the mapping is ours and new; the advice changes nothing that this process finds in it.
            let _ = unsafe { rustix::mm::madvise(pointer(this.0.start), length(HUGE_PAGES), advice) };
        }
        give_to_children(this.0, false)?;
        make_private(this.0)?;
        Ok(this)
    }

    /// Where it lies.
    pub const fn range(&self) -> PageRange {
        self.0
    }

    /// Sets its protection: `PROT_` bits.
    ///
    /// # Errors
    /// The process has as many mappings as it may.
    pub fn protect(&self, access: u8) -> Result<(), Errno> {
        let access = MprotectFlags::from_bits_retain(access.into());
        // SAFETY: the mapping is ours, and whoever holds one of these makes no reference to it that would outlive the call.
        unsafe { rustix::mm::mprotect(pointer(self.0.start), length(self.0.pages), access) }
    }

    /// Gives up its first pages' contents.
    pub fn drop_pages(&self, pages: u64) {
        let pages = pages.min(self.0.pages);
        let drop_them =
            // SAFETY: the mapping is ours, and whoever holds one of these uses it for contents that are done with.
            || unsafe { rustix::mm::madvise(pointer(self.0.start), length(pages), Advice::LinuxDontNeed) };
        if drop_them().is_err() {
            self.unlock();
            let _ = drop_them();
        }
    }

    /// Lets its pages be moved and given up again, should the program have locked all of its memory.
    pub fn unlock(&self) {
        // SAFETY: the mapping is ours; what is unlocked is not lost.
        let _ = unsafe { rustix::mm::munlock(pointer(self.0.start), length(self.0.pages)) };
    }

    /// Copies as many pages as this has from somewhere else, where others may be writing them.
    ///
    /// # Safety
    /// They must be mapped readable for the length of the call, and nobody else uses this memory yet.
    pub unsafe fn fill(&self, from: HostVirt) {
        for n in 0..self.0.pages {
            let to = pointer(self.0.start.add_pages(n)).cast::<[u8; PAGE_BYTES]>();
            // SAFETY: the page is of our mapping, which nobody uses: no other reference to it exists.
            let to = unsafe { &mut *to };
            // SAFETY: that it can be read is the caller's promise.
            unsafe { copy_page(from.add_pages(n), to) };
        }
    }

    /// Copies as many pages as this has from memory of the process that another thread may unmap meanwhile, up to the first that
    /// cannot be read. Says how many.
    pub fn fill_as_far_as_there(&self, from: HostVirt) -> u64 {
        let part = |at: HostVirt| libc::iovec { iov_base: pointer(at), iov_len: length(self.0.pages) };
        let (from, to) = (part(from), part(self.0.start));
        let own = libc::pid_t::try_from(std::process::id()).unwrap_or(0);
        // SAFETY: the kernel reads what can be read, and writes our mapping, which nobody uses yet.
        let copied = unsafe { libc::process_vm_readv(own, &raw const to, 1, &raw const from, 1, 0) };
        u64::try_from(copied).unwrap_or(0) / PAGE_BYTES as u64
    }

    /// Ends this being our memory: it was moved to another place.
    pub const fn forget(self) {
        std::mem::forget(self);
    }
}

impl Drop for MemberMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing refers to it when its owner is dropped.
        let unmapped = unsafe { rustix::mm::munmap(pointer(self.0.start), length(self.0.pages)) };
        debug_assert!(unmapped.is_ok());
    }
}

/// A segment of a pool: the file that is mapped in place of folded pages, and a view of it to compare with.
#[derive(Debug)]
pub struct PoolView {
    file: OwnedFd,
    view: PageRange,
}

impl PoolView {
    /// Looks at a pool file of so many slots, which this process can only read.
    ///
    /// # Errors
    /// The file is shorter than that, or address space is short.
    pub fn new(file: OwnedFd, slots: u32) -> Result<Self, Errno> {
        let bytes = pages_to_bytes(u64::from(slots));
        // A view that reaches beyond the file's end would end the process when it is read there.
        if rustix::fs::fstat(&file)?.st_size.cast_unsigned() < bytes {
            return Err(Errno::INVAL);
        }
        let (protection, flags) = (ProtFlags::READ, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), length(slots.into()), protection, flags, &file, 0) }?;
        // SAFETY: the mapping is ours and new; children have no use for it.
        let _ = unsafe { rustix::mm::madvise(at, length(slots.into()), Advice::LinuxDontFork) };
        Ok(Self { file, view: PageRange { start: HostVirt(at as u64), pages: slots.into() } })
    }

    /// Where a run of slots can be read; `None` where the segment is not so long.
    pub fn slots(&self, first: PoolSlot, pages: u64) -> Option<PageRange> {
        let end = u64::from(first.index()).checked_add(pages)?;
        (end <= self.view.pages).then(|| PageRange { start: self.view.start.add_pages(first.index().into()), pages })
    }

    /// Maps a run of slots, private and writable, in place of whatever is mapped at `place`.
    ///
    /// # Safety
    /// `place` must be memory that its owner would find unchanged: the slots hold what it held.
    ///
    /// # Errors
    /// The process has as many mappings as it may, or memory is short; `place` is as it was, or (on old kernels, where
    /// memory for the mapping itself is short) unmapped.
    pub unsafe fn map_over(&self, place: PageRange, first: PoolSlot) -> Result<(), Errno> {
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE);
        let offset = pages_to_bytes(first.index().into());
        // SAFETY: that the range may be replaced is the caller's promise.
        unsafe {
            rustix::mm::mmap(pointer(place.start), length(place.pages), protection, flags, self.file.as_fd(), offset)
        }
        .map(drop)
    }

    /// Maps a run of slots, private and writable, where nothing is mapped: for [`move_mapping_over`].
    ///
    /// # Errors
    /// The process has as many mappings as it may, or memory is short.
    pub fn map(&self, first: PoolSlot, pages: u64) -> Result<MemberMemory, Errno> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        let offset = pages_to_bytes(first.index().into());
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let at = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), length(pages), protection, flags, self.file.as_fd(), offset)
        }?;
        Ok(MemberMemory(PageRange { start: HostVirt(at as u64), pages }))
    }

    /// Waits for whoever holds the lock of the file's mappings, as [`PoolView::map_over`] would: the kernel holds it while it looks up
    /// who maps a page, and may lose its processor meanwhile.
    pub fn wait_for_lock(&self) {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let mapped =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), length(1), ProtFlags::READ, flags, &self.file, 0) };
        // Where there is no mapping to be had, none is waited for.
        if let Ok(at) = mapped {
            // SAFETY: it was just made, and nobody else knows of it.
            let _ = unsafe { rustix::mm::munmap(at, length(1)) };
        }
    }

    /// Unmaps from this process what was read through the view; the next look brings it back.
    pub fn rest(&self) {
        // SAFETY: the view is a shared mapping that is only read: dropping its page table entries loses nothing.
        let _ =
            unsafe { rustix::mm::madvise(pointer(self.view.start), length(self.view.pages), Advice::LinuxDontNeed) };
    }
}

impl Drop for PoolView {
    fn drop(&mut self) {
        // SAFETY: the view is ours, and nothing refers to it when its owner is dropped.
        let _ = unsafe { rustix::mm::munmap(pointer(self.view.start), length(self.view.pages)) };
    }
}

impl Inherit {
    /// Gives a mapping what it is to have.
    ///
    /// # Errors
    /// The range is not all mapped, or the process has as many mappings as it may.
    pub fn apply(self, range: PageRange) -> Result<(), Errno> {
        for (wanted, advice) in [(self.dont_fork, Advice::LinuxDontFork), (self.dont_dump, Advice::LinuxDontDump)] {
            if wanted {
                // SAFETY: neither advice changes what this process finds in the range.
                unsafe { rustix::mm::madvise(pointer(range.start), length(range.pages), advice) }?;
            }
        }
        Ok(())
    }
}

/// Says whether forked children are to get a range.
///
/// # Errors
/// The range is not all mapped, or the process has as many mappings as it may.
pub fn give_to_children(range: PageRange, give: bool) -> Result<(), Errno> {
    let advice = if give { Advice::LinuxDoFork } else { Advice::LinuxDontFork };
    // SAFETY: the advice does not change what this process finds in the range.
    unsafe { rustix::mm::madvise(pointer(range.start), length(range.pages), advice) }
}

/// A page of a file, mapped shared and out of reach, so that the kernel knows how long this address space, and those
/// forked from it, exist.
#[derive(Debug)]
pub struct SharedMark(HostVirt);

impl SharedMark {
    /// Maps the file's first page.
    ///
    /// # Errors
    /// The file was not opened for writing too, or mappings are short.
    pub fn new(file: impl AsFd) -> Result<Self, Errno> {
        let (protection, flags) = (ProtFlags::empty(), MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), PAGE_BYTES, protection, flags, file, 0) }?;
        Ok(Self(HostVirt(at as u64)))
    }
}

impl Drop for SharedMark {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody can have touched what it holds.
        let _ = unsafe { rustix::mm::munmap(pointer(self.0), PAGE_BYTES) };
    }
}

/// Writes pages that others may be writing to a file, as `pwrite` does, and says how many were written whole; what is not
/// mapped, or cannot be read, ends it without harm.
pub fn write_pages(file: impl AsFd, at_page: u64, from: PageRange) -> u64 {
    let offset = libc::off_t::try_from(pages_to_bytes(at_page)).unwrap_or(libc::off_t::MAX);
    // SAFETY: the kernel only reads the range, and answers EFAULT where there is nothing to read.
    let written = unsafe { libc::pwrite(file.as_fd().as_raw_fd(), pointer(from.start), length(from.pages), offset) };
    u64::try_from(written).unwrap_or(0) / PAGE_BYTES as u64
}

/// Maps fresh anonymous memory in place of whatever is mapped at `place`.
///
/// # Safety
/// Nobody may miss what `place` held.
///
/// # Errors
/// Memory or mappings are short.
pub unsafe fn map_anonymous_over(place: PageRange) -> Result<(), Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: that the range may be replaced is the caller's promise.
    unsafe { rustix::mm::mmap_anonymous(pointer(place.start), length(place.pages), protection, flags) }.map(drop)
}

/// Maps fresh anonymous memory where nothing is mapped.
///
/// # Errors
/// Something is mapped there (`EEXIST`), or memory or mappings are short.
pub fn map_anonymous_where_free(place: PageRange) -> Result<(), Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE | MapFlags::NORESERVE;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: maps only where nothing is mapped.
    unsafe { rustix::mm::mmap_anonymous(pointer(place.start), length(place.pages), protection, flags) }.map(drop)
}

/// Unmaps a range.
///
/// # Safety
/// Nobody may use it any more.
///
/// # Errors
/// The process has as many mappings as it may.
pub unsafe fn unmap(range: PageRange) -> Result<(), Errno> {
    // SAFETY: by the caller.
    unsafe { rustix::mm::munmap(pointer(range.start), length(range.pages)) }
}

/// Moves a mapping of our own over `place`, atomically: others find either what was there or what is moved there.
///
/// # Safety
/// Nobody may miss what `place` held: `from` holds the same.
///
/// # Errors
/// Memory or mappings are short, or `from` is more than one mapping.
pub unsafe fn move_mapping_over(from: PageRange, place: HostVirt) -> Result<(), Errno> {
    let bytes = length(from.pages);
    // SAFETY: that the destination may be replaced is the caller's promise, and that the source is its own.
    unsafe { rustix::mm::mremap_fixed(pointer(from.start), bytes, bytes, MremapFlags::MAYMOVE, pointer(place)) }
        .map(drop)
}

/// Makes every page of a range private and present, as if each had been written with what it holds.
///
/// # Errors
/// Memory is short; some of the range may have been done.
pub fn make_private(range: PageRange) -> Result<(), Errno> {
    // SAFETY: the call changes no content; it takes the faults that writing would take.
    unsafe { rustix::mm::madvise(pointer(range.start), length(range.pages), Advice::LinuxPopulateWrite) }
}

/// Makes every page of a range present, as if each had been read.
///
/// # Errors
/// Memory is short; some of the range may have been done.
pub fn make_present(range: PageRange) -> Result<(), Errno> {
    // SAFETY: the call changes no content; it takes the faults that reading would take.
    unsafe { rustix::mm::madvise(pointer(range.start), length(range.pages), Advice::LinuxPopulateRead) }
}

/// Splits the huge page that this page is part of, if it is one and nobody has pinned it. Whoever touches one of its pages
/// waits for that.
///
/// What this asks for is that the page be thought cold, which the kernel cannot think of a part of a huge page. It splits one
/// then while it is still mapped as one; by the time the mapping is cut, as it is to be registered or replaced in part, that
/// takes almost twice as long.
pub fn split_huge_page(page: HostVirt) {
    // SAFETY: the call changes no content. Where it does nothing, nothing is lost.
    let _ = unsafe { rustix::mm::madvise(pointer(page), PAGE_BYTES, Advice::LinuxCold) };
}

/// Copies a page that others may be writing. What is copied may be a mixture of before and after.
///
/// # Safety
/// The page must be mapped readable for the length of the call.
pub unsafe fn copy_page(from: HostVirt, to: &mut [u8; PAGE_BYTES]) {
    // SAFETY: by the caller for the source; the destination is exclusively borrowed. See `copy_words`.
    unsafe { copy_words(pointer(from).cast(), to.as_mut_ptr()) }
}

/// # Safety
/// Both must be valid for a page.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_words(from: *const u8, to: *mut u8) {
    // Written in assembly because a plain copy of memory that others write meanwhile is undefined in Rust; for the
    // processor it is only a copy.
    // SAFETY: reads and writes a page, by the caller's promise; the direction flag is clear by the ABI.
    unsafe {
        std::arch::asm!("rep movsb", inout("rcx") PAGE_BYTES => _, inout("rsi") from => _, inout("rdi") to => _,
            options(nostack, preserves_flags));
    }
}

/// # Safety
/// Both must be valid for a page.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_words(from: *const u8, to: *mut u8) {
    for offset in (0..PAGE_BYTES).step_by(size_of::<u64>()) {
        // SAFETY: within the page, by the caller's promise, and aligned, since pages are.
        let word = unsafe { from.add(offset).cast::<u64>().read_volatile() };
        // SAFETY: within the page; nothing is assumed of its alignment.
        unsafe { to.add(offset).cast::<u64>().write_unaligned(word) };
    }
}

/// Whether two pages hold the same bytes.
///
/// # Safety
/// Both must be mapped readable for the length of the call. If somebody writes one meanwhile, the answer is worthless.
pub unsafe fn pages_equal(one: HostVirt, other: HostVirt) -> bool {
    // SAFETY: by the caller. The comparison is libc's, so nothing is a Rust reference.
    unsafe { libc::memcmp(pointer(one), pointer(other), PAGE_BYTES) == 0 }
}

const fn pointer(at: HostVirt) -> *mut c_void {
    at.0 as usize as *mut c_void
}

const fn length(pages: u64) -> usize {
    pages_to_bytes(pages) as usize
}
