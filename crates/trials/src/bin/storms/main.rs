//! Storms: programs that do one thing to their memory, or to processes, as fast as they can. `pagefold bench overhead`
//! runs them as members and not as members, and compares the times.
//!
//! | storm | unit of work |
//! |---|---|
//! | `allocate` | `malloc` of 4 KiB to 4 MiB, a write to each page, `free` of an older block |
//! | `discard` | `madvise(MADV_DONTNEED)` of a piece of folded memory, and a write to each of its pages |
//! | `fork` | a fork of a process with many short folded runs; the child ends at once |
//! | `threads` | a thread that is created and joined |
//! | `walk` | a step in memory that waits for the step before; a quarter of the memory is written, too |
//!
//! All calls are made through the C library, as by other programs, so the time includes a member's hooks of its
//! functions. A storm ends with a line of JSON: `{"units": N, "seconds": S, "folded_pages": F}`. The seconds are those
//! of the storm alone, without the wait until memory is folded (`--await-folded`).

mod area;
mod storm;

use anyhow::{Context, bail};
use area::Area;
use clap::{Parser, ValueEnum};
use std::time::{Duration, Instant};

/// Time limit for memory to be folded: 60 s.
const PATIENCE: Duration = Duration::from_secs(60);

/// Do one thing as fast as can be.
#[derive(Parser)]
struct Args {
    /// The thing to do
    storm: Kind,
    /// Units of work; of `discard`, passes over the memory
    #[arg(long)]
    units: u64,
    /// Pages that must be folded before the storm begins
    #[arg(long, default_value_t = 0)]
    await_folded: u64,
    /// Seconds of rest between two passes of `discard`
    #[arg(long, default_value_t = 0)]
    rest: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    Allocate,
    Discard,
    Fork,
    Threads,
    Walk,
}

/// The outcome of a storm.
#[derive(Default)]
pub struct Done {
    units: u64,
    time: Duration,
    /// Pages that were folded when it began; of `discard`, on average over passes.
    folded_pages: u64,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let done = match args.storm {
        Kind::Allocate => storm::allocate(args.units),
        Kind::Discard => storm::discard(args.units, args.await_folded, Duration::from_secs(args.rest)),
        Kind::Fork => storm::fork(args.units, args.await_folded),
        Kind::Threads => storm::threads(args.units),
        Kind::Walk => storm::walk(args.units, args.await_folded),
    }?;
    let (units, seconds, folded_pages) = (done.units, done.time.as_secs_f64(), done.folded_pages);
    println!("{}", serde_json::json!({"units": units, "seconds": seconds, "folded_pages": folded_pages}));
    Ok(())
}

/// Waits until at least this many pages of the memory are folded. Returns how many are.
fn await_folded(area: &Area, pages: u64) -> anyhow::Result<u64> {
    let end = Instant::now() + PATIENCE;
    loop {
        let folded = area.folded_pages().context("cannot count folded pages")?;
        if folded >= pages {
            return Ok(folded);
        }
        if Instant::now() > end {
            bail!("{folded} pages are folded after {} s, and not {pages}", PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
