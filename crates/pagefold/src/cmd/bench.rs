//! `pagefold bench`: Pagefold measured against what it is made of, in one run.

use crate::exit::Outcome;
use clap::Subcommand;

mod census;
mod insight;
mod ksm;
mod median;
mod synthetic;

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
    /// What split huge pages cost a program that is bound by memory, and what comes back
    Huge(ksm::HugeArgs),
    /// Looking into running VMs, against a plain read of what describes their frames
    Insight(insight::Args),
    /// Folding against the kernel's own merger (ksmd), with the same guests
    Ksm(ksm::Args),
}

/// Arguments of the hidden command that a bench starts its processes with.
#[derive(clap::Args)]
pub struct GuestArgs {
    #[command(subcommand)]
    what: GuestOf,
}

#[derive(Subcommand)]
enum GuestOf {
    /// Hold pages until input closes
    Hold(synthetic::HoldArgs),
    /// Hold pages that may be merged
    Mergeable(ksm::MergeableArgs),
    /// Measure from inside what merging does to a guest
    Probe,
    /// Walk about in memory
    Walk(ksm::WalkArgs),
    /// Put everything back when the bench has ended
    Guard,
}

/// Runs it.
pub fn run(args: Args) -> anyhow::Result<Outcome> {
    match args.what {
        What::Census(args) => census::run(&args),
        What::Huge(args) => ksm::run_huge(&args),
        What::Insight(args) => insight::run(&args),
        What::Ksm(args) => ksm::run(&args),
    }
}

/// Runs one process of a bench.
pub fn run_guest(args: &GuestArgs) -> anyhow::Result<Outcome> {
    match &args.what {
        GuestOf::Hold(args) => synthetic::hold(args),
        GuestOf::Mergeable(args) => ksm::hold(args),
        GuestOf::Probe => ksm::probe(),
        GuestOf::Walk(args) => ksm::walk(args),
        GuestOf::Guard => ksm::guard(),
    }
}
