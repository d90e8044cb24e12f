//! Exit codes: what they mean, and how a command's outcome becomes one.

use crate::output::say;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

/// For the end of `--help`.
pub const CODES: &str = "\
Exit codes: 0 done; 1 done in part or not at all, stderr says what is missing; 2 usage;
3 this host lacks something, stderr says what and how to get it; 4 a bug in pagefold";

/// The code for a host that lacks something.
pub const HOST_LACKS: u8 = 3;

/// How a command that ran to its end went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything that was asked.
    Done,
    /// Not everything; the command has said what is missing on stderr.
    Partial,
    /// A command that was run for the user ended with this status, which becomes ours.
    Status(u8),
}

/// An error that is not the plain "could not be done".
#[derive(Debug, thiserror::Error)]
pub enum Stop {
    /// The call cannot mean anything.
    #[error("{0}")]
    Usage(String),
    /// The host lacks a feature, a right or a program.
    #[error("{0}")]
    HostLacks(String),
}

/// Runs a command and says how it went.
pub fn code_of(command: impl FnOnce() -> anyhow::Result<Outcome>) -> ExitCode {
    // A panic prints its message and place through the default hook before it arrives here.
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
    ExitCode::from(match error.downcast_ref::<Stop>() {
        Some(Stop::Usage(_)) => 2,
        Some(Stop::HostLacks(_)) => HOST_LACKS,
        None => 1,
    })
}

/// An error and its causes, each said once: many name their cause themselves.
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

/// Whoever reads our output has seen enough, as `head` does.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let mut kinds = error.chain().filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    kinds.any(|cause| cause.kind() == std::io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn causes_are_said_once() {
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
