//! `pagefold sketch`, `place`, `fleet`, `group suggest` and `bench place`: for these, the program `pagefold-place` is
//! executed, if it is installed.

use cli::exit::{Outcome, Stop};
use service::helper;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The program that carries out these commands.
const PROGRAM: &str = "pagefold-place";

/// Arguments that it takes. It has the help, too.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    /// Arguments of pagefold-place, which --help lists
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    pub words: Vec<OsString>,
}

/// Executes `pagefold-place` in place of this process.
///
/// # Errors
/// It is not installed, or is of another build.
pub fn run(command: &[&str], words: &[OsString]) -> anyhow::Result<Outcome> {
    let command = command.iter().map(OsString::from);
    Err(become_program(PROGRAM, "cargo build --release -p place", command.chain(words.iter().cloned())))
}

/// Executes a program that is installed with this one, in place of this process. Returns only if that fails, with the
/// reason; `remedy` says how to install the program.
pub fn become_program(name: &str, remedy: &str, words: impl Iterator<Item = OsString>) -> anyhow::Error {
    match helper::program(name) {
        Ok(program) => Command::new(program).args(words).exec().into(),
        Err(e) if e.kind() == ErrorKind::NotFound => {
            Stop::HostLacks(format!("{name} is not installed: {remedy}")).into()
        }
        Err(e) => Stop::HostLacks(e.to_string()).into(),
    }
}
