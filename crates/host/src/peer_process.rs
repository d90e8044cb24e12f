//! Which process is at the other end of a socket, for certain.
//!
//! The kernel notes the pid of who connects, and a pid is used again once its process is gone: whoever looks it up later
//! may find another process, which had no part in it. The kernel also keeps a pidfd of who connected (`SO_PEERPIDFD`, since
//! Linux 6.5). As long as that process was not collected its pid is its own, so what `/proc` says in between holds for it.

use crate::{ProcessId, ProcessStat, Seqpacket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
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
        // Its pidfd is readable from its end on. Before that nobody else can have had its pid, so the line was about it.
        let mut ended = [PollFd::new(&pidfd, PollFlags::IN)];
        if poll(&mut ended, Some(&Timespec::default()))? > 0 {
            return Err(io::Error::other(format!("process {} has ended", peer.pid)));
        }
        Ok(Self { id: ProcessId { pid: peer.pid, start_ticks: stat.start_ticks }, uid: peer.uid })
    }
}

fn peer_pidfd(socket: &Seqpacket) -> io::Result<OwnedFd> {
    let mut fd: libc::c_int = -1;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the option is one descriptor, written to `fd`, of whose size `length` tells; both are exclusively borrowed.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut length,
        )
    };
    if answer != 0 || fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just given us this descriptor, and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SeqpacketListener;
    use std::process::Command;

    #[test]
    fn who_connects_is_known_as_long_as_it_lives() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = SeqpacketListener::bind(&path).unwrap();
        let _ours = Seqpacket::connect(&path).unwrap();
        let peer = match PeerProcess::of(&listener.accept().unwrap().unwrap()) {
            Err(e) if e.raw_os_error() == Some(libc::ENOPROTOOPT) => {
                eprintln!("skipped: this kernel has no SO_PEERPIDFD");
                return;
            }
            peer => peer.unwrap(),
        };
        assert_eq!(peer.id, ProcessId::of(std::process::id()).unwrap());
        assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
        // A child connects, ends, and is not collected: its line can still be read, and is not believed.
        let script = format!("import socket; socket.socket(1, 5).connect('{}')", path.display());
        let Ok(mut child) = Command::new("python3").args(["-c", &script]).spawn() else {
            eprintln!("skipped: no python3 to connect with");
            return;
        };
        let theirs = loop {
            if let Some(socket) = listener.accept().unwrap() {
                break socket;
            }
        };
        while !ProcessStat::read(child.id()).unwrap().has_ended() {}
        assert!(PeerProcess::of(&theirs).unwrap_err().to_string().contains("has ended"));
        child.wait().unwrap();
        assert!(PeerProcess::of(&theirs).is_err());
    }
}
