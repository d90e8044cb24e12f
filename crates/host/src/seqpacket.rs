//! Sockets that keep frames whole (`SOCK_SEQPACKET`) and carry file descriptors. No call on them blocks.

use crate::{Error, Result};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    recvmsg, sendmsg, socket_with, socketpair, sockopt,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::path::{Path, PathBuf};

/// Most file descriptors in one frame. The kernel's own bound is 253.
pub const MOST_FDS: usize = 64;

/// Most connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// Credentials of the process at the other end, noted by the kernel when that process connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its pid.
    pub pid: u32,
    /// Its effective user.
    pub uid: u32,
}

/// Outcome of an attempt to receive a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// A frame, with its length in bytes.
    Frame(usize),
    /// No frame is there at the moment.
    Nothing,
    /// The connection is closed: no more frames will come.
    Closed,
}

/// One end of a connection.
#[derive(Debug)]
pub struct Seqpacket(OwnedFd);

impl Seqpacket {
    /// Connects to the process that listens at `path`.
    ///
    /// # Errors
    /// No process listens there, or the caller may not connect.
    pub fn connect(path: &Path) -> Result<Self> {
        let attempt = || {
            let socket = new_socket()?;
            connect(&socket, &SocketAddrUnix::new(path)?)?;
            Ok(Self(socket))
        };
        attempt().map_err(|e: Errno| Error::file("connect to", path, e))
    }

    /// The two ends of a new connection.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn pair() -> io::Result<(Self, Self)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (one, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Self(one), Self(other)))
    }

    /// Sends a frame and copies of `fds`, whole or not at all. False if nothing was sent because the peer has too many
    /// unread frames.
    ///
    /// # Errors
    /// The peer has closed the connection, or `fds` has more than [`MOST_FDS`].
    pub fn send(&self, frame: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<bool> {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many file descriptors for one frame"));
        }
        loop {
            match sendmsg(&self.0, &[IoSlice::new(frame)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(_) => return Ok(true),
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Receives the next frame into the front of `buffer`, and replaces `fds` by the file descriptors that it carries.
    ///
    /// # Errors
    /// The connection broke, the frame is longer than the buffer, or it carries more than [`MOST_FDS`] descriptors.
    pub fn receive(&self, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<Received> {
        fds.clear();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let got = loop {
            match recvmsg(&self.0, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
                Ok(got) => break got,
                Err(Errno::AGAIN) => return Ok(Received::Nothing),
                Err(Errno::CONNRESET) => return Ok(Received::Closed),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(sent) = message {
                fds.extend(sent);
            }
        }
        if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            fds.clear();
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a frame that is longer than any may be"));
        }
        // The end of the stream reads as a frame of no bytes. No process of Pagefold sends such a frame.
        Ok(if got.bytes == 0 { Received::Closed } else { Received::Frame(got.bytes) })
    }

    /// Bytes of kernel memory taken by frames that were sent and that the peer has not read yet.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn unread_bytes(&self) -> io::Result<u32> {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the kernel writes one int to `bytes`, which is exclusively borrowed for the call.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) } {
            0 => Ok(bytes.cast_unsigned()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Credentials of the process that connected; at the connecting side, of the process that listened.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn peer(&self) -> io::Result<Peer> {
        let ucred = sockopt::socket_peercred(&self.0)?;
        Ok(Peer { pid: ucred.pid.as_raw_nonzero().get().cast_unsigned(), uid: ucred.uid.as_raw() })
    }
}

impl AsFd for Seqpacket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Seqpacket> for OwnedFd {
    fn from(socket: Seqpacket) -> Self {
        socket.0
    }
}

impl From<OwnedFd> for Seqpacket {
    /// Takes over a socket that another process made as a `Seqpacket` and handed on.
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

/// A socket that accepts connections. Its path stays when it is dropped; the next listener there takes the path over.
#[derive(Debug)]
pub struct SeqpacketListener {
    socket: OwnedFd,
    path: PathBuf,
}

impl SeqpacketListener {
    /// Listens at `path`, in the place of a previous listener.
    ///
    /// # Errors
    /// The directory is missing, or the caller may not write to it.
    pub fn bind(path: &Path) -> Result<Self> {
        let attempt = || {
            let socket = new_socket()?;
            match rustix::fs::unlink(path) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(e) => return Err(e),
            }
            bind(&socket, &SocketAddrUnix::new(path)?)?;
            listen(&socket, BACKLOG)?;
            Ok(Self { socket, path: path.to_owned() })
        };
        attempt().map_err(|e: Errno| Error::file("listen at", path, e))
    }

    /// The next connection, if one waits.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn accept(&self) -> Result<Option<Seqpacket>> {
        match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => Ok(Some(Seqpacket(socket))),
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(e) => Err(Error::file("accept a connection at", &self.path, e)),
        }
    }

    /// The path that it listens at.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes over a listening socket that was handed on.
    pub fn from_fd(socket: OwnedFd, path: PathBuf) -> Self {
        Self { socket, path }
    }
}

impl AsFd for SeqpacketListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn new_socket() -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn frames_stay_whole_and_carry_files() {
        let (one, other) = Seqpacket::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        assert!(one.send(b"first", &[file.as_fd(), file.as_fd()]).unwrap());
        assert!(one.send(b"second", &[]).unwrap());
        assert_ne!(one.unread_bytes().unwrap(), 0);
        let (mut buffer, mut fds) = ([0; 8], Vec::new());
        assert_eq!(other.receive(&mut buffer, &mut fds).unwrap(), Received::Frame(5));
        assert_eq!((&buffer[..5], fds.len()), (&b"first"[..], 2));
        assert_eq!(other.receive(&mut buffer, &mut fds).unwrap(), Received::Frame(6));
        assert_eq!(fds.len(), 0);
        assert_eq!(one.unread_bytes().unwrap(), 0);
        assert_eq!(other.receive(&mut buffer, &mut fds).unwrap(), Received::Nothing);
        one.send(b"longer than eight", &[]).unwrap();
        assert_eq!(other.receive(&mut buffer, &mut fds).unwrap_err().kind(), io::ErrorKind::InvalidData);
        drop(one);
        assert_eq!(other.receive(&mut buffer, &mut fds).unwrap(), Received::Closed);
        assert!(other.send(b"x", &[]).is_err());
    }

    #[test]
    fn sending_to_peer_that_never_reads_does_not_block() {
        let (one, _other) = Seqpacket::pair().unwrap();
        let frame = [7; 60 << 10];
        let sent = (0..1000).take_while(|_| one.send(&frame, &[]).unwrap()).count();
        assert!((1..1000).contains(&sent), "{sent} frames were taken");
    }

    #[test]
    fn peer_credentials_come_from_kernel() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = SeqpacketListener::bind(&path).unwrap();
        assert!(listener.accept().unwrap().is_none());
        let _ours = Seqpacket::connect(&path).unwrap();
        let theirs = listener.accept().unwrap().unwrap();
        assert_eq!(theirs.peer().unwrap().pid, std::process::id());
        drop(listener);
        // A child forked by another test holds the listener too, until it executes its program.
        let deadline = Instant::now() + Duration::from_secs(10);
        let e = loop {
            match Seqpacket::connect(&path) {
                Err(e) => break e,
                Ok(_) => assert!(Instant::now() < deadline, "nobody listens, and the connection was taken"),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        assert!(e.to_string().contains("connect to"), "{e}");
        SeqpacketListener::bind(&path).unwrap();
    }
}
