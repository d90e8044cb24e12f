//! `pagefold-lab`: real guests to try Pagefold on, benches and studies. `pagefold lab`, `bench`, `study` and
//! `template create --image` start it, so it calls itself `pagefold` in its help.
#![forbid(unsafe_code)]

mod cmd;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use cli::exit::{Outcome, Stop};
use std::process::ExitCode;

/// The program that this one starts for other commands, such as folding the lab's guests.
const PAGEFOLD: &str = "pagefold";

/// Real guests to try Pagefold on, and Pagefold measured
#[derive(Parser)]
#[command(name = "pagefold-lab", bin_name = "pagefold", version = cli::version(), max_term_width = 110, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Real guests to try Pagefold on
    Lab(cmd::lab::Args),
    /// Measure Pagefold itself
    Bench(bench::Args),
    /// Repeat experiments of papers on this host, and get a verdict for each prediction
    Study(study::Args),
    /// Guests as files, from which clones are started: of the lab's images
    #[command(hide = true)]
    Template(commands::template::Args),
    /// Write manual pages and completions of shells
    #[command(hide = true)]
    Generate(cmd::generate::Args),
    /// A process of a study
    #[command(hide = true)]
    StudyGuest(study::GuestArgs),
    /// A guest of a bench: holds pages until its input closes
    #[command(hide = true)]
    BenchGuest(bench::GuestArgs),
}

fn main() -> ExitCode {
    let arguments = commands::with_exit_codes(Cli::command()).get_matches();
    let cli = Cli::from_arg_matches(&arguments).unwrap_or_else(|error| error.exit());
    cli::exit::code_of(|| run(cli.command))
}

fn run(command: Command) -> anyhow::Result<Outcome> {
    match command {
        Command::Generate(args) => return cmd::generate::run(&args, Cli::command()),
        Command::StudyGuest(args) => return study::run_guest(&args),
        Command::BenchGuest(args) => return bench::run_guest(&args),
        _ => {}
    }
    let pagefold =
        service::helper::program(PAGEFOLD).map_err(|e| Stop::HostLacks(format!("cannot find {PAGEFOLD}: {e}")))?;
    cli::use_pagefold(pagefold);
    match command {
        Command::Lab(args) => cmd::lab::run(args),
        Command::Bench(args) => bench::run(args, |words| commands::become_place(&["bench", "place"], words)),
        Command::Study(args) => study::run(&args),
        Command::Template(args) => commands::template::run_with(&args, &cmd::template::of_image),
        Command::Generate(_) | Command::StudyGuest(_) | Command::BenchGuest(_) => unreachable!("it has run"),
    }
}
