//! A service manager that keeps files for a service, as systemd's file descriptor store does.

use rustix::fd::{AsRawFd, OwnedFd};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

/// Puts the files with these numbers to 3 and up, and executes the program: `COUNT NUMBER... NAMES PROGRAM WORD...`.
const LAUNCH: &str = "
import fcntl, os, sys
count = int(sys.argv[1])
numbers, names, words = [int(n) for n in sys.argv[2 : 2 + count]], sys.argv[2 + count], sys.argv[3 + count :]
high = [fcntl.fcntl(n, fcntl.F_DUPFD, 1000) for n in numbers]
for n in numbers:
    os.close(n)
for at, n in enumerate(high):
    os.dup2(n, 3 + at)
    os.close(n)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(count), LISTEN_FDNAMES=names)
os.execv(words[0], words)
";

type Files = Arc<Mutex<Vec<(String, OwnedFd)>>>;

/// The manager. It keeps files as long as it lives.
pub struct Keeper {
    address: PathBuf,
    files: Files,
}

impl Keeper {
    /// Listens in this directory.
    pub fn new(dir: &Path) -> Self {
        let (address, files) = (dir.join("notify"), Files::default());
        let socket = UnixDatagram::bind(&address).expect("listen");
        let kept = Arc::clone(&files);
        std::thread::spawn(move || while keep(&socket, &kept) {});
        Self { address, files }
    }

    /// Names of the files that are kept.
    pub fn names(&self) -> Vec<String> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|(name, _)| name.clone()).collect()
    }

    /// A command that starts a program with the files that are kept.
    pub fn command(&self, program: &str) -> Command {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let mut command = Command::new("python3");
        command.args(["-c", LAUNCH, &files.len().to_string()]);
        for (_, file) in files.iter() {
            fcntl_setfd(file, FdFlags::empty()).expect("let a child have it");
            command.arg(file.as_raw_fd().to_string());
        }
        let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
        command.arg(names.join(":")).arg(program).env("NOTIFY_SOCKET", &self.address);
        command
    }
}

/// Does what the next message says. `false`: there will be no more.
fn keep(socket: &UnixDatagram, files: &Files) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let (mut control, mut bytes) = (RecvAncillaryBuffer::new(&mut space), [0; 4096]);
    let Ok(got) = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC) else {
        return false;
    };
    let text = String::from_utf8_lossy(&bytes[..got.bytes]).into_owned();
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let name = value("FDNAME").unwrap_or("stored").to_owned();
    let mut files = files.lock().unwrap_or_else(PoisonError::into_inner);
    if value("FDSTOREREMOVE").is_some() {
        files.retain(|(kept, _)| *kept != name);
    }
    for message in control.drain() {
        if let (RecvAncillaryMessage::ScmRights(sent), Some(_)) = (message, value("FDSTORE")) {
            files.extend(sent.map(|file| (name.clone(), file)));
        }
    }
    true
}
