//! `pagefold sketch`: rows of this host's guests, once or again and again.

use crate::command::{Guests, now_s, parse_guarantee, parse_time, print_json};
use anyhow::Context;
use cli::exit::Outcome;
use cli::{output, say};
use guest::Glob;
use page::pages_to_bytes;
use place::key::{Keys, usual_dir};
use place::row::{Row, VERSION};
use place::sketch::{Settings, take};
use place::table::{self, Keep};
use place::theta::{FINE_LG_K, FLEET_LG_K};
use report::{Align, Table};
use serde::Serialize;
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Arguments of `pagefold sketch`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold sketch --group-by service                   the guests as they are folded
  pagefold sketch --every 10m --parquet /var/lib/pagefold/sketches
                                                       a file every ten minutes, of which a day's are kept
  pagefold sketch --fine --guest web-1 --parquet f     64 KiB of it: three times as exact

A group whose guests are on several hosts needs the same file GROUP.key, of 32 random bytes, in the directory of keys of
each. Without it, its sketches are comparable within this host alone.")]
pub struct Args {
    #[command(flatten)]
    guests: Guests,
    /// Repeat, each so much later than the one before
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    every: Option<Duration>,
    /// Write the rows to this file, or to a new file in this directory, which is made if a / ends its name
    #[arg(long, value_name = "FILE|DIR")]
    parquet: Option<PathBuf>,
    /// Most files of this host that are kept in the directory
    #[arg(long, value_name = "N", default_value_t = 144, value_parser = clap::value_parser!(u32).range(1..))]
    keep: u32,
    /// Most bytes of these files, of which the newest is kept in any case
    #[arg(long, value_name = "SIZE", default_value = "1G", value_parser = cli::size::parse_bytes)]
    keep_size: u64,
    /// Sketches of 64 KiB, not 8
    #[arg(long)]
    fine: bool,
    /// Directory of keys [default: /var/lib/pagefold/sketch for root, else ~/.local/state/pagefold/sketch]
    #[arg(long, value_name = "DIR")]
    keys: Option<PathBuf>,
    /// Size that a guest keeps, whatever happens; without, all that it was given (repeatable)
    #[arg(long, value_name = "GLOB=SIZE", value_parser = parse_guarantee)]
    guaranteed: Vec<(Glob, u64)>,
    /// Print JSON, without the sketches; with --every, one object a line
    #[arg(long)]
    json: bool,
    /// End when standard input closes
    #[arg(long, hide = true)]
    until_hangup: bool,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Printed<'a> {
    version: i32,
    seconds: f64,
    sketch_bytes: usize,
    file: Option<&'a Path>,
    rows: &'a [Row],
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    if args.until_hangup {
        end_at_hangup();
    }
    args.parquet.as_deref().map(make_dir).transpose()?;
    let keys = Keys::open(&args.keys.clone().unwrap_or_else(usual_dir))?;
    let (begin, mut rounds, mut outcome) = (Instant::now(), 0, Outcome::Done);
    loop {
        if once(args, &keys)? == Outcome::Partial {
            outcome = Outcome::Partial;
        }
        rounds += 1;
        let Some(every) = args.every else { return Ok(outcome) };
        std::thread::sleep((every * rounds).saturating_sub(begin.elapsed()));
    }
}

/// Starts a thread that ends this process when standard input closes. A table appears whole, or not at all.
fn end_at_hangup() {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
}

/// Makes the directory `path` if that ends in `/`. Only its owner may enter it.
fn make_dir(path: &Path) -> anyhow::Result<()> {
    if !path.as_os_str().as_encoded_bytes().ends_with(b"/") {
        return Ok(());
    }
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .with_context(|| format!("cannot make {}", path.display()))
}

fn once(args: &Args, keys: &Keys) -> anyhow::Result<Outcome> {
    let (begin, epoch_s) = (Instant::now(), now_s()?);
    let settings = Settings {
        threads: args.guests.threads.into(),
        index_bytes: args.guests.index_bytes(),
        lg_k: if args.fine { FINE_LG_K } else { FLEET_LG_K },
        guaranteed: &args.guaranteed,
        epoch_s,
    };
    let (rows, missed) = take(&args.guests.resolve()?, &|group| keys.of(group), &settings)?;
    let file = args.parquet.as_deref().map(|path| write(args, path, epoch_s, &rows)).transpose()?;
    let printed = Printed {
        version: VERSION,
        seconds: begin.elapsed().as_secs_f64(),
        sketch_bytes: rows.iter().filter_map(|row| row.sketch.as_ref()).map(Vec::len).sum(),
        file: file.as_deref(),
        rows: &rows,
    };
    match (args.json, args.every) {
        (true, None) => print_json(&printed)?,
        (true, Some(_)) => {
            let mut line = Vec::new();
            report::json::write_line(&mut line, &printed)?;
            output::bytes(&line)?;
        }
        (false, _) if file.is_none() => output::bytes(table(&rows).to_string().as_bytes())?,
        (false, _) => {}
    }
    missed.iter().for_each(|missed| say!("pagefold: {}", cli::printable(missed)));
    Ok(if missed.is_empty() { Outcome::Done } else { Outcome::Partial })
}

fn write(args: &Args, path: &Path, epoch_s: u64, rows: &[Row]) -> anyhow::Result<PathBuf> {
    if !path.is_dir() {
        table::write(path, rows)?;
        return Ok(path.to_owned());
    }
    let host = rows.first().map(|row| row.host.as_str()).context("no row of the host")?;
    table::write_epoch(path, host, epoch_s, rows, Keep { files: args.keep as usize, bytes: args.keep_size })
}

fn table(rows: &[Row]) -> Table {
    let figures = ["resident", "zero", "distinct", "folded", "other"].map(|name| (name, Align::Right));
    let names = [("guest", Align::Left), ("group", Align::Left), ("template", Align::Left)];
    let mut table = Table::new(&[&names[..], &figures[..]].concat());
    for row in rows.iter().filter(|row| row.guest.is_some()) {
        let texts = [&row.guest, &row.group, &row.template].map(|text| text.clone().unwrap_or_default());
        let pages = [row.resident_pages, row.zero_pages, row.distinct_pages, row.folded_pages, row.other_pages];
        table.row(texts.into_iter().chain(pages.map(|pages| cli::size::mib(pages_to_bytes(pages)))));
    }
    table
}
