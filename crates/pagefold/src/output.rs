//! What goes to stdout, where failing to write is an error, and to stderr, where it is not: that nobody listens any
//! more is no reason to stop, let alone to call it a bug, as the standard library's `println!` and `eprintln!` do.

use anyhow::Context;
use std::fmt;
use std::io::{self, Write};

/// Says something on stderr, if anybody listens.
macro_rules! say {
    ($($words:tt)*) => { $crate::output::say_line(format_args!($($words)*)) };
}
pub(crate) use say;

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

/// Writes bytes to stdout, all the way.
///
/// # Errors
/// They cannot be written.
pub fn bytes(bytes: &[u8]) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes).and_then(|()| out.flush()).context("cannot write to stdout")
}
