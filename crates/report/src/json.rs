//! JSON for programs: indented, so that people can read it too, and ended by a line feed.

use serde::Serialize;
use std::io::{self, Write};

/// Writes `value` to `out`.
pub fn write(out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)
}

/// Writes `value` to `out` in one line, for streams of objects.
pub fn write_line(out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_indented_and_ends_with_a_line_feed() {
        let mut out = Vec::new();
        write(&mut out, &[("a\u{1b}", 1)]).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "[\n  [\n    \"a\\u001b\",\n    1\n  ]\n]\n");
    }

    #[test]
    fn a_closed_pipe_is_an_error_of_its_own_kind() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        assert_eq!(write(&mut Closed, &1).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
