//! `pagefold forecast`: how many more guests like these fit.
//!
//! A census of N guests tells how many frames (or, folded, contents) exactly 1, 2, ... N of them have in common. From that
//! follows what any n of them take together, on average over all ways to choose n: something that k of N have is wanted by at
//! least one of n with probability 1 - C(N-k, n) / C(N, n). So the curve of the average footprint is exact up to N, with no
//! guest started or stopped for it. Beyond N each further guest is taken to cost what the Nth did, which is what the guests
//! have for themselves alone; `docs/insight.md` has how far that was off.

use super::select::Selection;
use crate::exit::{Outcome, Stop};
use crate::output::say;
use crate::size::parse_bytes;
use crate::take::{Request, take};
use anyhow::Context;
use census::Commonness;
use guest::{Glob, Guest, HostSide};
use page::pages_to_bytes;
use serde::Serialize;
use std::io::Write;

/// Of the host's memory that is kept free if nothing is said: one part in so many.
const RESERVE: u64 = 20;
/// Points of the curve that are printed beyond the guests that there are, in multiples of these.
const AHEAD: [u64; 3] = [2, 4, 8];

/// Arguments of `pagefold forecast`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold forecast                       further guests like those that run
  pagefold forecast --like web-1          like web-1, from it and the guests of its kind and size
  pagefold forecast --like web-1 --folded if they were folded in one group")]
pub struct Args {
    /// From this guest and those of the same kind and memory; without, from all guests selected
    #[arg(long, value_name = "GUEST")]
    like: Option<Glob>,
    #[command(flatten)]
    selection: Selection,
    /// What they would take if all of them were folded in one group
    #[arg(long)]
    folded: bool,
    /// Memory of the host to keep free [default: a twentieth]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    reserve: Option<u64>,
    /// Scanning threads
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Forecast {
    folded: bool,
    now: Now,
    /// What the average comes to with many guests.
    asymptote_bytes: u64,
    /// What one more guest takes.
    next_guest_bytes: u64,
    /// Memory that can be had, less the reserve; folded: with what folding the present guests would give back.
    free_bytes: u64,
    reserve_bytes: u64,
    fits: u64,
    fits_low: u64,
    /// Absent where a single guest cannot tell what further ones share with it.
    fits_high: Option<u64>,
    /// Average footprint by number of guests: measured up to `now.guests`, forecast beyond.
    curve: Vec<Point>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct Now {
    guests: u64,
    average_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Point {
    guests: u64,
    average_bytes: u64,
}

/// Runs it.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let guests = like(args.selection.resolve()?, args.like.as_ref())?;
    if guests.is_empty() {
        return Err(Stop::Usage("there is no guest to make a forecast from".to_owned()).into());
    }
    let request = Request {
        guests: &guests,
        host_side: HostSide::default(),
        threads: args.threads.into(),
        index_bytes: None,
        no_trace: false,
        map_cells: 0,
        samples: None,
        inside: &[],
        see: None,
        round: None,
    };
    let (findings, _) = take(&request)?;
    let ram_bytes = host::ram_bytes();
    let reserve_bytes = args.reserve.unwrap_or(ram_bytes / RESERVE);
    let available = host::available_bytes().context("cannot tell how much memory is free")?;
    let alone: Vec<u64> = match args.folded {
        true => findings.commonness.alone_if_folded.clone(),
        false => findings.guests.iter().map(|g| g.incremental_pages).collect(),
    };
    let forecast = forecast(&findings.commonness, &alone, args.folded, available, reserve_bytes);
    let mut out = std::io::stdout().lock();
    let written =
        if args.json { report::json::write(&mut out, &forecast) } else { out.write_all(text(&forecast).as_bytes()) };
    written.and_then(|()| out.flush()).context("cannot write to stdout")?;
    for missing in &findings.partial {
        say!("pagefold: {}: {}", report::printable(&missing.guest), report::printable(&missing.reason));
    }
    Ok(if findings.partial.is_empty() { Outcome::Done } else { Outcome::Partial })
}

/// Guests like the one that is named: the same kind, and the same memory.
fn like(guests: Vec<Guest>, name: Option<&Glob>) -> anyhow::Result<Vec<Guest>> {
    let Some(name) = name else { return Ok(guests) };
    let hit = guests.iter().find(|g| name.matches(&g.id) || name.matches(&g.name));
    let Some(model) = hit.cloned() else {
        return Err(Stop::Usage(format!("no guest matches {}", report::printable(name.as_str()))).into());
    };
    Ok(guests.into_iter().filter(|g| g.kind == model.kind && g.ram_bytes == model.ram_bytes).collect())
}

/// `alone`: pages that each guest has for itself alone.
fn forecast(common: &Commonness, alone: &[u64], folded: bool, available: u64, reserve: u64) -> Forecast {
    let guests = common.guests();
    let taken = |n: usize| common.together(n, folded);
    let bytes = |pages: f64| pages_to_bytes(1) as f64 * pages;
    // The mean of `alone`; by whatever way it is reached, with one guest there is nothing shared.
    let next = if guests > 1 { taken(guests) - taken(guests - 1) } else { taken(1) };
    let (spread, trend) = (
        standard_error(alone),
        if guests > 2 {
            // What the cost of a further guest still fell by: it may go on falling.
            (taken(guests - 1) - taken(guests - 2) - next).max(0.0)
        } else {
            0.0
        },
    );
    let gained = if folded { bytes((common.together(guests, false) - taken(guests)).max(0.0)) as u64 } else { 0 };
    let free_bytes = (available + gained).saturating_sub(reserve);
    let fits = |pages: f64| if pages >= 1.0 { (free_bytes as f64 / bytes(pages)) as u64 } else { u64::MAX };
    let average = |n: u64, pages: f64| Point { guests: n, average_bytes: (bytes(pages) / n as f64) as u64 };
    let mut curve: Vec<Point> = (1..=guests).map(|n| average(n as u64, taken(n))).collect();
    for times in AHEAD {
        let n = guests as u64 * times;
        curve.push(average(n, taken(guests) + (n - guests as u64) as f64 * next));
    }
    Forecast {
        folded,
        now: Now { guests: guests as u64, average_bytes: curve[guests - 1].average_bytes },
        asymptote_bytes: bytes(next) as u64,
        next_guest_bytes: bytes(next) as u64,
        free_bytes,
        reserve_bytes: reserve,
        fits: fits(next),
        fits_low: fits(next + 2.0 * spread),
        fits_high: (guests > 1).then(|| fits((next - 2.0 * spread - trend).max(1.0))),
        curve,
    }
}

/// Of the mean of some figures.
fn standard_error(figures: &[u64]) -> f64 {
    let n = figures.len() as f64;
    if figures.len() < 2 {
        return 0.0;
    }
    let mean = figures.iter().sum::<u64>() as f64 / n;
    let variance = figures.iter().map(|f| (*f as f64 - mean).powi(2)).sum::<f64>() / (n - 1.0);
    (variance / n).sqrt()
}

fn text(f: &Forecast) -> String {
    use report::Align::Right;
    let how = if f.folded { "folded in one group" } else { "as they are" };
    let mut table = report::Table::new(&[("guests", Right), ("average", Right), ("", report::Align::Left)]);
    for point in &f.curve {
        let what = if point.guests <= f.now.guests { "measured" } else { "forecast" };
        table.row([point.guests.to_string(), report::bytes(point.average_bytes), what.to_owned()]);
    }
    let range = match f.fits_high {
        Some(high) => format!("between {} and {high}", f.fits_low),
        None => format!("{} or more: one guest does not tell what the next will share with it", f.fits_low),
    };
    let more = format!(
        "{} more {} fit into {} ({range}), at {} each; {} stay free.",
        f.fits,
        if f.fits == 1 { "guest" } else { "guests" },
        report::bytes(f.free_bytes),
        report::bytes(f.next_guest_bytes),
        report::bytes(f.reserve_bytes),
    );
    format!("Average footprint by number of guests, {how}\n{table}\n{}", report::explain_table::paragraph(&more))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three guests: 100 pages each for itself, 30 pages that two have (each pair ten), 60 that all have.
    fn three() -> Commonness {
        Commonness {
            frames_mapped_by: vec![300, 30, 60],
            other_frames_mapped_by: vec![30, 0, 30],
            contents_held_by: vec![120, 30, 20],
            alone_if_folded: vec![50; 3],
        }
    }

    #[test]
    fn the_curve_is_the_mean_over_all_choices() {
        let common = three();
        let taken = |n| common.together(n, false);
        assert_eq!([taken(1), taken(2), taken(3)].map(f64::round), [180.0, 290.0, 390.0]);
    }

    #[test]
    fn what_fits_follows_from_what_the_next_guest_takes() {
        let found = forecast(&three(), &[90, 100, 110], false, 1000 << 12, 100 << 12);
        assert_eq!(found.now, Now { guests: 3, average_bytes: 130 << 12 });
        assert_eq!((found.next_guest_bytes, found.fits), (100 << 12, 9));
        assert!(found.fits_low < 9 && found.fits_high > Some(9), "{found:?}");
        assert_eq!(found.curve.last().map(|p| p.guests), Some(24));
        let folded = forecast(&three(), &[50; 3], true, 1000 << 12, 100 << 12);
        // 170 contents and 60 frames in place of 390 frames.
        assert_eq!(folded.free_bytes, (900 + 160) << 12);
        assert_eq!((folded.next_guest_bytes, folded.fits, folded.fits_low), (50 << 12, 21, 21));
        let one = Commonness { frames_mapped_by: vec![100], ..Commonness::default() };
        let one = Commonness {
            other_frames_mapped_by: vec![0],
            contents_held_by: vec![90],
            alone_if_folded: vec![90],
            ..one
        };
        let found = forecast(&one, &[100], false, 1000 << 12, 0);
        assert_eq!((found.fits, found.fits_high), (10, None));
    }
}
