//! `pagefold group suggest`: groups that could be one.

use crate::command::{Guests, now_s, print_json};
use cli::exit::Outcome;
use cli::{output, say};
use place::fleet::Collector;
use place::key::Key;
use place::sketch::{Settings, take};
use place::suggest::{Suggestion, suggest};
use place::theta::FINE_LG_K;
use serde::Serialize;
use std::fmt::Write;

/// Arguments of `pagefold group suggest`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold group suggest                          each guest trusts nobody: who could?
  pagefold group suggest --group-by service       groups of the running service that could be one

Nothing is changed, and nothing is kept: the sketches are of a key that is gone when this ends.")]
pub struct Args {
    #[command(flatten)]
    guests: Guests,
    /// Part of the smaller one's contents that two groups must have in common, in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 10, value_parser = clap::value_parser!(u8).range(1..=100))]
    least: u8,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Groups that could be one.
#[derive(Serialize)]
struct Printed<'a> {
    /// Number of guests that were looked at.
    guests: usize,
    /// Pairs of groups, by what making them one would save.
    suggestions: &'a [Suggestion],
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let once = Key::once()?;
    let settings = Settings {
        threads: args.guests.threads.into(),
        index_bytes: args.guests.index_bytes(),
        lg_k: FINE_LG_K,
        guaranteed: &[],
        epoch_s: now_s()?,
    };
    let (rows, missed) = take(&args.guests.resolve()?, &|_| Ok(once.clone()), &settings)?;
    let mut collector = Collector::of_rows(rows.len());
    rows.into_iter().try_for_each(|row| collector.add(row))?;
    let fleet = collector.finish(0.0)?;
    let suggestions = suggest(&fleet, f64::from(args.least) / 100.0)?;
    if args.json {
        print_json(&Printed { guests: fleet.guests.len(), suggestions: &suggestions })?;
    } else {
        output::bytes(text(&suggestions).as_bytes())?;
    }
    missed.iter().for_each(|missed| say!("pagefold: {}", cli::printable(missed)));
    Ok(if missed.is_empty() { Outcome::Done } else { Outcome::Partial })
}

fn text(suggestions: &[Suggestion]) -> String {
    if suggestions.is_empty() {
        return "No two groups have enough in common.\n".to_owned();
    }
    let mut text = String::new();
    for found in suggestions {
        let groups: Vec<_> = found.groups.iter().map(|group| cli::printable(group)).collect();
        let (saves, error) = (cli::bytes(found.saves_bytes), cli::bytes(found.error_bytes));
        let _ = writeln!(text, "{} guests, {saves} +- {error}: {}", found.guests, groups.join(", "));
        for revealed in &found.reveals {
            let (guest, bytes) = (cli::printable(&revealed.guest), cli::bytes(revealed.bytes));
            let _ =
                writeln!(text, "  {guest} would let {} others learn of {bytes} that it holds them", revealed.to_guests);
        }
    }
    text + "Only you can say who trusts whom: a file for --groups, or the configuration of the service, does.\n"
}
