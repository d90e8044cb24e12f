//! `pagefold-place`: sketches of guests' contents, and where guests should live. `pagefold sketch`, `place`, `fleet`,
//! `group suggest` and `bench place` start it, so it calls itself `pagefold` in its help.
#![forbid(unsafe_code)]

mod command;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use cli::exit;
use std::process::ExitCode;

/// Sketches of what guests hold, and where they should live
#[derive(Parser)]
#[command(name = "pagefold-place", bin_name = "pagefold", version = cli::version(), max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// A row per guest: counts of its pages, and a sketch of their contents that tells nothing without its group's key
    Sketch(command::sketch::Args),
    /// Where guests should live, by the sketches of many hosts
    Place(command::place::Args),
    /// Memory of the guests of many hosts, and what folding saves where they are
    Fleet(command::fleet::Args),
    /// Groups
    #[command(subcommand)]
    Group(Group),
    /// Measure
    #[command(subcommand)]
    Bench(Bench),
    /// Memory of one guest, for pagefold migrate --dry-run
    #[command(hide = true)]
    Weigh(command::weigh::Args),
    /// Means of guests by kind, for simulated fleets
    #[command(hide = true)]
    Kinds(command::bench::KindsArgs),
}

#[derive(Subcommand)]
enum Group {
    /// Which groups of this host would save most if they were one, and what they would let each other learn
    Suggest(command::suggest::Args),
}

#[derive(Subcommand)]
enum Bench {
    /// Plans for a simulated fleet: hosts that each policy needs, and how long a plan takes
    Place(command::bench::Args),
}

/// A command and those below it, each with the exit codes at the end of its help.
fn with_exit_codes(command: clap::Command) -> clap::Command {
    let before = command.get_after_help().map_or_else(String::new, |help| format!("{help}\n\n"));
    command.after_help(before + exit::CODES).mut_subcommands(with_exit_codes)
}

fn main() -> ExitCode {
    let arguments = with_exit_codes(Cli::command()).get_matches();
    let cli = Cli::from_arg_matches(&arguments).unwrap_or_else(|error| error.exit());
    exit::code_of(|| match cli.command {
        Command::Sketch(args) => command::sketch::run(&args),
        Command::Place(args) => command::place::run(&args),
        Command::Fleet(args) => command::fleet::run(&args),
        Command::Group(Group::Suggest(args)) => command::suggest::run(&args),
        Command::Bench(Bench::Place(args)) => command::bench::run(&args),
        Command::Weigh(args) => command::weigh::run(&args),
        Command::Kinds(args) => command::bench::kinds(&args),
    })
}
