//! `pagefold bench overhead`: the price of being a member, for programs that gain nothing by it.
//!
//! ```text
//!   round 1:  not a member, member      each turn: fresh directory -> start -> rest until folded -> the work, timed
//!   round 2:  member, not a member                 (a service runs in a member's turn only)
//!   ...                                 a round's ratio: member's time over the other's
//! ```
//!
//! The figure is the median of the ratios of wall time per unit of work. Processor time of the group's worker is billed
//! to the group and not part of the ratio. Where it competes with the workload for processors, the wall time shows that.
//!
//! Members fold all pages that were not written for a while (`PAGEFOLD_EAGER`), as other people's programs do in `./x
//! peers`. `--patient` leaves members as users have them.

mod boot;
mod build;
pub mod servers;
mod storms;
mod table;

use crate::guardian::Guardian;
use crate::ratio::{Verdict, interval};
use crate::side::{self, Place, Side};
use anyhow::Context;
use cli::exit::{Outcome, Stop};
use cli::say;
use serde::Serialize;
use std::fs;
use std::fs::DirBuilder;
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Cap of the ratio for servers, builds and guests, and for programs that walk in memory: 2% more time.
const USUAL: f64 = 1.02;
/// Cap of the ratio for storms: 25% more time.
const STORM: f64 = 1.25;
/// Setting of the group: pages that are fingerprinted a second, more than any workload has. `./x peers` has the same.
const SETTINGS: &str = "scan-rate = 400000";
/// With `--short`, one in so many of the pages must be folded that must be folded otherwise.
pub const SHORT_FLOOR: u64 = 20;

/// A piece of work that is measured.
struct Workload {
    name: &'static str,
    /// Unit of work, in words for people.
    unit: &'static str,
    cap: f64,
    /// Least pages that must be folded before the work begins; 0 for a workload without equal pages that stay
    /// unwritten.
    floor: u64,
    /// Programs that must be installed, each with the Debian package that has it.
    needs: &'static [(&'static str, &'static str)],
    /// Does the work on one side. Returns wall time in seconds of a unit.
    recipe: fn(&Side) -> anyhow::Result<f64>,
}

/// All workloads.
const WORKLOADS: [Workload; 10] = [
    storms::ALLOCATE,
    storms::DISCARD,
    storms::FORK,
    storms::THREADS,
    servers::REDIS,
    servers::MARIADB,
    servers::POSTGRES,
    build::BUILD,
    storms::WALK,
    boot::BOOT,
];

/// Arguments of `pagefold bench overhead`.
#[derive(clap::Args)]
#[command(after_help = "\
Each workload runs as a member of a group and not as a member, in turns. The ratio is the member's wall time for a unit
of work over the other's: median of the rounds, and a 95% interval by Student's t of the logarithms of the ratios. A
workload is within its cap, over it, or undecided: the interval has the cap in it. More rounds decide more.

Workloads: allocate discard fork threads redis mariadb postgres build walk boot

Examples:
  pagefold bench overhead
  pagefold bench overhead redis fork --rounds 9 --json")]
pub struct Args {
    /// Workloads [default: all]
    #[arg(value_name = "WORKLOAD")]
    workloads: Vec<String>,
    /// Turns of each side
    #[arg(long, value_name = "R", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Fold what will stay folded, as members usually do, and not all that rests
    #[arg(long)]
    patient: bool,
    /// A small part of the work: shows that a workload runs, and no figure
    #[arg(long)]
    short: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Figures of a workload.
#[derive(Debug, Serialize)]
struct Figures {
    /// Its name.
    workload: &'static str,
    /// Median of the rounds' ratios of wall time per unit of work, member over not a member.
    ratio: f64,
    /// Interval that has the ratio with a probability of 95%; absent for one round.
    ci95: Option<[f64; 2]>,
    /// Number of rounds.
    n: usize,
    /// Bound of the ratio: 1.25 for storms, else 1.02.
    cap: f64,
    /// Whether the interval is below the bound, above it, or has it inside.
    verdict: Verdict,
    /// Fewest pages that were folded when the work began, in any round; of `discard`, on average over its passes.
    folded_pages: u64,
    /// Fewest pages that had to be folded; 0 where nothing rests that is there twice.
    floor: u64,
    /// Its unit of work, in words.
    unit: &'static str,
    /// Seconds of a unit while it was no member, by round.
    plain_s: Vec<f64>,
    /// Seconds of a unit while it was a member, by round.
    member_s: Vec<f64>,
}

/// Runs the bench and prints its result.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let chosen = chosen(args)?;
    if !rustix::process::geteuid().is_root() {
        let why = "servers run as users of their own here, and members are followed by a service of root's: run this with sudo";
        return Err(Stop::HostLacks(why.to_owned()).into());
    }
    let mut guardian = Guardian::start()?;
    let dir = make_dir(&mut guardian)?;
    let (mut all, mut outcome) = (Vec::new(), Outcome::Done);
    for workload in chosen {
        match measure(workload, args, &dir, &mut guardian) {
            Ok(figures) => all.push(figures),
            Err(e) => {
                say!("pagefold: {} could not be measured: {}", workload.name, cli::exit::in_words(&e));
                outcome = Outcome::Partial;
            }
        }
    }
    guardian.finish()?;
    let mut out = std::io::stdout().lock();
    if args.json { report::json::write(&mut out, &all) } else { table::print(&mut out, &all) }
        .and_then(|()| out.flush())
        .context("cannot write to stdout")?;
    Ok(outcome)
}

/// The workloads that the arguments name, or all.
fn chosen(args: &Args) -> anyhow::Result<Vec<&'static Workload>> {
    let names = WORKLOADS.iter().map(|workload| workload.name).collect::<Vec<_>>();
    if let Some(unknown) = args.workloads.iter().find(|name| !names.contains(&name.as_str())) {
        let text = format!("there is no workload {unknown:?}: there are {}", names.join(", "));
        return Err(Stop::Usage(text).into());
    }
    let is_wanted = |w: &&Workload| args.workloads.is_empty() || args.workloads.iter().any(|name| name == w.name);
    Ok(const { &WORKLOADS }.iter().filter(is_wanted).collect())
}

/// Makes the bench's directory. Servers run as users of their own and must be able to pass through it.
///
/// # Errors
/// The directory cannot be created.
pub fn make_dir(guardian: &mut Guardian) -> anyhow::Result<PathBuf> {
    let dir = std::env::temp_dir().join(format!("pagefold-bench-{}", std::process::id()));
    DirBuilder::new().mode(0o755).create(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    guardian.keep_dir(&dir)?;
    Ok(dir)
}

fn measure(workload: &'static Workload, args: &Args, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Figures> {
    side::check_programs(workload.needs)?;
    let dir = dir.join(workload.name);
    fs::create_dir(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let floor = if args.short { workload.floor.div_ceil(SHORT_FLOOR) } else { workload.floor };
    let (mut plain_s, mut member_s, mut folded_pages) = (Vec::new(), Vec::new(), u64::MAX);
    for round in 0..args.rounds {
        // The order is reversed in every second round, so that slow changes of the machine fall on both sides alike.
        for is_member in if round.is_multiple_of(2) { [false, true] } else { [true, false] } {
            let which = if is_member { "a member" } else { "not a member" };
            say!("pagefold: {}, round {} of {}: {which}", workload.name, round + 1, args.rounds);
            let place = Place {
                dir: &dir,
                is_member,
                is_eager: !args.patient,
                is_short: args.short,
                floor,
                settings: SETTINGS,
            };
            let side = Side::new(place, guardian)?;
            let seconds = (workload.recipe)(&side).with_context(|| format!("as {which}"))?;
            if is_member {
                folded_pages = folded_pages.min(side.finish()?);
                member_s.push(seconds);
            } else {
                side.finish()?;
                plain_s.push(seconds);
            }
        }
    }
    let ratios: Vec<f64> = member_s.iter().zip(&plain_s).map(|(member, plain)| member / plain).collect();
    let (ratio, ci95) = (crate::median::median(&ratios), interval(&ratios));
    let Workload { name, unit, cap, .. } = *workload;
    let verdict = Verdict::of(ci95, cap);
    Ok(Figures {
        workload: name,
        ratio,
        ci95,
        n: ratios.len(),
        cap,
        verdict,
        folded_pages,
        floor,
        unit,
        plain_s,
        member_s,
    })
}
