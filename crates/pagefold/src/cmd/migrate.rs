//! `pagefold migrate`: a VM goes to another host.

mod shown;

use super::park::{named, parked};
use super::which::Which;
use anyhow::{Context, bail, ensure};
use api::change::parse_destination;
use cli::exit::{Outcome, Stop};
use cli::size::bytes;
use cli::time::parse_seconds;
use cli::{output, say};
use guest::Guest;
use lend::{Ledger, Movable, Moved, Wanted};
use serde::{Deserialize, Serialize};
use serde_json::json;
use service::helper;
use shown::Shown;
use start::Clones;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use survey::Selection;

/// The reason why no guest is moved by postcopy.
const POSTCOPY: &str = "postcopy is refused: a member that wrote all the time failed the check of its bytes there, another move did not \
                        end in 5 minutes, and the cause is not known: move it without --postcopy";

/// Greatest value of `--within`, in seconds: 7 days.
const MOST_WITHIN_S: u64 = 7 * 86_400;

/// Arguments of `pagefold migrate`.
#[derive(clap::Args)]
#[command(after_help = "\
The operator starts a QEMU with the same machine on the other host, without -S: best as a member there.
  pagefold run --group acme -- qemu-system-x86_64 (as here) -incoming tcp:0.0.0.0:4444
  pagefold migrate web-7 --to tcp:10.0.0.2:4444 --bandwidth 110M --within 10m

If anything fails before the guest stands still for the last part, it goes on here. So it does where it has not arrived in time, because it
writes faster than the link carries. When it runs there, its QEMU here is ended, and its frames are free. If this command is killed, QEMU
goes on alone. The same command follows it then, within a time that counts from the begin, and ends a QEMU that the guest has left.

The stream is not encrypted. It holds all memory of the guest.")]
pub struct Args {
    /// The guest, by id, name or pid
    guest: String,
    /// The QEMU that waits for it: tcp:HOST:PORT, or unix:PATH
    #[arg(long, value_name = "URI", value_parser = parse_destination)]
    to: String,
    /// Refused, see [`POSTCOPY`]
    #[arg(long, hide = true)]
    postcopy: bool,
    /// Most bytes a second [default: as QEMU has it, 128M unless it was told otherwise]
    #[arg(long, value_name = "SIZE", value_parser = cli::size::parse_bytes)]
    bandwidth: Option<u64>,
    /// Time without progress after which the guest stays here
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=90))]
    give_up: u64,
    /// Time after which the guest stays here, if it has not arrived [default: 10m, or four times as long as all its RAM takes]
    #[arg(long, value_name = "TIME", value_parser = parse_within)]
    within: Option<u64>,
    /// The other host's QEMU has the same disks
    #[arg(long)]
    shared_disks: bool,
    /// Leave the QEMU here as it is, paused, when the guest has gone
    #[arg(long, conflicts_with = "dry_run")]
    keep: bool,
    /// Only say what it would free, cost and take
    #[arg(long)]
    dry_run: bool,
    /// Table of pagefold sketch of the other host, for what is there already
    #[arg(long, value_name = "FILE", requires = "dry_run")]
    sketch: Option<PathBuf>,
    /// Directory of keys of sketches, as of pagefold sketch
    #[arg(long, value_name = "DIR", requires = "sketch")]
    keys: Option<PathBuf>,
    #[command(flatten)]
    service: Which,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The output of `pagefold-place weigh`.
#[derive(Deserialize)]
struct Weighed {
    ram_bytes: u64,
    takes_bytes: u64,
    last_bytes: u64,
    frees_bytes: u64,
    already_there_bytes: Option<u64>,
    problem: Option<String>,
}

/// The output of `--dry-run --json`.
#[derive(Serialize)]
struct Predicted<'a> {
    /// The guest.
    guest: &'a str,
    /// The destination.
    to: &'a str,
    /// Memory that this host gets back: private frames of the guest's processes, and slots that nobody else maps.
    frees_bytes: u64,
    /// Memory that the guest's RAM takes there before anything is folded there, less `already_there_bytes`: zeros aside, but
    /// whole huge pages, where this host gives them.
    costs_bytes: u64,
    /// The part of the guest's RAM that guests of its group hold there, by `--sketch`; `None` if that is not known.
    already_there_bytes: Option<u64>,
    /// Time that the move takes; `None` where nothing bounds the stream.
    seconds: Option<f64>,
    /// Time for which the guest stands still; `None` where nothing bounds the stream.
    downtime_ms: Option<u64>,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let guest = named(Selection::default().resolve(&|| args.service.members())?, &args.guest)?;
    let movable = Movable::of(&guest)?;
    if movable.has_gone()? {
        return left(args, &guest, &movable);
    }
    if args.postcopy {
        return Err(Stop::Usage(POSTCOPY.into()).into());
    }
    if args.dry_run {
        check(args, &guest, &movable)?;
        return predict(args, &guest, &movable);
    }
    host::note_interrupts().context("cannot catch signals")?;
    let place = args.service.meant().place();
    place.make()?;
    let wanted = wanted(args, &guest, &movable)?;
    let mut shown = Shown::of(&guest, wanted.within);
    let moved = match movable.go_on(&wanted, place.dir(), &mut |progress| shown.see(progress))? {
        Some(moved) => moved,
        None => {
            check(args, &guest, &movable)?;
            let turn = Ledger::open(place.dir())?.take_turn()?;
            ensure!(host::interrupted().is_none(), "this command was interrupted");
            movable.go(&wanted, place.dir(), turn, &mut |progress| shown.see(progress))?
        }
    };
    drop(shown);
    end(args, &movable)?;
    show(args, &guest, &moved)
}

/// Parses a time such as `10m`, of a second at least.
pub(super) fn parse_within(text: &str) -> Result<u64, String> {
    match parse_seconds(text, MOST_WITHIN_S)? {
        0 => Err("a migration takes a second at least".into()),
        seconds => Ok(seconds),
    }
}

fn wanted(args: &Args, guest: &Guest, movable: &Movable) -> anyhow::Result<Wanted> {
    let within = match args.within {
        Some(seconds) => Duration::from_secs(seconds),
        None => movable.pace(args.bandwidth)?.usual_within(guest.ram_bytes.unwrap_or(0)),
    };
    let give_up = Duration::from_secs(args.give_up);
    Ok(Wanted { to: args.to.clone(), bandwidth: args.bandwidth, give_up, within })
}

/// Fails with the reason if the guest must not be moved.
fn check(args: &Args, guest: &Guest, movable: &Movable) -> anyhow::Result<()> {
    check_outside(args.service.meant().place().dir(), guest)?;
    movable.check(args.shared_disks)
}

/// Fails if the guest must not be moved for a reason that QEMU does not know of: it is parked, or a clone.
pub(super) fn check_outside(service: &Path, guest: &Guest) -> anyhow::Result<()> {
    let id = cli::printable(&guest.id);
    let is_its = |pid: u32| guest.pids.contains(&pid);
    if parked(service)?.iter().any(|parked| is_its(parked.process.pid)) {
        bail!("{id} is not moved: it is parked. Have it go on first: pagefold wake {id}");
    }
    let clones = Clones::open(&start::clones_dir()).seen();
    if clones.iter().any(|clone| clone.process.is_some_and(|process| is_its(process.pid))) {
        bail!("{id} is not moved: it is a clone, and its template, its identity and its record are on this host");
    }
    Ok(())
}

/// Ends the QEMU of a guest that has left this host already, unless `--keep` is given, and reports that.
fn left(args: &Args, guest: &Guest, movable: &Movable) -> anyhow::Result<Outcome> {
    ensure!(!args.dry_run, "{} has been moved already", cli::printable(&guest.id));
    end(args, movable)?;
    let id = cli::printable(&guest.id);
    let source = if args.keep { "stands still for good" } else { "is ended" };
    if args.json {
        output::line(json!({"guest": guest.id, "moved_before": true, "ended": !args.keep}))?;
    } else {
        output::line(format_args!("{id} had been moved already; its QEMU here {source}"))?;
    }
    Ok(Outcome::Done)
}

fn end(args: &Args, movable: &Movable) -> anyhow::Result<()> {
    if args.keep { Ok(()) } else { movable.end() }
}

fn show(args: &Args, guest: &Guest, moved: &Moved) -> anyhow::Result<Outcome> {
    let id = cli::printable(&guest.id);
    if args.json {
        let mut all = json!(moved);
        all["guest"] = json!(guest.id);
        all["to"] = json!(args.to);
        all["ended"] = json!(!args.keep);
        output::line(all)?;
        return Ok(Outcome::Done);
    }
    let source = if args.keep { "stands still for good" } else { "is ended" };
    output::line(format_args!(
        "{id} runs at {}: {:.1} s, {} sent; it stood still for {} ms. Its QEMU here {source}",
        args.to,
        moved.seconds,
        bytes(moved.sent_bytes),
        moved.downtime_ms
    ))?;
    Ok(Outcome::Done)
}

fn predict(args: &Args, guest: &Guest, movable: &Movable) -> anyhow::Result<Outcome> {
    let pace = movable.pace(args.bandwidth)?;
    let weighed = weigh(args, guest, pace.last_bytes())?;
    let estimate = pace.estimate(guest.ram_bytes.unwrap_or(0), weighed.ram_bytes, weighed.last_bytes);
    let already = weighed.already_there_bytes;
    if let Some(problem) = &weighed.problem {
        say!("pagefold: {}", cli::printable(problem));
    }
    let predicted = Predicted {
        guest: &guest.id,
        to: &args.to,
        frees_bytes: weighed.frees_bytes,
        costs_bytes: weighed.takes_bytes.saturating_sub(already.unwrap_or(0)),
        already_there_bytes: already,
        seconds: estimate.seconds,
        downtime_ms: estimate.downtime_ms,
    };
    if args.json {
        output::line(serde_json::to_string_pretty(&predicted)?)?;
        return Ok(Outcome::Done);
    }
    let there = already.map_or("nobody knows what is there already".to_owned(), |there| {
        format!("{} of it are there already", bytes(there))
    });
    let time = match (predicted.seconds, predicted.downtime_ms) {
        (Some(seconds), Some(ms)) => format!("{seconds:.1} s, of which it stands still for {ms} ms"),
        _ => "a time that QEMU's settings do not tell: say --bandwidth".to_owned(),
    };
    let [frees, costs] = [predicted.frees_bytes, predicted.costs_bytes].map(bytes);
    let id = cli::printable(&guest.id);
    output::line(format_args!("{id} would free {frees} here, and take {costs} there ({there}). It takes {time}"))?;
    Ok(Outcome::Done)
}

/// Runs `pagefold-place weigh`, and reads its output.
fn weigh(args: &Args, guest: &Guest, last_bytes: u64) -> anyhow::Result<Weighed> {
    let program = helper::program("pagefold-place")
        .map_err(|e| Stop::HostLacks(format!("--dry-run takes pagefold-place, which is not installed: {e}")))?;
    let mut command = Command::new(program);
    command
        .arg("weigh")
        .args(["--last".to_owned(), last_bytes.to_string()])
        .args(guest.pids.iter().flat_map(|pid| ["--pid".to_owned(), pid.to_string()]));
    if guest.facts.folded_in.is_some() {
        command.args(["--group-by", "service"]);
    }
    command.args(args.service.words());
    for (option, path) in [("--sketch", &args.sketch), ("--keys", &args.keys)] {
        path.iter().for_each(|path| _ = command.arg(option).arg(path));
    }
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("cannot run pagefold-place")?;
    match output.status.code() {
        Some(0) => Ok(serde_json::from_slice(&output.stdout).context("pagefold-place weigh prints something else")?),
        Some(2) => Err(Stop::Usage("the guest was not weighed".into()).into()),
        _ => bail!("the guest was not weighed"),
    }
}
