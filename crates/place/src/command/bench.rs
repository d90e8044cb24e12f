//! `pagefold bench place`: plans of a simulated fleet.

use crate::command::{Tables, fleet_of, now_s, print_json};
use cli::exit::{Outcome, Stop};
use cli::output;
use place::day::{Day, days};
use place::fleet::{Collector, Fleet, Rules};
use place::plan::{Outcome as Sums, Settings, outcome, plan};
use place::policy::Policy;
use place::row::Row;
use place::simulate::{HASHES, Kinds, Size, fleet, rows};
use place::summary::{summary, sums};
use place::table::{self, Source};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Arguments of `pagefold bench place`.
#[derive(clap::Args)]
pub struct Args {
    /// Hosts, all alike
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    hosts: u32,
    /// Guests
    #[arg(long, value_name = "N", default_value_t = 200_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    guests: u32,
    /// Tenants, each a group by itself
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    tenants: u32,
    /// Hashes of a guest's sketch
    #[arg(long, value_name = "N", default_value_t = HASHES, hide = true)]
    hashes: usize,
    /// Part of the folded pages that may break at once, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 100, value_parser = clap::value_parser!(u8).range(0..=100))]
    storm: u8,
    /// Besides, a day in which guests arrive and leave, and none is moved
    #[arg(long)]
    day: bool,
    /// Part of the guests that are replaced in the day, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 100, requires = "day", value_parser = clap::value_parser!(u16).range(0..=1000))]
    replaced: u16,
    /// Write the fleet's table to this file, and have the engine read it
    #[arg(long, value_name = "FILE")]
    parquet: Option<PathBuf>,
    /// Besides, sketch two real VMs, fold them as a plan expects, and audit what the move saves. Takes root
    #[arg(long)]
    moved: bool,
    /// Findings of `pagefold bench place --moved`
    #[arg(long, value_name = "GUEST:BYTES:BYTES", hide = true, value_parser = parse_predicted)]
    predicted: Vec<Predicted>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `pagefold-place kinds`.
#[derive(clap::Args)]
pub struct KindsArgs {
    #[command(flatten)]
    tables: Tables,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Report {
    /// Number of hosts.
    hosts: usize,
    /// Number of guests.
    guests: usize,
    /// Number of tenants.
    tenants: usize,
    /// Part of the folded pages for which room is kept.
    storm_percent: u8,
    /// Time of a plan with all policies.
    plan_s: f64,
    /// Memory that folding reaches, zeros aside.
    held_bytes: u64,
    /// Zero pages.
    zero_bytes: u64,
    /// Contents that one guest holds more than once.
    inside_bytes: u64,
    /// Memory that folding saves where the guests are, zero pages aside.
    now_saved_without_zero_bytes: u64,
    /// Plans.
    policies: Vec<OfPolicy>,
    /// With `--day`: guests arrive and leave over 24 hours, and none is moved.
    days: Vec<Day>,
    /// With `--parquet`: other engines.
    engines: Vec<OfEngine>,
    /// With `--moved`: moves of real guests.
    predicted: Vec<Predicted>,
}

/// A move of real guests.
#[derive(Clone, Debug, Serialize)]
struct Predicted {
    /// The guest that moves.
    moved: String,
    /// Bytes that its move saves by the plan.
    predicted_bytes: u64,
    /// The same by page frames.
    audited_bytes: u64,
}

/// Parses `GUEST:BYTES:BYTES`: a move, the savings by the plan, and the savings by page frames.
fn parse_predicted(text: &str) -> Result<Predicted, String> {
    let mut parts = text.rsplitn(3, ':');
    let mut bytes = || parts.next().and_then(|part| part.parse().ok()).ok_or("use GUEST:PREDICTED:AUDITED");
    let (audited_bytes, predicted_bytes) = (bytes()?, bytes()?);
    Ok(Predicted { moved: parts.next().unwrap_or_default().to_owned(), predicted_bytes, audited_bytes })
}

/// The plan of one policy.
#[derive(Serialize)]
struct OfPolicy {
    /// The policy.
    name: Policy,
    /// Hosts that have guests.
    hosts_needed: usize,
    /// Guests that are placed nowhere.
    without_room: usize,
    /// Hosts that have guests where zero pages are not given back.
    hosts_needed_with_zero_kept: usize,
    /// Memory that folding saves.
    saved_bytes: u64,
    /// The same, zero pages aside.
    saved_without_zero_bytes: u64,
    /// Part of the savings without zero pages that guests have by themselves.
    inside_share: f64,
}

/// The answer of another engine.
#[derive(Serialize)]
struct OfEngine {
    /// The engine.
    name: &'static str,
    /// Memory that folding saves, by its answer.
    saved_bytes: u64,
    /// Time of the answer.
    seconds: f64,
}

/// Runs the bench.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    if args.moved {
        return Err(Stop::Usage("pagefold-place starts no VMs: pagefold bench place --moved does".into()).into());
    }
    let [hosts, guests, tenants] = [args.hosts, args.guests, args.tenants].map(|n| n as usize);
    let size = Size { hosts, guests, tenants, hashes: args.hashes };
    let drawn = fleet(&Kinds::measured(), &size);
    let rules = Rules { storm: f64::from(args.storm) / 100.0, zero_pages: true };
    let settings = Settings { policy: Policy::Likeness, rules, most_moves: 100, valid_s: 3600, now_s: now_s()? };
    let begin = Instant::now();
    let found = plan(&drawn, &settings);
    let plan_s = begin.elapsed().as_secs_f64();
    let total = summary(&sums(&drawn), "own", 0.0).total;
    let of = |(name, sums): (Policy, Sums)| OfPolicy {
        name,
        hosts_needed: sums.hosts_needed,
        without_room: sums.without_room,
        hosts_needed_with_zero_kept: with_zero_kept(&drawn, name, &rules),
        saved_bytes: sums.saved_bytes,
        saved_without_zero_bytes: sums.saved_without_zero_bytes,
        inside_share: total.inside_bytes as f64 / sums.saved_without_zero_bytes.max(1) as f64,
    };
    let report = Report {
        hosts,
        guests,
        tenants,
        storm_percent: args.storm,
        plan_s,
        held_bytes: total.held_bytes,
        zero_bytes: total.zero_bytes,
        inside_bytes: total.inside_bytes,
        now_saved_without_zero_bytes: found.now.saved_without_zero_bytes,
        policies: found.policies.iter().map(|named| of((named.name, named.outcome))).collect(),
        days: if args.day {
            days(&Kinds::measured(), &size, &rules, f64::from(args.replaced) / 100.0)
        } else {
            Vec::new()
        },
        engines: args.parquet.as_ref().map(|path| engines(path, &drawn)).transpose()?.unwrap_or_default(),
        predicted: args.predicted.clone(),
    };
    if args.json {
        print_json(&report)?
    } else {
        output::line(text(&report))?
    }
    Ok(Outcome::Done)
}

fn with_zero_kept(fleet: &Fleet, policy: Policy, rules: &Rules) -> usize {
    let rules = Rules { zero_pages: false, ..*rules };
    outcome(fleet, &policy.place(fleet, &rules), &rules).hosts_needed
}

/// Writes the fleet to the table `path`, and measures how long this program takes to read and sum it.
fn engines(path: &Path, fleet: &Fleet) -> anyhow::Result<Vec<OfEngine>> {
    table::write(path, &rows(fleet, now_s()?).collect::<Vec<_>>())?;
    let begin = Instant::now();
    let read = fleet_of(&[Source::named(path)], 0.0)?;
    let summary = summary(&sums(&read), "own", begin.elapsed().as_secs_f64());
    let saved_bytes = summary.total.saved_without_zero_bytes;
    Ok(vec![OfEngine { name: summary.engine, saved_bytes, seconds: summary.seconds }])
}

fn text(report: &Report) -> String {
    let mut text = format!("{} guests on {} hosts, planned in {:.1} s\n", report.guests, report.hosts, report.plan_s);
    for policy in &report.policies {
        let [with, without] = [policy.saved_bytes, policy.saved_without_zero_bytes].map(cli::bytes);
        text += &format!(
            "{:?}: {} hosts, {} where zero pages are kept; saves {with}, {without} without zero pages, {:.0}% of it inside guests\n",
            policy.name,
            policy.hosts_needed,
            policy.hosts_needed_with_zero_kept,
            policy.inside_share * 100.0
        );
    }
    for day in &report.days {
        text += &format!(
            "{:?} over a day: {} arrivals; {:.0} hosts in the mean, {} at most, {} if placed anew; saves {} without zero pages\n",
            day.name,
            day.arrived,
            day.mean_hosts,
            day.most_hosts,
            day.hosts_anew,
            cli::bytes(day.saved_without_zero_bytes)
        );
    }
    for Predicted { moved, predicted_bytes, audited_bytes } in &report.predicted {
        let [predicted, audited] = [*predicted_bytes, *audited_bytes].map(cli::bytes);
        text += &format!("{moved}: its move saves {predicted} by the plan, and {audited} by page frames\n");
    }
    text.trim_end().to_owned()
}

/// Prints means of guests by kind. Files may be of one host at several times: each counts as a host.
pub fn kinds(args: &KindsArgs) -> anyhow::Result<Outcome> {
    let files = args.tables.files()?;
    let mut collector = Collector::of_rows(table::count(&files)?);
    for file in &files {
        table::read(std::slice::from_ref(file), &mut |row| {
            collector.add(Row { host: file.path.display().to_string(), ..row })
        })?;
    }
    output::bytes(toml::to_string(&Kinds::of(&collector.finish(0.0)?))?.as_bytes())?;
    Ok(Outcome::Done)
}
