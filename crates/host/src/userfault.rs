//! userfaultfd, for a process that looks after its own memory: taking pages out of reach and putting them
//! back (`UFFDIO_MOVE`), keeping writers out, and noting which pages were written.
//!
//! A thread that touches a page out of reach, or writes a protected one, sleeps until it is woken by [`Userfault::wake`],
//! [`Userfault::unregister`] or the page itself, and then tries again.
//!
//! Following memory, the kernel also tells of what is done to it, whoever does it and by whatever system call
//! ([`Userfault::next_message`]): a discard before it happens, a move and a fork after it. The thread that did it waits until its
//! message was read, and as long as one is unread, all calls here that place, move or protect pages fail with `EAGAIN`.
//!
//! Errors are bare numbers, because these calls are made where nothing may be allocated.

use linux_raw_sys::general::{
    UFFD_API, UFFD_EVENT_FORK, UFFD_EVENT_PAGEFAULT, UFFD_EVENT_REMAP, UFFD_EVENT_REMOVE, UFFD_FEATURE_EVENT_FORK,
    UFFD_FEATURE_EVENT_REMAP, UFFD_FEATURE_EVENT_REMOVE, UFFD_FEATURE_MINOR_SHMEM, UFFD_FEATURE_MOVE,
    UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_WP_ASYNC, UFFD_FEATURE_WP_HUGETLBFS_SHMEM,
    UFFD_FEATURE_WP_UNPOPULATED, UFFD_PAGEFAULT_FLAG_MINOR, UFFD_PAGEFAULT_FLAG_WP, uffdio_api, uffdio_continue,
    uffdio_copy, uffdio_move, uffdio_range, uffdio_register, uffdio_writeprotect, uffdio_zeropage,
};
use page::{HostVirt, PAGE_SHIFT, PageRange, pages_to_bytes};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
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
const UFFDIO_COPY: libc::Ioctl = ioctl_number(3, size_of::<uffdio_copy>(), 0x03);
const UFFDIO_ZEROPAGE: libc::Ioctl = ioctl_number(3, size_of::<uffdio_zeropage>(), 0x04);
const UFFDIO_MOVE: libc::Ioctl = ioctl_number(3, size_of::<uffdio_move>(), 0x05);
const UFFDIO_WRITEPROTECT: libc::Ioctl = ioctl_number(3, size_of::<uffdio_writeprotect>(), 0x06);
const UFFDIO_CONTINUE: libc::Ioctl = ioctl_number(3, size_of::<uffdio_continue>(), 0x07);
const _: () = assert!(UFFDIO_COPY == 0xc028_aa03 && UFFDIO_ZEROPAGE == 0xc020_aa04 && UFFDIO_CONTINUE == 0xc020_aa07);
const _: () = assert!(UFFDIO_API == 0xc018_aa3f && UFFDIO_REGISTER == 0xc020_aa00);
const _: () = assert!(UFFDIO_UNREGISTER == 0x8010_aa01 && UFFDIO_WAKE == 0x8010_aa02);
const _: () = assert!(UFFDIO_MOVE == 0xc028_aa05 && UFFDIO_WRITEPROTECT == 0xc018_aa06);

const MODE_MISSING: u64 = 1 << 0;
const MODE_WP: u64 = 1 << 1;
const MODE_MINOR: u64 = 1 << 2;

/// What a userfaultfd is for. A mapping can be registered with one of them only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Noting writes without stopping the writer (`WP_ASYNC`).
    Note,
    /// Following memory: moving its pages, keeping writers out, being told of discards and moves.
    Follow,
    /// The same, and being told of forks: the child's memory is followed, too. Takes `CAP_SYS_PTRACE` ([`Userfault::begin`]).
    FollowForks,
}

impl Purpose {
    const fn features(self) -> u32 {
        match self {
            Self::Note => UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_WP_UNPOPULATED | UFFD_FEATURE_WP_ASYNC,
            Self::Follow => {
                UFFD_FEATURE_MOVE
                    | UFFD_FEATURE_PAGEFAULT_FLAG_WP
                    | UFFD_FEATURE_WP_HUGETLBFS_SHMEM
                    | UFFD_FEATURE_MINOR_SHMEM
                    | UFFD_FEATURE_EVENT_REMOVE
                    | UFFD_FEATURE_EVENT_REMAP
            }
            Self::FollowForks => Self::Follow.features() | UFFD_FEATURE_EVENT_FORK,
        }
    }
}

/// For what accesses to a range are looked after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// Touching an absent page.
    Missing,
    /// Touching an absent page, and writing a protected one.
    MissingAndWrites,
    /// Writing a protected page.
    Writes,
    /// Touching a page of a shared memory file that is absent from the page table, and writing a protected page.
    AbsentAndWrites,
}

/// What the kernel tells of followed memory.
#[derive(Debug)]
pub enum Message {
    /// A thread sleeps because it touched this page.
    Fault(HostVirt, Fault),
    /// These pages are about to be discarded.
    Discard(PageRange),
    /// Pages were moved from one place to another, as many as the range has.
    Moved(PageRange, HostVirt),
    /// The process forked, and this follows the child.
    Forked(Userfault),
    /// Something else, which needs no answer.
    Other,
}

/// Why a touch of a page makes a thread sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// There is no page.
    Missing,
    /// The page table has no entry for the file's page.
    Absent,
    /// It is protected against writing.
    Protected,
}

/// `struct uffd_msg`: the number of the event, and what belongs to it.
#[repr(C)]
#[derive(Default)]
struct RawMessage {
    event: u8,
    reserved: [u8; 7],
    words: [u64; 3],
}

const _: () = assert!(size_of::<RawMessage>() == size_of::<linux_raw_sys::general::uffd_msg>());

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
        let this = Self::open_idle()?;
        this.begin(purpose)?;
        Ok(this)
    }

    /// Opens one that does nothing yet.
    ///
    /// # Errors
    /// `EPERM`: this process may not.
    pub fn open_idle() -> io::Result<Self> {
        open().map(Self)
    }

    /// Begins to serve a purpose. It may be another process that does this, by right of which forks are told of: the address
    /// space that is looked after is the opener's.
    ///
    /// # Errors
    /// `EPERM`: the caller may not; `EINVAL`: the kernel lacks what the purpose needs, or it was begun before.
    pub fn begin(&self, purpose: Purpose) -> io::Result<()> {
        let mut api = uffdio_api { api: UFFD_API.into(), features: purpose.features().into(), ioctls: 0 };
        // SAFETY: `api` is the struct that this ioctl reads and writes, exclusively borrowed for the call.
        unsafe { self.ioctl(UFFDIO_API, &raw mut api) }.map_err(io::Error::from)
    }

    /// Takes a descriptor for a userfaultfd, if it is one.
    ///
    /// # Errors
    /// It is another file, or `/proc` is not there.
    pub fn from_fd(file: OwnedFd) -> io::Result<Self> {
        let link = std::fs::read_link(format!("/proc/thread-self/fd/{}", file.as_raw_fd()))?;
        let is_one = link.as_os_str() == "anon_inode:[userfaultfd]";
        is_one.then_some(Self(file)).ok_or_else(|| io::ErrorKind::InvalidInput.into())
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
            Watch::MissingAndWrites => MODE_MISSING | MODE_WP,
            Watch::Writes => MODE_WP,
            Watch::AbsentAndWrites => MODE_MINOR | MODE_WP,
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

    /// Reads the next message, if there is one. Whoever caused it goes on from here.
    ///
    /// # Errors
    /// No file descriptors are left for a child's (then the message is still there), or the kernel refused.
    pub fn next_message(&self) -> io::Result<Option<Message>> {
        let mut raw = RawMessage::default();
        let bytes = size_of::<RawMessage>();
        // SAFETY: the kernel writes one message of this size into memory that is exclusively borrowed.
        let read = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut raw).cast(), bytes) };
        match usize::try_from(read) {
            Ok(read) if read == bytes => Ok(Some(message(&raw))),
            Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(_) => match io::Error::last_os_error() {
                e if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(None),
                e => Err(e),
            },
        }
    }

    /// Maps the file's own pages where the page table has no entries, and wakes who sleeps on them. Says how many pages from the
    /// first on. The range is one mapping, or a part of one.
    ///
    /// # Errors
    /// `EEXIST`: the first page has an entry; `EAGAIN`: a message is unread; `ESRCH`: the address space is gone.
    pub fn map_present(&self, range: PageRange) -> Result<u64, Errno> {
        let mut argument = uffdio_continue { range: raw(range), mode: 0, mapped: 0 };
        // SAFETY: `argument` is the struct that this ioctl reads and writes, exclusively borrowed for the call; pages that
        // have an entry stay as they are.
        let result = unsafe { self.ioctl(UFFDIO_CONTINUE, &raw mut argument) };
        done(result, argument.mapped, range)
    }

    /// Maps zeros where the page table has no entries, and wakes who sleeps on them; otherwise as [`Userfault::map_present`].
    ///
    /// # Errors
    /// As there.
    pub fn map_zeros(&self, range: PageRange) -> Result<u64, Errno> {
        let mut argument = uffdio_zeropage { range: raw(range), mode: 0, zeropage: 0 };
        // SAFETY: as for `map_present`.
        let result = unsafe { self.ioctl(UFFDIO_ZEROPAGE, &raw mut argument) };
        done(result, argument.zeropage, range)
    }

    /// Copies pages of the calling process to where the page table has no entries. Says how many from the first on.
    ///
    /// # Errors
    /// As for [`Userfault::map_present`].
    pub fn copy_pages(&self, from: HostVirt, to: PageRange) -> Result<u64, Errno> {
        let mut argument =
            uffdio_copy { dst: to.start.0, src: from.0, len: pages_to_bytes(to.pages), mode: 0, copy: 0 };
        // SAFETY: as for `map_present`; the kernel reads `from`, and answers EFAULT where there is nothing to read.
        let result = unsafe { self.ioctl(UFFDIO_COPY, &raw mut argument) };
        done(result, argument.copy, to)
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Pages that were done, where a call stopped after some; an error where it did none.
fn done(result: Result<(), Errno>, bytes: i64, range: PageRange) -> Result<u64, Errno> {
    match (result, u64::try_from(bytes)) {
        (Ok(()), _) => Ok(range.pages),
        (Err(_), Ok(bytes)) if bytes > 0 => Ok((bytes >> PAGE_SHIFT).min(range.pages)),
        (Err(e), _) => Err(e),
    }
}

fn message(raw: &RawMessage) -> Message {
    let page = |address: u64| HostVirt(address >> PAGE_SHIFT << PAGE_SHIFT);
    let [one, two, three] = raw.words;
    match raw.event.into() {
        // Flags, then the address.
        UFFD_EVENT_PAGEFAULT if one & u64::from(UFFD_PAGEFAULT_FLAG_WP) != 0 => {
            Message::Fault(page(two), Fault::Protected)
        }
        UFFD_EVENT_PAGEFAULT if one & u64::from(UFFD_PAGEFAULT_FLAG_MINOR) != 0 => {
            Message::Fault(page(two), Fault::Absent)
        }
        UFFD_EVENT_PAGEFAULT => Message::Fault(page(two), Fault::Missing),
        // The descriptor's number, in the first four bytes.
        UFFD_EVENT_FORK => match owned(libc::c_long::from(one as u32 as i32)) {
            Ok(child) => Message::Forked(Userfault(child)),
            Err(_) => Message::Other,
        },
        // From, to, length.
        UFFD_EVENT_REMAP => Message::Moved(PageRange { start: page(one), pages: three >> PAGE_SHIFT }, page(two)),
        // Start, end.
        UFFD_EVENT_REMOVE => {
            Message::Discard(PageRange { start: page(one), pages: two.saturating_sub(one) >> PAGE_SHIFT })
        }
        _ => Message::Other,
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
