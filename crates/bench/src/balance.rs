//! `pagefold bench balance`: memory between guests, when things go wrong.
//!
//! ```text
//!   faults: guests start -> faults are made -> pagefold balance withdraws every loan -> more faults -> all is healed
//! ```
//!
//! Guests are real ones of a lab, and faults are made from outside or by the guest's own kernel. The program under test is
//! `pagefold balance apply --every`, as a service runs it.

mod applying;
mod faults;
mod rig;

use crate::guardian::Guardian;
use anyhow::Context;
use cli::exit::Outcome;
use serde::Serialize;
use std::fs::DirBuilder;
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;

/// Arguments of `pagefold bench balance`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold bench balance
  pagefold bench balance --json")]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The result.
#[derive(Debug, Serialize)]
struct Bench {
    faults: Vec<faults::Figures>,
}

/// Runs the bench and prints its result.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let mut guardian = Guardian::start()?;
    let dir = std::env::temp_dir().join(format!("pagefold-bench-{}", std::process::id()));
    DirBuilder::new().mode(0o711).create(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    guardian.keep_dir(&dir)?;
    let faults = faults::run(&dir, &mut guardian);
    let put_back = guardian.finish();
    let bench = Bench { faults: faults? };
    put_back?;
    let mut out = std::io::stdout().lock();
    if args.json {
        report::json::write(&mut out, &bench)?;
    } else {
        out.write_all(faults::text(&bench.faults).as_bytes())?;
    }
    let is_good = bench.faults.iter().all(faults::Figures::is_good);
    Ok(if is_good { Outcome::Done } else { Outcome::Partial })
}
