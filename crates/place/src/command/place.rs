//! `pagefold place`: a plan over sketches of many hosts.

use crate::command::{Tables, now_s, parse_time, print_json};
use cli::exit::{Outcome, Stop};
use cli::output;
use place::fleet::{Fleet, Host, Rules};
use place::plan::{Outcome as Sums, Plan, Settings, plan};
use place::policy::Policy;
use report::{Align, Table};
use std::fmt::Write;
use std::time::Duration;

/// Arguments of `pagefold place`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold place /srv/sketches                         hosts that each policy needs, and moves towards likeness
  pagefold place --policy pack --moves 5 /srv/sketches
  pagefold place --storm 25 --json /srv/sketches       room for a quarter of all folded pages to break at once

Nothing is moved. Savings are those of folding within groups, for guests whose sketches have the same key.")]
pub struct Args {
    #[command(flatten)]
    tables: Tables,
    /// The policy that the moves follow
    #[arg(long, value_enum, default_value_t = Policy::Likeness)]
    policy: Policy,
    /// Part of the folded pages that may break at once, in percent: for these, hosts keep room
    #[arg(long, value_name = "PERCENT", default_value_t = 100, value_parser = clap::value_parser!(u8).range(0..=100))]
    storm: u8,
    /// Count zero pages as memory that guests keep
    #[arg(long)]
    keep_zero_pages: bool,
    /// Most moves that are listed
    #[arg(long, value_name = "N", default_value_t = 20)]
    moves: usize,
    /// Greatest age of sketches
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = parse_time)]
    max_age: Duration,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let settings = Settings {
        policy: args.policy,
        rules: Rules { storm: f64::from(args.storm) / 100.0, zero_pages: !args.keep_zero_pages },
        most_moves: args.moves,
        valid_s: args.max_age.as_secs(),
        now_s: now_s()?,
    };
    let fleet = args.tables.fleet()?;
    check_age(&fleet, &settings)?;
    let plan = plan(&fleet, &settings);
    if args.json {
        print_json(&plan)?
    } else {
        output::bytes(text(&plan).as_bytes())?
    }
    Ok(Outcome::Done)
}

/// Refuses sketches that are older than `--max-age`, since their guests may hold other pages by now, and sketches from
/// as far in the future, since a clock must be wrong.
fn check_age(fleet: &Fleet, settings: &Settings) -> anyhow::Result<()> {
    let apart = |host: &&Host| host.epoch_s.abs_diff(settings.now_s) > settings.valid_s;
    let Some(host) = fleet.hosts.iter().find(apart) else { return Ok(()) };
    let name = cli::printable(&host.name);
    let age = humantime::format_duration(Duration::from_secs(host.epoch_s.abs_diff(settings.now_s)));
    let text = if host.epoch_s < settings.now_s {
        format!("the sketches of host {name} are {age} old: take new ones, or say --max-age")
    } else {
        format!("the sketches of host {name} are of a time {age} ahead: set its clock, or this one")
    };
    Err(Stop::Usage(text).into())
}

fn text(plan: &Plan) -> String {
    let columns = ["hosts", "overfull", "no room", "saved", "without zeros", "+-"].map(|name| (name, Align::Right));
    let mut table = Table::new(&[&[("policy", Align::Left)][..], &columns[..]].concat());
    let name = |policy: Policy| format!("{policy:?}").to_lowercase();
    let mut row = |name: String, sums: &Sums| {
        let counts = [sums.hosts_needed, sums.hosts_overfull, sums.without_room].map(|n| cli::size::count(n as u64));
        let bytes = [sums.saved_bytes, sums.saved_without_zero_bytes, sums.error_bytes].map(cli::bytes);
        table.row([name].into_iter().chain(counts).chain(bytes));
    };
    row("as it is".to_owned(), &plan.now);
    plan.policies.iter().for_each(|named| row(name(named.name), &named.outcome));
    let mut text = format!("{} guests on {} hosts\n\n{table}", plan.guests, plan.hosts);
    if plan.moves.is_empty() {
        let _ = writeln!(text, "\nNo move leads to {}.", name(plan.policy));
        return text;
    }
    let figures = ["saves", "+-", "copies", "there already"].map(|name| (name, Align::Right));
    let names = ["guest", "group", "from", "to"].map(|name| (name, Align::Left));
    let mut moves = Table::new(&[&names[..], &figures[..]].concat());
    for step in &plan.moves {
        let bytes = [step.error_bytes, step.cost_bytes, step.already_there_bytes].map(cli::bytes);
        let names = [&step.guest, &step.group, &step.from, &step.to].map(String::clone);
        moves.row(names.into_iter().chain([cli::size::signed_bytes(step.saved_bytes)]).chain(bytes));
    }
    let _ =
        write!(text, "\nMoves towards {}, in order; {} more follow\n\n{moves}", name(plan.policy), plan.further_moves);
    text
}
