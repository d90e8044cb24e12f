//! `pagefold bench ksm`: Pagefold and the kernel's own merger with the same guests, in turns.
//!
//! ```text
//!   ksmd:     guests start -> idle -> run=1 -------> stable -> idle for a while -> the prober's questions -> all end
//!   pagefold: guests start -> idle -> fold=on -----> stable -> idle for a while -> the prober's questions -> all end
//!                                     |<- sampled ->|          CPU per second      reaction, breaks, stalls
//! ```
//! Both sides are asked the same questions in the same way; [`ksmd`] and [`folding`] hold the differences. Both sides'
//! own accounts are checked against page tables (`audit`). [`guardian`] puts the host back as it was.

pub mod account;
mod churn;
pub mod curve;
mod equal;
pub mod folding;
mod frames;
mod guests;
mod huge;
pub mod ksmd;
mod layout;
mod measure;
pub mod merger;
mod options;
mod probe;
mod prober;
mod result;
pub(crate) mod svg;
mod table;
mod timings;
mod walker;
mod zeros;

pub use guests::{MergeableArgs, hold};
pub use huge::{HugeArgs, run as run_huge};
pub use options::Options as Args;
pub use probe::run as probe;
pub use walker::{WalkArgs, walk};

use crate::guardian::Guardian;
use anyhow::Context;
use cli::exit::{Outcome, Stop};
use cli::say;
use measure::Side;
use options::Options;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Runs the bench and prints its result.
pub fn run(o: &Options) -> anyhow::Result<Outcome> {
    o.check()?;
    if o.small_pages {
        // Disables transparent huge pages for this process, and for all that it starts: they inherit the setting.
        rustix::thread::disable_transparent_huge_pages(true)?;
    }
    let mut guardian = Guardian::start()?;
    let knobs = ksmd::may_use(o.whole_host)?;
    let dir = make_dir(&mut guardian)?;
    guardian.keep_ksm(&knobs)?;
    let outcome = if o.churn { churn::run(o, &dir, &mut guardian) } else { compare(o, &dir, &mut guardian) };
    let put_back = guardian.finish();
    let outcome = outcome?;
    put_back?;
    Ok(outcome)
}

/// Makes the bench's directory. Its path is short, because the length of a socket's name is limited. Workers have users of
/// their own, and pass through it to the prover's socket.
///
/// # Errors
/// The directory cannot be created.
pub fn make_dir(guardian: &mut Guardian) -> anyhow::Result<PathBuf> {
    let dir = std::env::temp_dir().join(format!("pagefold-bench-{}", std::process::id()));
    DirBuilder::new().mode(0o711).create(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    guardian.keep_dir(&dir)?;
    Ok(dir)
}

/// Has ksmd and then Pagefold take a turn, as many times as the options say.
fn turns<T>(o: &Options, mut turn: impl FnMut(Side) -> anyhow::Result<T>) -> anyhow::Result<Vec<(T, T)>> {
    let mut rounds = Vec::new();
    for round in 1..=o.rounds {
        say!("pagefold: round {round} of {}: ksmd", o.rounds);
        // ksmd must merge nothing while guests start.
        act::set_ksm("run", "0")?;
        let theirs = turn(Side::Ksmd).map_err(|e| failed("ksmd", e))?;
        say!("pagefold: round {round} of {}: pagefold", o.rounds);
        let ours = turn(Side::Pagefold).map_err(|e| failed("Pagefold", e))?;
        rounds.push((theirs, ours));
    }
    Ok(rounds)
}

/// Makes an error plain text, unless it carries an exit code. Otherwise a broken pipe to a prober that has died would
/// count as the reader of the bench's own output being gone, which is no failure.
fn failed(who: &str, e: anyhow::Error) -> anyhow::Error {
    let what = format!("{who} could not be measured");
    if e.chain().any(|cause| cause.is::<Stop>()) { e.context(what) } else { anyhow::anyhow!("{what}: {e:#}") }
}

fn compare(o: &Options, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Outcome> {
    let rounds = turns(o, |side| measure::turn(side, o, dir, guardian))?;
    let rounds = rounds.into_iter().map(|(ksmd, pagefold)| result::Round::of(ksmd, pagefold)).collect();
    let bench = result::Bench::of(o, rounds);
    let mut out = std::io::stdout().lock();
    if o.json {
        report::json::write(&mut out, &bench)?;
    } else {
        table::print(&mut out, &bench)?;
    }
    Ok(Outcome::Done)
}
