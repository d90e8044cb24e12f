//! `pagefold bench containers`: containers with MariaDB and with Apache, whose programs are attached, beside ksmd with all of
//! the containers' memory opted in. Both merge the same containers, in turns.
//!
//! ```text
//!   containers start, opted in; ksmd stands still; tables are filled
//!   round: load --> ksmd merges, idle, load, all is unmerged --> load --> attach, fold, idle, load, detach
//!          nobody merges                                         nobody merges
//! ```

mod scene;
mod turn;

use crate::guardian::Guardian;
use crate::ksm::{ksmd, make_dir};
use crate::median::median;
use anyhow::Context;
use cli::exit::{Outcome, Stop};
use cli::say;
use scene::{Rates, Scene};
use serde::Serialize;
use std::io::Write;
use std::path::Path;
use turn::Turn;

/// Arguments of `pagefold bench containers`.
#[derive(clap::Args)]
#[command(after_help = "\
The containers are those of pagefold lab (lxc-mariadb, lxc-apache). They run in LXC on copies of a root directory, and are
opted in as a whole for ksmd (prctl PR_SET_MEMORY_MERGE). Pagefold attaches to all of their programs by their control
groups. The load is sysbench in each MariaDB, then ab in each Apache. Root's rights are needed.

Example:
  pagefold bench containers --containers 5 --rounds 1 --json")]
pub struct Args {
    /// Containers of each kind
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(2..=32))]
    containers: u32,
    /// Turns of each side
    #[arg(long, value_name = "R", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Seconds of idleness before the steady state is measured: members look ever more rarely, each 10 s after 80
    #[arg(long, value_name = "SECONDS", default_value_t = 80, value_parser = clap::value_parser!(u64).range(0..=3600))]
    rest: u64,
    /// Seconds of idleness over which the steady state is measured
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=3600))]
    steady: u64,
    /// Seconds of each load
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=3600))]
    load: u64,
    #[command(flatten)]
    whole_host: ksmd::WholeHost,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// One round.
#[derive(Serialize)]
struct Round {
    /// Rates while nobody merges: before ksmd's turn, and before Pagefold's.
    plain: [Rates; 2],
    /// ksmd's turn.
    ksmd: Turn,
    /// Pagefold's turn.
    pagefold: Turn,
    /// Pagefold's figures over ksmd's.
    ratio: Ratios,
}

/// Pagefold's figures over ksmd's of the same round.
#[derive(Serialize)]
struct Ratios {
    /// Pages saved when merging was stable.
    merged_idle: f64,
    /// Mean of the pages saved under load.
    merged_under_load: f64,
    /// Processor time until 99% was merged of what ksmd has merged in the end; `None` if that was not reached.
    cpu_to_99: Option<f64>,
    /// The same of time.
    wall_to_99: Option<f64>,
    /// Processor time while the containers are idle.
    idle_cpu: f64,
}

/// The result.
#[derive(Serialize)]
struct Bench {
    /// Number of containers of each kind.
    containers: u32,
    /// Their runtime: `lxc`.
    runtime: &'static str,
    /// Seconds of each load.
    load_s: u64,
    /// The single rounds.
    rounds: Vec<Round>,
    /// Medians over the rounds.
    medians: Medians,
}

/// Medians over the rounds: of the ratios, and of Pagefold's rates over those while nobody merges.
#[derive(Serialize)]
struct Medians {
    /// Of the ratios of pages saved when merging was stable.
    merged_idle: f64,
    /// Of the ratios of pages saved under load.
    merged_under_load: f64,
    /// Of Pagefold's transactions a second, over those while nobody merges.
    mariadb_over_plain: f64,
    /// Of Pagefold's requests a second, over those while nobody merges.
    apache_over_plain: f64,
}

/// Runs the bench and prints its result.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    if !rustix::process::geteuid().is_root() {
        return Err(
            Stop::HostLacks("containers and attaching take root's rights: run this with sudo".to_owned()).into()
        );
    }
    let mut guardian = Guardian::start()?;
    let knobs = ksmd::may_use(args.whole_host)?;
    let dir = make_dir(&mut guardian)?;
    guardian.keep_ksm(&knobs)?;
    let measured = measure(args, &dir, &mut guardian);
    let put_back = guardian.finish();
    let bench = measured?;
    put_back?;
    let mut out = std::io::stdout().lock();
    if args.json { report::json::write(&mut out, &bench) } else { print(&mut out, &bench) }
        .and_then(|()| out.flush())
        .context("cannot write to stdout")?;
    Ok(Outcome::Done)
}

fn measure(args: &Args, dir: &Path, guardian: &mut Guardian) -> anyhow::Result<Bench> {
    act::set_ksm("run", "0")?;
    let scene = Scene::start(args.containers, dir, guardian)?;
    let mut rounds = Vec::new();
    for round in 1..=args.rounds {
        say!("pagefold: round {round} of {}: ksmd", args.rounds);
        let before_ksmd = scene.load(args.load, || Ok(()))?;
        let mut ksmd = Turn::of_ksmd(&scene, args)?;
        say!("pagefold: round {round} of {}: pagefold", args.rounds);
        let before_pagefold = scene.load(args.load, || Ok(()))?;
        let mut pagefold = Turn::of_pagefold(&scene, args, dir, guardian)?;
        let reached = ksmd.merged_pages * 99 / 100;
        ksmd.judge(reached, before_ksmd);
        pagefold.judge(reached, before_pagefold);
        let ratio = ratio(&ksmd, &pagefold);
        rounds.push(Round { plain: [before_ksmd, before_pagefold], ksmd, pagefold, ratio });
    }
    let of = |figure: fn(&Round) -> f64| median(&rounds.iter().map(figure).collect::<Vec<_>>());
    let medians = Medians {
        merged_idle: of(|round| round.ratio.merged_idle),
        merged_under_load: of(|round| round.ratio.merged_under_load),
        mariadb_over_plain: of(|round| round.pagefold.over_plain.mariadb),
        apache_over_plain: of(|round| round.pagefold.over_plain.apache),
    };
    Ok(Bench { containers: args.containers, runtime: "lxc", load_s: args.load, rounds, medians })
}

fn ratio(ksmd: &Turn, pagefold: &Turn) -> Ratios {
    let both = ksmd.to_99.zip(pagefold.to_99);
    Ratios {
        merged_idle: pagefold.merged_pages as f64 / ksmd.merged_pages as f64,
        merged_under_load: pagefold.merged_under_load / ksmd.merged_under_load,
        cpu_to_99: both.map(|(theirs, ours)| ours.cpu_s / theirs.cpu_s),
        wall_to_99: both.map(|(theirs, ours)| ours.wall_s / theirs.wall_s),
        idle_cpu: pagefold.idle_cpu_s_per_s / ksmd.idle_cpu_s_per_s,
    }
}

fn print(out: &mut impl Write, bench: &Bench) -> std::io::Result<()> {
    writeln!(
        out,
        "{} containers with MariaDB and {} with Apache, {}",
        bench.containers, bench.containers, bench.runtime
    )?;
    for Round { ksmd, pagefold, .. } in &bench.rounds {
        writeln!(out, "                              ksmd    pagefold")?;
        let mut row =
            |what: &str, of: fn(&Turn) -> f64| writeln!(out, "{what:<22} {:>11.1} {:>11.1}", of(ksmd), of(pagefold));
        row("merged pages, idle", |turn| turn.merged_pages as f64)?;
        row("merged pages, loaded", |turn| turn.merged_under_load)?;
        row("CPU until stable, s", |turn| turn.cpu_s)?;
        row("idle, ms CPU a second", |turn| turn.idle_cpu_s_per_s * 1e3)?;
        row("MariaDB, % of plain", |turn| turn.over_plain.mariadb * 100.0)?;
        row("Apache, % of plain", |turn| turn.over_plain.apache * 100.0)?;
    }
    writeln!(out, "Plain is the rate of requests while nobody merges.")
}
