//! Errors of a lab, each with the way out of it.

use cli::exit::Stop;
use std::io;
use std::path::{Path, PathBuf};

/// Result of working with a lab.
pub type Result<T> = std::result::Result<T, Error>;

/// Why the lab could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request makes no sense, or the host lacks something.
    #[error("{0}")]
    Stop(#[from] Stop),
    /// A file, a directory or a process of the host.
    #[error(transparent)]
    Host(#[from] host::Error),
    /// A program that builds an image or runs a guest failed.
    #[error("{program} failed ({status}); {output}")]
    Program {
        /// Name of the program.
        program: String,
        /// Exit status of the program, or the signal that ended it.
        status: String,
        /// The end of its output, or the place of its log.
        output: String,
    },
    /// This process was told to end; the guests of these names, which it had started, are ended.
    #[error("interrupted: ended {0}")]
    Interrupted(String),
    /// A guest did not start, did not answer or did not end.
    #[error("guest {name}: {problem}")]
    Guest {
        /// Name of the guest.
        name: String,
        /// The step that the guest did not complete, and where to look for the reason.
        problem: String,
    },
}

impl Error {
    /// The request makes no sense.
    pub(crate) fn usage(text: String) -> Self {
        Stop::Usage(text).into()
    }

    /// The host lacks a program or a right; the text says which, and how to get it.
    pub(crate) fn host_lacks(text: String) -> Self {
        Stop::HostLacks(text).into()
    }

    /// A failed attempt on a file.
    pub(crate) fn file(attempted: &'static str, path: impl Into<PathBuf>, source: impl Into<io::Error>) -> Self {
        Self::Host(host::Error::file(attempted, path, source))
    }

    /// A guest that did not complete a step.
    pub(crate) fn guest(name: &str, problem: impl Into<String>) -> Self {
        Self::Guest { name: name.into(), problem: problem.into() }
    }
}

/// The last 20 lines of a log, to put behind an error, and all behind a panic of the guest's kernel. Empty if there is no log.
pub(crate) fn tail_of(log: &Path) -> String {
    const LINES: usize = 20;
    let text = std::fs::read(log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let last = lines.len().saturating_sub(LINES);
    let panic = lines.iter().rposition(|line| line.contains("Kernel panic"));
    lines[panic.map_or(last, |at| at.min(last))..].join("\n  ")
}
