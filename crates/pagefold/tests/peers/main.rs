//! Other people's programs, each run without Pagefold and as a member that is folded as fast as can be: their outcomes
//! must be the same.
//!
//! ```text
//!   ./x peers [NAME ...] [--short] [--json]    programs by name, or all; a table or JSON
//!             [--attach]                       attached while they run, and not started as members
//!   ./x test                                   those of the short list, as tests
//! ```
//!
//! A program's recipe (`fn(&Side) -> Value`) runs it on one side and returns what must be equal on both: digests, verdicts
//! of its own tests, counts. A failure inside is a panic. A program that is not installed is skipped with the package's
//! name.

#[path = "../common/mod.rs"]
mod common;

mod attach;
mod databases;
mod guests;
mod kernel;
mod rig;
mod runtimes;
mod table;
mod tools;
mod web;

use clap::Parser;
use rig::{Peer, Verdict};
use std::process::ExitCode;

/// All programs.
const PEERS: &[Peer] = &[
    kernel::SELFTESTS,
    kernel::STRESS,
    runtimes::GO,
    runtimes::JAVA,
    runtimes::ZGC,
    runtimes::NODE,
    runtimes::PYTHON,
    databases::REDIS,
    databases::SQLITE,
    databases::MARIADB,
    databases::POSTGRES,
    web::APACHE,
    web::PHP_FPM,
    tools::GIT,
    tools::GCC,
    guests::BALLOON,
    guests::PLUG,
    guests::LOCKED,
    guests::SNAPSHOT,
    guests::MIGRATE,
];

/// Run other people's programs without Pagefold and as members, and compare the outcomes.
#[derive(Parser)]
#[command(
    name = "./x peers",
    after_help = "Exit codes: 0 all are the same; 1 some are not; 2 usage; 3 not here: packages, root"
)]
struct Args {
    /// Programs [default: all]
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Only the short list, which is part of ./x test
    #[arg(long)]
    short: bool,
    /// Attach programs while they run: servers and their forked children are detached again before they are checked
    #[arg(long)]
    attach: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// List the programs
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1).peekable();
    // `./x peers` begins its arguments with this word. Otherwise this is a test program of cargo's, with the arguments of those.
    if words.next_if(|word| word == "peers").is_some() {
        return by_hand(&Args::parse_from(["./x peers".into()].into_iter().chain(words)));
    }
    as_tests(&words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>())
}

fn by_hand(args: &Args) -> ExitCode {
    if args.list {
        table::list(PEERS);
        return ExitCode::SUCCESS;
    }
    if let Some(unknown) = args.names.iter().find(|name| PEERS.iter().all(|peer| peer.name != **name)) {
        eprintln!("there is no program {unknown:?} here: see ./x peers --list");
        return ExitCode::from(2);
    }
    if common::service::cannot_fold() {
        return ExitCode::from(3);
    }
    let wanted = |peer: &&Peer| {
        if args.names.is_empty() {
            !args.short || peer.is_short
        } else {
            args.names.iter().any(|name| name == peer.name)
        }
    };
    // A run of many minutes that is interrupted has told of what is done.
    let say = |line: String| if args.json { eprintln!("{line}") } else { println!("{line}") };
    say(table::head());
    let judged = |peer| {
        let verdict = rig::judge(peer, args.short, args.attach);
        say(table::row(&verdict));
        verdict
    };
    let verdicts: Vec<Verdict> = PEERS.iter().filter(wanted).map(judged).collect();
    if args.json {
        println!("{}", serde_json::to_string_pretty(&verdicts).expect("JSON"));
    }
    match verdicts.iter().any(|verdict| verdict.ok == Some(false)) {
        true => ExitCode::FAILURE,
        false => ExitCode::SUCCESS,
    }
}

/// Runs the short list as the standard test harness would, and prints what that prints.
fn as_tests(words: &[String]) -> ExitCode {
    let filters: Vec<&String> = words.iter().filter(|word| !word.starts_with('-')).collect();
    let wanted =
        |peer: &&Peer| peer.is_short && (filters.is_empty() || filters.iter().any(|filter| peer.name == **filter));
    let wanted: Vec<&Peer> = PEERS.iter().filter(wanted).collect();
    if words.iter().any(|word| word == "--list") {
        // None is ignored, and a runner asks for those apart.
        let shown = wanted.iter().filter(|_| !words.iter().any(|word| word == "--ignored"));
        shown.for_each(|peer| println!("{}: test", peer.name));
        return ExitCode::SUCCESS;
    }
    println!("\nrunning {} tests", wanted.len());
    if common::not_root() {
        return ExitCode::SUCCESS;
    }
    let verdicts: Vec<Verdict> = wanted.iter().map(|peer| rig::judge(peer, true, false)).collect();
    table::as_tests(&verdicts);
    match verdicts.iter().any(|verdict| verdict.ok == Some(false)) {
        true => ExitCode::from(101),
        false => ExitCode::SUCCESS,
    }
}
