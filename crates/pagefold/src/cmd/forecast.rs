//! `pagefold forecast`: how many more guests like these fit. `survey::forecast` explains the method.

use crate::cmd::which::Which;
use anyhow::Context;
use census::{Findings, GuestFindings};
use cli::exit::{Outcome, Stop};
use cli::say;
use cli::size::parse_bytes;
use guest::{Glob, Guest};
use page::{Region, pages_to_bytes};
use std::io::Write;
use survey::Selection;
use survey::forecast::{Forecast, Grown, Present, Room, forecast};
use survey::{Request, take};

/// Default reserve, as a part of the host's memory: 1/20.
const RESERVE: u64 = 20;

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
    #[command(flatten)]
    service: Which,
    /// Forecast for guests that are all folded in one group
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

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let room = room(args)?;
    let guests = like(args.selection.resolve(&|| args.service.members())?, args.like.as_ref())?;
    if guests.is_empty() {
        return Err(Stop::Usage("there is no guest to make a forecast from".to_owned()).into());
    }
    let request = Request { threads: args.threads.into(), ..Request::of(&guests) };
    let (findings, _) = take(&request)?;
    let forecast = forecast(&findings.commonness, &present(&guests, &findings, args.folded), args.folded, &room);
    let mut out = std::io::stdout().lock();
    let written =
        if args.json { report::json::write(&mut out, &forecast) } else { out.write_all(text(&forecast).as_bytes()) };
    written.and_then(|()| out.flush()).context("cannot write to stdout")?;
    for missing in &findings.partial {
        say!("pagefold: {}: {}", cli::printable(&missing.guest), cli::printable(&missing.reason));
    }
    Ok(if findings.partial.is_empty() { Outcome::Done } else { Outcome::Partial })
}

/// Available memory and free swap of this host, and the reserve. Fails if the reserve is more than all memory.
fn room(args: &Args) -> anyhow::Result<Room> {
    let ram_bytes = host::ram_bytes();
    let reserve_bytes = args.reserve.unwrap_or(ram_bytes / RESERVE);
    if reserve_bytes > ram_bytes {
        let [reserve, ram] = [reserve_bytes, ram_bytes].map(cli::bytes);
        return Err(Stop::Usage(format!("--reserve {reserve} is more than this host has: {ram}")).into());
    }
    let available_bytes = host::available_bytes().context("cannot tell how much memory is free")?;
    Ok(Room { available_bytes, swap_bytes: host::free_swap_bytes(), reserve_bytes })
}

/// What each guest takes now, and how much it may take: a VM, all its RAM and what its VMM takes beside it.
fn present(guests: &[Guest], findings: &Findings, folded: bool) -> Vec<Present> {
    let beside = |found: &GuestFindings| {
        let regions = found.regions.iter().filter(|r| r.region != Region::GuestRam);
        pages_to_bytes(regions.map(|r| r.resident_pages).sum())
    };
    let found = findings.guests.iter().zip(&findings.commonness.alone_if_folded);
    let present = |(guest, (found, if_folded)): (&Guest, (&GuestFindings, &u64))| Present {
        alone_pages: if folded { *if_folded } else { found.incremental_pages },
        full_bytes: guest.ram_bytes.map(|ram| ram + beside(found)),
    };
    guests.iter().zip(found).map(present).collect()
}

/// Guests like the named one: of the same kind, and with the same memory.
fn like(guests: Vec<Guest>, name: Option<&Glob>) -> anyhow::Result<Vec<Guest>> {
    let Some(name) = name else { return Ok(guests) };
    let hit = guests.iter().find(|g| name.matches(&g.id) || name.matches(&g.name));
    let Some(model) = hit.cloned() else {
        return Err(Stop::Usage(format!("no guest matches {}", cli::printable(name.as_str()))).into());
    };
    Ok(guests.into_iter().filter(|g| g.kind == model.kind && g.ram_bytes == model.ram_bytes).collect())
}

fn text(f: &Forecast) -> String {
    use report::Align::Right;
    let how = if f.folded { "folded in one group" } else { "as they are" };
    let mut table = report::Table::new(&[("guests", Right), ("average", Right), ("", report::Align::Left)]);
    for point in &f.curve {
        let what = if point.guests <= f.now.guests { "measured" } else { "forecast" };
        table.row([point.guests.to_string(), cli::bytes(point.average_bytes), what.to_owned()]);
    }
    let range = match f.fits_high {
        Some(high) => format!("between {} and {high}", f.fits_low),
        None => format!("{} or more: one guest does not tell what the next will share with it", f.fits_low),
    };
    let more = format!(
        "{} more {} fit into {} ({range}), at {} each; {} stay free.",
        f.fits,
        if f.fits == 1 { "guest" } else { "guests" },
        cli::bytes(f.free_bytes),
        cli::bytes(f.next_guest_bytes),
        cli::bytes(f.reserve_bytes),
    );
    let paragraphs = [more, f.grown.as_ref().map_or_else(|| NOT_BOUNDED.to_owned(), |grown| in_words(grown, f.fits))];
    let paragraphs = paragraphs.map(|text| report::explain_table::paragraph(&text)).concat();
    format!("Average footprint by number of guests, {how}\n{table}\n{paragraphs}")
}

/// Remark for guests of which not all are VMs.
const NOT_BOUNDED: &str = "That is as they are now: how far containers and processes may grow is not known.";

/// How many guests fit once all use the memory that they were given, and what happens if more were started.
fn in_words(grown: &Grown, fits: u64) -> String {
    let swap = match grown.swap_bytes {
        0 => "memory; there is no swap".to_owned(),
        bytes => format!("memory and {} of swap", cli::bytes(bytes)),
    };
    let size = cli::bytes(grown.guest_bytes);
    let even = format!("If all used what they were given ({size} each, with the VMM's own) and shared nothing:");
    if grown.short_bytes == 0 {
        return format!("{even} {} more fit into {swap}.", grown.fits);
    }
    let short = cli::bytes(grown.short_bytes);
    let end = match grown.swap_bytes {
        0 => "The kernel would kill guests then.",
        _ => "The kernel would swap all the time then, and in the end kill guests.",
    };
    format!(
        "WARNING: that is as they are now. {even} {} more fit into {swap}. With {fits} more, {short} would be missing. {end}",
        grown.fits
    )
}
