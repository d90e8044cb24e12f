//! Accepts connections of members, and serves each in a thread of its own.

use crate::ReferenceCounts;
use crate::connection::{self, Shared};
use crate::keep;
use cli::note;
use host::SeqpacketListener;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// Most connections at a time: in all, and of one user other than root.
const MOST_CONNECTIONS: (usize, usize) = (1024, 512);
/// Pause after a failure to accept a connection, and between two checks for followed children: 200 ms.
const PAUSE: Duration = Duration::from_millis(200);
/// Stack of a connection's thread, in bytes: its calls are not deep.
const STACK_BYTES: usize = 128 << 10;

/// Serves until the supervisor has ended and no followed child is left.
///
/// # Errors
/// The kernel refuses to wait.
pub fn serve(listener: SeqpacketListener, supervisor: &OwnedFd, counts: ReferenceCounts) -> anyhow::Result<()> {
    accept_all(&listener, supervisor, counts)?;
    drop(listener);
    while keep::has_children() {
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// Accepts connections until the supervisor has ended.
fn accept_all(listener: &SeqpacketListener, supervisor: &OwnedFd, counts: ReferenceCounts) -> anyhow::Result<()> {
    let shared = Arc::new(Shared::new(counts));
    let mut places: Vec<Place> = Vec::new();
    loop {
        let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(supervisor, PollFlags::IN)];
        match poll(&mut fds, None) {
            // A pidfd becomes readable when its process ends.
            Ok(_) if !fds[1].revents().is_empty() => return Ok(()),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        let socket = match listener.accept() {
            Ok(Some(socket)) => socket,
            Ok(None) => continue,
            Err(e) => {
                note!("prover: {e}");
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        places.retain(|place| Arc::strong_count(&place.taken) > 1);
        let uid = match socket.peer() {
            Ok(peer) => peer.uid,
            Err(_) => continue,
        };
        let same_user = places.iter().filter(|place| place.uid == uid).count();
        if places.len() >= MOST_CONNECTIONS.0 || (uid != 0 && same_user >= MOST_CONNECTIONS.1) {
            note!("prover: user {uid} has too many connections");
            continue;
        }
        let (shared, taken) = (Arc::clone(&shared), Arc::new(()));
        places.push(Place { uid, taken: Arc::clone(&taken) });
        let thread = std::thread::Builder::new().name("connection".into()).stack_size(STACK_BYTES);
        let started = thread.spawn(move || {
            if let Err(e) = connection::serve(socket, &shared) {
                note!("prover: a connection is ended: {e}");
            }
            drop(taken);
        });
        if let Err(e) = started {
            note!("prover: cannot start a thread: {e}");
            std::thread::sleep(PAUSE);
        }
    }
}

/// A connection's place. It is free again when the connection's thread drops its clone of `taken`.
struct Place {
    uid: u32,
    taken: Arc<()>,
}
