//! `pagefold bench latency`: how long requests and ticks take while their programs are folded, against unfolded.
//!
//! ```text
//!   a scene: the loads' programs start as members of one kind, two alike of each; clients ask the first all the time
//!
//!   round 1:  unfold, rest | off: idle, saturated |  fold, settle | on: idle, saturated
//!   round 2:                                                      | on: idle, saturated | unfold, rest | off: ...
//!   ...                      `- slices ---------'    `- folding -'
//! ```
//!
//! A slice is a time in which neither the arm nor the host's load changes. A ratio is one of two slices of a round, with
//! the same load of the host. Rounds go forth and back, so that drift falls on both sides alike.
//!
//! **Settling is not counted.** Folded pages must be there in the slices of `on`, and none in those of `off`. So after
//! each change the bench waits until no more is folded, or until nothing is. The price of getting there is not hidden: it
//! is the arm `folding`. Each slice tells how many pages were folded when it began and ended.
//!
//! **Nothing is omitted.** Clients ask at a fixed rate, whether or not answers come. A time begins when a request was due,
//! and not when it was sent. So a stall counts for all requests that were due in it.
//!
//! | arm | folded | what runs |
//! |---|---|---|
//! | `off` | nothing | agents at rest |
//! | `folding` | more and more | all of the engine, until no more is folded |
//! | `on` | pages that rest | all of the engine |
//! | `rounds` | pages that rested | rounds, which write-protect; a page a second is fingerprinted |
//! | `still` | pages that rested | agents at rest: pages break, and stay broken |
//! | `ksmd` | by ksmd | ksmd at 50,000 pages a second |

mod arms;
mod burners;
mod client;
mod figures;
mod loads;
mod priority;
mod samples;
mod scene;
mod slice;
mod table;

pub use burners::{BurnArgs, burn};

use crate::guardian::Guardian;
use crate::ksm::ksmd::{WholeHost, may_use};
use crate::overhead::make_dir;
use crate::side::check_programs;
use anyhow::Context;
use api::change::{ScanRate, parse_latency};
use api::control::Latency;
use arms::Arm;
use burners::Host;
use clap::builder::PossibleValuesParser;
use cli::exit::{Outcome, Stop};
use cli::say;
use loads::{KINDS, Kind, Member};
use priority::Priority;
use scene::{Scene, settings};
use slice::Measured;
use std::io::Write;

/// Arguments of `pagefold bench latency`.
#[derive(clap::Args)]
#[command(after_help = "\
Loads that are named together run at the same time, in one group. The default takes about six minutes.

  redis     GET of any key, and each tenth request a SET of one in ten keys; 2,000 a second
  ticker    a thread that wakes each millisecond, reads 16 pages, and writes one each tenth time; also in guests
  postgres  transactions of pgbench, 100 a second
  web       a file of 8 KiB of nginx, 1,000 a second

Arms:

  off       nothing is folded
  on        pages that rest are folded; on the way there, times are those of the arm folding
  rounds    pages that rested are folded: the agents' rounds go on, which write-protect, and a page a second is fingerprinted
  still     pages that rested are folded: agents rest, and pages that are written stay private
  ksmd      the kernel's own merger at 50,000 pages a second, in place of ours

Times are in microseconds: medians of the slices' percentiles, and the longest of all slices. Ratios are to the arm off:
medians of the rounds, with a 95% interval by Student's t of the logarithms of the ratios.

Examples:
  pagefold bench latency
  pagefold bench latency ticker --members guest --hosts idle,busy,saturated --json
  pagefold bench latency redis --members started --arms off,still,rounds,on --hosts saturated")]
pub struct Args {
    /// Loads [default: redis ticker]
    #[arg(value_name = "LOAD", value_parser = PossibleValuesParser::new(KINDS.map(|kind| kind.name)))]
    loads: Vec<String>,
    /// How programs become members, one after the other
    #[arg(long, value_name = "KIND", value_delimiter = ',', default_value = "started,attached")]
    members: Vec<Member>,
    /// Loads of the host: burners take nothing of each processor, 70% of it, or all that they get
    #[arg(long, value_name = "HOST", value_delimiter = ',', default_value = "idle,saturated")]
    hosts: Vec<Host>,
    /// The arms
    #[arg(long, value_name = "ARM", value_delimiter = ',', default_value = "off,on")]
    arms: Vec<Arm>,
    /// Rounds: slices of each arm on each load of the host
    #[arg(long, value_name = "R", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Length of a slice
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    /// Most time to settle in an arm, once enough is folded
    #[arg(long, value_name = "SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=600))]
    settle: u32,
    /// Requests a second of each load that is asked [default: the load's own]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: Option<u32>,
    /// Fold all pages that rest, also where folds are likely to be short-lived
    #[arg(long)]
    eager: bool,
    /// Pages that may be fingerprinted a second, as for `group set`
    #[arg(long, value_name = "auto|N|adaptive[:N%]", default_value = "auto")]
    scan_rate: ScanRate,
    /// The group's setting, as for `group set`
    #[arg(long, value_name = "quiet|eager", value_parser = parse_latency, default_value = "quiet")]
    latency: Latency,
    /// Priority of the engine's threads: as they are, niceness 19, or only when nobody else wants the processor
    #[arg(long, value_name = "PRIORITY", value_enum, default_value = "same")]
    priority: Priority,
    #[command(flatten)]
    whole_host: WholeHost,
    /// A small part of the work: shows that a load runs, and no figure
    #[arg(long)]
    short: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Args {
    /// The rounds, and the length of a slice in seconds.
    const fn lengths(&self) -> (u32, u32) {
        if self.short { (1, 1) } else { (self.rounds, self.seconds) }
    }
}

/// Runs the bench and prints its result.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let kinds = chosen(args)?;
    if !rustix::process::geteuid().is_root() {
        let why =
            "clients take a high priority here, and programs are attached by a service of root's: run this with sudo";
        return Err(Stop::HostLacks(why.to_owned()).into());
    }
    kinds.iter().try_for_each(|kind| check_programs(kind.needs))?;
    let mut guardian = Guardian::start()?;
    if args.arms.contains(&Arm::Ksmd) {
        guardian.keep_ksm(&may_use(args.whole_host)?)?;
    }
    let dir = make_dir(&mut guardian)?;
    let (mut all, mut outcome) = (Vec::new(), Outcome::Done);
    for member in &args.members {
        say!("pagefold: loads in members of the kind {}", member.name());
        match measure(args, &kinds, *member, &dir, &mut guardian) {
            Ok(measured) => all.extend(measured),
            Err(e) => {
                say!("pagefold: {} could not be measured: {}", member.name(), cli::exit::in_words(&e));
                outcome = Outcome::Partial;
            }
        }
    }
    guardian.finish()?;
    let rows = figures::rows(&all);
    let mut out = std::io::stdout().lock();
    if args.json { report::json::write(&mut out, &rows) } else { table::print(&mut out, &rows) }
        .and_then(|()| out.flush())
        .context("cannot write to stdout")?;
    Ok(outcome)
}

/// The loads that are asked for. Each must run in members of all kinds that are asked for.
fn chosen(args: &Args) -> anyhow::Result<Vec<&'static Kind>> {
    let is_wanted = |kind: &&Kind| match args.loads.is_empty() {
        true => kind.is_usual,
        false => args.loads.iter().any(|name| name == kind.name),
    };
    let kinds: Vec<&Kind> = KINDS.iter().copied().filter(is_wanted).collect();
    for (kind, member) in kinds.iter().flat_map(|kind| args.members.iter().map(move |member| (kind, member))) {
        if !kind.members.contains(member) {
            let text = format!("the load {} does not run in members of the kind {}", kind.name, member.name());
            return Err(Stop::Usage(text).into());
        }
    }
    Ok(kinds)
}

fn measure(
    args: &Args,
    kinds: &[&'static Kind],
    member: Member,
    dir: &std::path::Path,
    guardian: &mut Guardian,
) -> anyhow::Result<Vec<Measured>> {
    let dir = dir.join(member.name());
    std::fs::create_dir(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let settings = settings(args.scan_rate, args.latency);
    let scene = Scene::new(args, kinds, (member, &dir), &settings, guardian)?;
    let measured = scene.run();
    let ended = scene.finish();
    let measured = measured?;
    ended.map(|()| measured)
}
