//! userfaultfd, for a process that handles faults in its own memory. It moves pages to other addresses and back
//! (`UFFDIO_MOVE`), keeps writers out by write protection, and notes which pages were written.
//!
//! A thread that touches a page that was moved away, or writes a protected one, sleeps. It is woken by
//! [`Userfault::wake`], by [`Userfault::unregister`] or by a call that maps the page, and then tries again.
//!
//! For *followed* memory, the kernel also sends messages ([`Userfault::next_message`]) about discards, moves and forks,
//! by any thread and system call.
//!
//! | event | message comes | the thread that caused it |
//! |---|---|---|
//! | discard | before it happens | waits until the message was read |
//! | move, fork | after it happened | waits until the message was read |
//!
//! As long as a message is unread, all calls here that place, move or protect pages fail with `EAGAIN`.
//!
//! Several processes may have the userfaultfd of a forked child open. One of them can *claim* it, and the others read
//! no messages from then on. A claim is a lock of the file (`F_OFD_SETLK`), which all of them see. It does not end when
//! one of several descriptors is closed, as a lock of a process does (`F_SETLK`).
//!
//! Errors are bare numbers (`Errno`), because callers must not allocate memory.

use crate::HUGE_PAGES;
use host::{UFFDIO_API, ioctl_number};
use linux_raw_sys::general::{
    UFFD_API, UFFD_EVENT_FORK, UFFD_EVENT_PAGEFAULT, UFFD_EVENT_REMAP, UFFD_EVENT_REMOVE, UFFD_FEATURE_EVENT_FORK,
    UFFD_FEATURE_EVENT_REMAP, UFFD_FEATURE_EVENT_REMOVE, UFFD_FEATURE_MINOR_SHMEM, UFFD_FEATURE_MOVE,
    UFFD_FEATURE_PAGEFAULT_FLAG_WP, UFFD_FEATURE_WP_ASYNC, UFFD_FEATURE_WP_HUGETLBFS_SHMEM,
    UFFD_FEATURE_WP_UNPOPULATED, UFFD_PAGEFAULT_FLAG_MINOR, UFFD_PAGEFAULT_FLAG_WP, uffdio_api, uffdio_continue,
    uffdio_copy, uffdio_move, uffdio_poison, uffdio_range, uffdio_register, uffdio_writeprotect, uffdio_zeropage,
};
use page::{HostVirt, PAGE_SHIFT, PageRange, pages_to_bytes};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

const UFFDIO_REGISTER: libc::Ioctl = ioctl_number(3, size_of::<uffdio_register>(), 0x00);
const UFFDIO_UNREGISTER: libc::Ioctl = ioctl_number(2, size_of::<uffdio_range>(), 0x01);
const UFFDIO_WAKE: libc::Ioctl = ioctl_number(2, size_of::<uffdio_range>(), 0x02);
const UFFDIO_COPY: libc::Ioctl = ioctl_number(3, size_of::<uffdio_copy>(), 0x03);
const UFFDIO_ZEROPAGE: libc::Ioctl = ioctl_number(3, size_of::<uffdio_zeropage>(), 0x04);
const UFFDIO_MOVE: libc::Ioctl = ioctl_number(3, size_of::<uffdio_move>(), 0x05);
const UFFDIO_WRITEPROTECT: libc::Ioctl = ioctl_number(3, size_of::<uffdio_writeprotect>(), 0x06);
const UFFDIO_CONTINUE: libc::Ioctl = ioctl_number(3, size_of::<uffdio_continue>(), 0x07);
const UFFDIO_POISON: libc::Ioctl = ioctl_number(3, size_of::<uffdio_poison>(), 0x08);
const _: () = assert!(UFFDIO_POISON as u32 == 0xc020_aa08);
const _: () = assert!(
    UFFDIO_COPY as u32 == 0xc028_aa03 && UFFDIO_ZEROPAGE as u32 == 0xc020_aa04 && UFFDIO_CONTINUE as u32 == 0xc020_aa07
);
const _: () = assert!(UFFDIO_REGISTER as u32 == 0xc020_aa00);
const _: () = assert!(UFFDIO_UNREGISTER as u32 == 0x8010_aa01 && UFFDIO_WAKE as u32 == 0x8010_aa02);
const _: () = assert!(UFFDIO_MOVE as u32 == 0xc028_aa05 && UFFDIO_WRITEPROTECT as u32 == 0xc018_aa06);

const MODE_MISSING: u64 = 1 << 0;
const MODE_WP: u64 = 1 << 1;
const MODE_MINOR: u64 = 1 << 2;

/// The use of a userfaultfd. A mapping can be registered with one userfaultfd only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Noting writes without stopping the writer (`WP_ASYNC`).
    Note,
    /// Following memory: moving its pages, keeping writers out, and getting messages of discards and moves.
    Follow,
    /// Following memory with messages of forks, so that the child's memory is followed, too. Takes `CAP_SYS_PTRACE`
    /// ([`Userfault::begin`]).
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

/// The accesses to a range that a userfaultfd handles.
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

/// A message of the kernel about followed memory.
#[derive(Debug)]
pub enum Message {
    /// A thread sleeps because it touched this page.
    Fault(HostVirt, Fault),
    /// These pages are about to be discarded.
    Discard(PageRange),
    /// These pages were moved to that address.
    Moved(PageRange, HostVirt),
    /// The process forked; this userfaultfd is the child's.
    Forked(Userfault),
    /// Another event, which needs no answer.
    Other,
}

/// Why a thread sleeps that has touched a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// There is no page.
    Missing,
    /// The page table has no entry for the page, which the file has.
    Absent,
    /// The page is write-protected.
    Protected,
}

/// `struct uffd_msg`: the number of the event in the first byte, and its arguments in three words.
pub type Record = [AtomicU64; 4];

const _: () = assert!(size_of::<Record>() == size_of::<linux_raw_sys::general::uffd_msg>());

/// Outcome of a move of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Number of pages moved, from the first on.
    pub pages: u64,
    /// The error that stopped the move at the next page; `None` if all pages were moved.
    pub stopped_by: Option<Errno>,
}

/// A userfaultfd: of this process, or of a child that this process follows.
#[derive(Debug)]
pub struct Userfault(OwnedFd);

/// Another descriptor of the file that a thread of this process has open under `number`, in a table of files of its
/// own.
///
/// # Errors
/// The thread or the file is gone, or the kernel is older than 6.9.
pub fn file_of_thread(thread: Pid, number: i32) -> io::Result<OwnedFd> {
    // `PIDFD_THREAD`, which rustix has no name for.
    let flags = PidfdFlags::from_bits_retain(libc::O_EXCL.cast_unsigned());
    Ok(pidfd_getfd(pidfd_open(thread, flags)?, number, PidfdGetfdFlags::empty())?)
}

impl Userfault {
    /// Opens a userfaultfd that also handles faults taken in the kernel (KVM, system calls).
    ///
    /// # Errors
    /// `EPERM`: this process may not; `EINVAL`: the kernel lacks a feature that the purpose needs.
    pub fn open(purpose: Purpose) -> io::Result<Self> {
        let this = Self::open_idle()?;
        this.begin(purpose)?;
        Ok(this)
    }

    /// Opens a userfaultfd that does nothing before [`Userfault::begin`].
    ///
    /// # Errors
    /// `EPERM`: this process may not.
    pub fn open_idle() -> io::Result<Self> {
        host::open_userfaultfd().map(Self)
    }

    /// Initialises the userfaultfd for a purpose (`UFFDIO_API`). A process other than the opener may call this: the
    /// right to have forks reported is then that process's. The userfaultfd still handles faults of the opener's
    /// address space.
    ///
    /// # Errors
    /// `EPERM`: the caller may not; `EINVAL`: the kernel lacks a feature that the purpose needs, or this was called
    /// before.
    pub fn begin(&self, purpose: Purpose) -> io::Result<()> {
        let mut api = uffdio_api { api: UFFD_API.into(), features: purpose.features().into(), ioctls: 0 };
        // SAFETY: `api` is the struct that this ioctl reads and writes, exclusively borrowed for the call.
        unsafe { self.ioctl(UFFDIO_API, &raw mut api) }.map_err(io::Error::from)
    }

    /// Takes over a descriptor if it is a userfaultfd.
    ///
    /// # Errors
    /// The descriptor is of another file, or `/proc` is not mounted.
    pub fn from_fd(file: OwnedFd) -> io::Result<Self> {
        let link = std::fs::read_link(format!("/proc/thread-self/fd/{}", file.as_raw_fd()))?;
        let is_one = link.as_os_str() == "anon_inode:[userfaultfd]";
        is_one.then_some(Self(file)).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Another descriptor of the userfaultfd that a thread of this process has open under `number`, in a table of
    /// files of its own.
    ///
    /// # Errors
    /// The thread or the file is gone, or the kernel is older than 6.9.
    pub fn of_thread(thread: Pid, number: i32) -> io::Result<Self> {
        file_of_thread(thread, number).map(Self)
    }

    /// Claims the userfaultfd.
    ///
    /// # Errors
    /// No descriptor is left, or the kernel is short of memory for the lock.
    pub fn claim(&self) -> io::Result<Claim> {
        let claim = Claim(self.0.try_clone()?);
        // The kernel opens userfaultfds for reading only, so only read locks can be set. Nothing but claims locks these
        // files.
        lock(self.0.as_fd(), libc::F_OFD_SETLK, libc::F_RDLCK)?;
        Ok(claim)
    }

    /// Whether a process has [claimed](Userfault::claim) the userfaultfd. If the kernel gives no answer, it counts as
    /// claimed.
    pub fn is_claimed(&self) -> bool {
        lock(self.0.as_fd(), libc::F_GETLK, libc::F_WRLCK).map_or(true, |found| found != libc::F_UNLCK)
    }

    /// Sets `O_NONBLOCK`, which another process with the same open file may have cleared. Without it, `poll` always
    /// reports that the file can be read.
    pub fn do_not_wait(&self) {
        let _ = rustix::fs::fcntl_setfl(&self.0, rustix::fs::OFlags::NONBLOCK);
    }

    /// Whether a process has [begun](Userfault::begin) the userfaultfd (`UFFDIO_API`).
    pub fn is_begun(&self) -> bool {
        let page = PageRange { start: HostVirt(1 << 16), pages: 1 };
        self.protect(page, false) != Err(Errno::INVAL)
    }

    /// The descriptor number of the userfaultfd in the calling thread's table of files.
    pub fn number(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// # Safety
    /// `argument` must be what the ioctl takes, valid for reads and writes.
    unsafe fn ioctl<T>(&self, number: libc::Ioctl, argument: *mut T) -> Result<(), Errno> {
        // libc's `ioctl` is not called: in a member, the preloaded agent replaces it, and its replacement is not meant
        // for these calls.
        // SAFETY: the caller promises that `argument` fits the ioctl.
        match unsafe { libc::syscall(libc::SYS_ioctl, self.0.as_raw_fd(), number, argument) } {
            0 => Ok(()),
            _ => Err(last_errno()),
        }
    }

    /// Begins to handle accesses to a range. Kinds of accesses that are handled there already stay so.
    ///
    /// # Errors
    /// A part of the range is memory that cannot be registered, or is registered with another userfaultfd (`EBUSY`).
    pub fn register(&self, range: PageRange, watch: Watch) -> Result<(), Errno> {
        let mode = match watch {
            Watch::Missing => MODE_MISSING,
            Watch::MissingAndWrites => MODE_MISSING | MODE_WP,
            Watch::Writes => MODE_WP,
            Watch::AbsentAndWrites => MODE_MINOR | MODE_WP,
        };
        let mut argument = uffdio_register { range: raw(range), mode, ioctls: 0 };
        // SAFETY: `argument` is the struct that this ioctl reads and writes, exclusively borrowed for the call.
        // The call changes the handling of faults in the range, not its content.
        unsafe { self.ioctl(UFFDIO_REGISTER, &raw mut argument) }
    }

    /// Ends the handling of a range, lifts its write protection and wakes the threads that sleep on it.
    ///
    /// # Errors
    /// A part of the range is memory that cannot be registered.
    pub fn unregister(&self, range: PageRange) -> Result<(), Errno> {
        let mut argument = raw(range);
        // SAFETY: `argument` is the struct that this ioctl reads, and outlives the call.
        let result = unsafe { self.ioctl(UFFDIO_UNREGISTER, &raw mut argument) };
        // The kernel wakes threads that wait for a missing page, and ends the handling after that. Without this call,
        // threads that touch the page in between, and threads that wait to write, would sleep for ever.
        let _ = self.wake(range);
        result
    }

    /// Wakes all threads that sleep on a range, even if other memory is mapped there by then.
    ///
    /// # Errors
    /// The range is not in user space.
    pub fn wake(&self, range: PageRange) -> Result<(), Errno> {
        let mut argument = raw(range);
        // SAFETY: `argument` is the struct that this ioctl reads, and outlives the call.
        unsafe { self.ioctl(UFFDIO_WAKE, &raw mut argument) }
    }

    /// Write-protects a registered range (`keep_out`), or lifts the protection and wakes the threads that wait to
    /// write.
    ///
    /// # Errors
    /// The range is not registered for write protection.
    pub fn protect(&self, range: PageRange, keep_out: bool) -> Result<(), Errno> {
        let mut argument = uffdio_writeprotect { range: raw(range), mode: u64::from(keep_out) };
        // SAFETY: `argument` is the struct that this ioctl reads, and outlives the call; the contents stay.
        unsafe { self.ioctl(UFFDIO_WRITEPROTECT, &raw mut argument) }
    }

    /// Moves pages without copying them. Each page moves atomically. If `from` is registered as [`Watch::Missing`], a
    /// thread that touches a page there after it was moved sleeps. The kernel stops at a page that is pinned for DMA,
    /// shared with a forked process, not private anonymous memory, or absent. Ranges as large as a huge page are
    /// refused (`EINVAL`).
    ///
    /// # Safety
    /// `from` loses its content. Until it was moved back or replaced, no code may rely on that content, except for
    /// threads that sleep because they touched it. `to` must be memory that no other code uses.
    pub unsafe fn move_pages(&self, from: PageRange, to: HostVirt) -> Moved {
        // The kernel splits a huge page of which only a part is moved. Some kernels have bugs in moving a whole one.
        if from.pages >= HUGE_PAGES {
            return Moved { pages: 0, stopped_by: Some(Errno::INVAL) };
        }
        let mut argument =
            uffdio_move { dst: to.0, src: from.start.0, len: pages_to_bytes(from.pages), mode: 0, move_: 0 };
        // SAFETY: `argument` is the struct that this ioctl reads and writes, exclusively borrowed for the call.
        // The caller promises that both ranges may change.
        let result = unsafe { self.ioctl(UFFDIO_MOVE, &raw mut argument) };
        // The kernel writes the number of moved bytes, or a negative number. Pages moved before it stopped stay moved.
        let pages = u64::try_from(argument.move_).unwrap_or(0) >> PAGE_SHIFT;
        match result {
            Ok(()) => Moved { pages: from.pages, stopped_by: None },
            Err(e) => Moved { pages: pages.min(from.pages), stopped_by: Some(e) },
        }
    }

    /// Reads the next message; `None` if there is none. After this, the thread that caused a discard, a move or a fork
    /// goes on.
    ///
    /// # Errors
    /// No file descriptor is left for a child's userfaultfd (the message is then still unread), or the kernel refused.
    pub fn next_message(&self) -> io::Result<Option<Message>> {
        self.next_message_into(&Record::default())
    }

    /// As [`Userfault::next_message`]. The kernel writes the message to `record`, even if this process is killed
    /// meanwhile.
    ///
    /// # Errors
    /// As [`Userfault::next_message`].
    pub fn next_message_into(&self, record: &Record) -> io::Result<Option<Message>> {
        let bytes = size_of::<Record>();
        // SAFETY: the kernel writes one message of this size. Atomic numbers may change while they are borrowed.
        let read = unsafe { libc::read(self.0.as_raw_fd(), std::ptr::from_ref(record).cast_mut().cast(), bytes) };
        match usize::try_from(read) {
            Ok(read) if read == bytes => Ok(Some(message(record))),
            Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(_) => match io::Error::last_os_error() {
                e if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(None),
                e => Err(e),
            },
        }
    }

    /// Maps the pages that the file has at addresses without page-table entries, and wakes the threads that sleep on
    /// them. The range must lie in one mapping. Returns the number of pages mapped, from the first on.
    ///
    /// # Errors
    /// `EEXIST`: the first page has an entry; `EAGAIN`: a message is unread; `ESRCH`: the address space is gone.
    pub fn map_present(&self, range: PageRange) -> Result<u64, Errno> {
        let mut argument = uffdio_continue { range: raw(range), mode: 0, mapped: 0 };
        // SAFETY: `argument` is the struct that this ioctl reads and writes, exclusively borrowed for the call. Pages
        // that have an entry stay as they are.
        let result = unsafe { self.ioctl(UFFDIO_CONTINUE, &raw mut argument) };
        done(result, argument.mapped, range)
    }

    /// Maps pages of zeros at addresses without page-table entries; otherwise as [`Userfault::map_present`].
    ///
    /// # Errors
    /// As for [`Userfault::map_present`].
    pub fn map_zeros(&self, range: PageRange) -> Result<u64, Errno> {
        let mut argument = uffdio_zeropage { range: raw(range), mode: 0, zeropage: 0 };
        // SAFETY: as for `map_present`.
        let result = unsafe { self.ioctl(UFFDIO_ZEROPAGE, &raw mut argument) };
        done(result, argument.zeropage, range)
    }

    /// Copies pages of the calling process to addresses without page-table entries. Returns the number of pages copied,
    /// from the first on.
    ///
    /// # Errors
    /// As for [`Userfault::map_present`].
    pub fn copy_pages(&self, from: HostVirt, to: PageRange) -> Result<u64, Errno> {
        let mut argument =
            uffdio_copy { dst: to.start.0, src: from.0, len: pages_to_bytes(to.pages), mode: 0, copy: 0 };
        // SAFETY: as for `map_present`. The kernel reads `from`, and answers EFAULT where there is nothing to read.
        let result = unsafe { self.ioctl(UFFDIO_COPY, &raw mut argument) };
        done(result, argument.copy, to)
    }

    /// Marks addresses without page-table entries as failed memory: threads that touch them get `SIGBUS`, and system
    /// calls `EFAULT`. Returns the number of pages marked, from the first on.
    ///
    /// # Errors
    /// As for [`Userfault::map_present`].
    pub fn poison(&self, range: PageRange) -> Result<u64, Errno> {
        let mut argument = uffdio_poison { range: raw(range), mode: 0, updated: 0 };
        // SAFETY: as for `map_present`.
        let result = unsafe { self.ioctl(UFFDIO_POISON, &raw mut argument) };
        done(result, argument.updated, range)
    }
}

/// A claim to a userfaultfd, which ends when this is dropped.
#[derive(Debug)]
pub struct Claim(OwnedFd);

impl Drop for Claim {
    fn drop(&mut self) {
        // Unlocking needs no memory, so the call does not fail.
        let _ = lock(self.0.as_fd(), libc::F_OFD_SETLK, libc::F_UNLCK);
    }
}

/// Sets a lock on a whole file, or asks which lock conflicts with it (`F_GETLK`). Returns the kind of lock that the
/// kernel answers with.
fn lock(file: BorrowedFd<'_>, command: libc::c_int, kind: libc::c_int) -> io::Result<libc::c_int> {
    // SAFETY: all bits zero are a lock of the whole file.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    // SAFETY: the kernel reads and writes a lock of this layout, which is exclusively borrowed for the call.
    let answer = unsafe { libc::syscall(libc::SYS_fcntl, file.as_raw_fd(), command, &raw mut lock) };
    if answer == 0 { Ok(lock.l_type.into()) } else { Err(io::Error::last_os_error()) }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Number of pages that a call has handled, even if it stopped before the end; the error if it has handled none.
fn done(result: Result<(), Errno>, bytes: i64, range: PageRange) -> Result<u64, Errno> {
    match (result, u64::try_from(bytes)) {
        (Ok(()), _) => Ok(range.pages),
        (Err(_), Ok(bytes)) if bytes > 0 => Ok((bytes >> PAGE_SHIFT).min(range.pages)),
        (Err(e), _) => Err(e),
    }
}

fn message(record: &Record) -> Message {
    let page = |address: u64| HostVirt(address >> PAGE_SHIFT << PAGE_SHIFT);
    let [event, one, two, three] = [0, 1, 2, 3].map(|word: usize| record[word].load(Ordering::Relaxed));
    match event as u32 & 0xff {
        // Flags, then the address.
        UFFD_EVENT_PAGEFAULT if one & u64::from(UFFD_PAGEFAULT_FLAG_WP) != 0 => {
            Message::Fault(page(two), Fault::Protected)
        }
        UFFD_EVENT_PAGEFAULT if one & u64::from(UFFD_PAGEFAULT_FLAG_MINOR) != 0 => {
            Message::Fault(page(two), Fault::Absent)
        }
        UFFD_EVENT_PAGEFAULT => Message::Fault(page(two), Fault::Missing),
        // The descriptor's number, in the first four bytes.
        UFFD_EVENT_FORK => match one as u32 as i32 {
            // SAFETY: the kernel has just given us this descriptor, and nobody else knows of it.
            fd @ 0.. => Message::Forked(Userfault(unsafe { OwnedFd::from_raw_fd(fd) })),
            _ => Message::Other,
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

#[cfg(test)]
#[path = "userfault_tests.rs"]
mod tests;
