//! The process at the other end of a socket, identified for certain.
//!
//! The kernel notes the pid of the process that connects. It may use this pid again once the process is gone. A later
//! look at `/proc/PID` may then find another process, which has nothing to do with the connection.
//!
//! The kernel also keeps a pidfd of the process that connected (`SO_PEERPIDFD`, since Linux 6.5). The pid cannot be
//! used again before the process has ended and its parent has collected it. So `/proc/PID` is read first and the
//! pidfd is asked afterwards: if the process has not ended by then, `/proc/PID` was about it.

use crate::memory_files::proc_file;
use crate::{Error, Pagemap, PagemapEntry, ProcessId, ProcessStat, Result, Seqpacket};
use page::PageRange;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::io;
use std::os::unix::fs::MetadataExt;

/// Socket option that returns a pidfd of the peer; it is not in every libc's headers.
const SO_PEERPIDFD: libc::c_int = 77;

/// The process that connected, and the user whose rights it had at that moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerProcess {
    /// The process.
    pub id: ProcessId,
    /// The user.
    pub uid: u32,
}

impl PeerProcess {
    /// The process that connected to `socket`.
    ///
    /// # Errors
    /// The process has ended meanwhile, or this kernel has no `SO_PEERPIDFD`.
    pub fn of(socket: &Seqpacket) -> io::Result<Self> {
        let peer = socket.peer()?;
        let pidfd = peer_pidfd(socket)?;
        let stat = ProcessStat::read(peer.pid).map_err(|e| io::Error::other(e.to_string()))?;
        // No other process can have the pid before this process ends. It has not ended by now, so `stat` was of this
        // process.
        if has_ended(&pidfd)? {
            return Err(io::Error::other(format!("process {} has ended", peer.pid)));
        }
        Ok(Self { id: ProcessId { pid: peer.pid, start_ticks: stat.start_ticks }, uid: peer.uid })
    }
}

/// Addresses of the code and of the first stack of the process that connected ([`ProcessStat::layout`]). A forked
/// process has the same ones as its parent. `None` if the process has ended, or the caller may not read them.
pub fn peer_layout(socket: &Seqpacket) -> Option<(u64, u64)> {
    let (pid, pidfd) = (socket.peer().ok()?.pid, peer_pidfd(socket).ok()?);
    let layout = ProcessStat::read(pid).ok()?.layout;
    layout.filter(|_| has_ended(&pidfd).is_ok_and(|ended| !ended))
}

/// The pagemap of the process that connected.
///
/// The pagemap is opened once, and stays with the address space that the process has at that moment. It reads as empty
/// once this address space is gone.
#[derive(Debug)]
pub struct PeerPages {
    pagemap: Pagemap,
    pidfd: OwnedFd,
}

impl PeerPages {
    /// The pagemap of the process that connected to `socket`. `handed` is the pagemap that the supervisor has opened,
    /// if the process is a member that the kernel hides from its own user ([`crate::Visibility`]).
    ///
    /// # Errors
    /// - The process has ended meanwhile, or this kernel has no `SO_PEERPIDFD`.
    /// - The process has executed a program with other rights than it had when it connected. Its end of the socket
    ///   may be held by another process by then, which must learn nothing of that program's memory.
    pub fn of(socket: &Seqpacket, handed: Option<Pagemap>) -> io::Result<Self> {
        let peer = socket.peer()?;
        let pidfd = peer_pidfd(socket)?;
        if let Some(pagemap) = handed {
            return Ok(Self { pagemap, pidfd });
        }
        let other = |e: Error| io::Error::other(e.to_string());
        let pagemap = Pagemap::open(peer.pid).map_err(other)?;
        // The owner is looked up after the file was opened. The file belongs to the user whose rights the process
        // has. It belongs to root where the kernel keeps others from looking, as after the execution of a program
        // with more rights.
        let owner = std::fs::symlink_metadata(proc_file(peer.pid, "pagemap"))?.uid();
        if has_ended(&pidfd)? {
            return Err(io::Error::other(format!("process {} has ended", peer.pid)));
        }
        if owner != peer.uid {
            let why = format!("process {} may be looked at by user {owner}, and connected as {}", peer.pid, peer.uid);
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        Ok(Self { pagemap, pidfd })
    }

    /// Appends the entries of some pages. Pages beyond the end of the address space get entries of absent pages.
    /// `buffer` is scratch space.
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

    /// Waits until `socket` has a frame to read, is closed, or the process has ended. False if the process has ended.
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

/// Whether the process has ended: from then on its pidfd is readable.
fn has_ended(pidfd: &OwnedFd) -> io::Result<bool> {
    Ok(poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&Timespec::default()))? > 0)
}

fn peer_pidfd(socket: &Seqpacket) -> io::Result<OwnedFd> {
    let mut fd: libc::c_int = -1;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes one descriptor to `fd`, whose size is in `length`; both are exclusively borrowed.
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
    fn peer_is_identified_until_it_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = SeqpacketListener::bind(&path, crate::Files::Refused).unwrap();
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
        // A child connects, ends, and is not collected: its `stat` can still be read, but is not believed.
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
