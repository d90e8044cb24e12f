//! Checks of the source tree: `./x structure`, `./x words`, `./x figures` and `./x formats`. Also `./x test`, and
//! `./x bench guard`.
//!
//! ```text
//!  .rs files --> rust (tokens, comments) ----------------------------------> words: findings
//!  .md files ----------------------------------------------------------------^
//!  cargo metadata, table in ARCHITECTURE.md, .rs files --------------------> structure: rooms, problems
//!  .rs files --> rust (tokens) --> formats::types --------------------------> formats: tables in docs/formats.md
//!  raw output of benches in docs/figures ----------------------------------> figures: tables in docs/performance.md
//!  output of a bench, docs/figures/guard.json -----------------------------> guard: whether folding costs more
//! ```
//!
//! All run in the root of the repository. The exit code is 0 if nothing was found, 1 if something was, and 2 if the
//! check itself failed.
#![forbid(unsafe_code)]

mod figures;
mod files;
mod formats;
mod graph;
mod guard;
mod markers;
mod rust;
mod structure;
mod suite;
mod words;

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Parser;

/// The command line.
#[derive(Parser)]
#[command(about = "Checks of the source tree")]
enum Command {
    /// Rooms, their sizes and dependencies, cycles, and long functions
    Structure {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Run tests, and say how many passed, failed and were skipped
    Test {
        /// Write the results to this file, as JSON
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// Which tests, as `cargo nextest run` takes them [default: all]
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// Rules for words in comments, names and Markdown files
    Words {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Files and directories to check; everything if there are none
        paths: Vec<String>,
    },
    /// Tables of docs/performance.md, from raw output of benches in docs/figures
    Figures {
        /// Write nothing, and fail if a table differs
        #[arg(long)]
        check: bool,
    },
    /// Tables of docs/formats.md, from the types that are printed as JSON
    Formats {
        /// Write nothing, and fail if a table differs
        #[arg(long)]
        check: bool,
    },
    /// Cost of folding beside that of the last record in docs/figures/guard.json
    Guard {
        /// Output of `pagefold bench ksm --json`
        output: PathBuf,
        /// The day
        #[arg(long)]
        date: String,
        /// The commit that was measured
        #[arg(long)]
        commit: String,
        /// Add a record
        #[arg(long)]
        write: bool,
    },
}

fn main() -> ExitCode {
    match run(&Command::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Runs one check, prints its result, and says whether the tree passes.
fn run(command: &Command) -> Result<bool> {
    let root = Path::new(".");
    ensure!(root.join("ARCHITECTURE.md").exists(), "no ARCHITECTURE.md here: run ./x in the root of the repository");
    match command {
        Command::Structure { json } => {
            let structure = structure::read(root)?;
            print(&if *json { to_json(&structure)? } else { structure.to_string() })?;
            Ok(structure.problems.is_empty())
        }
        Command::Test { json, words } => {
            let summary = suite::run(words, json.as_deref())?;
            print(&summary.to_string())?;
            Ok(summary.is_good())
        }
        Command::Words { json, paths } => {
            let findings = words::check(root, paths)?;
            print(&words::told(&findings, *json)?)?;
            Ok(findings.is_empty())
        }
        Command::Figures { check } => {
            let report = figures::update(root, *check)?;
            print(&report.to_string())?;
            Ok(!*check || report.stale.is_empty())
        }
        Command::Formats { check } => {
            let stale = formats::update(root, *check)?;
            print(&formats::told(&stale, *check))?;
            Ok(!*check || stale.is_empty())
        }
        Command::Guard { output, date, commit, write } => {
            let report = guard::compare(root, output, (date, commit), *write)?;
            print(&report.to_string())?;
            Ok(report.is_good())
        }
    }
}

fn to_json(value: &impl serde::Serialize) -> Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// Prints to stdout. A reader that hangs up early is no error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to stdout"),
    }
}
