//! Exit codes: their meaning, and the code for a command's outcome.

use crate::say;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

/// Explanation of the exit codes, for the end of `--help`.
pub const CODES: &str = "\
Exit codes: 0 done; 1 done in part or not at all, stderr says what is missing; 2 usage;
3 this host lacks something, stderr says what and how to get it; 4 a bug in pagefold";

/// Exit code for a host that lacks a feature, a right or a program.
pub const HOST_LACKS: u8 = 3;

/// Outcome of a command that ran to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The command has done everything that was asked.
    Done,
    /// The command has not done everything, and has said on stderr what is missing.
    Partial,
    /// A command that was run for the user ended with this status, which becomes ours.
    Status(u8),
}

/// An error with an exit code of its own; other errors get the code 1.
#[derive(Debug, thiserror::Error)]
pub enum Stop {
    /// The arguments do not make sense.
    #[error("{0}")]
    Usage(String),
    /// The host lacks a feature, a right or a program.
    #[error("{0}")]
    HostLacks(String),
}

/// Runs a command, prints its error if it fails, and returns its exit code.
pub fn code_of(command: impl FnOnce() -> anyhow::Result<Outcome>) -> ExitCode {
    // The default hook has printed the panic's message and place before it arrives here.
    let Ok(result) = catch_unwind(AssertUnwindSafe(command)) else {
        say!("pagefold: this is a bug in pagefold; please report the message above");
        return ExitCode::from(4);
    };
    let error = match result {
        Ok(Outcome::Done) => return ExitCode::SUCCESS,
        Ok(Outcome::Partial) => return ExitCode::from(1),
        Ok(Outcome::Status(status)) => return ExitCode::from(status),
        Err(error) => error,
    };
    if is_closed_pipe(&error) {
        return ExitCode::SUCCESS;
    }
    say!("pagefold: {}", in_words(&error));
    ExitCode::from(match error.chain().find_map(|cause| cause.downcast_ref::<Stop>()) {
        Some(Stop::Usage(_)) => 2,
        Some(Stop::HostLacks(_)) => HOST_LACKS,
        None => 1,
    })
}

/// An error and its causes. Many errors name their cause themselves, so each cause is printed only once.
fn in_words(error: &anyhow::Error) -> String {
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
