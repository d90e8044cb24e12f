//! Handing connections on: of an agent that cannot reach the service's sockets, because it is in another mount namespace.
//!
//! ```text
//!   agent: makes both ends --> pagefold-attach --hand.sock--> supervisor: the peer is the agent's process, says the kernel
//! ```
//!
//! A process speaks for itself alone: the kernel notes at both ends which process made them. And only root, or the user
//! whose process that is, can hand such an end on.

use crate::place::Place;
use host::{PeerProcess, Received, Seqpacket};
use rustix::fd::BorrowedFd;
use rustix::net::{AddressFamily, SocketType, sockopt};
use std::io;
pub use wire::attach::Server;

/// Hands a connection on to a service.
///
/// # Errors
/// No service is there, or it has no room.
pub fn hand_on(place: &Place, server: Server, socket: BorrowedFd<'_>) -> io::Result<()> {
    let service = Seqpacket::connect(&place.hand_socket()).map_err(io::Error::other)?;
    if service.send(&server.frame(), &[socket])? { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
}

/// Takes a connection that somebody hands on; `None` if there is none yet.
///
/// # Errors
/// It is none, or not theirs to hand on.
pub fn take(from: &Seqpacket) -> io::Result<Option<(Server, Seqpacket)>> {
    let (mut frame, mut files) = ([0; 8], Vec::new());
    let received = from.receive(&mut frame, &mut files);
    // All that came is closed by another thread.
    let mut sockets: Vec<Seqpacket> = files.into_iter().map(Seqpacket::from_stranger).collect();
    let bytes = match received? {
        Received::Nothing => return Ok(None),
        Received::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
        Received::Frame(bytes) => bytes,
    };
    let (Some(server), Some(socket), true) = (Server::of(&frame[..bytes]), sockets.pop(), sockets.is_empty()) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let is_ours = sockopt::socket_domain(&socket)? == AddressFamily::UNIX
        && sockopt::socket_type(&socket)? == SocketType::SEQPACKET;
    let (sender, peer) = (from.peer()?, PeerProcess::of(&socket)?);
    if !is_ours || (sender.uid != 0 && sender.uid != peer.uid) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(Some((server, socket)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::{Files, SeqpacketListener};
    use rustix::fd::{AsFd, OwnedFd};

    #[test]
    fn only_connections_of_processes_are_taken() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::at(dir.path());
        let listener = SeqpacketListener::bind(&place.hand_socket(), Files::Taken).unwrap();
        let taken = |file: OwnedFd| {
            hand_on(&place, Server::Prover, file.as_fd()).unwrap();
            take(&listener.accept().unwrap().expect("a connection"))
        };
        let (one, other) = Seqpacket::pair().unwrap();
        let (server, socket) = taken(other.into()).unwrap().expect("a frame");
        assert_eq!((server, socket.peer().unwrap().pid), (Server::Prover, std::process::id()));
        assert!(socket.send(b"x", &[]).unwrap());
        assert_eq!(one.receive_bare(&mut [0; 8]).unwrap(), Received::Frame(1));
        assert!(taken(tempfile::tempfile().unwrap().into()).is_err());
        let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(taken(stream.into()).is_err());
        let silent = Seqpacket::connect(&place.hand_socket()).unwrap();
        let accepted = listener.accept().unwrap().expect("a connection");
        assert!(take(&accepted).unwrap().is_none());
        silent.send(b"aa", &[]).unwrap();
        assert!(take(&accepted).is_err());
    }
}
