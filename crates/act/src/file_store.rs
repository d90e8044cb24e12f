//! Files that the service manager keeps for the next process of a unit: systemd's file descriptor store
//! (`FileDescriptorStoreMax=` in the unit; sd_notify(3), sd_listen_fds(3)).
//!
//! ```text
//!   keep(name, file) --FDSTORE=1, FDNAME + the file--> service manager --LISTEN_FDS, LISTEN_FDNAMES--> FileStore::take
//!   forget(name) ------FDSTOREREMOVE=1, FDNAME------->                     in the next process
//! ```
//!
//! Without a service manager that listens, nothing is kept, and that is no error.

use rustix::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::ffi::{OsStr, OsString};
use std::io::{self, IoSlice};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Number of the first descriptor that a service manager passes on: the one after standard error.
const FIRST: RawFd = 3;
/// Most files that are taken from the service manager; further ones stay open and unused.
const MOST: usize = 1 << 16;
/// Time limit for the service manager to take a message: 1 s.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whether [`FileStore::take`] has handed out the files.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// The address of the service manager's store; `None` if there is none.
#[derive(Debug, Default)]
pub struct FileStore(Option<OsString>);

impl FileStore {
    /// The store of this process's service manager, and the files that it kept for this process, with their names. A
    /// second call gets no files.
    ///
    /// It must be called before this process closes any file that was open from the beginning.
    pub fn take() -> (Self, Vec<(String, OwnedFd)>) {
        let store = Self(std::env::var_os("NOTIFY_SOCKET"));
        let text = |name| std::env::var(name).unwrap_or_default();
        let is_ours = text("LISTEN_PID").parse() == Ok(std::process::id());
        let count = text("LISTEN_FDS").parse().unwrap_or(0).min(MOST);
        if !is_ours || count == 0 || TAKEN.swap(true, Ordering::Relaxed) {
            return (store, Vec::new());
        }
        let names = text("LISTEN_FDNAMES");
        let numbers = (FIRST..).take(count);
        (
            store,
            numbers.zip(names.split(':')).filter_map(|(number, name)| Some((name.to_owned(), own(number)?))).collect(),
        )
    }

    /// The store of a service manager that listens at this address, written as in `NOTIFY_SOCKET`.
    pub fn at(address: impl Into<OsString>) -> Self {
        Self(Some(address.into()))
    }

    /// Hands a file to the service manager to keep. A file that the service manager does not want is dropped without
    /// notice.
    ///
    /// The file may only be a memory file ([`crate::check`]): the service manager closes it one day, and must not wait
    /// for anybody then.
    ///
    /// # Errors
    /// The message could not be sent.
    pub fn keep(&self, name: &str, file: BorrowedFd<'_>) -> io::Result<()> {
        // A memory file never hangs up, so the service manager need not poll it.
        self.send(&format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"), &[file])
    }

    /// Has the service manager drop the files of this name.
    ///
    /// # Errors
    /// The message could not be sent.
    pub fn forget(&self, name: &str) -> io::Result<()> {
        self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[])
    }

    /// Sends a message over a new socket each time: after the service manager has executed itself anew, it listens at
    /// another socket.
    fn send(&self, message: &str, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let Some(address) = &self.0 else { return Ok(()) };
        let socket = UnixDatagram::unbound()?;
        socket.set_write_timeout(Some(PATIENCE))?;
        socket.connect_addr(&address_of(address)?)?;
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "one file a message"));
        }
        sendmsg(&socket, &[IoSlice::new(message.as_bytes())], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

/// The address that `NOTIFY_SOCKET` names: a path, or after `@` a name in the abstract namespace.
fn address_of(text: &OsStr) -> io::Result<SocketAddr> {
    match text.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(text),
    }
}

/// Takes ownership of a file that this process was started with. `None`: there is no file of this number.
fn own(number: RawFd) -> Option<OwnedFd> {
    // SAFETY: the call touches no memory. It fails with EBADF if there is no such file.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } != 0 {
        return None;
    }
    // SAFETY: the service manager opened this number for this process, by the variables with this process's pid in
    // them. Nothing in this process owns it. The kernel gives its number to no other file as long as it is open, and
    // `TAKEN` lets only one call come here.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsFd;

    #[test]
    fn messages_reach_the_service_manager_with_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let store = FileStore::at(path);
        let file = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        store.keep("pool.acme.1.16", file.as_fd()).unwrap();
        store.forget("pool.acme.1.16").unwrap();
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = rustix::net::RecvAncillaryBuffer::new(&mut space);
        let (mut bytes, flags) = ([0; 100], rustix::net::RecvFlags::empty());
        let got = rustix::net::recvmsg(&manager, &mut [io::IoSliceMut::new(&mut bytes)], &mut control, flags).unwrap();
        assert_eq!(&bytes[..got.bytes], b"FDSTORE=1\nFDNAME=pool.acme.1.16\nFDPOLL=0");
        let files: Vec<OwnedFd> = control
            .drain()
            .flat_map(|message| match message {
                rustix::net::RecvAncillaryMessage::ScmRights(files) => files.collect(),
                _ => Vec::new(),
            })
            .collect();
        let inode = |file: BorrowedFd<'_>| rustix::fs::fstat(file).unwrap().st_ino;
        assert_eq!(files.iter().map(|f| inode(f.as_fd())).collect::<Vec<_>>(), [inode(file.as_fd())]);
        let got = manager.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..got], b"FDSTOREREMOVE=1\nFDNAME=pool.acme.1.16");
        drop(manager);
        assert!(store.forget("pool.acme.1.16").is_err(), "nobody listens any more");
        assert!(FileStore::default().keep("x", file.as_fd()).is_ok(), "there never was anybody");
    }
}
