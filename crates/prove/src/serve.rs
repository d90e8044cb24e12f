//! Accepts connections of members, and serves each in a thread of its own.

use crate::ReferenceCounts;
use crate::connection::{self, Shared};
use crate::keep;
use cli::note;
use host::{Peer, Received, Seqpacket, SeqpacketListener, Shares};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Places for connections. A member takes two, one of them for the children that it forks.
const PLACES: Shares = Shares { most: 2048, roots: 256, others: (256, 32) };
/// Pause after a failure to accept a connection, and between two checks for followed children: 200 ms.
const PAUSE: Duration = Duration::from_millis(200);
/// Longest list of users, in bytes.
const USERS_BYTES: usize = 64 << 10;
/// Stack of a connection's thread, in bytes: its calls are not deep.
const STACK_BYTES: usize = 128 << 10;

/// Everything that a prover gets from its supervisor.
pub struct Serving<'a> {
    /// The socket to which members connect.
    pub listener: SeqpacketListener,
    /// A pidfd of the supervisor.
    pub supervisor: &'a OwnedFd,
    /// Through it, the supervisor says which users have members: a frame of all their numbers, 4 bytes each,
    /// little-endian. A frame that carries a file hands on the connection of a member that cannot connect by itself.
    pub users: Seqpacket,
}

/// Serves until the supervisor has ended and no followed child is left.
///
/// # Errors
/// The kernel refuses to wait.
pub fn serve(with: Serving<'_>, counts: ReferenceCounts) -> anyhow::Result<()> {
    accept_all(&with, counts)?;
    let path = with.listener.address();
    drop(with);
    while keep::has_children() {
        std::thread::sleep(PAUSE);
        path.as_deref().inspect(|path| keep::hand_on(path));
    }
    Ok(())
}

/// Accepts connections until the supervisor has ended.
fn accept_all(with: &Serving<'_>, counts: ReferenceCounts) -> anyhow::Result<()> {
    let shared = Arc::new(Shared::new(counts));
    let (mut places, mut members, mut buffer) = (Vec::<Place>::new(), BTreeSet::new(), vec![0; USERS_BYTES]);
    let mut files = Vec::new();
    loop {
        let mut fds = [&with.supervisor.as_fd(), &with.listener.as_fd(), &with.users.as_fd()]
            .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN));
        match poll(&mut fds, None) {
            // A pidfd becomes readable when its process ends.
            Ok(_) if !fds[0].revents().is_empty() => return Ok(()),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        while let Ok(Received::Frame(bytes)) = with.users.receive(&mut buffer, &mut files) {
            if files.is_empty() {
                members = buffer[..bytes].as_chunks().0.iter().map(|uid| u32::from_le_bytes(*uid)).collect();
            }
            for connection in files.drain(..) {
                give_place(Seqpacket::from_stranger(connection), &members, &mut places, &shared);
            }
        }
        match with.listener.accept() {
            Ok(Some(socket)) => {
                give_place(socket, &members, &mut places, &shared);
            }
            Ok(None) => {}
            Err(e) => {
                note!("prover: {e}");
                std::thread::sleep(PAUSE);
            }
        }
    }
}

/// Serves a connection in a thread of its own, if its user may have another one.
fn give_place(socket: Seqpacket, members: &BTreeSet<u32>, places: &mut Vec<Place>, shared: &Arc<Shared>) {
    let Ok(Peer { uid, .. }) = socket.peer() else { return };
    places.retain(|place| Arc::strong_count(&place.taken) > 1);
    if !PLACES.have_room(uid, members, places.iter().map(|place| place.uid)) {
        return note!("prover: user {uid} has too many connections");
    }
    let (shared, taken) = (Arc::clone(shared), Arc::new(()));
    places.push(Place { uid, taken: Arc::clone(&taken) });
    let thread = std::thread::Builder::new().name("connection".into()).stack_size(STACK_BYTES);
    let started = thread.spawn(move || {
        // Its files are this thread's, which keeps its place for as long as closing them may take.
        if let Err(e) = connection::serve(socket.take_files(), &shared) {
            note!("prover: a connection is ended: {e}");
        }
        drop(taken);
    });
    if let Err(e) = started {
        note!("prover: cannot start a thread: {e}");
        std::thread::sleep(PAUSE);
    }
}

/// A connection's place. It is free again when the connection's thread drops its clone of `taken`.
struct Place {
    uid: u32,
    taken: Arc<()>,
}
