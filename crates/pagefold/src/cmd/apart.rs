//! `pagefold lab`, `bench` and `study`, and templates of the lab's images: for these, the program `pagefold-lab` is
//! executed, if it is installed.

use super::place::become_program;
use std::ffi::OsString;

/// The program that carries out these commands.
const PROGRAM: &str = "pagefold-lab";

/// Arguments that it takes. It has the help, too.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    /// Arguments of pagefold-lab, which --help lists
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    _words: Vec<OsString>,
}

/// Executes `pagefold-lab` in place of this process, with the same arguments. Returns only if that fails, with the
/// reason.
pub fn become_lab() -> anyhow::Error {
    become_program(
        PROGRAM,
        "install the package pagefold-lab, or cargo build -p pagefold-lab",
        std::env::args_os().skip(1),
    )
}
