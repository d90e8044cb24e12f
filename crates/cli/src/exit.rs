//! Exit codes: their meaning, and the code for a command's outcome.
//!
//! | code | rule |
//! |---|---|
//! | 1 | the reason lies outside of the command: part of the work may be done |
//! | 2 | the reason is what the user wrote: arguments, a file that is named there, a name that matches nothing |

use crate::{printable, say};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

/// Explanation of the exit codes, for the end of `--help` of every command.
pub const CODES: &str = "\
Exit codes:
  0  done
  1  done in part or not at all, for a reason outside: a guest ended, a service refuses, a full disk
  2  what was asked cannot be meant: arguments, a file named there, a name that matches nothing
  3  this host lacks a feature, a right or a program: stderr says what, and how to get it
  4  a bug in pagefold
Whatever is not 0 has its reason on stderr. 'run' and 'lab exec' pass on the code of their program.";

/// An exit code. [`CODES`] explains all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Code {
    /// 0
    Done = 0,
    /// 1
    Partial = 1,
    /// 2, as `clap` has it for arguments that it refuses
    Usage = 2,
    /// 3
    HostLacks = 3,
    /// 4
    Bug = 4,
}

/// The outcome of a command that ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The command has done everything that was asked.
    Done,
    /// The command has not done everything, and has said on stderr what is missing.
    Partial,
    /// A program that was run for the user ended with this status, which becomes the command's.
    Status(u8),
}

/// An error with an exit code of its own; other errors get [`Code::Partial`].
#[derive(Debug, thiserror::Error)]
pub enum Stop {
    /// The user's request is wrong: arguments, names or files.
    #[error("{0}")]
    Usage(String),
    /// The host lacks a feature, a right or a program.
    #[error("{0}")]
    HostLacks(String),
}

impl Stop {
    /// An error about what the user wrote, with its causes in words.
    pub fn usage(error: impl Into<anyhow::Error>) -> Self {
        Self::Usage(in_words(&error.into()))
    }
}

/// Runs a command, prints its error if it fails, and returns its exit code.
pub fn code_of(command: impl FnOnce() -> anyhow::Result<Outcome>) -> ExitCode {
    // The default hook has printed the panic's message and place before it arrives here.
    let Ok(result) = catch_unwind(AssertUnwindSafe(command)) else {
        say!("pagefold: this is a bug in pagefold; please report the message above");
        return ExitCode::from(Code::Bug as u8);
    };
    match &result {
        Err(error) if is_closed_pipe(error) => return ExitCode::from(Code::Done as u8),
        Err(error) => say_error(error),
        Ok(_) => {}
    }
    ExitCode::from(status(&result))
}

/// Prints an error to stderr, with its causes, in characters that cannot steer a terminal.
pub fn say_error(error: &anyhow::Error) {
    // The text may hold file names, keys of a configuration and words of other processes.
    in_words(error).lines().enumerate().for_each(|(n, line)| {
        say!("{}{}", if n == 0 { "pagefold: " } else { "" }, printable(line));
    });
}

/// The exit code of a result.
fn status(result: &anyhow::Result<Outcome>) -> u8 {
    let code = match result {
        Ok(Outcome::Status(status)) => return *status,
        Ok(Outcome::Done) => Code::Done,
        Ok(Outcome::Partial) => Code::Partial,
        Err(error) => match error.chain().find_map(|cause| cause.downcast_ref::<Stop>()) {
            Some(Stop::Usage(_)) => Code::Usage,
            Some(Stop::HostLacks(_)) => Code::HostLacks,
            None => Code::Partial,
        },
    };
    code as u8
}

/// An error and its causes. Many errors name their cause themselves, so each cause is printed only once.
pub fn in_words(error: &anyhow::Error) -> String {
    let mut words = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if cause.starts_with(&words) {
            words = cause;
        } else if !words.ends_with(&cause) {
            words = format!("{words}: {cause}");
        }
    }
    words
}

/// Whether the reader of our output has closed it, as `head` does.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let mut kinds = error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    kinds.any(|cause| cause.kind() == std::io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn each_outcome_has_its_code() {
        let stop = |stop: Stop| Err(anyhow::Error::from(stop).context("more"));
        for (result, code) in [
            (Ok(Outcome::Done), 0),
            (Ok(Outcome::Partial), 1),
            (Err(anyhow!("disk full")), 1),
            (stop(Stop::Usage("x".into())), 2),
            (stop(Stop::HostLacks("x".into())), 3),
            (Ok(Outcome::Status(77)), 77),
        ] {
            assert_eq!(status(&result), code, "{result:?}");
        }
        assert_eq!(code_of(|| panic!("a bug of this test's own")), ExitCode::from(4));
        let closed = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        assert_eq!(code_of(|| Err(anyhow::Error::from(closed).context("cannot write"))), ExitCode::SUCCESS);
    }

    #[test]
    fn causes_are_printed_once() {
        let full = || anyhow!("disk full");
        for (error, words) in [
            (full(), "disk full"),
            (full().context("cannot write x"), "cannot write x: disk full"),
            (full().context("cannot write x: disk full"), "cannot write x: disk full"),
            (full().context("cannot write x: disk full").context("cannot write x"), "cannot write x: disk full"),
        ] {
            assert_eq!(in_words(&error), words);
        }
    }
}
