//! `pagefold guests`: what VMs, containers and processes hold by the kernel's own accounting.

use super::select::Selection;
use crate::exit::Outcome;
use crate::output::say;
use anyhow::Context;
use guest::{Footprint, Partial};
use serde::Serialize;
use std::io::Write;

/// Arguments of `pagefold guests`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold guests                       all VMs and containers
  pagefold guests --guest 'qemu:web-*'  those VMs
  pagefold guests --pid 4711 --json     one process, for a program")]
pub struct Args {
    #[command(flatten)]
    selection: Selection,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Measured {
    guests: Vec<Footprint>,
    partial: Vec<Partial>,
}

/// Runs it.
pub fn run(args: Args) -> anyhow::Result<Outcome> {
    let mut measured = Measured { guests: Vec::new(), partial: Vec::new() };
    for guest in args.selection.resolve()? {
        let (footprint, partial) = Footprint::measure(&guest);
        // A row of zeros would be a wrong answer: of a guest that could not be read at all, only that is said.
        if partial.len() < guest.pids.len() {
            measured.guests.push(footprint);
        }
        measured.partial.extend(partial);
    }
    for p in &measured.partial {
        say!("pagefold: {}, process {}: {}", report::printable(&p.guest), p.pid, report::printable(&p.reason));
    }
    let mut out = std::io::stdout().lock();
    let written = if args.json {
        report::json::write(&mut out, &measured)
    } else {
        report::guests_table::write(&mut out, &measured.guests)
    };
    written.and_then(|()| out.flush()).context("cannot write to stdout")?;
    Ok(if measured.partial.is_empty() { Outcome::Done } else { Outcome::Partial })
}
