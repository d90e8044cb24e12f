//! `pagefold lab`

use crate::exit::Outcome;

/// Arguments of `pagefold lab`.
#[derive(clap::Args)]
pub struct Args {}

/// Runs it.
pub fn run(_args: Args) -> anyhow::Result<Outcome> {
    Ok(Outcome::Done)
}
