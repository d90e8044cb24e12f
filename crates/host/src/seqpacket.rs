//! Sockets that keep frames whole (`SOCK_SEQPACKET`) and carry file descriptors. No call on them blocks.
//!
//! # Files from strangers
//!
//! Closing a file that a stranger sent may wait for ever (`foreign_file.rs`). The kernel closes files too:
//!
//! - those of a frame, when the receiver leaves no room for them,
//! - those of unread frames, when the socket is closed.
//!
//! | | where no files are due ([`Files::Refused`]) | where some are due ([`Files::Taken`]) |
//! |---|---|---|
//! | Linux 6.16 or newer | the sender gets `EPERM` (`SO_PASSRIGHTS`) | room is left for all files of a frame |
//! | older | a frame is looked at before it is received, and stays where it is if it carries files | the same |
//! | closing the socket | by another thread, unless the kernel refuses files | by the caller |

use crate::foreign_file::ForeignFile;
use crate::{Error, Peer, Result};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, RecvMsg, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, getsockname,
    listen, recvmsg, sendmsg, socket_with, socketpair,
};
use std::ffi::OsStr;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Most file descriptors that are sent in one frame.
pub const MOST_FDS: usize = 64;

/// Most file descriptors that the kernel puts into one frame (`SCM_MAX_FD`). If a receiver left room for fewer, the
/// kernel would close the others while it receives a frame.
const KERNELS_MOST_FDS: usize = 253;

/// Socket option (Linux 6.16) that says whether files may be sent to a socket; it is not in every libc's headers. A
/// connection has it from the socket that listened.
const SO_PASSRIGHTS: libc::c_int = 83;

/// Most connections that the kernel queues before they are accepted (`listen`). All agents of a host may connect at the
/// same time.
const BACKLOG: i32 = 1024;

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

/// Whether the other end of a connection may send files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Files {
    /// The other end may not send files.
    Refused,
    /// The other end may send files.
    Taken,
}

/// One end of a connection.
#[derive(Debug)]
pub struct Seqpacket {
    socket: Closed,
    /// Whether the kernel refuses files sent to this end.
    refuses_files: bool,
}

/// A socket, and whether the thread that drops it closes it (`Here`) or another thread (`Elsewhere`).
#[derive(Debug)]
enum Closed {
    Here(OwnedFd),
    Elsewhere(ForeignFile),
}

impl Seqpacket {
    /// Connects to the process that listens at `path`.
    ///
    /// # Errors
    /// No process listens there, or the caller may not connect.
    pub fn connect(path: &Path) -> Result<Self> {
        let attempt = || {
            let socket = new_socket()?;
            connect(&socket, &SocketAddrUnix::new(path)?)?;
            Ok(Self::from(socket))
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
        Ok((one.into(), other.into()))
    }

    /// A connection to an untrusted peer, made by another process and handed on. If the peer may have sent files by it
    /// (`SCM_RIGHTS`), another thread closes it.
    pub fn from_stranger(socket: OwnedFd) -> Self {
        let refuses_files = passes_rights(&socket) == Some(false);
        let socket = if refuses_files { Closed::Here(socket) } else { Closed::Elsewhere(socket.into()) };
        Self { socket, refuses_files }
    }

    /// Lets the peer send files from here on. Closing the socket is then up to the caller, who may have to wait for it.
    pub fn take_files(self) -> Self {
        let socket = OwnedFd::from(self);
        // A kernel that does not know the option takes files anyway.
        let _ = set_passes_rights(&socket, true);
        Self::from(socket)
    }

    /// Sends a frame and copies of `fds`, whole or not at all. False if nothing was sent, because the peer has too many
    /// unread frames or the kernel is short of memory.
    ///
    /// # Errors
    /// The peer has closed the connection or refuses files (`PermissionDenied`), or `fds` has more than [`MOST_FDS`].
    pub fn send(&self, frame: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<bool> {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many file descriptors for one frame"));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            match sendmsg(self, &[IoSlice::new(frame)], &mut control, flags) {
                Ok(_) => return Ok(true),
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM | Errno::TOOMANYREFS) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Receives the next frame into the front of `buffer`, from a peer that may send no files.
    ///
    /// # Errors
    /// The connection broke, the frame is longer than the buffer, or it carries files.
    pub fn receive_bare(&self, buffer: &mut [u8]) -> io::Result<Received> {
        let mut nothing = RecvAncillaryBuffer::default();
        if !self.refuses_files {
            // `PEEK` takes no frame out of the socket, so the kernel closes no files.
            let look = recv(self, &mut [0], &mut nothing, RecvFlags::PEEK)?;
            if look.is_some_and(|look| look.flags.contains(ReturnFlags::CTRUNC)) {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "it sent files"));
            }
        }
        received(recv(self, buffer, &mut nothing, RecvFlags::empty())?)
    }

    /// Receives the next frame into the front of `buffer`, and replaces `fds` by the file descriptors that it carries.
    ///
    /// # Errors
    /// The connection broke, or the frame is longer than the buffer. Then its files are left in `fds`.
    pub fn receive(&self, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<Received> {
        fds.clear();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KERNELS_MOST_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = recv(self, buffer, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(sent) = message {
                fds.extend(sent);
            }
        }
        received(got)
    }

    /// Bytes of kernel memory taken by frames that were sent and that the peer has not read yet.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn unread_bytes(&self) -> io::Result<u32> {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the kernel writes one int to `bytes`, which is exclusively borrowed for the call.
        match unsafe { libc::ioctl(self.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) } {
            0 => Ok(bytes.cast_unsigned()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Credentials of the process that connected; at the connecting side, of the process that listened.
    ///
    /// # Errors
    /// As for [`Peer::of`].
    pub fn peer(&self) -> io::Result<Peer> {
        Peer::of(self)
    }
}

impl AsFd for Seqpacket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.socket {
            Closed::Here(socket) => socket.as_fd(),
            Closed::Elsewhere(socket) => socket.as_fd(),
        }
    }
}

impl From<Seqpacket> for OwnedFd {
    fn from(socket: Seqpacket) -> Self {
        match socket.socket {
            Closed::Here(socket) => socket,
            Closed::Elsewhere(socket) => socket.into_inner(),
        }
    }
}

impl From<OwnedFd> for Seqpacket {
    /// Takes over a socket that another process made as a `Seqpacket` and handed on.
    fn from(fd: OwnedFd) -> Self {
        Self { socket: Closed::Here(fd), refuses_files: false }
    }
}

/// A socket that accepts connections. Its path stays when it is dropped; the next listener there takes the path over.
#[derive(Debug)]
pub struct SeqpacketListener {
    socket: OwnedFd,
    path: PathBuf,
}

impl SeqpacketListener {
    /// Listens at `path`, in the place of a previous listener. `files` says whether peers may send files; it applies to
    /// each connection.
    ///
    /// # Errors
    /// The directory is missing, or the caller may not write to it.
    pub fn bind(path: &Path, files: Files) -> Result<Self> {
        let attempt = || {
            let socket = new_socket()?;
            if files == Files::Refused {
                // On a kernel that does not know the option, each connection is closed by another thread
                // ([`Closed::Elsewhere`]).
                let _ = set_passes_rights(&socket, false);
            }
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

    /// Accepts the next connection; `None` if none waits. Its other end is not trusted.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn accept(&self) -> Result<Option<Seqpacket>> {
        match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => Ok(Some(Seqpacket::from_stranger(socket))),
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(e) => Err(Error::file("accept a connection at", &self.path, e)),
        }
    }

    /// The path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path to which the socket was bound, from the kernel; `None` if it is not absolute.
    pub fn address(&self) -> Option<PathBuf> {
        let address = SocketAddrUnix::try_from(getsockname(&self.socket).ok()?).ok()?;
        let path = PathBuf::from(OsStr::from_bytes(address.path_bytes()?));
        path.is_absolute().then_some(path)
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

/// Receives without waiting; `None` if nothing is there.
fn recv(
    socket: &Seqpacket,
    buffer: &mut [u8],
    control: &mut RecvAncillaryBuffer<'_>,
    flags: RecvFlags,
) -> io::Result<Option<RecvMsg>> {
    loop {
        return match recvmsg(socket, &mut [IoSliceMut::new(buffer)], control, flags | RecvFlags::DONTWAIT) {
            Ok(got) => Ok(Some(got)),
            Err(Errno::AGAIN) => Ok(None),
            // `ECONNRESET` comes once, before the frames that the peer had sent: the peer has closed its end without
            // having read all.
            Err(Errno::CONNRESET | Errno::INTR) => continue,
            Err(e) => Err(e.into()),
        };
    }
}

fn received(got: Option<RecvMsg>) -> io::Result<Received> {
    let Some(got) = got else { return Ok(Received::Nothing) };
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a frame that is longer than any may be"));
    }
    // The end of the stream reads as a frame of no bytes. No process of Pagefold sends such a frame.
    Ok(if got.bytes == 0 { Received::Closed } else { Received::Frame(got.bytes) })
}

/// Whether files may be sent to a socket; `None` on a kernel that does not say.
fn passes_rights(socket: &OwnedFd) -> Option<bool> {
    let (mut passes, mut length): (libc::c_int, _) = (1, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the kernel writes one int to `passes`, whose size is in `length`; both are exclusively borrowed.
    let answer = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw mut passes).cast(), &raw mut length)
    };
    (answer == 0).then_some(passes != 0)
}

/// Says whether files may be sent to a socket.
///
/// # Errors
/// The kernel does not know the option.
fn set_passes_rights(socket: &OwnedFd, passes: bool) -> io::Result<()> {
    let (passes, length) = (libc::c_int::from(passes), size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the kernel reads one int from `passes`, whose size is `length`.
    let answer = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, (&raw const passes).cast(), length)
    };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
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
        // A child forked by another test holds that end too, until it executes its program.
        let deadline = Instant::now() + Duration::from_secs(10);
        while other.receive(&mut buffer, &mut fds).unwrap() != Received::Closed {
            assert!(Instant::now() < deadline, "the other end is closed, and this one did not hear of it");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(other.send(b"x", &[]).is_err());
    }

    /// The last answers of a peer that hung up were lost.
    #[test]
    fn frames_of_peer_that_closed_without_reading_all_are_received() {
        let (one, other) = Seqpacket::pair().unwrap();
        assert!(one.send(b"unread", &[]).unwrap() && other.send(b"answer", &[]).unwrap());
        drop(other);
        let mut buffer = [0; 8];
        assert_eq!(one.receive_bare(&mut buffer).unwrap(), Received::Frame(6));
        assert_eq!(one.receive_bare(&mut buffer).unwrap(), Received::Closed);
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
        let listener = SeqpacketListener::bind(&path, Files::Taken).unwrap();
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
        SeqpacketListener::bind(&path, Files::Taken).unwrap();
    }
}
