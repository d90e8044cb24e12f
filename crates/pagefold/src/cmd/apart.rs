//! `pagefold lab`, `bench` and `study`, and templates of the lab's images: a program of its own does them, where it is installed.

use super::place::become_program;
use std::ffi::OsString;

/// The program.
const PROGRAM: &str = "pagefold-lab";

/// Arguments that it takes. It has the help, too.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Args {
    /// Arguments of pagefold-lab, which --help lists
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    _words: Vec<OsString>,
}

/// Becomes the program, with this command line. Returns only to tell why that is not possible.
pub fn become_lab() -> anyhow::Error {
    become_program(
        PROGRAM,
        "install the package pagefold-lab, or cargo build -p pagefold-lab",
        std::env::args_os().skip(1),
    )
}
