//! `pagefold bench insight`: the time to look into a running VM, beside a plain read of the memory that describes its
//! frames.
//!
//! A round measures each of them once, one after the other; the figures are medians over the rounds. The guest keeps
//! running.

use super::median::median;
use anyhow::Context;
use cli::exit::{Outcome, Stop};
use guest::{Guest, GuestRam, open_ram};
use insight::{GuestMemory, Kernel};
use report::{Align, Table};
use serde::Serialize;
use std::hint::black_box;
use std::io::Write;
use std::time::Instant;
use survey::Selection;

/// Size in bytes of the description of one frame (`struct page`), in every kernel tried.
const DESCRIPTION_BYTES: usize = 64;
/// Size in bytes of one piece of the plain read.
const PIECE_BYTES: usize = 2 << 20;

/// Arguments of `pagefold bench insight`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    selection: Selection,
    /// Times that everything is measured
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Medians measured of one VM, in milliseconds.
#[derive(Serialize)]
struct Figures {
    /// The guest.
    guest: String,
    /// Release of its kernel.
    release: String,
    /// Its memory.
    memory_bytes: u64,
    /// Memory that the host backs.
    backed_bytes: u64,
    /// Number of rounds; times are medians over them.
    rounds: u32,
    /// Look up the guest memory that the host backs.
    open_ms: f64,
    /// Find the kernel and its types.
    find_ms: f64,
    /// Classify every frame.
    classify_ms: f64,
    /// The three steps together.
    whole_ms: f64,
    /// Read as many bytes as describe the frames, and do nothing with them.
    plain_read_ms: f64,
    /// `whole_ms`, scaled to 1 GiB of guest memory.
    whole_ms_per_gib: f64,
}

/// Runs the bench and prints its result.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let guests = args.selection.resolve(&|| Ok(None))?;
    let mut all = Vec::new();
    for guest in guests.iter().filter(|g| g.kind.is_vm()) {
        all.push(measure(guest, args.rounds)?);
    }
    if all.is_empty() {
        return Err(Stop::Usage("no VM to look into: start one with 'pagefold lab up --image tiny'".to_owned()).into());
    }
    let mut out = std::io::stdout().lock();
    if args.json { report::json::write(&mut out, &all) } else { print(&mut out, &all) }
        .and_then(|()| out.flush())
        .context("cannot write to stdout")?;
    Ok(Outcome::Done)
}

fn measure(guest: &Guest, rounds: u32) -> anyhow::Result<Figures> {
    let mut times: [Vec<f64>; 5] = Default::default();
    let mut figures = None;
    // Which of several layouts is right does not change, and where the first is not, looking takes longer.
    for _ in 0..rounds {
        let begin = Instant::now();
        let rams = open_ram(guest, None).with_context(|| format!("cannot read the memory of {}", guest.id))?;
        let opened = begin.elapsed();
        let found = rams.iter().find_map(|ram| Some((ram, Kernel::find(ram).ok()?)));
        let (ram, kernel) = found.with_context(|| format!("no kernel found in {}", guest.id))?;
        let found = begin.elapsed();
        black_box(kernel.classify());
        let whole = begin.elapsed();
        let plain = plain_read(ram);
        let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        let this = [ms(opened), ms(found - opened), ms(whole - found), ms(whole), plain];
        times.iter_mut().zip(this).for_each(|(list, time)| list.push(time));
        figures = Some((kernel.release().to_owned(), ram.index().count() as u64, ram.backed_frames()));
    }
    let (release, frames, backed) = figures.context("no round was measured")?;
    let [open_ms, find_ms, classify_ms, whole_ms, plain_read_ms] = times.map(|list| median(&list));
    let memory_bytes = page::pages_to_bytes(frames);
    Ok(Figures {
        guest: guest.id.clone(),
        release,
        memory_bytes,
        backed_bytes: page::pages_to_bytes(backed),
        rounds,
        open_ms,
        find_ms,
        classify_ms,
        whole_ms,
        plain_read_ms,
        whole_ms_per_gib: whole_ms * f64::from(1 << 30) / memory_bytes as f64,
    })
}

/// Reads as many bytes as describe the guest's frames, from the end of its memory, where the descriptions usually are.
fn plain_read(ram: &GuestRam) -> f64 {
    let mut left = ram.index().count() * DESCRIPTION_BYTES;
    let mut piece = vec![0; PIECE_BYTES];
    let begin = Instant::now();
    for range in ram.ranges().iter().rev() {
        let mut end = range.end().0;
        while left > 0 && end > range.start.0 {
            let some = left.min(PIECE_BYTES).min((end - range.start.0) as usize);
            end -= some as u64;
            left -= some;
            black_box(ram.read(page::GuestPhys(end), &mut piece[..some]));
        }
    }
    begin.elapsed().as_secs_f64() * 1e3
}

fn print(out: &mut dyn Write, all: &[Figures]) -> std::io::Result<()> {
    let names = ["memory", "backed", "open", "find", "classify", "whole", "a GiB", "plain read"];
    let mut columns = vec![("guest", Align::Left), ("kernel", Align::Left)];
    columns.extend(names.map(|name| (name, Align::Right)));
    let mut table = Table::new(&columns);
    for f in all {
        let sizes = [f.memory_bytes, f.backed_bytes].map(cli::bytes);
        let times = [f.open_ms, f.find_ms, f.classify_ms, f.whole_ms, f.whole_ms_per_gib, f.plain_read_ms];
        let times = times.map(|ms| format!("{ms:.1}"));
        table.row([f.guest.clone(), f.release.clone()].into_iter().chain(sizes).chain(times));
    }
    writeln!(out, "Looking into running VMs: milliseconds, medians of {} rounds, one thread\n{table}", all[0].rounds)
}
