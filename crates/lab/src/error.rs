//! What went wrong with a lab, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

/// Result of working with a lab.
pub type Result<T> = std::result::Result<T, Error>;

/// Why the lab could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What was asked for cannot mean anything.
    #[error("{0}")]
    Usage(String),
    /// The host lacks a program or a right; the text says which, and how to get it.
    #[error("{0}")]
    HostLacks(String),
    /// A file, a directory or a process of the host.
    #[error(transparent)]
    Host(#[from] host::Error),
    /// A program that builds an image or runs a guest failed.
    #[error("{program} failed ({status}); {output}")]
    Program {
        /// Its name.
        program: String,
        /// How it ended.
        status: String,
        /// The end of what it said, or where to read it.
        output: String,
    },
    /// A guest did not start, did not answer or did not end.
    #[error("guest {name}: {problem}")]
    Guest {
        /// Which.
        name: String,
        /// What it did not do, and where to look.
        problem: String,
    },
}

impl Error {
    /// A failed attempt on a file.
    pub(crate) fn file(attempted: &'static str, path: impl Into<PathBuf>, source: impl Into<io::Error>) -> Self {
        Self::Host(host::Error::file(attempted, path, source))
    }

    /// A guest that did not do something.
    pub(crate) fn guest(name: &str, problem: impl Into<String>) -> Self {
        Self::Guest { name: name.into(), problem: problem.into() }
    }
}

/// The last lines of a log, to put behind an error; empty if there is none.
pub(crate) fn tail_of(log: &Path) -> String {
    const LINES: usize = 20;
    let text = std::fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n  ")
}
