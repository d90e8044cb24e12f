//! Sockets of a service to which one user alone may connect, beside sockets to which everybody may connect.
//!
//! ```text
//!   DIR/control.sock             everybody's
//!   DIR/users/UID/control.sock   the file is user UID's, and nobody else may write it; the directory is the service's
//! ```
//!
//! The kernel keeps a queue of connections for each socket. Strangers who connect all the time fill the queue of the
//! socket for everybody, and not a user's own.

use crate::{Result, Seqpacket};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Name of the directory with users' own sockets.
pub const USERS: &str = "users";

/// Path of a user's own socket, given the `path` of the socket for everybody.
pub fn own_socket(path: &Path, uid: u32) -> PathBuf {
    let dir = path.parent().unwrap_or(Path::new("")).join(USERS);
    dir.join(uid.to_string()).join(path.file_name().unwrap_or(OsStr::new("")))
}

impl Seqpacket {
    /// Connects to the service that listens at `path`, by the caller's own socket if there is one. In a user namespace,
    /// a process does not know its uid on the host, and does not find its own socket.
    ///
    /// # Errors
    /// No process listens there, the caller may not connect, or its own queue is full.
    pub fn connect_to_service(path: &Path) -> Result<Self> {
        match Self::connect(&own_socket(path, rustix::process::geteuid().as_raw())) {
            Err(e) if !e.is_full() => Self::connect(path),
            done => done,
        }
    }
}
