//! The mappings that a member's agent changes in the member's address space.
//!
//! The program uses this memory at the same time, so no Rust reference to it is ever made. Addresses are numbers.
//! Contents are copied by the processor's string instructions or the kernel, and compared by libc. The duties of the
//! caller are in each `Safety` section. Errors are bare numbers (`Errno`), because most callers must not allocate
//! memory.

use crate::apart::map_apart;
use crate::pool_memory::{Role, check};
use page::{HostVirt, PAGE_BYTES, PAGE_SHIFT, PageRange, PoolSlot, pages_to_bytes};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{FallocateFlags, MemfdFlags, SeekFrom, fallocate, fstat, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags};
use std::ffi::c_void;
use std::time::Duration;

/// Base pages in a huge page of 2 MiB.
pub const HUGE_PAGES: u64 = 512;
/// Most pages that are copied through a file at a time: 256 KiB, which stay in the processor's cache.
const BY_FILE_PAGES: u64 = 64;

/// Settings of a mapping that a new one must take over from the one it replaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inherit {
    /// Not given to forked children (`MADV_DONTFORK`).
    pub dont_fork: bool,
    /// Not in core dumps (`MADV_DONTDUMP`).
    pub dont_dump: bool,
    /// Huge pages are asked for (`MADV_HUGEPAGE`, true) or forbidden (`MADV_NOHUGEPAGE`, false); `None`: the host's
    /// policy decides.
    pub huge: Option<bool>,
}

/// Anonymous memory of the agent's own, unmapped when this is dropped.
#[derive(Debug)]
pub struct MemberMemory(PageRange);

impl MemberMemory {
    /// Maps fresh memory, of which no page is present.
    ///
    /// # Errors
    /// Memory or mappings are short.
    pub fn new(pages: u64) -> Result<Self, Errno> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        let at = map_apart(length(pages), |at, more| {
            // SAFETY: a new mapping where nothing is mapped.
            unsafe { rustix::mm::mmap_anonymous(at, length(pages), protection, flags | more) }
        })?;
        Ok(Self(PageRange { start: HostVirt(at as u64), pages }))
    }

    /// As [`MemberMemory::new`], but at an address that the kernel chooses, among a program's mappings.
    #[cfg(test)]
    pub fn where_kernel_chooses(pages: u64) -> Self {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let at = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length(pages), protection, flags) };
        Self(PageRange { start: HostVirt(at.expect("a mapping") as u64), pages })
    }

    /// Maps fresh memory between two pages that nobody can touch, and returns these guards, too. So it is a mapping
    /// (VMA) of its own, without any page. A mapping without pages can be joined with its neighbours after it was
    /// moved; one with a page cannot. `accounted`: whether the kernel accounts for it (no `MAP_NORESERVE`), as for a
    /// program's own memory.
    ///
    /// # Errors
    /// Memory or mappings are short.
    pub fn apart(pages: u64, accounted: bool) -> Result<(Self, [Self; 2]), Errno> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let at =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length(pages + 2), ProtFlags::empty(), flags) }?;
        let first = HostVirt(at as u64);
        let one = |start| Self(PageRange { start, pages: 1 });
        let (this, guards) = (first.add_pages(1), [one(first), one(first.add_pages(pages + 1))]);
        let this = Self(PageRange { start: this, pages });
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        let flags = if accounted { flags } else { flags | MapFlags::NORESERVE };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the range is the inner part of the mapping that was just made.
        unsafe { rustix::mm::mmap_anonymous(pointer(this.0.start), length(pages), protection, flags) }?;
        Ok((this, guards))
    }

    /// Maps memory to which pages can be moved one by one. It never has huge pages, and is not given to forked
    /// children, which have no use for it.
    ///
    /// # Errors
    /// Memory or mappings are short.
    pub fn stage(pages: u64) -> Result<Self, Errno> {
        let this = Self::new(pages)?;
        // A kernel without huge pages refuses the first advice, and does not need it.
        for advice in [Advice::LinuxNoHugepage, Advice::LinuxDontFork] {
            // SAFETY: the mapping is ours and new, and neither advice changes its content.
            let _ = unsafe { rustix::mm::madvise(pointer(this.0.start), length(pages), advice) };
        }
        Ok(this)
    }

    /// Maps 2 MiB, aligned for a huge page, with all pages present. It is not given to forked children, because a
    /// huge page shared with a child would be split.
    ///
    /// The kernel is asked for a huge page if `wanted` is true, and for base pages if it is false. If it is `None`, the
    /// host's policy decides. Without a free huge page the kernel uses base pages.
    ///
    /// # Errors
    /// Memory or mappings are short.
    pub fn huge_page(wanted: Option<bool>) -> Result<Self, Errno> {
        let room = Self::new(2 * HUGE_PAGES - 1)?;
        let (start, end) = (room.0.start.page(), room.0.end().page());
        let first = start.next_multiple_of(HUGE_PAGES);
        for (from, to) in [(start, first), (first + HUGE_PAGES, end)].into_iter().filter(|(from, to)| from < to) {
            // SAFETY: the range is a part of the mapping just made, and nothing refers to it.
            unsafe { rustix::mm::munmap(pointer(HostVirt(from << PAGE_SHIFT)), length(to - from)) }?;
        }
        room.forget();
        let this = Self(PageRange { start: HostVirt(first << PAGE_SHIFT), pages: HUGE_PAGES });
        Inherit { huge: wanted, ..Inherit::default() }.apply(this.0)?;
        give_to_children(this.0, false)?;
        make_private(this.0)?;
        Ok(this)
    }

    /// The address range of this memory.
    pub const fn range(&self) -> PageRange {
        self.0
    }

    /// Sets the protection of this memory to these `PROT_` bits.
    ///
    /// # Errors
    /// The process has reached its limit of mappings.
    pub fn protect(&self, access: u8) -> Result<(), Errno> {
        let access = MprotectFlags::from_bits_retain(access.into());
        // SAFETY: the mapping is ours, and no user of this type makes a reference to it that would outlive the call.
        unsafe { rustix::mm::mprotect(pointer(self.0.start), length(self.0.pages), access) }
    }

    /// Drops the content of the first `pages` pages.
    pub fn drop_pages(&self, pages: u64) {
        let pages = pages.min(self.0.pages);
        let drop_them =
            // SAFETY: the mapping is ours, and its users call this once they are done with the content of these pages.
            || unsafe { rustix::mm::madvise(pointer(self.0.start), length(pages), Advice::LinuxDontNeed) };
        if drop_them().is_err() {
            self.unlock();
            let _ = drop_them();
        }
    }

    /// Unlocks the pages, so that they can be moved and dropped, in case the program has locked all of its memory
    /// (`mlockall`).
    pub fn unlock(&self) {
        // SAFETY: the mapping is ours, and unlocking does not change its content.
        let _ = unsafe { rustix::mm::munlock(pointer(self.0.start), length(self.0.pages)) };
    }

    /// Copies pages into this memory, from `from` on. Other threads may be writing them.
    ///
    /// # Safety
    /// As many pages as this has must be mapped readable at `from` for the length of the call. No one else may use this
    /// memory yet.
    pub unsafe fn fill(&self, from: HostVirt) {
        for n in 0..self.0.pages {
            let to = pointer(self.0.start.add_pages(n)).cast::<[u8; PAGE_BYTES]>();
            // SAFETY: the page is part of our mapping, which no one else uses, so no other reference to it exists.
            let to = unsafe { &mut *to };
            // SAFETY: the caller promises that the source can be read.
            unsafe { copy_page(from.add_pages(n), to) };
        }
    }

    /// Copies pages into this memory, from `from` on. Another thread may unmap them meanwhile. Stops at the first page
    /// that cannot be read. Returns the number of pages copied.
    pub fn fill_as_far_as_there(&self, from: HostVirt) -> u64 {
        let part = |at: HostVirt| libc::iovec { iov_base: pointer(at), iov_len: length(self.0.pages) };
        let (source, to) = (part(from), part(self.0.start));
        let own = libc::pid_t::try_from(std::process::id()).unwrap_or(0);
        // SAFETY: the kernel reads only what is mapped readable, and writes to our mapping, which no one else uses yet.
        let copied = unsafe { libc::process_vm_readv(own, &raw const to, 1, &raw const source, 1, 0) };
        match u64::try_from(copied) {
            Ok(copied) => copied / PAGE_BYTES as u64,
            Err(_) if std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT) => 0,
            Err(_) => self.fill_by_file(from),
        }
    }

    /// As [`Self::fill_as_far_as_there`], by writing the pages to a memory file and reading them from it. A program's
    /// filter of system calls (seccomp) may forbid `process_vm_readv`, as the filter of Docker 20.10 does.
    fn fill_by_file(&self, from: HostVirt) -> u64 {
        let Ok(file) = memfd_create(c"own-copies", MemfdFlags::CLOEXEC) else { return 0 };
        let mut done = 0;
        while done < self.0.pages {
            let wanted = BY_FILE_PAGES.min(self.0.pages - done);
            let there = write_pages(&file, 0, PageRange { start: from.add_pages(done), pages: wanted });
            let to = pointer(self.0.start.add_pages(done));
            // SAFETY: the kernel writes to these pages of our mapping, which no one else uses yet.
            let read = unsafe { libc::pread(file.as_raw_fd(), to, length(there), 0) };
            if usize::try_from(read) != Ok(length(there)) {
                break;
            }
            done += there;
            if there < wanted {
                break;
            }
        }
        done
    }

    /// Gives up ownership without unmapping anything, after the memory was moved to another place.
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

/// A segment of a pool, as a member sees it: its file, which is mapped in place of folded pages, and a read-only
/// mapping of it (the view), with which pages are compared.
#[derive(Debug)]
pub struct PoolView {
    file: OwnedFd,
    view: PageRange,
}

impl PoolView {
    /// Maps a view of a pool file of `slots` slots, which this process can only read.
    ///
    /// # Errors
    /// The file is not a segment's, or is too short, or address space is short.
    pub fn new(file: OwnedFd, slots: u32) -> Result<Self, Errno> {
        check(&file, Role::Segment)?;
        let bytes = pages_to_bytes(u64::from(slots));
        // A read in a view beyond the file's end would kill the process (`SIGBUS`). The size is sealed.
        if rustix::fs::fstat(&file)?.st_size.cast_unsigned() < bytes {
            return Err(Errno::INVAL);
        }
        let (protection, flags) = (ProtFlags::READ, MapFlags::SHARED | MapFlags::NORESERVE);
        let at = map_apart(length(slots.into()), |at, more| {
            // SAFETY: a new mapping where nothing is mapped.
            unsafe { rustix::mm::mmap(at, length(slots.into()), protection, flags | more, &file, 0) }
        })?;
        // Forked children have no use for the view, and neither has a core file.
        for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
            // SAFETY: the mapping is ours and new, and the advice does not change its content.
            let _ = unsafe { rustix::mm::madvise(at, length(slots.into()), advice) };
        }
        Ok(Self { file, view: PageRange { start: HostVirt(at as u64), pages: slots.into() } })
    }

    /// Number of the segment's slots.
    pub const fn pages(&self) -> u64 {
        self.view.pages
    }

    /// The index within the segment of the slot that the view shows at this address; `None` if the view does not show
    /// this address.
    pub fn place_of(&self, at: HostVirt) -> Option<u32> {
        let is_within = self.view.start <= at && at < self.view.end();
        is_within.then(|| u32::try_from(at.page() - self.view.start.page()).ok()).flatten()
    }

    /// Another view of the same file.
    ///
    /// # Errors
    /// No descriptor or address space is left.
    pub fn again(&self) -> Result<Self, Errno> {
        let file = rustix::io::fcntl_dupfd_cloexec(&self.file, 0)?;
        Self::new(file, u32::try_from(self.view.pages).map_err(|_| Errno::INVAL)?)
    }

    /// The parts of a run of slots that have content, each as its first page (counted from the start of the run) and
    /// its number of pages. The other slots are empty.
    pub fn filled(&self, first: PoolSlot, pages: u64) -> Vec<(u64, u64)> {
        let (begin, end) = (pages_to_bytes(first.index().into()), pages_to_bytes(u64::from(first.index()) + pages));
        let (mut found, mut at) = (Vec::new(), begin);
        // Behind the last data, `seek` fails, which ends the loop, too.
        while at < end
            && let Ok(from) = rustix::fs::seek(&self.file, SeekFrom::Data(at))
            && from < end
            && let Ok(to) = rustix::fs::seek(&self.file, SeekFrom::Hole(from))
        {
            let to = to.min(end);
            found.push(((from - begin) / PAGE_BYTES as u64, (to - from) / PAGE_BYTES as u64));
            at = to;
        }
        found
    }

    /// The address range at which the view shows a run of slots; `None` if the segment is shorter.
    pub fn slots(&self, first: PoolSlot, pages: u64) -> Option<PageRange> {
        let end = u64::from(first.index()).checked_add(pages)?;
        (end <= self.view.pages).then(|| PageRange { start: self.view.start.add_pages(first.index().into()), pages })
    }

    /// Maps a run of slots, private and writable, in place of the mappings at `place`.
    ///
    /// Kernels before Linux 6.12 unmap the old mappings before they allocate the new one. If that fails, nothing lies
    /// at `place`, and the call is made again, as by [`move_mapping_over`].
    ///
    /// # Safety
    /// The slots must hold the same bytes as `place`, so that the owner of `place` finds its memory unchanged.
    ///
    /// # Errors
    /// The process has reached its limit of mappings, or memory is short. `place` is then as it was.
    pub unsafe fn map_over(&self, place: PageRange, first: PoolSlot) -> Result<(), Errno> {
        let (protection, flags) =
            (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE);
        let offset = pages_to_bytes(first.index().into());
        let (at, bytes) = (pointer(place.start), length(place.pages));
        loop {
            // SAFETY: the caller promises that the range may be replaced.
            match unsafe { rustix::mm::mmap(at, bytes, protection, flags, self.file.as_fd(), offset) } {
                Err(Errno::NOMEM) if !is_mapped(place.start) => std::thread::sleep(AGAIN),
                result => return result.map(drop),
            }
        }
    }

    /// Maps a run of slots, private and writable, where nothing is mapped. [`move_mapping_over`] then moves the
    /// mapping.
    ///
    /// # Errors
    /// The process has reached its limit of mappings, or memory is short.
    pub fn map(&self, first: PoolSlot, pages: u64) -> Result<MemberMemory, Errno> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        let offset = pages_to_bytes(first.index().into());
        let at = map_apart(length(pages), |at, more| {
            // SAFETY: a new mapping where nothing is mapped.
            unsafe { rustix::mm::mmap(at, length(pages), protection, flags | more, self.file.as_fd(), offset) }
        })?;
        Ok(MemberMemory(PageRange { start: HostVirt(at as u64), pages }))
    }

    /// Waits until the kernel's lock of the file's mappings is free, so that [`PoolView::map_over`] need not wait for
    /// it. A kernel thread holds this lock while it looks up the mappings of a page, and may be preempted meanwhile.
    pub fn wait_for_lock(&self) {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let mapped = map_apart(length(1), |at, more| {
            // SAFETY: a new mapping where nothing is mapped.
            unsafe { rustix::mm::mmap(at, length(1), ProtFlags::READ, flags | more, &self.file, 0) }
        });
        // If the mapping fails, there is nothing to undo.
        if let Ok(at) = mapped {
            // SAFETY: the mapping was just made, and nothing else has its address.
            let _ = unsafe { rustix::mm::munmap(at, length(1)) };
        }
    }

    /// Drops the page-table entries of the view, which this process does not read for a while. The next read of a page
    /// brings its entry back.
    pub fn rest(&self) {
        // SAFETY: the view is a shared mapping that is only read, so dropping its page table entries loses nothing.
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
    /// Applies these settings to the mappings in a range.
    ///
    /// # Errors
    /// A part of the range is not mapped, or the process has reached its limit of mappings.
    pub fn apply(self, range: PageRange) -> Result<(), Errno> {
        let fork = self.dont_fork.then_some(Advice::LinuxDontFork);
        let dump = self.dont_dump.then_some(Advice::LinuxDontDump);
        let huge = self.huge.map(|huge| if huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage });
        for advice in [fork, dump, huge].into_iter().flatten() {
            // SAFETY: no such advice changes the content of the range.
            match unsafe { rustix::mm::madvise(pointer(range.start), length(range.pages), advice) } {
                // A kernel without huge pages refuses this, and does not need it.
                Err(Errno::INVAL) if Some(advice) == huge => {}
                result => result?,
            }
        }
        Ok(())
    }
}

/// Sets whether forked children get a copy of a range.
///
/// # Errors
/// A part of the range is not mapped, or the process has reached its limit of mappings.
pub fn give_to_children(range: PageRange, give: bool) -> Result<(), Errno> {
    let advice = if give { Advice::LinuxDoFork } else { Advice::LinuxDontFork };
    // SAFETY: the advice does not change the content of the range.
    unsafe { rustix::mm::madvise(pointer(range.start), length(range.pages), advice) }
}

/// A page of a lease's file, mapped shared and without any access. The kernel keeps this mapping as long as this
/// address space, or one forked from it, exists. So the worker can ask the kernel whether any of these address spaces
/// still exists.
#[derive(Debug)]
pub struct SharedMark(HostVirt);

impl SharedMark {
    /// Maps the file's first page.
    ///
    /// # Errors
    /// The file is not a lease, it was not opened for reading and writing, or mappings are short.
    pub fn new(file: impl AsFd) -> Result<Self, Errno> {
        check(&file, Role::Lease)?;
        let (protection, flags) = (ProtFlags::empty(), MapFlags::SHARED);
        let at = map_apart(PAGE_BYTES, |at, more| {
            // SAFETY: a new mapping where nothing is mapped.
            unsafe { rustix::mm::mmap(at, PAGE_BYTES, protection, flags | more, &file, 0) }
        })?;
        Ok(Self(HostVirt(at as u64)))
    }

    /// A mark that this process has inherited from the process that forked it.
    ///
    /// # Safety
    /// A mark lies at `at`, and nobody else is going to unmap it.
    pub const unsafe fn inherited(at: HostVirt) -> Self {
        Self(at)
    }
}

impl Drop for SharedMark {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and it allows no access to its page.
        let _ = unsafe { rustix::mm::munmap(pointer(self.0), PAGE_BYTES) };
    }
}

/// Writes pages of memory to a file, from its page `at_page` on, while other threads may be writing to these pages.
/// Stops without harm at memory that is not mapped or cannot be read. Returns the number of pages written whole.
pub fn write_pages(file: impl AsFd, at_page: u64, from: PageRange) -> u64 {
    let offset = libc::off_t::try_from(pages_to_bytes(at_page)).unwrap_or(libc::off_t::MAX);
    // SAFETY: the kernel only reads the range, and answers EFAULT where there is nothing to read.
    let written = unsafe { libc::pwrite(file.as_fd().as_raw_fd(), pointer(from.start), length(from.pages), offset) };
    u64::try_from(written).unwrap_or(0) / PAGE_BYTES as u64
}

/// Frees all memory of a memory file. The file keeps its size, and reads as zeros.
///
/// The call waits until nobody is writing to the file, so it is not for callers that must not wait.
///
/// # Errors
/// The kernel refused; the file may be sealed against writing.
pub fn empty_file(file: impl AsFd) -> Result<(), Errno> {
    let bytes = fstat(&file)?.st_size.cast_unsigned();
    fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, bytes)
}

/// Maps fresh anonymous memory where nothing is mapped.
///
/// # Errors
/// Something is mapped there (`EEXIST`), or memory or mappings are short.
pub fn map_anonymous_where_free(place: PageRange) -> Result<(), Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE | MapFlags::NORESERVE;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: `MAP_FIXED_NOREPLACE` maps only where nothing is mapped.
    unsafe { rustix::mm::mmap_anonymous(pointer(place.start), length(place.pages), protection, flags) }.map(drop)
}

/// Time between two tries of a move for which the kernel had no memory: 100 us.
pub const AGAIN: Duration = Duration::from_micros(100);

/// Moves a mapping of the agent's own over `place`, atomically: other threads find either the former mapping or the
/// moved one.
///
/// The kernel unmaps `place` before it allocates memory for the mapping. If it cannot (at a memory control group's
/// limit), nothing lies at `place`, and `from` is as it was. There is no way back then: the move is made again, every
/// [`AGAIN`], until it succeeds. The wait has no bound, because the caller holds the only copy of memory that the
/// program needs.
///
/// # Safety
/// `from` must hold the same bytes as `place`, and no one else may use `from`.
///
/// # Errors
/// Memory or mappings are short, or `from` is more than one mapping. Then `place` is as it was.
pub unsafe fn move_mapping_over(from: PageRange, place: HostVirt) -> Result<(), Errno> {
    let (bytes, to) = (length(from.pages), pointer(place));
    loop {
        // SAFETY: the caller promises that the destination may be replaced, and that the source is its own.
        let moved = unsafe { rustix::mm::mremap_fixed(pointer(from.start), bytes, bytes, MremapFlags::MAYMOVE, to) };
        match moved {
            Err(Errno::NOMEM) if !is_mapped(place) => std::thread::sleep(AGAIN),
            result => return result.map(drop),
        }
    }
}

/// Whether anything is mapped at this page.
fn is_mapped(page: HostVirt) -> bool {
    let mut is_resident = 0;
    // SAFETY: the kernel writes one byte for the page, and touches nothing of it.
    0 == unsafe { libc::mincore(pointer(page), PAGE_BYTES, &raw mut is_resident) }
}

/// Makes every page of a range private and present, as if each had been overwritten with its own content.
///
/// # Errors
/// Memory is short. The call may have done a part of the range.
pub fn make_private(range: PageRange) -> Result<(), Errno> {
    // SAFETY: the call changes no content; it takes the faults that writes would take.
    unsafe { rustix::mm::madvise(pointer(range.start), length(range.pages), Advice::LinuxPopulateWrite) }
}

/// Makes every page of a range present, as if each had been read.
///
/// # Errors
/// Memory is short. The call may have done a part of the range.
pub fn make_present(range: PageRange) -> Result<(), Errno> {
    // SAFETY: the call changes no content; it takes the faults that reads would take.
    unsafe { rustix::mm::madvise(pointer(range.start), length(range.pages), Advice::LinuxPopulateRead) }
}

/// Drops the private copies of pages in a range. In a private mapping of a file, the file's pages show then.
///
/// # Safety
/// The file's pages must hold the same bytes as the private copies, and nobody may be able to write either of them, so
/// that the program finds the range unchanged.
///
/// # Errors
/// A part of the range is not mapped, or locked.
pub unsafe fn drop_private(range: PageRange) -> Result<(), Errno> {
    // SAFETY: by the caller.
    unsafe { rustix::mm::madvise(pointer(range.start), length(range.pages), Advice::LinuxDontNeed) }
}

/// Splits the huge page that this page is part of, if there is one and it is not pinned. Threads that touch one of
/// its pages wait meanwhile.
///
/// The call advises that this page is cold (`MADV_COLD`). The kernel cannot mark a part of a huge page as cold, so it
/// splits the huge page while it is still mapped as one. Registering a part of the mapping with a userfaultfd, or
/// replacing it, would split the huge page, too, but take almost twice as long.
pub fn split_huge_page(page: HostVirt) {
    // SAFETY: the call changes no content, and if it fails nothing is lost.
    let _ = unsafe { rustix::mm::madvise(pointer(page), PAGE_BYTES, Advice::LinuxCold) };
}

/// Copies a page that other threads may be writing. The copy may then be a mixture of old and new bytes.
///
/// # Safety
/// The page must be mapped readable for the length of the call.
pub unsafe fn copy_page(from: HostVirt, to: &mut [u8; PAGE_BYTES]) {
    // SAFETY: the caller promises that the source can be read; the destination is exclusively borrowed. See
    // `copy_words`.
    unsafe { copy_words(pointer(from).cast(), to.as_mut_ptr()) }
}

/// # Safety
/// Both must be valid for a page.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_words(from: *const u8, to: *mut u8) {
    // This is assembly because a plain copy of memory that other threads write meanwhile is undefined behaviour in
    // Rust. For the processor it is just a copy.
    // SAFETY: the caller promises that both are valid for a page. The direction flag is clear by the ABI.
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
        // SAFETY: the word is within the page, which the caller promises to be valid, and aligned, since pages are.
        let word = unsafe { from.add(offset).cast::<u64>().read_volatile() };
        // SAFETY: the word is within the page; the write needs no alignment.
        unsafe { to.add(offset).cast::<u64>().write_unaligned(word) };
    }
}

/// Whether two pages hold the same bytes.
///
/// # Safety
/// Both must be mapped readable for the length of the call. If another thread writes to one meanwhile, the answer is
/// worthless.
pub unsafe fn pages_equal(one: HostVirt, other: HostVirt) -> bool {
    // SAFETY: the caller promises that both can be read. libc compares them, so no Rust reference is made.
    unsafe { libc::memcmp(pointer(one), pointer(other), PAGE_BYTES) == 0 }
}

const fn pointer(at: HostVirt) -> *mut c_void {
    at.0 as usize as *mut c_void
}

const fn length(pages: u64) -> usize {
    pages_to_bytes(pages) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_end_at_first_page_that_is_not_there_in_either_way() {
        let pages = 3 * BY_FILE_PAGES + 5;
        let (from, first) = (MemberMemory::new(pages).unwrap(), |at: HostVirt| at.0 as usize as *mut u64);
        (0..pages).for_each(|n| {
            // SAFETY: the address is that of the first word of a page of the test's own.
            unsafe { first(from.range().start.add_pages(n)).write_volatile(n + 1) };
        });
        for there in [pages, 2 * BY_FILE_PAGES, BY_FILE_PAGES + 7, 0] {
            let rest = from.range().start.add_pages(there);
            if there < pages {
                // SAFETY: these pages are the test's own, and nothing refers to them.
                unsafe { rustix::mm::mprotect(pointer(rest), length(pages - there), MprotectFlags::empty()) }.unwrap();
            }
            for fill in [MemberMemory::fill_as_far_as_there, MemberMemory::fill_by_file] {
                let to = MemberMemory::new(pages).unwrap();
                assert_eq!(fill(&to, from.range().start), there);
                // SAFETY: the address is that of the first word of a page of the test's own.
                let read = |n: u64| unsafe { first(to.range().start.add_pages(n)).read_volatile() };
                assert!((0..pages).all(|n| read(n) == if n < there { n + 1 } else { 0 }), "{there} pages");
            }
        }
    }
}
