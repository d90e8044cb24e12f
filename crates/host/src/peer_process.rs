//! Which process is at the other end of a socket, for certain.
//!
//! The kernel notes the pid of who connects, and a pid is used again once its process is gone: whoever looks it up later
//! may find another process, which had no part in it. The kernel also keeps a pidfd of who connected (`SO_PEERPIDFD`, since
//! Linux 6.5). As long as that process was not collected its pid is its own, so what `/proc` says in between holds for it.

use crate::{Error, Pagemap, PagemapEntry, ProcessId, ProcessStat, Result, Seqpacket};
use page::PageRange;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::io;
use std::os::unix::fs::MetadataExt;

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
        // Before its end nobody else can have had its pid, so the line was about it.
        if has_ended(&pidfd)? {
            return Err(io::Error::other(format!("process {} has ended", peer.pid)));
        }
        Ok(Self { id: ProcessId { pid: peer.pid, start_ticks: stat.start_ticks }, uid: peer.uid })
    }
}

/// Where the pages of the process that connected lie.
///
/// It is opened once. From then on it is of that address space, and reads as empty when that has gone.
#[derive(Debug)]
pub struct PeerPages {
    pagemap: Pagemap,
    pidfd: OwnedFd,
}

impl PeerPages {
    /// Of who connected to `socket`.
    ///
    /// # Errors
    /// It has ended meanwhile, this kernel cannot tell for certain who it is, or it executes by now what has other rights
    /// than it had when it connected: somebody else may hold its end of the socket, whom that program's memory is none
    /// of the business of.
    pub fn of(socket: &Seqpacket) -> io::Result<Self> {
        let peer = socket.peer()?;
        let pidfd = peer_pidfd(socket)?;
        let other = |e: Error| io::Error::other(e.to_string());
        let pagemap = Pagemap::open(peer.pid).map_err(other)?;
        // Looked up again now that it is open: the file belongs to the user whose rights the process has, or to root where
        // the kernel keeps others from looking at it, as it does after a program was executed that has more rights.
        let owner = std::fs::symlink_metadata(format!("/proc/{}/pagemap", peer.pid))?.uid();
        if has_ended(&pidfd)? {
            return Err(io::Error::other(format!("process {} has ended", peer.pid)));
        }
        if owner != peer.uid {
            let why = format!("process {} may be looked at by user {owner}, and connected as {}", peer.pid, peer.uid);
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        Ok(Self { pagemap, pidfd })
    }

    /// Appends the entries of some pages; of those beyond the end of the address space, entries of absent pages.
    /// `buffer` is used on the way.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn append(
        &self,
        range: PageRange,
        entries: &mut Vec<PagemapEntry>,
        buffer: &mut Vec<PagemapEntry>,
    ) -> Result<()> {
        self.pagemap.read(range.start, range.pages, buffer)?;
        let absent = usize::try_from(range.pages).unwrap_or(usize::MAX) - buffer.len();
        entries.append(buffer);
        entries.extend(std::iter::repeat_n(PagemapEntry::from_bits(0), absent));
        Ok(())
    }

    /// Waits until `socket` has something to read, or is closed; false if the process has ended.
    ///
    /// # Errors
    /// The kernel refuses to wait.
    pub fn wait_for(&self, socket: &Seqpacket) -> io::Result<bool> {
        let mut fds = [PollFd::new(socket, PollFlags::IN), PollFd::new(&self.pidfd, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(fds[1].revents().is_empty()),
            Err(e) => Err(e.into()),
        }
    }
}

/// A pidfd is readable from the end of its process on.
fn has_ended(pidfd: &OwnedFd) -> io::Result<bool> {
    Ok(poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&Timespec::default()))? > 0)
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
