//! `pagefold bench balance`: memory between guests, when things go wrong.
//!
//! ```text
//!   storm:  every guest writes all its folded pages at once, and the host is nearly full (storm.rs)
//!   faults: guests start -> faults are made -> pagefold balance withdraws every loan -> more faults -> all is healed
//! ```
//!
//! Guests are real ones of a lab, and faults are made from outside or by the guest's own kernel. The program under test is
//! `pagefold balance apply --every`, as a service runs it.

mod applying;
mod faults;
mod rig;
mod small_host;
mod storm;

use crate::guardian::Guardian;
use anyhow::Context;
use cli::exit::Outcome;
use serde::Serialize;
use std::fs::DirBuilder;
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Arguments of `pagefold bench balance`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold bench balance
  pagefold bench balance --json")]
pub struct Args {
    /// Only this part
    #[arg(long, value_name = "PART", value_parser = ["storm", "faults"])]
    only: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The result.
#[derive(Debug, Serialize)]
struct Bench {
    #[serde(skip_serializing_if = "Option::is_none")]
    storm: Option<storm::Figures>,
    #[serde(skip_serializing_if = "Option::is_none")]
    faults: Option<Vec<faults::Figures>>,
}

/// Runs the bench and prints its result.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let mut guardian = Guardian::start()?;
    let dir = std::env::temp_dir().join(format!("pagefold-bench-{}", std::process::id()));
    DirBuilder::new().mode(0o711).create(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    guardian.keep_dir(&dir)?;
    let bench = args.measure(&dir, &mut guardian);
    let put_back = guardian.finish();
    let bench = bench?;
    put_back?;
    let mut out = std::io::stdout().lock();
    if args.json {
        report::json::write(&mut out, &bench)?;
    } else {
        let (storm, faults) = (bench.storm.as_ref(), bench.faults.as_ref());
        out.write_all(storm.map_or_else(String::new, storm::Figures::text).as_bytes())?;
        out.write_all(faults.map_or_else(String::new, |faults| faults::text(faults)).as_bytes())?;
    }
    let is_good = bench.storm.iter().all(storm::Figures::is_good);
    let is_good = is_good && bench.faults.iter().flatten().all(faults::Figures::is_good);
    Ok(if is_good { Outcome::Done } else { Outcome::Partial })
}

impl Args {
    fn measure(&self, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Bench> {
        let wants = |part: &str| self.only.as_deref().is_none_or(|only| only == part);
        let part = |name: &str| -> anyhow::Result<PathBuf> {
            let dir = dir.join(name);
            DirBuilder::new().mode(0o711).create(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
            Ok(dir)
        };
        let storm = if wants("storm") { Some(storm::run(&part("s")?, guardian)?) } else { None };
        let faults = if wants("faults") { Some(faults::run(&part("f")?, guardian)?) } else { None };
        Ok(Bench { storm, faults })
    }
}
