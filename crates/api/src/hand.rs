//! Handing connections on to a service, for an agent that cannot reach the service's sockets because it is in another
//! mount namespace.
//!
//! ```text
//!   agent: makes both ends --> pagefold-attach --hand.sock--> supervisor: the peer is the agent's process, says the kernel
//! ```
//!
//! Nobody can make a connection in another process's name: the kernel notes at both ends which process made them. And
//! the service accepts an end only from root, or from the user of the process that made it.
//!
//! The agent's object, which is the file with the agent's program that is mapped into processes, is handed on, too. The
//! service keeps this sealed memory file for the next `pagefold-attach`, so that all processes map one file. Anybody
//! may ask for the file, and compares its bytes with its own copy of the object. Only root may hand one over to be
//! kept.
//!
//! Questions about templates come here, too, because files go with them ([`crate::template`]).
//!
//! ```text
//!   pagefold-attach: which object is kept? --> supervisor --> that file, or none
//!   pagefold-attach: keep this object -------> supervisor
//! ```

use crate::place::Place;
use crate::template;
use host::{ForeignFile, PeerProcess, Received, Seqpacket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::BorrowedFd;
use rustix::net::{AddressFamily, SocketType, sockopt};
use std::io;
use std::time::Duration;
pub use wire::attach::Server;

/// Hands a connection on to a service.
///
/// # Errors
/// No service is there, or it has no room.
pub fn hand_on(place: &Place, server: Server, socket: BorrowedFd<'_>) -> io::Result<()> {
    let service = Seqpacket::connect_to_service(&place.hand_socket()).map_err(io::Error::other)?;
    if service.send(&server.frame(), &[socket])? { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
}

/// What a client may send at `hand.sock`: a connection, a file to keep, or a question.
#[derive(Debug)]
pub enum Handed {
    /// A connection to a process of the service.
    Connection(Server, Seqpacket),
    /// An agent's object to keep.
    Object(ForeignFile),
    /// The question which object is kept.
    WhichObject,
    /// A question about templates, and the file that goes with it.
    Template(template::Question, Option<ForeignFile>),
}

/// The message about the agent's object: with a file, keep this one; without, which one is kept.
const OBJECT: [u8; 1] = *b"o";
/// Time for the answer to a question: 10 s. The service may be starting anew.
const ANSWER: Duration = Duration::from_secs(10);

/// The agent's object that a service keeps; `None` if it keeps none.
///
/// # Errors
/// No service is there, or it does not answer.
pub fn kept_object(place: &Place) -> io::Result<Option<ForeignFile>> {
    let service = Seqpacket::connect_to_service(&place.hand_socket()).map_err(io::Error::other)?.take_files();
    service.send(&OBJECT, &[])?;
    let (mut frame, mut files) = ([0; 1], Vec::new());
    poll(&mut [PollFd::new(&service, PollFlags::IN)], Timespec::try_from(ANSWER).ok().as_ref())?;
    match service.receive(&mut frame, &mut files)? {
        Received::Frame(_) => Ok(files.pop().map(ForeignFile::from)),
        Received::Nothing | Received::Closed => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// Answers the question of [`kept_object`].
///
/// # Errors
/// The asker is gone.
pub fn answer_object(to: &Seqpacket, kept: Option<BorrowedFd<'_>>) -> io::Result<()> {
    to.send(&OBJECT, &Vec::from_iter(kept)).map(drop)
}

/// Hands an agent's object to a service to keep.
///
/// # Errors
/// No service is there.
pub fn keep_object(place: &Place, object: BorrowedFd<'_>) -> io::Result<()> {
    let service = Seqpacket::connect_to_service(&place.hand_socket()).map_err(io::Error::other)?;
    service.send(&OBJECT, &[object]).map(drop)
}

/// Receives what a client hands on; `None` if nothing has come yet.
///
/// # Errors
/// The message is invalid, or the client may not hand this on.
pub fn take(from: &Seqpacket) -> io::Result<Option<Handed>> {
    let (mut frame, mut files) = ([0; 512], Vec::new());
    let received = from.receive(&mut frame, &mut files);
    if let Ok(Received::Frame(bytes)) = received
        && frame[0] == template::MARK
        && files.len() <= 1
    {
        let file = files.pop().map(ForeignFile::from);
        let question = template::decode(&frame[..bytes]).ok_or(io::ErrorKind::InvalidData)?;
        return Ok(Some(Handed::Template(question, file)));
    }
    if matches!(received, Ok(Received::Frame(1))) && frame[..1] == OBJECT && files.len() <= 1 {
        let Some(object) = files.pop().map(ForeignFile::from) else { return Ok(Some(Handed::WhichObject)) };
        let is_roots = from.peer()?.uid == 0;
        return if is_roots { Ok(Some(Handed::Object(object))) } else { Err(io::ErrorKind::PermissionDenied.into()) };
    }
    // Closing files that a stranger has sent may block. So all of them are made sockets of a kind that another thread
    // closes.
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
    Ok(Some(Handed::Connection(server, socket)))
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
        let Some(Handed::Connection(server, socket)) = taken(other.into()).unwrap() else { panic!("no connection") };
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

    #[test]
    fn object_is_kept_for_the_next_one_that_asks() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::at(dir.path());
        let listener = SeqpacketListener::bind(&place.hand_socket(), Files::Taken).unwrap();
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| [kept_object(&place), kept_object(&place)].map(Result::unwrap));
            let next = || loop {
                if let Some(asker) = listener.accept().unwrap() {
                    while !matches!(take(&asker).unwrap(), Some(Handed::WhichObject)) {
                        std::thread::yield_now();
                    }
                    return asker;
                }
            };
            answer_object(&next(), None).unwrap();
            let file = tempfile::tempfile().unwrap();
            answer_object(&next(), Some(file.as_fd())).unwrap();
            let [none, some] = asked.join().unwrap();
            let number = |file: BorrowedFd<'_>| rustix::fs::fstat(file).unwrap().st_ino;
            assert!(none.is_none());
            assert_eq!(some.map(|some| number(some.as_fd())), Some(number(file.as_fd())));
            keep_object(&place, file.as_fd()).unwrap();
            let given = listener.accept().unwrap().expect("a connection");
            let taken = take(&given);
            if rustix::process::getuid().is_root() {
                assert!(matches!(taken.unwrap(), Some(Handed::Object(_))));
            } else {
                assert_eq!(taken.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
            }
        });
    }
}
