//! userfaultfd, for a process that looks after its own memory: taking pages out of reach and putting them
//! back (`UFFDIO_MOVE`), keeping writers out, and noting which pages were written.
//!
//! Nobody ever reads a message from these descriptors. Whoever touches a page that is out of reach sleeps until
//! it is woken by [`Userfault::wake`] or [`Userfault::unregister`], and then tries again; so every use here is a
//! short section that ends with one of the two.
//!
//! Errors are bare numbers, because these calls are made where nothing may be allocated.

use linux_raw_sys::general::{
    UFFD_API, UFFD_FEATURE_MOVE, UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_WP_ASYNC,
    UFFD_FEATURE_WP_HUGETLBFS_SHMEM, UFFD_FEATURE_WP_UNPOPULATED, uffdio_api, uffdio_move, uffdio_range,
    uffdio_register, uffdio_writeprotect,
};
use page::{HostVirt, PAGE_SHIFT, PageRange, pages_to_bytes};
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::fs::OpenOptions;
use std::io;

const fn ioctl_number(direction: u32, argument_bytes: usize, number: u32) -> libc::Ioctl {
    (direction << 30 | (argument_bytes as u32) << 16 | 0xaa << 8 | number) as libc::Ioctl
}

/// `_IO(0xAA, 0x00)`, on `/dev/userfaultfd`
const USERFAULTFD_IOC_NEW: libc::Ioctl = ioctl_number(0, 0, 0);
const UFFDIO_API: libc::Ioctl = ioctl_number(3, size_of::<uffdio_api>(), 0x3f);
const UFFDIO_REGISTER: libc::Ioctl = ioctl_number(3, size_of::<uffdio_register>(), 0x00);
const UFFDIO_UNREGISTER: libc::Ioctl = ioctl_number(2, size_of::<uffdio_range>(), 0x01);
const UFFDIO_WAKE: libc::Ioctl = ioctl_number(2, size_of::<uffdio_range>(), 0x02);
const UFFDIO_MOVE: libc::Ioctl = ioctl_number(3, size_of::<uffdio_move>(), 0x05);
const UFFDIO_WRITEPROTECT: libc::Ioctl = ioctl_number(3, size_of::<uffdio_writeprotect>(), 0x06);
const _: () = assert!(UFFDIO_API == 0xc018_aa3f && UFFDIO_REGISTER == 0xc020_aa00);
const _: () = assert!(UFFDIO_UNREGISTER == 0x8010_aa01 && UFFDIO_WAKE == 0x8010_aa02);
const _: () = assert!(UFFDIO_MOVE == 0xc028_aa05 && UFFDIO_WRITEPROTECT == 0xc018_aa06);

const MODE_MISSING: u64 = 1 << 0;
const MODE_WP: u64 = 1 << 1;

/// What a userfaultfd is for. A mapping can be registered with one of them only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Moving pages, and noting writes without stopping the writer (`WP_ASYNC`).
    MoveAndNote,
    /// Moving pages, on a kernel that cannot note writes.
    MoveOnly,
    /// Keeping writers out for the length of a section.
    KeepOut,
}

impl Purpose {
    const fn features(self) -> u32 {
        const NOTE: u32 = UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_UNPOPULATED;
        match self {
            Self::MoveAndNote => UFFD_FEATURE_MOVE | NOTE | UFFD_FEATURE_WP_ASYNC,
            Self::MoveOnly => UFFD_FEATURE_MOVE,
            Self::KeepOut => UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_HUGETLBFS_SHMEM,
        }
    }
}

/// For what accesses to a range are looked after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// Touching an absent page.
    Missing,
    /// Writing a protected page.
    Writes,
    /// Both.
    MissingAndWrites,
}

/// How far a move came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Pages that were moved, from the first on.
    pub pages: u64,
    /// Why the next one was not.
    pub stopped_by: Option<Errno>,
}

/// A userfaultfd of this process.
#[derive(Debug)]
pub struct Userfault(OwnedFd);

impl Userfault {
    /// Opens one that also sees faults of the kernel (KVM, system calls).
    ///
    /// # Errors
    /// `EPERM`: this process may not; `EINVAL`: the kernel lacks what the purpose needs.
    pub fn open(purpose: Purpose) -> io::Result<Self> {
        let this = Self(open()?);
        let mut api = uffdio_api { api: UFFD_API.into(), features: purpose.features().into(), ioctls: 0 };
        // SAFETY: `api` is the struct that this ioctl reads and writes, exclusively borrowed for the call.
        unsafe { this.ioctl(UFFDIO_API, &raw mut api) }?;
        Ok(this)
    }

    /// Another thread of this process has one open under that number, in a table of files of its own: the same one.
    ///
    /// # Errors
    /// The thread or the file is gone, or the kernel is older than 6.9.
    pub fn of_thread(thread: Pid, number: i32) -> io::Result<Self> {
        // `PIDFD_THREAD`, which rustix has no name for.
        let flags = PidfdFlags::from_bits_retain(libc::O_EXCL.cast_unsigned());
        let thread = pidfd_open(thread, flags)?;
        Ok(Self(pidfd_getfd(thread, number, PidfdGetfdFlags::empty())?))
    }

    /// The number under which the calling thread has it open.
    pub fn number(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// # Safety
    /// `argument` must be what the ioctl takes, valid for reads and writes.
    unsafe fn ioctl<T>(&self, number: libc::Ioctl, argument: *mut T) -> Result<(), Errno> {
        // Not by way of libc's function: who preloads us puts another one in front of it, which these calls are not for.
        // SAFETY: by the caller.
        match unsafe { libc::syscall(libc::SYS_ioctl, self.0.as_raw_fd(), number, argument) } {
            0 => Ok(()),
            _ => Err(last_errno()),
        }
    }

    /// Begins to look after a range; what it is looked after for already stays.
    ///
    /// # Errors
    /// The range is not all memory of a kind that can be, or is registered with another userfaultfd (`EBUSY`).
    pub fn register(&self, range: PageRange, watch: Watch) -> Result<(), Errno> {
        let mode = match watch {
            Watch::Missing => MODE_MISSING,
            Watch::Writes => MODE_WP,
            Watch::MissingAndWrites => MODE_MISSING | MODE_WP,
        };
        let mut argument = uffdio_register { range: raw(range), mode, ioctls: 0 };
        // SAFETY: `argument` is the struct that this ioctl reads and writes, exclusively borrowed for the call.
        // What the call changes is who serves faults in the range, not what the range holds.
        unsafe { self.ioctl(UFFDIO_REGISTER, &raw mut argument) }
    }

    /// Ends all looking after a range, lifts its protection and wakes who sleeps on it.
    ///
    /// # Errors
    /// The range is not all memory of a kind that can be registered.
    pub fn unregister(&self, range: PageRange) -> Result<(), Errno> {
        let mut argument = raw(range);
        // SAFETY: `argument` is the struct that this ioctl reads, and outlives the call.
        unsafe { self.ioctl(UFFDIO_UNREGISTER, &raw mut argument) }
    }

    /// Wakes everybody who sleeps on a range, whatever is mapped there by now.
    ///
    /// # Errors
    /// The range is not one of user space.
    pub fn wake(&self, range: PageRange) -> Result<(), Errno> {
        let mut argument = raw(range);
        // SAFETY: `argument` is the struct that this ioctl reads, and outlives the call.
        unsafe { self.ioctl(UFFDIO_WAKE, &raw mut argument) }
    }

    /// Keeps writers out of a registered range, or lets them in again and wakes them.
    ///
    /// # Errors
    /// The range is not registered for that.
    pub fn protect(&self, range: PageRange, keep_out: bool) -> Result<(), Errno> {
        let mut argument = uffdio_writeprotect { range: raw(range), mode: u64::from(keep_out) };
        // SAFETY: `argument` is the struct that this ioctl reads, and outlives the call; the contents stay.
        unsafe { self.ioctl(UFFDIO_WRITEPROTECT, &raw mut argument) }
    }

    /// Moves pages from one place to another, atomically page by page and without copying; what touches the
    /// place they left sleeps, if that is registered as [`Watch::Missing`]. The kernel stops at a page that is
    /// pinned for DMA, shared with a forked process, not private anonymous memory, or absent.
    ///
    /// # Safety
    /// `from` ceases to hold what it held: nobody may rely on it until it was moved back or replaced, except who
    /// touches it through the fault that sleeps. `to` must be memory that nobody else uses.
    pub unsafe fn move_pages(&self, from: PageRange, to: HostVirt) -> Moved {
        let mut argument =
            uffdio_move { dst: to.0, src: from.start.0, len: pages_to_bytes(from.pages), mode: 0, move_: 0 };
        // SAFETY: `argument` is the struct that this ioctl reads and writes, exclusively borrowed for the call;
        // what becomes of the two ranges is the caller's promise.
        let result = unsafe { self.ioctl(UFFDIO_MOVE, &raw mut argument) };
        // The kernel writes the moved bytes, or a negative number; what it did before it stopped counts as done.
        let pages = u64::try_from(argument.move_).unwrap_or(0) >> PAGE_SHIFT;
        match result {
            Ok(()) => Moved { pages: from.pages, stopped_by: None },
            Err(e) => Moved { pages: pages.min(from.pages), stopped_by: Some(e) },
        }
    }
}

const fn raw(range: PageRange) -> uffdio_range {
    uffdio_range { start: range.start.0, len: pages_to_bytes(range.pages) }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// By the system call or else by the device.
fn open() -> io::Result<OwnedFd> {
    // SAFETY: the system call takes flags only and gives back a new descriptor or an error.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    match owned(fd) {
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => open_by_device().map_err(|_| e),
        other => other,
    }
}

fn open_by_device() -> io::Result<OwnedFd> {
    let device = OpenOptions::new().read(true).write(true).open("/dev/userfaultfd")?;
    // SAFETY: this ioctl takes flags as its argument, no pointer, and gives back a new descriptor or an error.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    owned(fd.into())
}

fn owned(fd: libc::c_long) -> io::Result<OwnedFd> {
    match i32::try_from(fd) {
        // SAFETY: the kernel has just given us this descriptor, and nobody else knows of it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Asked for no feature in particular, the kernel answers with all that it has.
pub(crate) fn kernel_features() -> io::Result<u64> {
    let this = Userfault(open()?);
    let mut api = uffdio_api { api: UFFD_API.into(), features: 0, ioctls: 0 };
    // SAFETY: `api` is the struct that this ioctl reads and writes, exclusively borrowed for the call.
    unsafe { this.ioctl(UFFDIO_API, &raw mut api) }?;
    Ok(api.features)
}
