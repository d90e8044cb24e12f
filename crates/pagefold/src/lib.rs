//! The commands of `pagefold`, one file each in `cmd`. `pagefold-lab` uses some of them, and generates manual pages for
//! all.
#![forbid(unsafe_code)]

mod cmd;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::process::ExitCode;

pub use cmd::place::run as become_place;
pub use cmd::room::Room;
pub use cmd::template;

/// Measure what VMs, containers and processes hold in memory, page by page, and what of it is held more than once.
#[derive(Parser)]
#[command(version = cli::version(), max_term_width = 110, propagate_version = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Requirements that this host and each guest meet, and why nothing merges
    Doctor(cmd::doctor::Args),
    /// Footprints of VMs, containers and processes, by the kernel's own accounting
    Guests(cmd::guests::Args),
    /// Count every page by owner, kind and content, and what of it is held more than once
    Census(cmd::census::Args),
    /// Each page of a VM by its use inside the guest, the others that have it, and what to do about it
    Explain(cmd::explain::Args),
    /// How many more guests like these fit
    Forecast(cmd::forecast::Args),
    /// Whether further guests fit, with a promise of memory
    Admit(cmd::admit::Args),
    /// Start a program as a member of a group, whose members share identical pages
    Run(cmd::run::Args),
    /// Make a process that runs already a member of a group
    Attach(cmd::attach::AttachArgs),
    /// End the membership of a process that was attached, and leave it as it was before
    Detach(cmd::attach::DetachArgs),
    /// Make all pages private again, and leave attached processes
    Stop(cmd::stop::Args),
    /// Rules by which running processes become members
    Enrol(cmd::enrol::Args),
    /// The service: decides who is a member, and folds
    Serve(cmd::serve::Args),
    /// The service's configuration
    Config(cmd::config::Args),
    /// Groups: which there are, how they do, how they are run
    Group(cmd::group::Args),
    /// Guests and groups as they change: who shares with whom, what folding saves and costs
    Top(cmd::top::Args),
    /// Figures of groups and members over time, where [history] is configured
    History(cmd::history::Args),
    /// Prove from page frames that groups share nothing with each other, and what is really saved
    Audit(cmd::audit::Args),
    /// The journal: who has changed what
    Journal(cmd::journal::Args),
    /// Memory between guests: what each has, should have, and gets
    Balance(cmd::balance::Args),
    /// The kernel's own merger, driven by need, on a host of one trust domain
    Ksm(cmd::ksm::Args),
    /// A row per guest: counts of its pages, and a sketch of their contents, for plans over many hosts
    Sketch(cmd::place::Args),
    /// Where guests of many hosts should live, by their sketches
    Place(cmd::place::Args),
    /// Memory of guests of many hosts, and what folding saves where they are, by their sketches
    Fleet(cmd::place::Args),
    /// Have a guest stand still, with as little memory as may be
    Park(cmd::park::ParkArgs),
    /// Have a parked guest go on
    Wake(cmd::park::WakeArgs),
    /// Move a VM to another host while it runs
    Migrate(cmd::migrate::Args),
    /// Guests as files, from which clones are started
    Template(cmd::template::Args),
    /// Start guests from a template, each another than its siblings
    Clone(cmd::clone::CloneArgs),
    /// Clones that live
    Clones(cmd::clone::ClonesArgs),
    /// Put a clone back to where its template stood
    Rollback(cmd::clone::RollbackArgs),
    /// Write a clone to a file
    Save(cmd::clone::SaveArgs),
    /// Go on with a clone that was saved
    Restore(cmd::clone::RestoreArgs),
    /// Real guests to try Pagefold on
    Lab(cmd::apart::Args),
    /// Measure Pagefold itself
    Bench(cmd::apart::Args),
    /// Repeat experiments of papers on this host, and get a verdict for each prediction
    Study(cmd::apart::Args),
}

/// The whole command line.
pub fn command() -> clap::Command {
    with_exit_codes(Cli::command())
}

/// A command and those below it, each with the exit codes at the end of its help.
pub fn with_exit_codes(command: clap::Command) -> clap::Command {
    let before = command.get_after_help().map_or_else(String::new, |help| format!("{help}\n\n"));
    command.after_help(before + cli::exit::CODES).mut_subcommands(with_exit_codes)
}

/// Runs the command of this process's arguments.
pub fn main() -> ExitCode {
    let arguments = command().get_matches();
    let cli = Cli::from_arg_matches(&arguments).unwrap_or_else(|error| error.exit());
    cli::exit::code_of(|| match cli.command {
        Command::Doctor(args) => cmd::doctor::run(args),
        Command::Guests(args) => cmd::guests::run(args),
        Command::Census(args) => cmd::census::run(args),
        Command::Explain(args) => cmd::explain::run(&args),
        Command::Forecast(args) => cmd::forecast::run(&args),
        Command::Admit(args) => cmd::admit::run(&args),
        Command::Run(args) => cmd::run::run(&args),
        Command::Attach(args) => cmd::attach::attach(&args),
        Command::Detach(args) => cmd::attach::detach(&args),
        Command::Stop(args) => cmd::stop::run(&args),
        Command::Enrol(args) => cmd::enrol::run(&args),
        Command::Serve(args) => cmd::serve::run(&args),
        Command::Config(args) => cmd::config::run(&args),
        Command::Group(args) => cmd::group::run(&args),
        Command::Top(args) => cmd::top::run(&args),
        Command::History(args) => cmd::history::run(&args),
        Command::Audit(args) => cmd::audit::run(&args),
        Command::Journal(args) => cmd::journal::run(&args),
        Command::Balance(args) => cmd::balance::run(&args),
        Command::Ksm(args) => cmd::ksm::run(&args),
        Command::Park(args) => cmd::park::park(&args),
        Command::Wake(args) => cmd::park::wake(&args),
        Command::Migrate(args) => cmd::migrate::run(&args),
        Command::Sketch(args) => cmd::place::run(&["sketch"], &args.words),
        Command::Place(args) => cmd::place::run(&["place"], &args.words),
        Command::Fleet(args) => cmd::place::run(&["fleet"], &args.words),
        Command::Template(args) => cmd::template::run(&args),
        Command::Clone(args) => cmd::clone::clone(&args),
        Command::Clones(args) => cmd::clone::clones(&args),
        Command::Rollback(args) => cmd::clone::roll_back(&args),
        Command::Save(args) => cmd::clone::save(&args),
        Command::Restore(args) => cmd::clone::restore(&args),
        Command::Lab(_) | Command::Bench(_) | Command::Study(_) => Err(cmd::apart::become_lab()),
    })
}
