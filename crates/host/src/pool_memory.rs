//! The memory that a group shares, and how its worker knows who can still reach it.
//!
//! ```text
//!   worker                                      members
//!     | segment: memfd, one writable mapping ---- read-only file --> mapped privately, page by page
//!     | donation window: memfd, never mapped <--- pages copied in --|
//!     | lease: empty memfd ---------------------- mapped by who maps slots, and by its children
//! ```
//!
//! - A **segment** is mapped once, by who made it, and sealed then (`F_SEAL_FUTURE_WRITE`): from there on no mapping that
//!   can write comes into being, nor does `write` work, nor `fallocate`, whoever asks and with whatever rights. What is
//!   handed out is opened read-only besides. The price: `MADV_REMOVE` is a `fallocate` too, so single pages cannot be
//!   given back (`EPERM`, Linux 6.18); they are used again, and go when the segment does.
//! - The **donation window** is written by a member. It is only ever read with `pread`, so a member that writes it at
//!   the same time, or punches holes into it, gives us other bytes and nothing else.
//! - A **lease** is held by mapping it. `fork` copies the mapping, `exec` and the end of a process drop it: it lives as
//!   long as the mappings of the pool do. `F_ADD_SEALS` with `F_SEAL_WRITE` fails with `EBUSY` while a shared mapping
//!   made from a writable file is there, readable or not (`man 2 fcntl`), and that is how it is asked.

use page::PAGE_BYTES;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, SeekFrom, fchmod, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate,
    memfd_create, open, seek,
};
use rustix::io::{Errno, pread};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::ffi::c_void;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr::{NonNull, null_mut};

/// What a segment is sealed with: nobody writes it but through the mapping that is there, and it keeps its size.
const SEGMENT_SEALS: SealFlags =
    SealFlags::FUTURE_WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);

/// Where a slot begins in its segment's file.
fn offset(slot: u32) -> u64 {
    u64::from(slot) * PAGE_BYTES as u64
}

fn new_memfd(name: &str, bytes: u64) -> rustix::io::Result<OwnedFd> {
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    fchmod(&file, Mode::RUSR | Mode::WUSR)?;
    ftruncate(&file, bytes)?;
    Ok(file)
}

/// A segment that this process made: the only one that writes it.
#[derive(Debug)]
pub struct PoolSegment {
    file: OwnedFd,
    map: NonNull<c_void>,
    slots: u32,
}

// SAFETY: the mapping belongs to the process, not to a thread; it is written through `&mut self` only.
unsafe impl Send for PoolSegment {}

impl PoolSegment {
    /// Makes a segment of so many slots, all of them empty: it takes no memory yet.
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
            // A kernel without huge pages knows no such advice, and needs none.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(e) => return Err(e.into()),
        }
        fcntl_add_seals(&segment.file, SEGMENT_SEALS)?;
        Ok(segment)
    }

    /// How many slots it has.
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// A file of it that can be read and mapped privately, and not written.
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

    /// Fills slots with what lies in the window from its page `page` on.
    ///
    /// # Errors
    /// Memory is short (`EFAULT`, `ENOMEM`); some of the slots may have been filled.
    pub fn fill(&mut self, slots: Range<u32>, window: &DonationWindow, page: usize) -> io::Result<()> {
        let bytes = self.bytes_of(&slots);
        // SAFETY: `bytes_of` keeps within the mapping, which is as long as the segment.
        let start = unsafe { self.map.as_ptr().cast::<u8>().add(bytes.start) };
        // SAFETY: mapped, writable, and initialized (a hole reads as zeros) for as long as `self` is borrowed; other
        // processes can only read it, and within this one nobody else has a reference while we hold `&mut self`.
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

    /// The bytes of a slot. Those of an empty one are zeros, and reading them takes a page of memory.
    pub fn slot(&self, slot: u32) -> &[u8] {
        let bytes = self.bytes_of(&(slot..slot + 1));
        // SAFETY: as in `fill`.
        let start = unsafe { self.map.as_ptr().cast::<u8>().add(bytes.start) };
        // SAFETY: mapped, readable and initialized for as long as `self` is borrowed; nobody writes it meanwhile, as that
        // takes `&mut self`, and no other process can.
        unsafe { std::slice::from_raw_parts(start, bytes.len()) }
    }
}

impl Drop for PoolSegment {
    fn drop(&mut self) {
        // SAFETY: exactly the range that mmap returned; references into it borrow `self` and have ended.
        let unmapped = unsafe { munmap(self.map.as_ptr(), self.slots as usize * PAGE_BYTES) };
        debug_assert!(unmapped.is_ok(), "unmapping a mapping of our own: {unmapped:?}");
    }
}

/// A segment that an earlier process made, which can be read and no longer be written by anybody.
#[derive(Debug)]
pub struct InheritedSegment {
    file: OwnedFd,
    slots: u32,
}

impl InheritedSegment {
    /// Takes over a segment's file.
    ///
    /// # Errors
    /// It is not sealed the way segments are, or has another size.
    pub fn take(file: OwnedFd, slots: u32) -> io::Result<Self> {
        let sealed = fcntl_get_seals(&file)?.contains(SEGMENT_SEALS);
        let bytes = u64::try_from(fstat(&file)?.st_size).unwrap_or(0);
        if sealed && bytes == offset(slots) { Ok(Self { file, slots }) } else { Err(Errno::INVAL.into()) }
    }

    /// How many slots it has.
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// A file of it that can only be read.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn read_only(&self) -> io::Result<OwnedFd> {
        Ok(rustix::io::fcntl_dupfd_cloexec(&self.file, 0)?)
    }

    /// The next slots from `from` on that hold something; `None` behind the last.
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

    /// Copies slots from `slot` on into `into`, as many as fit; an empty one stays empty.
    ///
    /// # Errors
    /// The kernel refused, or the segment ends before.
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

/// Where a member puts copies of its pages for its worker.
#[derive(Debug)]
pub struct DonationWindow(OwnedFd);

impl DonationWindow {
    /// A window of so many pages, whose size nobody can change.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn create(pages: usize) -> io::Result<Self> {
        let file = new_memfd("pagefold-donation", pages as u64 * PAGE_BYTES as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self(file))
    }
}

impl AsFd for DonationWindow {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A file that whoever maps slots of the pool maps too. It is empty and stays so: nobody can make the kernel wait for
/// pages of it.
#[derive(Debug)]
pub struct Lease(OwnedFd);

/// Whether somebody holds a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseState {
    /// Some process maps it.
    Held,
    /// No process does, and none ever will.
    Over,
    /// Somebody made it impossible to find out. No honest member does.
    Spoilt,
}

impl Lease {
    /// A lease that nobody holds yet.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn create() -> io::Result<Self> {
        let file = new_memfd("pagefold-lease", 0)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(Self(file))
    }

    /// Asks whether somebody holds it. When nobody does it ends: nobody can map it any more.
    ///
    /// # Errors
    /// The kernel refused for another reason than its being held.
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

/// A lease that is held by this process, and by the children that it forks meanwhile.
#[derive(Debug)]
pub struct HeldLease(NonNull<c_void>);

// SAFETY: the mapping belongs to the process, not to a thread, and no byte of it can be read or written.
unsafe impl Send for HeldLease {}

impl HeldLease {
    /// Holds the lease until this is dropped.
    ///
    /// # Errors
    /// It is over, or no address space is left.
    pub fn hold(lease: impl AsFd) -> io::Result<Self> {
        // SAFETY: the kernel chooses an address where nothing is mapped, so no memory of ours is replaced.
        let map = unsafe { mmap(null_mut(), PAGE_BYTES, ProtFlags::empty(), MapFlags::SHARED, lease, 0) }?;
        Ok(Self(NonNull::new(map).ok_or(Errno::NOMEM)?))
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        // SAFETY: exactly the range that mmap returned, to which no reference was ever made.
        let unmapped = unsafe { munmap(self.0.as_ptr(), PAGE_BYTES) };
        debug_assert!(unmapped.is_ok(), "unmapping a mapping of our own: {unmapped:?}");
    }
}

#[cfg(test)]
#[path = "pool_memory_tests.rs"]
mod tests;
