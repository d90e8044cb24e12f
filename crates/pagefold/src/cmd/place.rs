//! `pagefold sketch`, `place`, `fleet`, `group suggest` and `bench place`: a program of its own does them, where it is installed.

use cli::exit::{Outcome, Stop};
use service::helper;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The program.
const PROGRAM: &str = "pagefold-place";

/// Arguments that it takes. It has the help, too.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    /// Arguments of pagefold-place, which --help lists
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    pub words: Vec<OsString>,
}

/// Becomes the program.
pub fn run(command: &[&str], words: &[OsString]) -> anyhow::Result<Outcome> {
    let program = helper::program(PROGRAM).map_err(|e| match e.kind() {
        ErrorKind::NotFound => Stop::HostLacks(format!("{PROGRAM} is not installed: cargo build --release -p place")),
        _ => Stop::HostLacks(e.to_string()),
    })?;
    Err(Command::new(program).args(command).args(words).exec().into())
}
