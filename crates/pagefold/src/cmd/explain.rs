//! `pagefold explain`: each page of a VM by its use inside the guest, the other holders of the same contents, the idle
//! memory, and advice.

use crate::cmd::which::Which;
use anyhow::Context;
use census::GuestFindings;
use cli::exit::{Outcome, Stop};
use cli::say;
use guest::{Glob, Guest, GuestKind, HostSide, Qmp};
use std::io::Write;
use std::path::{Path, PathBuf};
use survey::Selection;
use survey::explain::{Device, Explained, SHOWN, Things, explain};
use survey::{HOST, Inside, Request, check_host_files, other_processes, take};

/// Arguments of `pagefold explain`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold explain web-1                      one VM, against all other guests and the host
  pagefold explain web-1 --group-by name      web-1 and web-2 trust each other
  pagefold explain web-1 --qmp /run/web-1.qmp ask QEMU where its memory lies, over this socket")]
pub struct Args {
    /// The VM, by name or id
    #[arg(value_name = "GUEST")]
    guest: Glob,
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    service: Which,
    /// QEMU's QMP socket [default: as its command line says, where nobody else holds it]
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<PathBuf>,
    /// Leave the host's own processes out of the comparison
    #[arg(long)]
    no_host: bool,
    /// Count this file's page cache as the host's too: a disk image, say (repeatable)
    #[arg(long, value_name = "FILE")]
    host_file: Vec<PathBuf>,
    /// Scanning threads
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: u16,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    check_host_files(&args.host_file)?;
    let guests = args.selection.resolve(&|| args.service.members())?;
    let target = target(&guests, &args.guest)?;
    let mut qmp = args.qmp.as_deref().map(|path| qmp(&guests[target], path)).transpose()?;
    let mut inside = Vec::new();
    for (n, guest) in guests.iter().enumerate() {
        let looked = Inside::of(guest, qmp.take_if(|_| n == target), true);
        // Of the other guests only names of files are needed, so their errors do not matter.
        inside.push(if n == target { looked.context("cannot read its memory")? } else { looked.unwrap_or_default() });
    }
    let things = Things::new(&guests, &inside, target);
    let request = Request {
        host_side: HostSide {
            pids: if args.no_host { Vec::new() } else { other_processes(&guests) },
            files: args.host_file.clone(),
        },
        threads: args.threads.into(),
        inside: &inside,
        see: Some(&things),
        ..Request::of(&guests)
    };
    let (findings, _) = take(&request)?;
    let found = &findings.guests[target];
    let fold_in = fold_in(&guests[target]);
    let devices = devices(&guests[target], args.qmp.as_deref());
    let explained = explain(&guests[target], inside[target].as_ref(), found, things.largest(), devices, &fold_in);
    let mut out = std::io::stdout().lock();
    let written = if args.json {
        report::json::write(&mut out, &explained)
    } else {
        out.write_all(text(&explained, found).as_bytes())
    };
    written.and_then(|()| out.flush()).context("cannot write to stdout")?;
    let mut outcome = Outcome::Done;
    for missing in findings.partial.iter().filter(|p| p.guest == found.id || p.guest != HOST && p.pid == 0) {
        say!("pagefold: {}: {}", cli::printable(&missing.guest), cli::printable(&missing.reason));
        outcome = Outcome::Partial;
    }
    if let Some(problem) = &explained.problem {
        say!("pagefold: {}: {problem}", cli::printable(&found.id));
        outcome = Outcome::Partial;
    }
    Ok(outcome)
}

/// Connects to the guest's QEMU by the QMP socket that the user named.
fn qmp(guest: &Guest, path: &Path) -> anyhow::Result<Qmp> {
    let id = cli::printable(&guest.id);
    if guest.kind != GuestKind::Qemu {
        return Err(Stop::Usage(format!("--qmp: {id} is no QEMU, and has no such socket")).into());
    }
    Qmp::of(guest.pids[0], path).map_err(|e| match e.is_wrong_socket() {
        true => Stop::Usage(format!("--qmp: {e}; without it, {id} is explained by its mappings")).into(),
        false => anyhow::Error::from(e).context("--qmp"),
    })
}

/// The emulated devices of a guest; `None` if no QEMU tells. QEMU serves one client at a time, so this connects anew.
fn devices(guest: &Guest, socket: Option<&Path>) -> Option<Vec<Device>> {
    let mut qmp = match socket {
        Some(path) => qmp(guest, path).ok()?,
        None => guest::open_qmp(guest)?.ok()?,
    };
    Device::all(guest, &mut qmp).ok()
}

/// The group that a guest is folded in. For a guest that is not folded, a group that it could be started in.
fn fold_in(guest: &Guest) -> String {
    let pool = |pid: &u32| {
        let mappings = host::Mapping::list(*pid).ok()?;
        mappings.iter().filter(|m| guest::holds_folded_pages(m)).find_map(guest::pool_group).map(str::to_owned)
    };
    let own = if guest.group == guest.id { &guest.name } else { &guest.group };
    guest.pids.iter().find_map(pool).unwrap_or_else(|| api::name::of_group(own))
}

/// The index of the one guest that matches. Fails if none or several match, or if it is no VM.
fn target(guests: &[Guest], glob: &Glob) -> anyhow::Result<usize> {
    let hit = |g: &Guest| glob.matches(&g.id) || glob.matches(&g.name);
    let hits: Vec<usize> = (0..guests.len()).filter(|&n| hit(&guests[n])).collect();
    let usage = |text: String| Err(Stop::Usage(text).into());
    let ids = |of: &[usize]| of.iter().map(|&n| cli::printable(&guests[n].id)).collect::<Vec<_>>().join(", ");
    let name = cli::printable(glob.as_str());
    match hits[..] {
        [n] if guests[n].kind.is_vm() => Ok(n),
        [n] => usage(format!("{} is no VM: explain looks into the memory of VMs", ids(&[n]))),
        [] => usage(format!("no guest matches {name}; there are {}", ids(&(0..guests.len()).collect::<Vec<_>>()))),
        _ => usage(format!("{name} matches several guests: {}; name one", ids(&hits))),
    }
}

fn text(explained: &Explained, found: &GuestFindings) -> String {
    use report::explain_table::paragraph;
    let mut text = heading(explained);
    let table = kinds(explained);
    let not_counted = match explained.kinds.iter().any(|k| k.duplicates.host.is_none()) {
        true => "-: not counted (--no-host)\n",
        false => "",
    };
    text +=
        &format!("\nIts memory by what it is inside, and what of it is held once more, in MiB\n{table}{not_counted}");
    text += &report::explain_table::cost(&found.cost());
    if !explained.things.is_empty() {
        text += "\nHeld more than once\n";
        for thing in explained.things.iter().take(SHOWN) {
            text += &paragraph(&thing.in_words());
        }
    }
    text += &emulated(explained.devices.as_deref().unwrap_or_default());
    text += "\nIdle\n";
    text += &paragraph(&explained.bloat.in_words());
    if !explained.advice.is_empty() {
        text += "\nWhat to do, in order of what it yields; yields overlap\n";
        for advice in &explained.advice {
            text += &paragraph(&advice.in_words());
        }
    }
    text
}

/// The guest and its kernel, as a line.
fn heading(explained: &Explained) -> String {
    let guest = cli::printable(&explained.guest);
    let Some(k) = &explained.kernel else { return format!("{guest}: no kernel found in its memory\n") };
    let moved = k.kaslr_offset.map_or_else(String::new, |n| format!(", KASLR offset {n:#x}"));
    format!("{guest}: Linux {}{moved}, {} levels of page tables\n", k.release, k.paging_levels)
}

/// Emulated devices, a row each; empty if none is known.
fn emulated(devices: &[Device]) -> String {
    use report::Align::{Left, Right};
    let mut table = report::Table::new(&[("device", Left), ("memory", Right), ("backed", Right), ("left out", Left)]);
    for device in devices {
        let bytes: u64 = device.regions.iter().map(|region| region.bytes).sum();
        let [memory, backed] = [device.costs_bytes.map(|_| bytes), device.costs_bytes]
            .map(|bytes| bytes.map_or("-".to_owned(), cli::size::mib));
        let left_out = device.left_out.clone().unwrap_or_else(|| "-".to_owned());
        table.row([cli::printable(&device.driver), memory, backed, cli::printable(&left_out)]);
    }
    if table.is_empty() {
        return String::new();
    }
    format!("\nEmulated devices, and what of QEMU's memory is known to be theirs, in MiB\n{table}-: not known\n")
}

/// The guest's memory by kind, a row each.
fn kinds(explained: &Explained) -> report::Table {
    use report::Align::{Left, Right};
    use report::explain_table::mib;
    let columns =
        ["kind", "memory", "backed", "zero", "within itself", "in group", "other groups", "on host", "folded", "KSM"];
    let columns: Vec<_> = columns.iter().map(|name| (*name, if *name == "kind" { Left } else { Right })).collect();
    let mut table = report::Table::new(&columns);
    for k in &explained.kinds {
        let d = k.duplicates;
        let figures = [k.pages, k.backed_pages, k.zero_pages, d.within, d.group, d.other_groups];
        let on_host = d.host.map_or("-".to_owned(), mib);
        let merged = [k.folded_pages, k.ksm_pages].map(mib);
        let figures = figures.map(mib).into_iter().chain([on_host]).chain(merged);
        table.row([k.kind.name().replace('_', " ")].into_iter().chain(figures));
    }
    table
}
