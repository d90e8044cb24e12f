//! `pagefold history`: figures over time. The program `pagefold-history` keeps and reads them, so that no other program
//! is linked with SQLite.

use super::place::become_program;
use cli::exit::Outcome;
use std::ffi::OsString;

/// The program that keeps and reads figures over time.
const PROGRAM: &str = "pagefold-history";

/// Arguments that it takes. It has the help, too.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    /// Arguments of pagefold-history, which --help lists
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    words: Vec<OsString>,
}

/// Executes `pagefold-history` in place of this process.
///
/// # Errors
/// It is not installed, or is of another build.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    Err(become_program(PROGRAM, "cargo build --release -p history", args.words.iter().cloned()))
}
