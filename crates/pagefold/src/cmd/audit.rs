//! `pagefold audit`: the proof from page frames.

use crate::exit::Outcome;

/// Arguments of `pagefold audit`.
#[derive(clap::Args)]
pub struct Args {}

/// Runs it.
pub fn run(_: &Args) -> anyhow::Result<Outcome> {
    Ok(Outcome::Done)
}
