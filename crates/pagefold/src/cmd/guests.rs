//! `pagefold guests`: footprints of VMs, containers and processes by the kernel's own accounting.

use crate::cmd::which::Which;
use anyhow::Context;
use cli::exit::Outcome;
use cli::say;
use guest::{Footprint, Partial};
use serde::Serialize;
use std::io::Write;
use survey::Selection;

/// Arguments of `pagefold guests`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold guests                       all VMs and containers, and programs that are folded
  pagefold guests --guest 'qemu:web-*'  those VMs
  pagefold guests --pid 4711 --json     one process, for a program")]
pub struct Args {
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    service: Which,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The footprints, in the shape that `--json` prints.
#[derive(Serialize)]
struct Measured {
    /// One entry a guest.
    guests: Vec<Footprint>,
    /// Processes of guests that could not be read in full.
    partial: Vec<Partial>,
}

/// Runs the command.
pub fn run(args: Args) -> anyhow::Result<Outcome> {
    let mut measured = Measured { guests: Vec::new(), partial: Vec::new() };
    for guest in args.selection.resolve(&|| args.service.members())? {
        let (footprint, partial) = Footprint::measure(&guest);
        // A row of zeros would be a wrong answer: a guest that could not be read at all is only reported as missing.
        if partial.len() < guest.pids.len() {
            measured.guests.push(footprint);
        }
        measured.partial.extend(partial);
    }
    for p in &measured.partial {
        say!("pagefold: {}, process {}: {}", cli::printable(&p.guest), p.pid, cli::printable(&p.reason));
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
