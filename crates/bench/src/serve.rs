//! `pagefold bench serve`: what a service costs and answers with many members, and whether the savings that it shows are so.
//!
//! ```text
//!   members start, and fold --> nothing changes --> a crowd comes --> audit --> everything is unfolded
//!   requests are timed          processor time,     requests are     savings   free memory before and after
//!                               memory, requests    timed
//! ```
//!
//! The members are processes that hold pages of known contents. All members of a group hold the same, so that nearly all
//! of it folds.

mod crowd;
mod requests;
mod scene;
mod table;

use crate::guardian::Guardian;
use crate::serving::Serving;
use anyhow::Context;
use cli::exit::{Outcome, Stop};
use cli::say;
use crowd::Crowd;
use requests::{Prober, Times};
use scene::{Members, Scene, group};
use serde::Serialize;
use std::fs::DirBuilder;
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::Duration;

/// Time in which nothing changes, for the processor time of an idle service: 30 s.
const IDLE: Duration = Duration::from_secs(30);
/// Requests that are timed without a crowd, and as many with one; and the longest time for each of the two: 500
/// requests, 120 s. The 99th percentile is then the fifth longest time.
const ASKED: (usize, Duration) = (500, Duration::from_secs(120));
/// With `--short`, times and numbers of requests are divided by this.
const SHORT: u32 = 40;

/// Directory of the service, in memory: that of an installed service is in memory, too.
const IN_MEMORY: &str = "/dev/shm";

/// Fields of the result, each with the bound below which it has to be: a time of requests in ms, percents of a
/// processor, MiB beside the indexes, percents of difference, and how many times as long requests take.
const BARS: [(&str, f64); 6] = [
    ("api_p99_ms", 50.0),
    ("idle_cpu_percent", 1.0),
    ("memory_mib", 64.0),
    ("audit_difference_percent", 1.0),
    ("free_difference_percent", 3.0),
    ("crowd_ratio", 2.0),
];

/// Arguments of `pagefold bench serve`.
#[derive(clap::Args)]
#[command(after_help = "\
Runs a service of its own, with members that are processes of this program. Each holds 4 MiB: half of it is the same in
all members of its group, a quarter is the same in all members, the rest is zeros and repeats.

Examples:
  pagefold bench serve
  pagefold bench serve --members 100 --groups 10 --json")]
pub struct Args {
    /// Members
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(2..=5000))]
    members: u32,
    /// Groups
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=500))]
    groups: u32,
    /// Pages of each member
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(64..=262_144))]
    pages: u32,
    /// Short times of measuring: shows that the bench runs, and no figure
    #[arg(long)]
    short: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The figures.
#[derive(Debug, Serialize)]
struct Figures {
    /// Number of members.
    members: u32,
    /// Number of groups.
    groups: u32,
    /// Requests that were timed while members started and were folded.
    requests: usize,
    /// Median time of a request.
    api_p50_ms: f64,
    /// 99th percentile of these times.
    api_p99_ms: f64,
    /// Processor time of the service's processes while nothing changes, in percent of a core; that of all agents.
    idle_cpu_percent: f64,
    /// The same of all agents.
    idle_agents_cpu_percent: f64,
    /// Private memory of the service's processes without the indexes; the indexes and the workers' other tables.
    memory_mib: f64,
    /// Indexes and other tables of the workers.
    index_mib: f64,
    /// Most tasks of the service's processes while members were folded.
    most_tasks: usize,
    /// The 99th percentile of requests while nothing else happens; the same beside a crowd, and how many times as long.
    alone_p99_ms: f64,
    /// The same beside a crowd.
    crowd_p99_ms: f64,
    /// How many times as long.
    crowd_ratio: f64,
    /// Requests timed beside the crowd, and answers that its clients with tokens got meanwhile.
    crowd_requests: usize,
    /// Reads of answers by its clients that flood.
    crowd_answers: u64,
    /// Savings that the service shows, and by page frames.
    saved_bytes: i64,
    /// Net savings by page frames.
    audit_saved_bytes: i64,
    /// How far these two are apart.
    audit_difference_percent: f64,
    /// Savings that unfolding ends, as the service shows them, and by how much the host's free memory fell.
    unfolded_bytes: i64,
    /// By how much the free memory of the host fell. It has copies of files in it, and free pages that processors keep
    /// at hand.
    free_fell_bytes: i64,
    /// How far these two are apart.
    free_difference_percent: f64,
    /// Claims, and whether they hold.
    claims: Vec<Claim>,
}

/// A claim, and whether it holds.
#[derive(Debug, Serialize)]
struct Claim {
    /// A field of the result.
    claim: &'static str,
    /// Its value.
    value: f64,
    /// The bound.
    bar: f64,
    /// Whether the value is below the bound.
    holds: bool,
}

/// Runs the bench and prints its result.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    if !rustix::process::geteuid().is_root() {
        let why = "page frames are shown to root only, and a service of root's is measured: run this with sudo";
        return Err(Stop::HostLacks(why.to_owned()).into());
    }
    let mut guardian = Guardian::start()?;
    let dir = Path::new(IN_MEMORY).join(format!("pagefold-bench-{}", std::process::id()));
    DirBuilder::new().mode(0o755).create(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    guardian.keep_dir(&dir)?;
    let figures = measure(args, &dir, &mut guardian)?;
    guardian.finish()?;
    let mut out = std::io::stdout().lock();
    if args.json { report::json::write(&mut out, &figures) } else { table::print(&mut out, &figures) }
        .and_then(|()| out.flush())
        .context("cannot write to stdout")?;
    Ok(Outcome::Done)
}

fn measure(args: &Args, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Figures> {
    let groups: String = (0..args.groups).map(|n| format!("[[group]]\nname = \"{}\"\n", group(n))).collect();
    let tokens = dir.join("tokens.toml");
    crowd::write_tokens(&tokens)?;
    let config = format!("[api]\ntokens = \"{}\"\n{groups}", tokens.display());
    let mut serving = Serving::start(dir, &config, guardian)?;
    let mut prober = Prober::start(serving.dir().join("api.sock"), group(0));
    say!("pagefold: {} members in {} groups start", args.members, args.groups);
    let members = Members::start(args, serving.dir())?;
    let scene = Scene { groups: args.groups, serving: &serving };
    let most_tasks = scene.wait_until_nothing_changes()?;
    let folding = prober.finish()?;
    let figures = Measured { args, scene: &scene, folding, most_tasks }.figures()?;
    drop(members);
    serving.end()?;
    Ok(figures)
}

/// A running service whose members are folded, and the times of requests up to then.
struct Measured<'a> {
    args: &'a Args,
    scene: &'a Scene<'a>,
    folding: Times,
    most_tasks: usize,
}

impl Measured<'_> {
    /// The number by which times and numbers of requests are divided.
    const fn part(&self) -> u32 {
        if self.args.short { SHORT } else { 1 }
    }

    /// Times of requests to the service while nothing else happens.
    fn ask(&self) -> anyhow::Result<Times> {
        let mut prober = Prober::start(self.scene.web_side(), group(0));
        prober.wait_for(ASKED.0 / self.part() as usize, ASKED.1 / self.part());
        prober.finish()
    }

    fn figures(&self) -> anyhow::Result<Figures> {
        let (scene, folding) = (self.scene, &self.folding);
        let idle = scene.idle(IDLE / self.part())?;
        let (memory_mib, index_mib) = scene.memory()?;
        let alone = self.ask()?;
        say!("pagefold: a crowd comes");
        let crowd = Crowd::start(&scene.web_side())?;
        let beside = self.ask()?;
        let crowd_answers = crowd.answers();
        drop(crowd);
        scene.wait_until_nothing_changes()?;
        let (saved_bytes, audit_saved_bytes) = (scene.savings()?.saved_bytes(), scene.audit()?);
        say!("pagefold: everything is unfolded");
        let (unfolded, free_fell_bytes) = scene.unfold()?;
        let unfolded_bytes = saved_bytes - unfolded.saved_bytes();
        let percent = |of: i64, whole: i64| 100.0 * (of - whole).abs() as f64 / whole.max(1) as f64;
        let audit_difference_percent = percent(saved_bytes, audit_saved_bytes);
        let free_difference_percent = percent(unfolded_bytes, free_fell_bytes);
        let crowd_ratio = beside.p99_ms / alone.p99_ms;
        let values =
            [folding.p99_ms, idle[0], memory_mib, audit_difference_percent, free_difference_percent, crowd_ratio];
        let claim = |((claim, bar), value): ((&'static str, f64), f64)| Claim { claim, value, bar, holds: value < bar };
        Ok(Figures {
            members: self.args.members,
            groups: self.args.groups,
            requests: folding.requests,
            api_p50_ms: folding.p50_ms,
            api_p99_ms: folding.p99_ms,
            idle_cpu_percent: idle[0],
            idle_agents_cpu_percent: idle[1],
            memory_mib,
            index_mib,
            most_tasks: self.most_tasks,
            alone_p99_ms: alone.p99_ms,
            crowd_p99_ms: beside.p99_ms,
            crowd_ratio,
            crowd_requests: beside.requests,
            crowd_answers,
            saved_bytes,
            audit_saved_bytes,
            audit_difference_percent,
            unfolded_bytes,
            free_fell_bytes,
            free_difference_percent,
            claims: BARS.into_iter().zip(values).map(claim).collect(),
        })
    }
}
