//! Writing to stdout and stderr. A failure to write is an error on stdout, and is ignored on stderr. A closed pipe is
//! no bug, so the standard library's `println!` and `eprintln!` are not used: they panic.

use anyhow::Context;
use std::fmt;
use std::io::{self, Write};

/// Writes a line to stderr, and ignores failures.
#[macro_export]
macro_rules! say {
    ($($words:tt)*) => { $crate::output::say_line(format_args!($($words)*)) };
}

/// See [`say!`].
pub fn say_line(line: fmt::Arguments) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Writes a line to stdout.
///
/// # Errors
/// It cannot be written.
pub fn line(line: impl fmt::Display) -> anyhow::Result<()> {
    bytes(format!("{line}\n").as_bytes())
}

/// Writes bytes to stdout and flushes them.
///
/// # Errors
/// They cannot be written.
pub fn bytes(bytes: &[u8]) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).context("cannot write to stdout")
}
