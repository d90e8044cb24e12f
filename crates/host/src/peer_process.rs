//! Which process is at the other end of a socket, for certain.
//!
//! The kernel notes the pid of who connects, and a pid is used again once its process is gone: whoever looks it up later
//! may find another process, which had no part in it. The kernel also keeps a pidfd of who connected (`SO_PEERPIDFD`, since
//! Linux 6.5). As long as that process was not collected its pid is its own, so what `/proc` says in between holds for it.

use crate::{ProcessId, ProcessStat, Seqpacket};
use rustix::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use rustix::process::{Signal, pidfd_send_signal};
use std::io;

/// Not in every libc's headers.
const SO_PEERPIDFD: libc::c_int = 77;

/// The process that connected, and the user whose rights it had then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerProcess {
    /// Which process.
    pub id: ProcessId,
    /// Its user.
    pub uid: u32,
}

impl PeerProcess {
    /// Who connected to `socket`.
    ///
    /// # Errors
    /// It has ended meanwhile, or this kernel cannot tell for certain.
    pub fn of(socket: &Seqpacket) -> io::Result<Self> {
        let peer = socket.peer()?;
        let pidfd = peer_pidfd(socket)?;
        let stat = ProcessStat::read(peer.pid).map_err(|e| io::Error::other(e.to_string()))?;
        // The process is still there, so nobody else can have had its pid when the line was read. A signal that only
        // asks whether it could be sent fails with EPERM for other users' processes: they are there, too.
        match pidfd_send_signal(&pidfd, Signal::CONT).or_else(|e| ignore_denied(e)) {
            Ok(()) if !stat.has_ended() => {}
            _ => return Err(io::Error::other(format!("process {} has ended", peer.pid))),
        }
        Ok(Self { id: ProcessId { pid: peer.pid, start_ticks: stat.start_ticks }, uid: peer.uid })
    }
}
