//! `pagefold bench`: Pagefold measured against what it is made of, in one run.

use crate::exit::Outcome;
use clap::Subcommand;

mod census;
mod synthetic;

pub use synthetic::GuestArgs;

/// Arguments of `pagefold bench`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// The census against plain hashing and copying of the same bytes
    Census(census::Args),
}

/// Runs it.
pub fn run(args: Args) -> anyhow::Result<Outcome> {
    match args.what {
        What::Census(args) => census::run(&args),
    }
}

/// Runs one synthetic guest of a bench.
pub fn run_guest(args: &GuestArgs) -> anyhow::Result<Outcome> {
    synthetic::hold(args)
}
