//! Kinds of sockets.

use rustix::fd::{AsFd, AsRawFd};
use rustix::io::Errno;
use rustix::net::sockopt::socket_domain;

/// Most bytes of the name of a protocol's handler: the kernel's `TCP_ULP_NAME_MAX`.
const HANDLER_BYTES: usize = 16;

/// A socket's kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketKind {
    /// Its family.
    pub family: u16,
    /// Whether the kernel transforms what is received (`TCP_ULP`): decrypts it, for example.
    pub transformed: bool,
}

impl SocketKind {
    /// Asks the kernel about a descriptor.
    ///
    /// # Errors
    /// `ENOTSOCK`: it is no socket. Others are the kernel's.
    pub fn of(file: impl AsFd) -> Result<Self, Errno> {
        let family = i32::from(socket_domain(&file)?.as_raw());
        let is_inet = family == libc::AF_INET || family == libc::AF_INET6;
        let handler = if is_inet { tcp_handler(&file) } else { [0; HANDLER_BYTES] };
        // Multipath TCP is a `TCP_ULP` handler, too, and does not change what is received.
        let plain = handler.iter().all(|byte| *byte == 0) || handler.starts_with(b"mptcp");
        Ok(Self { family: family as u16, transformed: !plain })
    }
}

/// The name of a TCP socket's `TCP_ULP` handler; zeros if it has none.
fn tcp_handler(file: &impl AsFd) -> [u8; HANDLER_BYTES] {
    let mut name = [0_u8; HANDLER_BYTES];
    let mut length = HANDLER_BYTES as libc::socklen_t;
    let (number, place) = (file.as_fd().as_raw_fd(), name.as_mut_ptr().cast());
    // SAFETY: the kernel writes at most `length` bytes to `name`.
    let answer = unsafe { libc::getsockopt(number, libc::IPPROTO_TCP, libc::TCP_ULP, place, &raw mut length) };
    if answer == 0 { name } else { [0; HANDLER_BYTES] }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::net::{TcpListener, UdpSocket};
    use std::os::unix::net::UnixStream;

    #[test]
    fn sockets_are_told_by_family_and_other_files_are_none() {
        let of = |family: i32| Ok(SocketKind { family: family as u16, transformed: false });
        assert_eq!(SocketKind::of(UnixStream::pair().unwrap().0), of(libc::AF_UNIX));
        assert_eq!(SocketKind::of(TcpListener::bind("127.0.0.1:0").unwrap()), of(libc::AF_INET));
        assert_eq!(SocketKind::of(UdpSocket::bind("127.0.0.1:0").unwrap()), of(libc::AF_INET));
        assert_eq!(SocketKind::of(File::open("/dev/null").unwrap()), Err(Errno::NOTSOCK));
    }
}
