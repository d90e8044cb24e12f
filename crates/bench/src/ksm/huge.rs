//! `pagefold bench huge`: the price of splitting the huge pages of a program that is bound by memory. It measures the
//! program's slowdown, the pages saved, and the huge pages that come back once no pages are equal any more.
//!
//! ```text
//!   two walkers start -> walk -> merging begins ... stable -> walk -> their pages are made to differ ... -> walk
//! ```

use super::curve::{Curve, SETTLE_S};
use super::equal::{Guest, equal_pages, memory_of};
use super::folding::Folding;
use super::ksmd::{Ksmd, WholeHost, may_use};
use super::merger::Merger;
use super::prober::Prober;
use crate::guardian::Guardian;
use crate::median::median;
use anyhow::Context;
use api::change::{Change, HugePages};
use cli::exit::{Outcome, Stop};
use cli::say;
use cli::size::parse_bytes;
use host::Pagemap;
use page::PAGE_BYTES;
use report::{Align, Table};
use serde::Serialize;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

/// Number of walkers, the programs that walk; they walk one after the other.
const WALKERS: u64 = 2;
/// Interval between two counts of the pages in huge pages.
const EVERY: Duration = Duration::from_secs(1);
/// Time without growth of that count after which no more huge pages are expected: 150 s. Memory written within the last
/// minute is not collapsed.
const NO_MORE: Duration = Duration::from_secs(150);
/// Time limit for huge pages to come back: 5 min.
const LONGEST: Duration = Duration::from_secs(300);

/// Arguments of `pagefold bench huge`.
#[derive(clap::Args)]
#[command(after_help = "\
Two programs hold huge pages, a quarter of which have nothing in common with the other's, and the others a quarter, three
quarters, or all of their small pages. They walk about in them, each step waiting for the one before. A round takes ten
minutes, most of which are spent waiting for huge pages to come back.

Examples:
  pagefold bench huge
  pagefold bench huge --memory 1G --rounds 3 --json")]
pub struct HugeArgs {
    /// Memory of each of the two programs
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = parse_bytes)]
    memory: u64,
    /// Turns of each side
    #[arg(long, value_name = "R", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    #[command(flatten)]
    whole_host: WholeHost,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The contestants: names, and Pagefold's setting `huge-pages` (none for ksmd).
const SIDES: [(&str, Option<HugePages>); 4] = [
    ("ksmd", None),
    ("huge-pages = never", Some(HugePages::Never)),
    ("huge-pages = 50", Some(HugePages::Percent(50))),
    ("huge-pages = 1", Some(HugePages::Percent(1))),
];

/// The walkers' speed and their share of huge pages, at one stage of a turn.
#[derive(Clone, Copy, Debug, Serialize)]
struct Stage {
    /// Nanoseconds per step, mean of the walkers.
    step_ns: f64,
    /// Share of the walkers' memory that lies in huge pages.
    huge_share: f64,
}

/// One turn of one side.
#[derive(Debug, Serialize)]
struct Turn {
    /// The merger, or the setting of huge pages.
    side: &'static str,
    /// Before merging.
    before: Stage,
    /// With all equal pages merged.
    merged: Stage,
    /// With no two pages equal any more.
    differing: Stage,
    /// Pages saved by merging, as a share of the walkers' memory.
    saved_share: f64,
    /// Seconds until the last huge page came back.
    #[serde(rename = "regained_after_s")]
    collapsed_after_s: f64,
}

/// Medians over the rounds; times as multiples of those before merging.
#[derive(Debug, Serialize)]
struct Side {
    /// The merger, or the setting of huge pages.
    side: &'static str,
    /// Nanoseconds per step before merging.
    step_ns_before: f64,
    /// Time of a step with merged pages, as a multiple of that before merging.
    merged_over_before: f64,
    /// Time of a step with no two pages equal any more, as a multiple of that before merging.
    differing_over_before: f64,
    /// Share of the walkers' memory in huge pages before merging.
    huge_share_before: f64,
    /// The same with merged pages.
    huge_share_merged: f64,
    /// The same with no two pages equal any more.
    huge_share_differing: f64,
    /// Pages saved by merging, as a share of the walkers' memory.
    saved_share: f64,
    /// Seconds until the last huge page came back.
    #[serde(rename = "regained_after_s")]
    collapsed_after_s: f64,
}

/// The result of the bench.
#[derive(Debug, Serialize)]
struct Bench {
    /// Memory of each walker.
    memory_bytes: u64,
    /// Number of walkers.
    walkers: u64,
    /// Medians of each side.
    sides: Vec<Side>,
    /// The single turns.
    turns: Vec<Turn>,
}

/// Runs the bench and prints its result.
pub fn run(args: &HugeArgs) -> anyhow::Result<Outcome> {
    if !rustix::process::geteuid().is_root() {
        let why = "setting ksmd, and seeing page frames, takes root: run this with sudo";
        return Err(Stop::HostLacks(why.to_owned()).into());
    }
    if !(16 << 20..=host::available_bytes()? / 4).contains(&args.memory) {
        return Err(
            Stop::Usage("--memory must be 16M or more, and a quarter of what is available at most".to_owned()).into()
        );
    }
    let mut guardian = Guardian::start()?;
    let knobs = may_use(args.whole_host)?;
    let dir = super::make_dir(&mut guardian)?;
    guardian.keep_ksm(&knobs)?;
    let turns = turns(args, &dir, &mut guardian);
    let put_back = guardian.finish();
    let turns = turns?;
    put_back?;
    let sides = SIDES.map(|(side, _)| Side::of(side, &turns)).into();
    let bench = Bench { memory_bytes: args.memory, walkers: WALKERS, sides, turns };
    let mut out = std::io::stdout().lock();
    if args.json {
        report::json::write(&mut out, &bench)?;
    } else {
        print(&mut out, &bench.sides)?;
    }
    Ok(Outcome::Done)
}

fn turns(args: &HugeArgs, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Vec<Turn>> {
    let mut turns = Vec::new();
    for round in 1..=args.rounds {
        for (side, policy) in SIDES {
            say!("pagefold: round {round} of {}: {side}", args.rounds);
            act::set_ksm("run", "0")?;
            let merger: Box<dyn Merger> = match policy {
                None => Box::new(Ksmd::new(false)?),
                Some(policy) => {
                    let folding = Folding::start(dir, true, guardian)?;
                    folding.set(Change { huge_pages: Some(policy), ..Change::default() })?;
                    Box::new(folding)
                }
            };
            let folds = policy != Some(HugePages::Never);
            turns
                .push(turn(side, folds, merger, args.memory).with_context(|| format!("{side} could not be measured"))?);
        }
    }
    Ok(turns)
}

fn turn(side: &'static str, folds: bool, mut merger: Box<dyn Merger>, memory: u64) -> anyhow::Result<Turn> {
    let pages = memory / PAGE_BYTES as u64;
    let mut walkers = (0..WALKERS)
        .map(|number| {
            let args = ["walk", "--number", &number.to_string(), "--pages", &pages.to_string()].map(str::to_owned);
            Prober::start(merger.as_ref(), &format!("walker-{number}"), &args)
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    let processes: Vec<Guest> = walkers.iter().map(|walker| (walker.pid(), memory / 2)).collect();
    merger.meet(&processes)?;
    let total = (pages * WALKERS) as f64;
    let before = stage(&mut walkers, &processes, total)?;
    // A merger that never splits a huge page merges none of these pages, so nothing is waited for.
    let equal_pages = if folds { equal_pages(&processes)? } else { 0 };
    let (begin, cpu_before) = (Instant::now(), merger.cpu_s()?);
    merger.on()?;
    let curve = Curve::until_stable(begin, cpu_before, equal_pages, SETTLE_S, || merger.progress())?;
    let merged = stage(&mut walkers, &processes, total)?;
    let saved_share = curve.end().so_far.merged_pages as f64 / total;
    walkers.iter_mut().try_for_each(Prober::differ)?;
    let is_split = merged.huge_share < before.huge_share;
    let collapsed_after_s = if is_split { until_no_more(|| huge_pages(&processes))? } else { 0.0 };
    let differing = stage(&mut walkers, &processes, total)?;
    drop(walkers);
    merger.off()?;
    Ok(Turn { side, before, merged, differing, saved_share, collapsed_after_s })
}

fn stage(walkers: &mut [Prober], processes: &[Guest], pages: f64) -> anyhow::Result<Stage> {
    let steps = walkers.iter_mut().map(Prober::walk).sum::<anyhow::Result<f64>>()?;
    Ok(Stage { step_ns: steps / WALKERS as f64, huge_share: huge_pages(processes)? / pages })
}

/// Number of small pages that lie in huge pages. Mappings of any size are counted, since folding splits mappings into
/// small ones.
fn huge_pages(processes: &[Guest]) -> anyhow::Result<f64> {
    let mut pages = 0;
    for (pid, _) in processes {
        let pagemap = Pagemap::open(*pid)?;
        for mapping in memory_of((*pid, 0))? {
            pages += pagemap.huge_ranges(mapping.start, mapping.end)?.iter().map(|range| range.pages).sum::<u64>();
        }
    }
    Ok(pages as f64)
}

/// Seconds after which the count grew for the last time. Returns when it has not grown for `NO_MORE`, or after
/// `LONGEST`.
fn until_no_more(mut count: impl FnMut() -> anyhow::Result<f64>) -> anyhow::Result<f64> {
    let begin = Instant::now();
    let (mut last, mut grown) = (count()?, begin);
    while grown.elapsed() < NO_MORE && begin.elapsed() < LONGEST {
        std::thread::sleep(EVERY);
        let now = count()?;
        if now > last {
            grown = Instant::now();
        }
        last = now;
    }
    Ok((grown - begin).as_secs_f64())
}

impl Side {
    fn of(side: &'static str, turns: &[Turn]) -> Self {
        let median = |of: &dyn Fn(&Turn) -> f64| {
            let all: Vec<f64> = turns.iter().filter(|turn| turn.side == side).map(of).collect();
            median(&all)
        };
        Self {
            side,
            step_ns_before: median(&|t| t.before.step_ns),
            merged_over_before: median(&|t| t.merged.step_ns / t.before.step_ns),
            differing_over_before: median(&|t| t.differing.step_ns / t.before.step_ns),
            huge_share_before: median(&|t| t.before.huge_share),
            huge_share_merged: median(&|t| t.merged.huge_share),
            huge_share_differing: median(&|t| t.differing.huge_share),
            saved_share: median(&|t| t.saved_share),
            collapsed_after_s: median(&|t| t.collapsed_after_s),
        }
    }
}

fn print(out: &mut dyn Write, sides: &[Side]) -> std::io::Result<()> {
    use Align::{Left, Right};
    let columns = [
        ("", Left),
        ("step, ns", Right),
        ("merged", Right),
        ("differing", Right),
        ("saved", Right),
        ("in huge pages", Right),
        ("merged", Right),
        ("differing", Right),
        ("back after", Right),
    ];
    let mut table = Table::new(&columns);
    let percent = |share: f64| format!("{:.0}%", share * 100.0);
    for s in sides {
        table.row([
            s.side.to_owned(),
            format!("{:.1}", s.step_ns_before),
            format!("x {:.2}", s.merged_over_before),
            format!("x {:.2}", s.differing_over_before),
            percent(s.saved_share),
            percent(s.huge_share_before),
            percent(s.huge_share_merged),
            percent(s.huge_share_differing),
            format!("{:.0} s", s.collapsed_after_s),
        ]);
    }
    write!(out, "{table}")
}
