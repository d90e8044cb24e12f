//! `pagefold bench balance`: how `pagefold balance` moves memory between guests when drivers, QEMU or guests fail.
//!
//! ```text
//!   policies: memory is taken of the host, under each policy in turn (policies.rs)
//!   storm:  every guest writes all its folded pages at once, and the host is nearly full (storm.rs)
//!   idle:   processor time of a service with 50 guests (idle.rs)
//!   stall:  a guest writes at once after it was given memory back (stall.rs)
//!   faults: guests start -> faults are made -> pagefold balance withdraws every loan -> more faults -> all is healed
//! ```
//!
//! Guests are real ones of a lab, and faults are made from outside or by the guest's own kernel. The program under test is
//! `pagefold balance apply --every`, as a service runs it.

mod applying;
mod faults;
mod idle;
mod load;
mod policies;
mod rig;
mod small_host;
mod stall;
mod storm;

pub(crate) use rig::{PATIENCE, Rig, group, on_all};
pub use small_host::SmallHost;
pub use storm::{Figures as Storm, run as make_storm};

use crate::guardian::Guardian;
use anyhow::Context;
use cli::exit::Outcome;
use load::System;
use serde::Serialize;
use std::fs::DirBuilder;
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Policies that can be compared: those of `pagefold balance`, and the rules of other programs.
const POLICIES: [&str; 8] = ["working-set", "group", "entitlement", "equal", "reporting", "mom", "proxmox", "squeezed"];

/// Arguments of `pagefold bench balance`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold bench balance
  pagefold bench balance --only policies --policies working-set,mom
  pagefold bench balance --only policies --system debian
  pagefold bench balance --json")]
pub struct Args {
    /// Only this part; `idle` and `stall` are measured in no other way
    #[arg(long, value_name = "PART", value_parser = ["policies", "storm", "faults", "idle", "stall"])]
    only: Option<String>,
    /// Policies to compare
    #[arg(long, value_name = "NAME,NAME", value_delimiter = ',', value_parser = POLICIES)]
    policies: Vec<String>,
    /// System of the guests under the policies; `debian` boots six guests once, and saves them
    #[arg(long, value_name = "SYSTEM", default_value = "tiny", value_parser = ["tiny", "debian"])]
    system: String,
    /// Number of guests in the storm
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(2..=16))]
    storm_guests: u8,
    /// Number of guests of the service that does nothing
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u8).range(1..))]
    idle_guests: u8,
    /// Seconds that pass for the balancer's rules in one of the host's while faults are made, for tests
    #[arg(long, value_name = "N", default_value_t = 1, hide = true, value_parser = clap::value_parser!(u32).range(1..=5))]
    hurry: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The result.
#[derive(Debug, Serialize)]
struct Bench {
    /// Guests under each policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    policies: Option<Vec<policies::Figures>>,
    /// A break storm.
    #[serde(skip_serializing_if = "Option::is_none")]
    storm: Option<storm::Figures>,
    /// Faults of balloons and guests.
    #[serde(skip_serializing_if = "Option::is_none")]
    faults: Option<Vec<faults::Figures>>,
    /// The cost while nothing happens.
    #[serde(skip_serializing_if = "Option::is_none")]
    idle: Option<idle::Figures>,
    /// First writes of a guest that was just given memory back.
    #[serde(skip_serializing_if = "Option::is_none")]
    stall: Option<Vec<stall::Figures>>,
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
        let policies = bench.policies.as_deref();
        out.write_all(policies.map_or_else(String::new, policies::text).as_bytes())?;
        let (storm, faults) = (bench.storm.as_ref(), bench.faults.as_ref());
        out.write_all(storm.map_or_else(String::new, storm::Figures::text).as_bytes())?;
        out.write_all(bench.idle.as_ref().map_or_else(String::new, idle::Figures::text).as_bytes())?;
        out.write_all(faults.map_or_else(String::new, |faults| faults::text(faults)).as_bytes())?;
        out.write_all(bench.stall.as_deref().map_or_else(String::new, stall::text).as_bytes())?;
    }
    let is_good = bench.policies.as_ref().is_none_or(|tried| tried.len() == args.policies().len());
    let is_good = is_good && bench.idle.iter().all(idle::Figures::is_good);
    let is_good = is_good && bench.storm.iter().all(storm::Figures::is_good);
    let is_good = is_good && bench.faults.iter().flatten().all(faults::Figures::is_good);
    Ok(if is_good { Outcome::Done } else { Outcome::Partial })
}

impl Args {
    /// The policies to be compared.
    fn policies(&self) -> Vec<&'static str> {
        let is_named = |name: &&str| self.policies.is_empty() || self.policies.iter().any(|named| named == name);
        POLICIES.into_iter().filter(is_named).collect()
    }

    fn measure(&self, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Bench> {
        let wants = |part: &str| self.only.as_deref().is_none_or(|only| only == part);
        let part = |name: &str| -> anyhow::Result<PathBuf> {
            let dir = dir.join(name);
            DirBuilder::new().mode(0o711).create(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
            Ok(dir)
        };
        let system = if self.system == "debian" { System::Debian } else { System::Tiny };
        let policies = if wants("policies") {
            Some(policies::run(&part("p")?, system, &self.policies(), guardian)?)
        } else {
            None
        };
        let storm =
            if wants("storm") { Some(storm::run(&part("s")?, self.storm_guests.into(), guardian)?) } else { None };
        let faults = if wants("faults") { Some(faults::run(&part("f")?, self.hurry, guardian)?) } else { None };
        let idle = if self.only.as_deref() == Some("idle") {
            Some(idle::run(&part("i")?, self.idle_guests.into(), guardian)?)
        } else {
            None
        };
        let stall = if self.only.as_deref() == Some("stall") { Some(stall::run(&part("w")?, guardian)?) } else { None };
        Ok(Bench { policies, storm, faults, idle, stall })
    }
}
