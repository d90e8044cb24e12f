//! `pagefold clone`, `pagefold clones` and `pagefold rollback`.

use super::room::Room;
use super::which::Which;
use api::name;
use clap::Subcommand;
use cli::exit::{Outcome, Stop};
use cli::output;
use report::{Align, Table};
use serde_json::json;
use start::{Cloned, Clones, Folding, Record, Starter, State, Store, Wanted};
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `pagefold clone`.
#[derive(clap::Args)]
#[command(after_help = "\
Starts all clones, and returns when each has answered from inside: that it is another than its siblings, by a request that
names each thing that must differ. Clones that do not answer so are ended, and none is handed out.

Where a service serves the group (pagefold serve), the clones are members of it from their first moment: what they write is folded
again, with everybody in the group. It keeps the template's memory until the last clone has ended. Where it balances memory between
guests, clones that do not fit are not started (pagefold admit).

Examples:
  pagefold clone web --count 10 --group acme
  pagefold clone web --count 3 --group acme --name 'shop-%d' --json
  pagefold clone web --group acme --name shop-9 --snippet libvirt > shop-9.sh")]
pub struct CloneArgs {
    /// The template
    template: String,
    /// How many
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    count: u32,
    /// The group of the template, and of its clones
    #[arg(long, value_name = "GROUP", value_parser = name::parse_group)]
    group: String,
    /// Names of the clones, with %d for a number [default: the template's name, -%d]
    #[arg(long, value_name = "PATTERN")]
    name: Option<String>,
    /// Keep this many machines loaded and stopped, for the next clones
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1000))]
    warm: u32,
    /// Hand out clones in which nobody answers, too: they have the names, keys and random numbers of their siblings
    #[arg(long)]
    allow_unconfirmed: bool,
    /// Start clones that are no members, also where a service serves the group
    #[arg(long, conflicts_with = "service")]
    no_fold: bool,
    /// Print a script by which something else starts the clone's QEMU: a command line, libvirt, or Proxmox VE
    #[arg(long, value_name = "WHO", requires = "name", conflicts_with_all = ["count", "warm"])]
    snippet: Option<By>,
    /// Hold the memory for a QEMU that such a script starts, and let it go on as this clone
    #[arg(long = "await", requires = "name", conflicts_with_all = ["count", "warm", "snippet"])]
    is_awaited: bool,
    #[command(flatten)]
    service: Which,
    #[command(flatten)]
    how: How,
}

/// The one who starts a clone's QEMU.
#[derive(Clone, Copy, clap::ValueEnum)]
enum By {
    Command,
    Libvirt,
    Proxmox,
}

/// Options that all commands have which start clones.
#[derive(clap::Args)]
struct How {
    /// Longest time until a clone answers
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `pagefold rollback`.
#[derive(clap::Args)]
pub struct RollbackArgs {
    /// The clone
    clone: String,
    #[command(flatten)]
    how: How,
}

/// Arguments of `pagefold save`.
#[derive(clap::Args)]
pub struct SaveArgs {
    /// The clone; it is stopped while it is written, and goes on
    clone: String,
    /// The file
    file: PathBuf,
}

/// Arguments of `pagefold restore`.
#[derive(clap::Args)]
pub struct RestoreArgs {
    /// Name of the clone that goes on
    clone: String,
    /// The file that pagefold save has written
    file: PathBuf,
    /// Hand it out although nobody inside answers
    #[arg(long)]
    allow_unconfirmed: bool,
    #[command(flatten)]
    how: How,
}

/// Arguments of `pagefold clones`.
#[derive(clap::Args)]
pub struct ClonesArgs {
    #[command(subcommand)]
    action: Option<Action>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Action {
    /// Show the clones that live
    List,
    /// End clones
    End {
        /// The clones
        #[arg(required_unless_present = "all", value_name = "NAME")]
        names: Vec<String>,
        /// All of them, and machines that wait for later requests
        #[arg(long, conflicts_with = "names")]
        all: bool,
    },
}

fn places() -> (Store, Clones) {
    (Store::open(&start::templates_dir()), Clones::open(&start::clones_dir()))
}

/// Runs `pagefold clone`.
pub fn clone(args: &CloneArgs) -> anyhow::Result<Outcome> {
    let (store, clones) = places();
    let (template, dir) = store.find(&args.group, &args.template)?;
    // A QEMU that Proxmox VE starts by itself is no member.
    let is_folded = !args.no_fold && !matches!(args.snippet, Some(By::Proxmox));
    let folding = if !is_folded { None } else { Folding::find(&args.service.meant(), &args.group)? };
    host::note_interrupts()?;
    let names = args.name.clone().unwrap_or_else(|| format!("{}-%d", template.name));
    let wanted = Wanted {
        template: &template,
        dir: &dir,
        count: args.count as usize,
        names: &names,
        warm: args.warm as usize,
        allow_unconfirmed: args.allow_unconfirmed,
        patience: Duration::from_secs(args.how.timeout),
        folding: folding.as_ref(),
    };
    if let Some(by) = args.snippet {
        return print_snippet(&clones.snippet(&wanted, by.starter())?, args.how.json);
    }
    let started = (template.memory.bytes, args.count as usize + args.warm as usize);
    let room = Room::make(args.service.meant().place().dir(), "clone", started, Some(&args.group))?;
    let made = if args.is_awaited { vec![clones.wait_for(&wanted)?] } else { clones.make(&wanted)? };
    drop(room);
    print(&made, args.how.json)
}

impl By {
    const fn starter(self) -> Starter {
        match self {
            Self::Command => Starter::Command,
            Self::Libvirt => Starter::Libvirt,
            Self::Proxmox => Starter::Proxmox,
        }
    }
}

fn print_snippet(script: &str, as_json: bool) -> anyhow::Result<Outcome> {
    if as_json {
        output::line(serde_json::to_string_pretty(&json!({"snippet": script}))?)?;
    } else {
        output::bytes(script.as_bytes())?;
    }
    Ok(Outcome::Done)
}

/// Runs `pagefold rollback`.
pub fn roll_back(args: &RollbackArgs) -> anyhow::Result<Outcome> {
    let (store, clones) = places();
    let clone = clones.find(&args.clone)?;
    if clone.state == State::Warm {
        return Err(
            Stop::Usage(format!("{} waits to be a clone, and has nothing to be put back from", clone.name)).into()
        );
    }
    let (template, dir) = store.find(&clone.group, &clone.template)?;
    if !clone.is_of(&template) {
        let text = format!("template {} was made anew after clone {} was made of it", template.name, clone.name);
        return Err(Stop::Usage(format!("{text}: there is nothing to put it back to")).into());
    }
    let folding = Folding::again(&clone)?;
    host::note_interrupts()?;
    let wanted = Wanted {
        template: &template,
        dir: &dir,
        count: 1,
        names: &clone.name,
        warm: 0,
        allow_unconfirmed: clone.state == State::Unconfirmed,
        patience: Duration::from_secs(args.how.timeout),
        folding: folding.as_ref(),
    };
    print(&[clones.roll_back(&clone, &wanted)?], args.how.json)
}

/// Runs `pagefold save`.
pub fn save(args: &SaveArgs) -> anyhow::Result<Outcome> {
    let (store, clones) = places();
    let clone = clones.find(&args.clone)?;
    let (template, dir) = store.find(&clone.group, &clone.template)?;
    clones.save(&clone, &template, &dir, &args.file)?;
    output::line(format_args!("saved {} in {}", clone.name, args.file.display()))?;
    Ok(Outcome::Done)
}

/// Runs `pagefold restore`.
pub fn restore(args: &RestoreArgs) -> anyhow::Result<Outcome> {
    let (store, clones) = places();
    let hand = (args.allow_unconfirmed, Duration::from_secs(args.how.timeout));
    print(&[clones.restore(&args.file, Some(&args.clone), hand, &store)?], args.how.json)
}

/// Runs `pagefold clones`.
pub fn clones(args: &ClonesArgs) -> anyhow::Result<Outcome> {
    let (store, clones) = places();
    match &args.action {
        None | Some(Action::List) => list(&clones.list()?, args.json),
        Some(Action::End { names, all }) => {
            let living = clones.list()?;
            let named = |clone: &&Record| *all || names.contains(&clone.name);
            let missing = names.iter().find(|name| !living.iter().any(|clone| clone.name == **name));
            if let Some(name) = missing {
                return Err(Stop::Usage(format!("no clone {name}: pagefold clones lists those there are")).into());
            }
            let ending: Vec<&Record> = living.iter().filter(named).collect();
            ending.iter().try_for_each(|clone| clones.end(clone))?;
            store.tidy(&clones.list()?)?;
            let ended: Vec<&str> = ending.iter().map(|clone| clone.name.as_str()).collect();
            if args.json {
                output::line(json!({"ended": ended}))?;
            } else {
                output::line(format_args!(
                    "ended {}",
                    if ended.is_empty() { "none".into() } else { ended.join(", ") }
                ))?;
            }
            Ok(Outcome::Done)
        }
    }
}

fn list(living: &[Record], as_json: bool) -> anyhow::Result<Outcome> {
    if as_json {
        output::line(serde_json::to_string_pretty(&json!({"clones": living}))?)?;
        return Ok(Outcome::Done);
    }
    let columns = [
        ("CLONE", Align::Left),
        ("GROUP", Align::Left),
        ("TEMPLATE", Align::Left),
        ("PID", Align::Right),
        ("STATE", Align::Left),
    ];
    let mut table = Table::new(&columns);
    for clone in living {
        let pid = clone.process.map_or_else(|| "-".into(), |process| process.pid.to_string());
        table.row([clone.name.clone(), clone.group.clone(), clone.template.clone(), pid, state(clone.state)]);
    }
    output::bytes(table.to_string().as_bytes())?;
    Ok(Outcome::Done)
}

fn state(state: State) -> String {
    let value = serde_json::to_value(state).expect("a plain name");
    value.as_str().unwrap_or_default().to_owned()
}

fn print(made: &[Cloned], as_json: bool) -> anyhow::Result<Outcome> {
    if as_json {
        output::line(serde_json::to_string_pretty(&json!({"clones": made}))?)?;
        return Ok(Outcome::Done);
    }
    let (left, right) = (Align::Left, Align::Right);
    let columns = [("CLONE", left), ("PID", right), ("ANSWERED", right), ("FOLDED", left), ("MACHINE-ID", left)];
    let mut table = Table::new(&columns);
    for one in made {
        let answered = one.answered_ms.map_or_else(|| "unconfirmed".into(), |ms| format!("{ms:.0} ms"));
        let folded = if one.service.is_some() { "yes" } else { "no" };
        let machine_id = one.machine_id.clone().unwrap_or_else(|| "-".into());
        table.row([one.name.clone(), one.pid.to_string(), answered, folded.to_owned(), machine_id]);
    }
    output::bytes(table.to_string().as_bytes())?;
    Ok(Outcome::Done)
}
