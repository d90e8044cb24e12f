//! `pagefold`: what every page of every guest is, who else holds the same bytes, what it costs.
#![forbid(unsafe_code)]

mod audit;
mod cmd;
mod exit;
mod inside;
mod output;
mod progress;
mod prove;
mod service;
mod size;
mod take;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Measure what VMs, containers and processes hold in memory, page by page, and what of it is held more than once.
#[derive(Parser)]
#[command(version, after_help = exit::CODES, max_term_width = 110, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// What this host and each guest allow, and why nothing merges
    Doctor(cmd::doctor::Args),
    /// Footprints of VMs, containers and processes, by the kernel's own accounting
    Guests(cmd::guests::Args),
    /// Count every page by owner, kind and content, and what of it is held more than once
    Census(cmd::census::Args),
    /// What every page of a VM is to the guest itself, who else has it, and what to do about it
    Explain(cmd::explain::Args),
    /// How many more guests like these fit
    Forecast(cmd::forecast::Args),
    /// Start a program as a member of a group, whose members share identical pages
    Run(cmd::run::Args),
    /// The service: decides who is a member, and folds
    Serve(cmd::serve::Args),
    /// Groups: which there are, how they do, how they are run
    Group(cmd::group::Args),
    /// Prove from page frames that groups share nothing with each other, and what is really saved
    Audit(cmd::audit::Args),
    /// Folds the pages of one group
    #[command(hide = true)]
    Worker(cmd::worker::Args),
    /// Tells members whether anybody else holds their pages
    #[command(hide = true)]
    Prove(cmd::prove::Args),
    /// Real guests to try Pagefold on
    Lab(cmd::lab::Args),
    /// Measure Pagefold itself
    Bench(cmd::bench::Args),
    /// A guest of a bench: holds pages until its input closes
    #[command(hide = true)]
    BenchGuest(cmd::bench::GuestArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    exit::code_of(|| match cli.command {
        Command::Doctor(args) => cmd::doctor::run(args),
        Command::Guests(args) => cmd::guests::run(args),
        Command::Census(args) => cmd::census::run(args),
        Command::Explain(args) => cmd::explain::run(&args),
        Command::Forecast(args) => cmd::forecast::run(&args),
        Command::Run(args) => cmd::run::run(&args),
        Command::Serve(args) => cmd::serve::run(args),
        Command::Group(args) => cmd::group::run(&args),
        Command::Audit(args) => cmd::audit::run(&args),
        Command::Worker(args) => cmd::worker::run(&args),
        Command::Prove(args) => cmd::prove::run(&args),
        Command::Lab(args) => cmd::lab::run(args),
        Command::Bench(args) => cmd::bench::run(args),
        Command::BenchGuest(args) => cmd::bench::run_guest(&args),
    })
}
