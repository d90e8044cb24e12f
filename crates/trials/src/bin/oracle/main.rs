//! An oracle of mappings. This program makes random operations on its memory: all that a program can make, in every
//! way that a system call can be made. After each step it knows the bytes that every page must hold, and the accesses
//! that it must allow.
//!
//! ```text
//!   seed, thread, number of the step
//!        | decide
//!        v
//!   check some pages -> one operation (ops) -> the model follows (plot) -> check again -> the plot rests
//!        |                                                                       |
//!        +------ a byte, an error or a protection that the kernel would not give-+--> exit code 1, with the seed
//! ```
//! | exit code | meaning |
//! |---|---|
//! | 0 | success, with one line of JSON |
//! | 1 | something is wrong |
//! | 2 | wrong command line |
//! | 3 | a thread makes no step for a minute |
//!
//! The program checks:
//!
//! - whole pages against the model,
//! - pages that may not be read, through `/proc/self/mem`,
//! - protections, through system calls that must answer `EFAULT`,
//! - answers of calls that are the same on every kernel.
//!
//! Threads own their plots (`plot`), and children check their copies (`ops::child`).

mod content;
mod history;
mod ops;
mod plot;
mod select;
mod senses;
mod sys;
mod tally;
mod verdict;
mod watch;
mod worker;

use clap::Parser;
use content::{Random, mix};
use select::{Selection, Term};
use std::time::{Duration, Instant};
use worker::{Plan, Worker};

/// Change memory in every way that a program can, and check all of it against a model
#[derive(Parser)]
struct Args {
    /// Threads that share the address space, each with plots of its own
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=watch::THREADS as i64))]
    threads: u8,
    /// Steps of all threads together
    #[arg(long, default_value_t = 100_000)]
    steps: u64,
    /// Seed of all decisions [default: another one each time]
    #[arg(long)]
    seed: Option<u64>,
    /// Time over which the steps are spread, so that plots rest: 0 for as fast as they can be made
    #[arg(long, default_value_t = 0.0)]
    seconds: f64,
    /// Plots of a thread
    #[arg(long, default_value_t = 40)]
    plots: usize,
    /// Most pages of a plot
    #[arg(long, default_value_t = plot::MOST as u16, value_parser = clap::value_parser!(u16).range(1..=plot::MOST as i64))]
    most_pages: u16,
    /// Make only these operations; reading and writing always goes on. A word is a class, an operation as named in the
    /// result, a way, or a way and one of the others, like raw-mapping. Classes: discard, mapping, protect, lock,
    /// advise, fork, brk, uffd. Ways: libc, function, raw
    #[arg(long, value_delimiter = ',', value_parser = select::parse)]
    only: Vec<Term>,
    /// Leave out these operations
    #[arg(long, value_delimiter = ',', value_parser = select::parse)]
    without: Vec<Term>,
    /// Seconds without a step after which a thread hangs
    #[arg(long, default_value_t = 60)]
    patience: u64,
}

fn main() {
    let args = Args::parse();
    let seed = args.seed.unwrap_or_else(unforeseen);
    verdict::init(seed);
    verdict::say(&format!("oracle {}: seed {seed}\n", std::process::id()));
    std::panic::set_hook(Box::new(|info| verdict::fail(&format!("{info}"))));
    watch::install();
    content::init();
    ops::fork::init();
    ops::brk::keep_allocator_off();
    let selection = Selection::new(&args.only, &args.without);
    let plan = Plan {
        seed,
        steps: args.steps / u64::from(args.threads),
        time: (args.seconds > 0.0).then(|| Duration::from_secs_f64(args.seconds)),
        plots: args.plots,
        most_pages: args.most_pages.into(),
        userfaults: ops::by_name("uffd").filter(|n| selection.has(*n)).and_then(|_| ops::uffd::open()),
        selection,
    };
    let began = Instant::now();
    run(&plan, args.threads.into(), Duration::from_secs(args.patience));
    let steps = plan.steps * u64::from(args.threads);
    println!("{}", tally::line(seed, args.threads.into(), steps, began.elapsed().as_secs_f64()));
}

/// Runs the threads to their end. Ends the process if one makes no step for `patience`.
fn run(plan: &Plan, threads: usize, patience: Duration) {
    std::thread::scope(|scope| {
        let living: Vec<_> = (0..threads).map(|n| scope.spawn(move || Worker::new(plan, n).live())).collect();
        watch::watch(patience, || living.iter().all(|thread| thread.is_finished()));
    });
}

/// A seed that differs from run to run.
#[expect(clippy::disallowed_methods, reason = "a seed, not a time")]
fn unforeseen() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock");
    Random::new(now.as_nanos() as u64 ^ mix(u64::from(std::process::id()))).next()
}
