//! userfaultfd: opening one, and asking for its features. The crate `act` uses it.

use linux_raw_sys::general::{UFFD_API, uffdio_api};
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::fs::OpenOptions;
use std::io;
use std::sync::OnceLock;

/// Number of an ioctl of userfaultfd, as the kernel composes it.
pub const fn ioctl_number(direction: u32, argument_bytes: usize, number: u32) -> libc::Ioctl {
    (direction << 30 | (argument_bytes as u32) << 16 | 0xaa << 8 | number) as libc::Ioctl
}

/// `_IO(0xAA, 0x00)`, an ioctl of `/dev/userfaultfd`.
const USERFAULTFD_IOC_NEW: libc::Ioctl = ioctl_number(0, 0, 0);
/// Number of the ioctl that agrees on version and features of a userfaultfd.
pub const UFFDIO_API: libc::Ioctl = ioctl_number(3, size_of::<uffdio_api>(), 0x3f);
const _: () = assert!(UFFDIO_API as u32 == 0xc018_aa3f);

/// An open `/dev/userfaultfd` that another process has given to this one.
static LENT: OnceLock<OwnedFd> = OnceLock::new();

/// Opens a userfaultfd: through the device that was lent ([`lend_userfaultfd_device`]) if there is one, else by the
/// system call. If this is not permitted, through `/dev/userfaultfd`.
///
/// # Errors
/// The kernel has no userfaultfd, or the caller may not use it.
pub fn open_userfaultfd() -> io::Result<OwnedFd> {
    if let Some(device) = LENT.get() {
        return by_device(device);
    }
    // SAFETY: the system call takes flags only and returns a new descriptor or an error.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    match owned(fd) {
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => {
            open_userfaultfd_device().and_then(|device| by_device(&device)).map_err(|_| e)
        }
        other => other,
    }
}

/// Opens `/dev/userfaultfd`, through which userfaultfds can be made.
///
/// # Errors
/// There is none, or the caller may not use it.
pub fn open_userfaultfd_device() -> io::Result<OwnedFd> {
    OpenOptions::new().read(true).write(true).open("/dev/userfaultfd").map(OwnedFd::from)
}

/// Makes [`open_userfaultfd`] use this device, because a filter of system calls may end this process for the system
/// call `userfaultfd`.
pub fn lend_userfaultfd_device(device: OwnedFd) {
    let _ = LENT.set(device);
}

fn by_device(device: &OwnedFd) -> io::Result<OwnedFd> {
    // SAFETY: this ioctl takes flags as its argument, no pointer, and returns a new descriptor or an error.
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

/// Features of this kernel's userfaultfd. Asked for no feature in particular, the kernel answers with all that it has.
///
/// # Errors
/// As for [`open_userfaultfd`].
pub fn userfaultfd_features() -> io::Result<u64> {
    let fd = open_userfaultfd()?;
    let mut api = uffdio_api { api: UFFD_API.into(), features: 0, ioctls: 0 };
    // SAFETY: `api` is the struct that this ioctl reads and writes, exclusively borrowed for the call.
    match unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, &raw mut api) } {
        0.. => Ok(api.features),
        _ => Err(io::Error::last_os_error()),
    }
}
