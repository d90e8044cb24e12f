//! The process at the other end of a socket, as the kernel has noted it when they were connected.

use rustix::fd::{AsFd, AsRawFd};
use std::io;

/// Credentials of the process at the other end, noted by the kernel when that process connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its pid.
    pub pid: u32,
    /// Its effective user.
    pub uid: u32,
}

impl Peer {
    /// The process that connected to a Unix socket; at the connecting side, the process that began to listen.
    ///
    /// # Errors
    /// The kernel refused, or the process is in a PID namespace that is not seen from here.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let ucred = credentials(socket)?;
        let pid = u32::try_from(ucred.pid).ok().filter(|pid| *pid != 0);
        let pid = pid.ok_or_else(|| io::Error::other("it is in a PID namespace that is not seen from here"))?;
        Ok(Self { pid, uid: ucred.uid })
    }

    /// The effective user of the process at the other end, in whichever PID namespace it is.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn user_of(socket: impl AsFd) -> io::Result<u32> {
        Ok(credentials(socket)?.uid)
    }
}

/// The credentials as the kernel returns them. The pid is 0 if the process is not visible in this PID namespace;
/// `rustix` has no value for that.
fn credentials(socket: impl AsFd) -> io::Result<libc::ucred> {
    let mut ucred = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes a `ucred` to `ucred`, whose size is in `length`; both are exclusively borrowed. Any
    // numbers are valid there.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut ucred).cast(),
            &raw mut length,
        )
    };
    if answer == 0 { Ok(ucred) } else { Err(io::Error::last_os_error()) }
}
