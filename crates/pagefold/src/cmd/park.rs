//! `pagefold park` and `pagefold wake`.

mod idle;

use super::which::Which;
use anyhow::Context;
use api::place::Place;
use cli::exit::{Outcome, Stop};
use cli::size::bytes;
use cli::time::parse_seconds;
use cli::{output, say};
use guest::Guest;
use host::ProcessId;
use lend::{Held, Ledger, NOTES_WITHIN, Parked, Parking, Shrunk};
use serde::Serialize;
use serde_json::json;
use start::Clones;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use survey::Selection;

/// Greatest value of `--idle`, in seconds: 1 day.
const MOST_IDLE_S: u64 = 86_400;
/// Most characters of a reason for the journal.
const MOST_WHY: usize = 200;

/// Arguments of `pagefold park`.
#[derive(clap::Args)]
#[command(after_help = "\
The guest stands still until pagefold wake: nothing inside runs, and nobody is answered. What is equal to pages of its group is folded.
Private memory is written to swap, or to zram, where the host has one. A VM needs a QMP socket; a program is stopped by SIGSTOP, and has to
be a member. If this command fails or is interrupted, the guest goes on.

Examples:
  pagefold park web-7                     with as little memory as may be, until pagefold wake web-7
  pagefold park --idle 10m --group acme   looks on for 10 minutes, and parks all that were idle
  pagefold park --list                    guests that are parked")]
pub struct ParkArgs {
    /// The guest, by id, name or pid
    #[arg(required_unless_present_any = ["list", "idle"])]
    guest: Option<String>,
    /// Park all guests that are idle for so long
    #[arg(long, value_name = "TIME", conflicts_with = "guest", value_parser = parse_idle)]
    idle: Option<u64>,
    #[command(flatten)]
    meant: idle::Meant,
    /// Show guests that are parked
    #[arg(long, conflicts_with_all = ["guest", "idle"])]
    list: bool,
    /// Longest time for folding what is equal
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(0..=3600))]
    fold_for: u64,
    /// Reason for the journal
    #[arg(long, value_name = "TEXT", value_parser = parse_why)]
    why: Option<String>,
    /// Go on, and park each guest as soon as it has been idle for so long, until the standard input closes
    #[arg(long, hide = true, requires = "idle")]
    until_hangup: bool,
    #[command(flatten)]
    service: Which,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `pagefold wake`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold wake web-7
  pagefold wake web-7 -- systemd-socket-proxyd 10.0.0.7:80   becomes this program. The guest is not parked while that runs")]
pub struct WakeArgs {
    /// The guest, by id, name or pid
    #[arg(required_unless_present = "all")]
    guest: Option<String>,
    /// All guests that are parked
    #[arg(long, conflicts_with = "guest")]
    all: bool,
    /// Longest wait for a clone's helper to set its clock
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=600))]
    clock_within: u64,
    /// Reason for the journal
    #[arg(long, value_name = "TEXT", value_parser = parse_why)]
    why: Option<String>,
    #[command(flatten)]
    service: Which,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Program to execute then, with its arguments. Until it has ended, the guest is not parked
    #[arg(last = true, value_name = "PROGRAM", conflicts_with = "all")]
    program: Vec<OsString>,
}

fn parse_idle(text: &str) -> Result<u64, String> {
    match parse_seconds(text, MOST_IDLE_S)? {
        0 => Err("a guest is looked at for a second at least".into()),
        seconds => Ok(seconds),
    }
}

fn parse_why(text: &str) -> Result<String, String> {
    if text.chars().count() > MOST_WHY {
        return Err(format!("a reason has {MOST_WHY} characters at most"));
    }
    Ok(cli::printable(text))
}

/// The end of parking a guest.
#[derive(Serialize)]
struct Done {
    guest: String,
    memory: Option<Shrunk>,
    problem: Option<String>,
}

/// Runs `pagefold park`.
pub fn park(args: &ParkArgs) -> anyhow::Result<Outcome> {
    let place = args.service.meant().place();
    if args.list {
        return list(place.dir(), args.json);
    }
    // Fails unless the directory is the caller's: by another user's notes of parked guests, this command would stop and
    // wake guests.
    place.make()?;
    host::note_interrupts().context("cannot catch signals")?;
    let find = || find(&args.service);
    let patience = Duration::from_secs(args.fold_for);
    let idle_for = Duration::from_secs(args.idle.unwrap_or(0));
    if args.until_hangup {
        idle::park_on(&find, &args.meant, idle_for, &place, patience)?;
        return Ok(Outcome::Done);
    }
    let why = args.why.clone().unwrap_or_else(|| match args.idle {
        None => "a command asked for it".to_owned(),
        Some(seconds) => idle::words(seconds),
    });
    let guests = match &args.guest {
        Some(name) => vec![named(find()?, name)?],
        None => {
            let mut idle = idle::found(&find, &args.meant, idle_for)?;
            idle.truncate(args.meant.room(parked(place.dir())?.len()));
            idle
        }
    };
    let all = park_all(&place, &guests, patience, &why);
    if args.json {
        output::line(serde_json::to_string_pretty(&json!({"parked": all}))?)?;
    }
    for done in &all {
        match (&done.problem, &done.memory) {
            (Some(problem), _) => say!("pagefold: {problem}"),
            (None, Some(memory)) if !args.json => output::bytes(text(&done.guest, memory).as_bytes())?,
            _ => {}
        }
    }
    Ok(if all.iter().all(|done| done.problem.is_none()) { Outcome::Done } else { Outcome::Partial })
}

/// All guests of the host, with members of the service.
fn find(service: &Which) -> anyhow::Result<Vec<Guest>> {
    Selection::default().resolve(&|| service.members())
}

/// Parks guests. An error of one guest does not end the work on the others.
fn park_all(place: &Place, guests: &[Guest], patience: Duration, why: &str) -> Vec<Done> {
    let before: Vec<Held> = guests.iter().map(Held::of).collect();
    let mut not_folded = vec![None; guests.len()];
    // A program's agent stops with the program, so the program is folded first. A VM's agent runs while the VM is
    // stopped.
    let mut fold = |are_meant: &dyn Fn(usize) -> bool| {
        let meant: Vec<usize> = (0..guests.len()).filter(|n| are_meant(*n)).collect();
        let all: Vec<Guest> = meant.iter().map(|n| guests[*n].clone()).collect();
        for (n, why) in meant.into_iter().zip(lend::until_folded(place, &all, patience)) {
            not_folded[n] = why;
        }
    };
    fold(&|n| !guests[n].kind.is_vm());
    let stopped: Vec<anyhow::Result<Parked>> = guests.iter().map(|guest| stop(place.dir(), guest, why)).collect();
    fold(&|n| guests[n].kind.is_vm() && stopped[n].is_ok());
    let settled = guests.iter().zip(stopped).zip(before.into_iter().zip(not_folded));
    let settled = settled.map(|((guest, stopped), held)| {
        let settled = stopped.and_then(|parked| settle(place.dir(), guest, &parked, held));
        let problem = settled.as_ref().err().map(|why| format!("{why:#}"));
        Done { guest: guest.id.clone(), memory: settled.ok(), problem }
    });
    settled.collect()
}

fn stop(service: &Path, guest: &Guest, why: &str) -> anyhow::Result<Parked> {
    let mut ledger = Ledger::open(service)?;
    let turn = ledger.take_turn()?;
    check_interrupts()?;
    Parking::lock(service, NOTES_WITHIN)?.park(guest, &ledger, &turn, why)
}

fn check_interrupts() -> anyhow::Result<()> {
    anyhow::ensure!(host::interrupted().is_none(), "this command was interrupted");
    Ok(())
}

/// Has memory of a stopped guest written to swap, and keeps the guest parked. On an error the guest is resumed. The
/// last argument is the memory that the guest held before, and why folding was not finished.
fn settle(
    service: &Path,
    guest: &Guest,
    parked: &Parked,
    (before, not_folded): (Held, Option<String>),
) -> anyhow::Result<Shrunk> {
    let shrunk = check_interrupts().map(|()| lend::shrink(guest, before, not_folded));
    anyhow::ensure!(parked.is_alive(), "{} has ended", cli::printable(&parked.guest));
    let parking = Parking::lock(service, NOTES_WITHIN)?;
    let kept = shrunk.and_then(|shrunk| {
        check_interrupts()?;
        parking.keep(parked).map(|()| shrunk)
    });
    kept.map_err(|why| parking.give_up(parked, &why))
}

fn text(guest: &str, shrunk: &Shrunk) -> String {
    let [before, after, swapped] =
        [shrunk.private_before_bytes, shrunk.held.private_bytes, shrunk.held.swapped_bytes].map(bytes);
    let reasons = [&shrunk.not_folded, &shrunk.problem].into_iter().flatten();
    let reasons: String = reasons.map(|why| format!("{why}\n")).collect();
    let guest = cli::printable(guest);
    format!("{guest} stands still: it held {before} alone, and holds {after}; {swapped} are in swap\n{reasons}")
}

/// The guest with this id, name or pid. Owners choose names, so a name of several guests is an error.
pub(super) fn named(guests: Vec<Guest>, name: &str) -> anyhow::Result<Guest> {
    let pid = name.parse::<u32>().ok();
    let is_it =
        |guest: &Guest| guest.id == name || guest.name == name || pid.is_some_and(|pid| guest.pids.contains(&pid));
    let (by_id, others): (Vec<Guest>, Vec<Guest>) =
        guests.into_iter().filter(is_it).partition(|guest| guest.id == name);
    let found = if by_id.is_empty() { others } else { by_id };
    let shown = cli::printable(name);
    match <[Guest; 1]>::try_from(found) {
        Ok([guest]) => Ok(guest),
        Err(none) if none.is_empty() => Err(Stop::Usage(format!("no guest is called {shown}")).into()),
        Err(several) => {
            let ids: Vec<String> = several.iter().map(|guest| cli::printable(&guest.id)).collect();
            Err(Stop::Usage(format!("several guests are called {shown}: name one of {}", ids.join(", "))).into())
        }
    }
}

/// Guests that are parked, by the notes in the service's directory; empty if there are no notes.
pub(super) fn parked(service: &Path) -> anyhow::Result<Vec<Parked>> {
    if !service.join("parked").is_dir() {
        return Ok(Vec::new());
    }
    // Fails unless the directory is the caller's: by another user's notes of parked guests, this command would wake
    // guests.
    Place::at(service).make()?;
    Parking::lock(service, NOTES_WITHIN)?.list()
}

fn list(service: &Path, as_json: bool) -> anyhow::Result<Outcome> {
    let all = parked(service)?;
    let of = |parked: &Parked| json!({"guest": parked.guest, "parked_s": parked_s(parked)});
    if as_json {
        let all: Vec<_> = all.iter().map(of).collect();
        output::line(serde_json::to_string_pretty(&json!({"parked": all}))?)?;
    } else {
        for parked in &all {
            output::line(format_args!("{}: for {} s", cli::printable(&parked.guest), parked_s(parked)))?;
        }
    }
    Ok(Outcome::Done)
}

fn parked_s(parked: &Parked) -> u64 {
    host::boot_clock_s().saturating_sub(parked.at_s)
}

/// Runs `pagefold wake`.
pub fn wake(args: &WakeArgs) -> anyhow::Result<Outcome> {
    let place = args.service.meant().place();
    let mut all = meant_to_wake(args, &place)?;
    if let Some(name) = args.guest.as_ref().filter(|_| !args.program.is_empty()) {
        keep_awake(&place, &all, name, &args.service)?;
        // The guest may have been parked just before `keep_awake`.
        all = meant_to_wake(args, &place)?;
    } else if let Some(name) = args.guest.as_ref().filter(|_| all.is_empty()) {
        return Err(Stop::Usage(format!("{} is not parked", cli::printable(name))).into());
    }
    let why = match &args.why {
        Some(why) => why.as_str(),
        None if args.program.is_empty() => "a command asked for it",
        None => "a program is about to use it",
    };
    let mut outcome = Outcome::Done;
    for parked in &all {
        let woken = Parking::lock(place.dir(), NOTES_WITHIN).and_then(|parking| parking.wake(parked, why));
        if let Err(why) = woken {
            say!("pagefold: {why:#}");
            outcome = Outcome::Partial;
            continue;
        }
        show_woken(parked, Duration::from_secs(args.clock_within), args.json)?;
    }
    match args.program.split_first() {
        Some((program, words)) if outcome == Outcome::Done => {
            let why = Command::new(program).args(words).exec();
            Err(why).with_context(|| format!("cannot execute {}", Path::new(program).display()))
        }
        _ => Ok(outcome),
    }
}

/// Parked guests with the id, name or pid of the command line, or all if there is none.
fn meant_to_wake(args: &WakeArgs, place: &Place) -> anyhow::Result<Vec<Parked>> {
    let mut all = parked(place.dir())?;
    if let Some(name) = &args.guest {
        let pid = name.parse().ok();
        let is_it = |parked: &Parked| parked.guest == *name || parked.name == *name || pid == Some(parked.process.pid);
        all.retain(is_it);
    }
    Ok(all)
}

/// Prevents the `parked` guests, or if there are none the guest called `name`, from being parked. This lasts as long as
/// this process lives, also after `execve`.
fn keep_awake(place: &Place, parked: &[Parked], name: &str, service: &Which) -> anyhow::Result<()> {
    place.make()?;
    let mut guests: Vec<ProcessId> = parked.iter().map(|parked| parked.process).collect();
    if guests.is_empty() {
        let guest = named(find(service)?, name)?;
        guests.push(ProcessId::of(*guest.pids.first().context("a guest without a process")?)?);
    }
    let (parking, own) = (Parking::lock(place.dir(), NOTES_WITHIN)?, ProcessId::of(std::process::id())?);
    guests.into_iter().try_for_each(|guest| parking.keep_awake(guest, own))
}

fn show_woken(parked: &Parked, clock_within: Duration, as_json: bool) -> anyhow::Result<()> {
    let parked_s = parked_s(parked);
    let clock = clock_of(parked, clock_within).unwrap_or_else(|why| {
        say!("pagefold: the clock of {} is not set: {why:#}", cli::printable(&parked.guest));
        "behind"
    });
    if as_json {
        return output::line(json!({"woken": parked.guest, "parked_s": parked_s, "clock": clock}));
    }
    let clock = match clock {
        "hosts" => "its clock is the host's".to_owned(),
        "set" => "its clock is set".to_owned(),
        _ => format!("its clock is {parked_s} s behind, and nobody inside sets it for us"),
    };
    output::line(format_args!("{} goes on after {parked_s} s; {clock}", cli::printable(&parked.guest)))
}

/// Has the helper inside a parked clone set the guest's clock, which stood still with the VM. A program uses the host's
/// clock.
fn clock_of(parked: &Parked, patience: Duration) -> anyhow::Result<&'static str> {
    if !parked.is_vm() {
        return Ok("hosts");
    }
    let clones = Clones::open(&start::clones_dir());
    let found = clones.list()?.into_iter().find(|clone| clone.process == Some(parked.process));
    let Some(clone) = found else { return Ok("behind") };
    Ok(if clones.set_clock(&clone, patience)? { "set" } else { "behind" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guest(id: &str, name: &str, pid: u32) -> Guest {
        Guest {
            id: id.into(),
            name: name.into(),
            kind: guest::GuestKind::Process,
            pids: vec![pid],
            group: "g".into(),
            ram_bytes: None,
            facts: guest::Facts::default(),
        }
    }

    #[test]
    fn name_that_several_guests_have_means_none_of_them() {
        let all =
            || vec![guest("qemu:web", "web", 7), guest("qemu:web@9", "web", 9), guest("process:8", "qemu:web", 8)];
        let found = |name: &str| named(all(), name).map(|guest| guest.pids[0]).map_err(|why| why.to_string());
        assert_eq!([found("qemu:web"), found("qemu:web@9"), found("8")], [Ok(7), Ok(9), Ok(8)]);
        assert_eq!(found("web"), Err("several guests are called web: name one of qemu:web, qemu:web@9".into()));
        assert_eq!(found("no"), Err("no guest is called no".into()));
    }
}
