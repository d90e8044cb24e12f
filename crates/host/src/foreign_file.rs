//! Files that another process sent (`SCM_RIGHTS`), and closing them.
//!
//! Closing a file may wait for as long as its sender likes. The server of a FUSE file system need not answer, and a
//! peer need not take what was sent to it (`SO_LINGER`). Closing a socket in which such files wait to be received waits
//! too. So files from other processes are closed by threads that do nothing else, and no other thread waits.

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// Most threads that close files at a time. Beyond them, files wait to be closed.
const MOST_THREADS: usize = 256;
/// Stack of a thread that closes files, in bytes: its calls are not deep.
const STACK_BYTES: usize = 64 << 10;

/// Files to be closed, and the number of threads that close files.
struct Closing {
    files: Vec<OwnedFd>,
    threads: usize,
}

static CLOSING: Mutex<Closing> = Mutex::new(Closing { files: Vec::new(), threads: 0 });

/// A file that another process sent. Dropping it does not wait: another thread closes it.
#[derive(Debug)]
pub struct ForeignFile(Option<OwnedFd>);

impl ForeignFile {
    fn file(&self) -> &OwnedFd {
        self.0.as_ref().expect("it is taken out only by those who end this")
    }

    /// The file. Closing it may wait.
    pub fn into_inner(mut self) -> OwnedFd {
        self.0.take().expect("it is taken out only by those who end this")
    }
}

impl From<OwnedFd> for ForeignFile {
    fn from(file: OwnedFd) -> Self {
        Self(Some(file))
    }
}

impl AsFd for ForeignFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file().as_fd()
    }
}

impl Drop for ForeignFile {
    fn drop(&mut self) {
        if let Some(file) = self.0.take() {
            close_elsewhere(file);
        }
    }
}

fn lock() -> std::sync::MutexGuard<'static, Closing> {
    // If a thread panicked while it held the lock, the number of threads is at worst one too high.
    CLOSING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn close_elsewhere(file: OwnedFd) {
    let mut closing = lock();
    closing.files.push(file);
    if closing.threads >= MOST_THREADS {
        return;
    }
    let thread = std::thread::Builder::new().name("close".into()).stack_size(STACK_BYTES);
    // If no thread can be started, a thread that runs closes the file later.
    if thread.spawn(close_all).is_ok() {
        closing.threads += 1;
    }
}

fn close_all() {
    loop {
        let mut closing = lock();
        let Some(file) = closing.files.pop() else {
            closing.threads -= 1;
            return;
        };
        drop(closing);
        drop(file);
    }
}
