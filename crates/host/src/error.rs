//! Failures to read the host, each with the file that it concerns.

use std::io;
use std::path::PathBuf;

/// Result of reading the host.
pub type Result<T> = std::result::Result<T, Error>;

/// A failure to read the host, with the object it failed on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory could not be opened, read or written.
    #[error("cannot {attempted} {}: {cause}", path.display())]
    File {
        /// The attempt: `open`, `read`, ...
        attempted: &'static str,
        /// The file.
        path: PathBuf,
        /// The kernel's answer. It is part of the message, and so no source besides.
        cause: io::Error,
    },
    /// A file's content is not what the kernel documents.
    #[error("{} line {line}: {problem}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// The fault of that line, in words.
        problem: String,
    },
}

impl Error {
    /// A failed attempt on a file.
    pub fn file(attempted: &'static str, path: impl Into<PathBuf>, cause: impl Into<io::Error>) -> Self {
        Self::File { attempted, path: path.into(), cause: cause.into() }
    }

    /// Whether the process or file concerned is gone (`ENOENT`, `ESRCH`).
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::File { cause, .. }
            if matches!(cause.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)))
    }

    /// Whether the address is not, or no longer, mapped in the process (`EFAULT`, `EIO`).
    pub fn is_bad_address(&self) -> bool {
        matches!(self, Self::File { cause, .. }
            if matches!(cause.raw_os_error(), Some(libc::EFAULT | libc::EIO)))
    }

    /// Whether the socket exists, but takes no connection: nobody listens, or its queue is full.
    pub fn is_refused(&self) -> bool {
        matches!(self, Self::File { cause, .. }
            if matches!(cause.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::WouldBlock))
    }

    /// Whether the socket's queue of connections is full.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::File { cause, .. } if cause.kind() == io::ErrorKind::WouldBlock)
    }

    /// Whether the caller lacks rights (`EACCES`, `EPERM`).
    pub fn is_denied(&self) -> bool {
        matches!(self, Self::File { cause, .. }
            if matches!(cause.raw_os_error(), Some(libc::EACCES | libc::EPERM)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cause_is_told_once() {
        let error = Error::file("open", "/x", io::Error::from_raw_os_error(libc::ENOENT));
        assert_eq!(error.to_string(), "cannot open /x: No such file or directory (os error 2)");
        // With a source, `{:#}` would print the cause twice.
        assert!(std::error::Error::source(&error).is_none() && error.is_gone());
    }
}
