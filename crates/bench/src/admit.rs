//! `pagefold bench admit`: random requests to admit guests, ends of guests, changes of the memory that they use, and
//! break storms, on a simulated host. What is decided is decided by the crate `balance`, as on a real host. The time of
//! an answer is measured apart from the simulation, with the files that a service with 500 guests keeps.

mod host;
mod world;

use self::world::{Seen, World};
use ::host::ProcessId;
use api::promise::{self, Asked, Look, Promises};
use balance::{Assurance, Standing, Wanted};
use cli::exit::Outcome;
use cli::journal::By;
use cli::output;
use serde::Serialize;
use std::time::{Duration, Instant};

/// Guests in the files of the service by which the time of an answer is measured.
const MEMBERS: usize = 500;
/// Number of answers whose time is measured.
const ANSWERS: usize = 1000;

/// Arguments of `pagefold bench admit`.
#[derive(clap::Args)]
pub struct Args {
    /// Guests or small batches that ask to be admitted
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    asked: u32,
    /// The policy: strict, likely or none
    #[arg(long, value_name = "POLICY", default_value = "strict", value_parser = parse)]
    policy: Assurance,
    /// Start of the random numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn parse(text: &str) -> Result<Assurance, String> {
    Assurance::named(text).ok_or_else(|| format!("there is no policy {text:?}"))
}

/// Figures of a run.
#[derive(Serialize)]
struct Shown {
    /// The policy of admission.
    policy: &'static str,
    /// `true`: guests, balloons and storms are simulated, and the decisions are the balancer's own.
    simulated: bool,
    #[serde(flatten)]
    seen: Seen,
    /// Median time of an answer, by the files of a service in a directory for temporary files.
    p50_ms: f64,
    /// 99th percentile of these times.
    p99_ms: f64,
    /// Guests in these files.
    members: usize,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let seen = World::new(args.policy, args.seed).run(args.asked);
    let took = times()?;
    let ms = |at: usize| took[at].as_secs_f64() * 1000.0;
    let (p50_ms, p99_ms) = (ms(ANSWERS / 2), ms(ANSWERS * 99 / 100));
    let is_good = seen.kills == 0 && seen.swap_bytes == 0 && seen.below_guarantee == 0;
    let shown = Shown { policy: args.policy.name(), simulated: true, seen, p50_ms, p99_ms, members: MEMBERS };
    if args.json {
        output::line(serde_json::to_string_pretty(&shown)?)?;
    } else {
        let Seen { admitted, by_limits, kills, swap_bytes, below_guarantee, refused, .. } = &shown.seen;
        output::line(format_args!(
            "simulated, {}: {admitted} guests at once, {by_limits} by their limits; {refused} refused; {kills} killed, {} swapped, \
             {below_guarantee} below their guarantee\nanswers with {MEMBERS} members: p50 {p50_ms:.2} ms, p99 {p99_ms:.2} ms",
            shown.policy,
            cli::bytes(*swap_bytes)
        ))?;
    }
    Ok(if is_good { Outcome::Done } else { Outcome::Partial })
}

/// Times of `ANSWERS` answers, in ascending order.
fn times() -> anyhow::Result<Vec<Duration>> {
    let dir = std::env::temp_dir().join(format!("pagefold-bench-admit-{}", std::process::id()));
    let took = times_in(&dir);
    let _ = std::fs::remove_dir_all(&dir);
    took
}

fn times_in(dir: &std::path::Path) -> anyhow::Result<Vec<Duration>> {
    let guest = |n: usize| balance::Seen {
        id: format!("qemu:guest-{n}"),
        name: format!("guest-{n}"),
        group: format!("group-{}", n % 20),
        ram_bytes: 512 << 20,
        age_s: 1000,
        ..balance::Seen::default()
    };
    let standing = Standing {
        total_bytes: u64::MAX,
        available_bytes: u64::MAX,
        guests: (0..MEMBERS).map(guest).collect(),
        ..Standing::default()
    };
    let look = Look {
        boot: ::host::boot_id()?,
        balancer: ProcessId::of(std::process::id())?,
        began_ms: ::host::boot_clock_ms(),
        every_s: 3600,
        within: None,
        assurance: Assurance::Strict,
        standing,
    };
    let patience = Duration::from_secs(10);
    let mut took = Vec::new();
    for n in 0..ANSWERS {
        // As many promises as a busy scheduler has under way.
        if n % 50 == 0 {
            let look = Look { began_ms: ::host::boot_clock_ms(), ..look.clone() };
            Promises::lock(dir, patience)?.keep(&look, |_| true)?;
        }
        let wanted = Wanted { like: Some("guest-7".into()), memory_bytes: Some(4096), guests: 1, ..Wanted::default() };
        let asked = Asked { wanted, hold_s: 60, ..Asked::default() };
        let began = Instant::now();
        promise::ask(dir, &asked, &By::this_process(), patience)?;
        took.push(began.elapsed());
    }
    took.sort_unstable();
    Ok(took)
}
