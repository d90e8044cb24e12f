//! `pagefold fleet`: memory and savings of guests where they are.

use crate::command::{Tables, print_json};
use cli::exit::Outcome;
use cli::output;
use place::summary::{Summary, Total, summary, sums};
use report::{Align, Table};
use std::time::Instant;

/// Arguments of `pagefold fleet`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    tables: Tables,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let begin = Instant::now();
    let summary = summary(&sums(&args.tables.fleet()?), "own", begin.elapsed().as_secs_f64());
    if args.json {
        print_json(&summary)?
    } else {
        output::bytes(table(&summary).to_string().as_bytes())?
    }
    Ok(Outcome::Done)
}

fn table(summary: &Summary) -> Table {
    let figures = ["hosts", "guests", "held", "zero", "saved where they are", "inside guests"];
    let mut table =
        Table::new(&[&[("group", Align::Left)][..], &figures.map(|name| (name, Align::Right))[..]].concat());
    let mut row = |name: &str, hosts: usize, total: &Total| {
        let counts = [hosts as u64, total.guests].map(cli::size::count);
        let bytes = [total.held_bytes, total.zero_bytes, total.saved_without_zero_bytes, total.inside_bytes];
        table.row([name.to_owned()].into_iter().chain(counts).chain(bytes.map(cli::bytes)));
    };
    summary.groups.iter().for_each(|group| row(&group.group, group.hosts, &group.total));
    row("total", summary.hosts, &summary.total);
    table
}
