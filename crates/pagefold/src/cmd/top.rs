//! `pagefold top`: who shares with whom, what folding saves and costs, as it changes.

use crate::cmd::which::Which;
use cli::exit::Outcome;
use std::time::Duration;

/// Arguments of `pagefold top`.
#[derive(clap::Args)]
#[command(after_help = "\
Groups come first, then members of a group (Enter), then processes of a member; ? shows the keys, and the meaning of each
column. Changes of a group's settings are confirmed. Its service takes or refuses them, as for pagefold group set.
Without a terminal, one picture is printed.

Examples:
  pagefold top
  pagefold top --once --interval 0       at once, and without rates
  pagefold top --json --interval 10      an object a line, every ten seconds")]
pub struct Args {
    /// Seconds between two looks, from which rates are made. 0 is for one picture without rates
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = parse_interval)]
    interval: Duration,
    /// Print one picture as text, or with --json one object, and leave
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    service: Which,
    /// Print JSON, an object a line
    #[arg(long)]
    json: bool,
    /// Print what services answered, as the tests of the command read it
    #[arg(long, hide = true, conflicts_with_all = ["once", "json"])]
    raw: bool,
}

/// Longest interval, in seconds: 1 hour.
const MOST_INTERVAL_S: f64 = 3600.0;

fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.0..=MOST_INTERVAL_S).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| format!("{text:?} is no time from 0 to 3600 seconds"))
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    watch::run(&watch::Options {
        meant: args.service.meant(),
        every: args.interval,
        once: args.once,
        json: args.json,
        raw: args.raw,
        // See no-color.org.
        colour: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
    })
}
