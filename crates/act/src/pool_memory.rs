//! The memory that a group shares, and the leases by which its worker knows whether a process can still reach it.
//!
//! ```text
//!   worker                                      members
//!     | segment: memfd, one writable mapping ---- read-only file --> mapped privately, page by page
//!     | donation window: memfd, never mapped <--- pages copied in --|
//!     | lease: empty memfd ---------------------- mapped by each process that maps slots, forked children included
//! ```
//!
//! A process that is handed such a file first checks that the file is one ([`check`]). A file of another kind can make
//! its reader wait for ever, and a file that shrinks can kill it.
//!
//! - A **segment** is mapped once, by the worker that made it, and then sealed (`F_SEAL_FUTURE_WRITE`). From then on no
//!   process, not even root's, can map it writable, `write` it or `fallocate` it. Besides, members get it opened
//!   read-only. In return, single pages cannot be given back, because `MADV_REMOVE` is a `fallocate`, too (`EPERM`,
//!   Linux 6.18). Slots are used again, and their memory is freed with the segment.
//! - A member writes the **donation window**. The worker reads it with `pread` only. A member that writes it at the
//!   same time, or punches holes into it, gives the worker other bytes and does no other harm.
//! - A process holds a **lease** by mapping it. `fork` copies the mapping; `exec` and the end of a process drop it.
//!   So it lives as long as the process's mappings of the pool. To ask whether a lease is held, the worker adds the
//!   seal `F_SEAL_WRITE`. This fails with `EBUSY` while a shared mapping made from a writable file exists, readable
//!   or not (`man 2 fcntl`).

use crate::object_file;
use page::{HostVirt, PAGE_BYTES, PageRange, PoolSlot};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, SeekFrom, Stat, fchmod, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs,
    ftruncate, memfd_create, open, seek,
};
use rustix::io::{Errno, pread};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr::{NonNull, null_mut};

/// Seals of a segment: it can be written only through the mapping that exists already, and it keeps its size.
const SEGMENT_SEALS: SealFlags =
    SealFlags::FUTURE_WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);

/// Seals of a template: nobody can write it at all.
const TEMPLATE_SEALS: SealFlags = SEGMENT_SEALS.union(SealFlags::WRITE);

/// Seals of a donation window: it keeps its size.
const WINDOW_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
/// Seals of a lease: it keeps its size. To ask whether the lease is held, the worker adds another seal.
const LEASE_SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);
/// `f_type` of the file system of memory files with small pages (`TMPFS_MAGIC`).
const MEMORY_FILES: i64 = 0x0102_1994;

/// The role of a file that one process hands to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A segment of the pool.
    Segment,
    /// A donation window.
    Window,
    /// A lease.
    Lease,
    /// The agent's object.
    Object,
}

/// Checks that a file is a memory file of the kernel's, and sealed as files of this role are. Then its size cannot
/// change, and no process has to answer when its pages are read.
///
/// # Errors
/// `EINVAL`: it is a file of another kind. `EPERM`: it lacks a seal.
pub fn check(file: impl AsFd, role: Role) -> Result<(), Errno> {
    let seals = match role {
        Role::Segment => SEGMENT_SEALS,
        Role::Window => WINDOW_SEALS,
        Role::Lease => LEASE_SEALS,
        Role::Object => object_file::SEALS,
    };
    // The seals are asked for first, because only the kernel answers: a file system in user space may leave other
    // questions unanswered.
    if !fcntl_get_seals(&file)?.contains(seals) {
        return Err(Errno::PERM);
    }
    // A memory file with huge pages is refused: there may be too few huge pages when a page is touched.
    if fstatfs(&file)?.f_type == MEMORY_FILES { Ok(()) } else { Err(Errno::INVAL) }
}

/// Offset in bytes of a slot in its segment's file.
fn offset(slot: u32) -> u64 {
    u64::from(slot) * PAGE_BYTES as u64
}

/// Beginning of the names of a pool's files, as `/proc/PID/maps` shows them.
pub const POOL_NAMES: &str = "/memfd:pagefold-";

fn new_memfd(name: &str, bytes: u64) -> rustix::io::Result<OwnedFd> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    fchmod(&file, Mode::RUSR | Mode::WUSR)?;
    ftruncate(&file, bytes)?;
    Ok(file)
}

/// A template: a sealed memory file with a guest's memory, used as a segment.
#[derive(Debug)]
pub struct Template {
    /// A read-only descriptor of its file.
    pub file: OwnedFd,
    /// Number of its slots, including empty ones.
    pub slots: u32,
    /// Memory that the file takes, in bytes.
    pub bytes: u64,
}

impl Template {
    /// Seals a memory file for good.
    ///
    /// # Errors
    /// `EINVAL`: it is no memory file, or has no size that a segment may have. `EBUSY`, `EPERM`: some process can write
    /// it, and keeps that right.
    pub fn seal(file: impl AsFd) -> Result<Self, Errno> {
        if !fcntl_get_seals(&file)?.contains(TEMPLATE_SEALS) {
            fcntl_add_seals(&file, TEMPLATE_SEALS)?;
        }
        check(&file, Role::Segment)?;
        let found = fstat(&file)?;
        let bytes = u64::try_from(found.st_size).map_err(|_| Errno::INVAL)?;
        let slots = u32::try_from(bytes / PAGE_BYTES as u64).map_err(|_| Errno::INVAL)?;
        let fits = (1..=PoolSlot::PER_SEGMENT).contains(&slots) && offset(slots) == bytes;
        let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        let file =
            if fits { open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())? } else { return Err(Errno::INVAL) };
        Ok(Self { file, slots, bytes: memory_of(&found) })
    }

    /// Whether a file is sealed as a template.
    pub fn is_sealed(file: impl AsFd) -> bool {
        fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(TEMPLATE_SEALS)) && check(&file, Role::Segment).is_ok()
    }

    /// Memory that a file takes, in bytes.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn bytes_of(file: impl AsFd) -> Result<u64, Errno> {
        fstat(file).map(|found| memory_of(&found))
    }
}

/// Memory that a file takes, in bytes.
fn memory_of(found: &Stat) -> u64 {
    u64::try_from(found.st_blocks).unwrap_or(0) * 512
}

/// A segment that this process has made. No other process can write it.
#[derive(Debug)]
pub struct PoolSegment {
    file: OwnedFd,
    map: NonNull<c_void>,
    slots: u32,
}

// SAFETY: the mapping belongs to the process, not to a thread; it is written through `&mut self` only.
unsafe impl Send for PoolSegment {}

impl PoolSegment {
    /// Makes a segment of `slots` empty slots, which takes no memory yet.
    ///
    /// # Errors
    /// No file descriptors, address space or kernel memory are left.
    pub fn create(group: &str, slots: u32) -> io::Result<Self> {
        let bytes = usize::try_from(offset(slots)).map_err(|_| Errno::NOMEM)?;
        let file = new_memfd(&format!("pagefold-{group}"), offset(slots))?;
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: the kernel chooses an address where nothing is mapped, so no memory of ours is replaced.
        let map = unsafe { mmap(null_mut(), bytes, protection, flags, &file, 0) }?;
        let map = NonNull::new(map).ok_or(Errno::NOMEM)?;
        let segment = Self { file, map, slots };
        // SAFETY: the range is the mapping just made; the advice changes no content.
        match unsafe { madvise(segment.map.as_ptr(), bytes, Advice::LinuxNoHugepage) } {
            // A kernel without huge pages does not know this advice, and does not need it.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(e) => return Err(e.into()),
        }
        fcntl_add_seals(&segment.file, SEGMENT_SEALS)?;
        Ok(segment)
    }

    /// Number of slots.
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// A descriptor of the segment's file by which it can be read and mapped privately, but not written.
    ///
    /// # Errors
    /// `/proc` is not mounted, or no file descriptors are left.
    pub fn read_only(&self) -> io::Result<OwnedFd> {
        Ok(open(format!("/proc/self/fd/{}", self.file.as_raw_fd()), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Byte range of `slots` within the mapping.
    fn bytes_of(&self, slots: &Range<u32>) -> Range<usize> {
        assert!(slots.start <= slots.end && slots.end <= self.slots, "slots {slots:?} of {}", self.slots);
        slots.start as usize * PAGE_BYTES..slots.end as usize * PAGE_BYTES
    }

    /// Fills slots with pages of the donation window, from its page `page` on.
    ///
    /// # Errors
    /// Memory is short (`EFAULT`, `ENOMEM`), or the window has too few pages. Some of the slots may have been filled.
    pub fn fill(&mut self, slots: Range<u32>, window: &DonationWindow, page: usize) -> io::Result<()> {
        let bytes = self.bytes_of(&slots);
        // SAFETY: `bytes_of` keeps within the mapping, which is as long as the segment.
        let start = unsafe { self.map.as_ptr().cast::<u8>().add(bytes.start) };
        // SAFETY: the bytes are mapped, writable, and initialized (a hole reads as zeros) for as long as `self` is
        // borrowed. Other processes can only read them. In this process no other reference to them exists while we
        // hold `&mut self`.
        let mut into = unsafe { std::slice::from_raw_parts_mut(start, bytes.len()) };
        let mut from = page as u64 * PAGE_BYTES as u64;
        while !into.is_empty() {
            match pread(&window.0, &mut *into, from) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    into = into.split_at_mut(read).1;
                    from += read as u64;
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    /// The address range of slots in this process. Each slot is read, so that the page table has an entry for it.
    pub fn place(&self, slots: &Range<u32>) -> PageRange {
        let bytes = self.bytes_of(slots);
        for slot in slots.clone() {
            std::hint::black_box(self.slot(slot)[0]);
        }
        PageRange { start: HostVirt(self.map.as_ptr() as u64 + bytes.start as u64), pages: slots.len() as u64 }
    }

    /// The bytes of a slot. Reading an empty slot gives zeros, and allocates a page for it.
    pub fn slot(&self, slot: u32) -> &[u8] {
        let bytes = self.bytes_of(&(slot..slot + 1));
        // SAFETY: `bytes_of` keeps within the mapping, which is as long as the segment.
        let start = unsafe { self.map.as_ptr().cast::<u8>().add(bytes.start) };
        // SAFETY: the bytes are mapped, readable and initialized for as long as `self` is borrowed. They do not change
        // meanwhile: writing them in this process takes `&mut self`, and other processes cannot write them.
        unsafe { std::slice::from_raw_parts(start, bytes.len()) }
    }
}

impl Drop for PoolSegment {
    fn drop(&mut self) {
        // SAFETY: this is exactly the range that mmap returned. References into it borrow `self` and have ended.
        let unmapped = unsafe { munmap(self.map.as_ptr(), self.slots as usize * PAGE_BYTES) };
        debug_assert!(unmapped.is_ok(), "unmapping a mapping of our own: {unmapped:?}");
    }
}

/// A segment that a previous worker process made. It can be read, but no process can write it any more.
#[derive(Debug)]
pub struct InheritedSegment {
    file: OwnedFd,
    slots: u32,
}

impl InheritedSegment {
    /// Takes over a segment's file.
    ///
    /// # Errors
    /// The file lacks a seal that segments have, or has another size.
    pub fn take(file: OwnedFd, slots: u32) -> io::Result<Self> {
        check(&file, Role::Segment)?;
        let bytes = u64::try_from(fstat(&file)?.st_size).unwrap_or(0);
        if bytes == offset(slots) { Ok(Self { file, slots }) } else { Err(Errno::INVAL.into()) }
    }

    /// Number of slots.
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// A read-only descriptor of the segment's file.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn read_only(&self) -> io::Result<OwnedFd> {
        Ok(rustix::io::fcntl_dupfd_cloexec(&self.file, 0)?)
    }

    /// Number of slots that take memory.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn pages(&self) -> io::Result<u32> {
        Ok(u32::try_from(memory_of(&fstat(&self.file)?) / PAGE_BYTES as u64).unwrap_or(self.slots))
    }

    /// The next run of filled slots, from slot `from` on; `None` if there is none.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn filled(&self, from: u32) -> io::Result<Option<Range<u32>>> {
        let slot = |bytes: u64| u32::try_from(bytes / PAGE_BYTES as u64).unwrap_or(self.slots).min(self.slots);
        let start = match seek(&self.file, SeekFrom::Data(offset(from))) {
            Ok(bytes) => bytes,
            Err(Errno::NXIO) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        Ok(Some(slot(start)..slot(seek(&self.file, SeekFrom::Hole(start))?)))
    }

    /// Copies slots, from `slot` on, into `into`, as many as fit. Reading an empty slot allocates no memory.
    ///
    /// # Errors
    /// The kernel refused, or the segment has too few slots.
    pub fn read(&self, slot: u32, into: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            match pread(&self.file, &mut into[done..], offset(slot) + done as u64) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => done += read,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }
}

/// A memory file into which a member copies pages for its worker.
#[derive(Debug)]
pub struct DonationWindow(OwnedFd);

impl DonationWindow {
    /// A window of `pages` pages, whose size is sealed.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn create(pages: usize) -> io::Result<Self> {
        let file = new_memfd("pagefold-donation", pages as u64 * PAGE_BYTES as u64)?;
        fcntl_add_seals(&file, WINDOW_SEALS)?;
        Ok(Self(file))
    }
}

impl AsFd for DonationWindow {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A file that every process which maps slots of the pool maps, too. It is empty and its size is sealed, so it has no
/// pages for which a process could make the kernel wait.
#[derive(Debug)]
pub struct Lease(OwnedFd);

/// Whether any process holds a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// Some process maps it.
    Held,
    /// No process maps it, and mapping it later does not count.
    Over,
    /// A member has sealed the lease against further seals, so the worker cannot ask. No honest member does this.
    Spoilt,
}

impl Lease {
    /// A new lease, which no process holds.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn create() -> io::Result<Self> {
        let file = new_memfd("pagefold-lease", 0)?;
        fcntl_add_seals(&file, LEASE_SEALS)?;
        Ok(Self(file))
    }

    /// Asks whether a process holds the lease. If none does, the lease is over from then on.
    ///
    /// # Errors
    /// The kernel refused for another reason than that a process holds the lease.
    pub fn state(&self) -> io::Result<LeaseState> {
        match fcntl_add_seals(&self.0, SealFlags::WRITE) {
            Ok(()) => Ok(LeaseState::Over),
            Err(Errno::BUSY) => Ok(LeaseState::Held),
            Err(Errno::PERM) if fcntl_get_seals(&self.0)?.contains(SealFlags::WRITE) => Ok(LeaseState::Over),
            Err(Errno::PERM) => Ok(LeaseState::Spoilt),
            Err(e) => Err(e.into()),
        }
    }
}

impl AsFd for Lease {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A lease held by this process, and by the children that it forks while it holds it.
#[derive(Debug)]
pub struct HeldLease(NonNull<c_void>);

// SAFETY: the mapping belongs to the process, not to a thread, and no byte of it can be read or written.
unsafe impl Send for HeldLease {}

impl HeldLease {
    /// Holds the lease until this is dropped.
    ///
    /// # Errors
    /// The lease is over (newer kernels let it be mapped all the same), or no address space is left.
    pub fn hold(lease: impl AsFd) -> io::Result<Self> {
        // SAFETY: the kernel chooses an address where nothing is mapped, so no memory of ours is replaced.
        let map = unsafe { mmap(null_mut(), PAGE_BYTES, ProtFlags::empty(), MapFlags::SHARED, lease, 0) }?;
        Ok(Self(NonNull::new(map).ok_or(Errno::NOMEM)?))
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        // SAFETY: this is exactly the range that mmap returned, to which no reference was ever made.
        let unmapped = unsafe { munmap(self.0.as_ptr(), PAGE_BYTES) };
        debug_assert!(unmapped.is_ok(), "unmapping a mapping of our own: {unmapped:?}");
    }
}

#[cfg(test)]
#[path = "pool_memory_tests.rs"]
mod tests;
