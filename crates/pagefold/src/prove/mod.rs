//! The prover: tells a member whether anybody else holds pages of its own. One process a service, with the right to see.
//!
//! A page that was folded and then written lies, private again, inside a private mapping of the pool's file. The kernel does
//! not move it out of there, so that who wants to fold it again has to keep writers out in another way, and to prove that
//! nobody is left who needs no page table to write it: a device in the middle of a read (`FOLL_PIN`), a system call or a
//! driver with a plain reference (`get_user_pages`), a buffer that is registered with io_uring, a pipe. All of them hold a
//! reference of the frame, and the kernel's own merger goes by their number. So do we:
//!
//! ```text
//!   member's agent                                    prover                                       kernel
//!     | protects pages (userfaultfd, synchronous)        |                                           |
//!     | ranges ----------------------------------------> |                                           |
//!     |                                                  | page table: frame, private, ours alone -> |
//!     |                                                  | reference count and mappings of frame --> |
//!     |                                                  | page table again: the same entry -------> |
//!     | <------------------------- free, or it is not    |                                           |
//!     | compares, replaces or lifts the protection       |
//! ```
//!
//! # What "free" proves
//!
//! *Free* is said of a page whose entry in the asker's page table was the same before and after its count was read: present,
//! private, small, mapped nowhere else, and protected by a userfaultfd; and whose frame had one reference and one
//! mapping. Then, **if the asker's protection is a synchronous one that stood before it asked and stands until it has replaced
//! the page**, nobody can write the page until then:
//!
//! - *Through page tables*: every processor's, KVM's and a device's that shares them were told of the protection before
//!   the asker's call returned; a write since then faults, and waits for the asker.
//! - *Through a reference*: one that was taken before the protection and is still held counts. (Who takes one without a
//!   lock looks at the page table again after it has counted itself, and lets go if the entry has changed: either it sees the
//!   protection, or we see it.) A new one that may write needs a writable entry of a page table, thus a write fault.
//! - *The frame was the page's.* While somebody holds a reference the kernel does not move a page to another frame, so
//!   the count was read of the frame that the holder refers to, whatever else happened between the two looks at the page table.
//!   A holder that let go between them can write no more.
//!
//! What is *not* proven: that nobody will *read* the frame. A reference for reading can be taken after the count was
//! read, and then goes on to see the bytes as they were, which are those of the slot. That the protection is synchronous
//! cannot be seen from here: one that only notes writes looks the same.
//!
//! *Referenced* may be untrue a moment later, and often is untrue when it is said: the kernel holds references of its own for
//! a moment, and keeps fresh pages on a list of each processor's until that is full, where they count. Where pages are
//! held by one reference too many, the prover has these lists emptied, at most ten times a second, and looks again.
//!
//! # Who may ask, and about what
//!
//! Anybody who may connect to the service's socket for agents, but only about the process that connected: its page table
//! is opened once, by the pidfd that the kernel keeps with the connection. An address is looked up there and nowhere else, so
//! that there is no way to name a page of somebody else. (Whoever holds the connection after an `exec` of a program with more
//! rights learns nothing about that program either: see [`host::PeerPages`].) What is told is three values a page.
//!
//! Each connection has a thread of its own, because the kernel has us wait for a lock of the asker's address space, which
//! a hostile asker can hold for long; what threads share is the BPF program, for the microseconds of one run. Who asks much is
//! made to wait, who sends anything but a question or does not read answers is hung up on, and there are so many
//! connections and no more.

mod connection;
mod drain;
mod keep;

use crate::service::log::note;
use connection::Shared;
use host::{ReferenceCounts, SeqpacketListener};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// Connections at a time: in all, and of one user other than root.
const MOST_CONNECTIONS: (usize, usize) = (1024, 512);
/// Where accepting fails, it is tried again after so long.
const PAUSE: Duration = Duration::from_millis(200);
/// A thread's stack: it calls nothing deep.
const STACK_BYTES: usize = 128 << 10;

/// Serves until the supervisor has ended, and no child is left that is followed.
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
            // A process that has ended is readable.
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

/// A connection's place; it is free again when the connection's thread has let go of its half.
struct Place {
    uid: u32,
    taken: Arc<()>,
}
