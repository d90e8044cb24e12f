//! `pagefold audit`: prove isolation and savings from page frames.

use crate::cmd::which::Which;
use anyhow::bail;
use api::ask::MemberLine;
use api::client::Service;
use api::name;
use audit::{Engine, Findings, Member, Missed, take};
use cli::exit::{Outcome, Stop};
use cli::{output, say};
use host::ProcessId;
use page::Savings;
use report::audit_table;

/// Tolerated difference between the engine's account, which is about a second old, and the frames: 4 MiB, or 1 part in
/// 20.
const ROUGHLY: (u64, u64) = (4 << 20, 20);

/// Arguments of `pagefold audit`.
#[derive(clap::Args)]
#[command(after_help = "\
Looks at the page tables of all members, and of every other process that maps a pool. Beside the sum
of the savings stands the engine's account, line by line. Two lines are that account on both sides:
pages of zeros are in no page table, and the engine's tables lie among other memory. Exit code 1 if two groups have a frame
in common, or if a member could not be looked at. Takes root.

Examples:
  pagefold audit                      all groups
  pagefold audit --group acme --json  one of them, for a program")]
pub struct Args {
    /// Report of this group only; frames are compared with those of all others
    #[arg(long, value_name = "GROUP", value_parser = name::parse_group)]
    group: Option<String>,
    #[command(flatten)]
    service: Which,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let engines = ask(args)?;
    let unknown = engines.is_empty();
    let mut findings = take(&engines)?;
    if unknown && findings.by_group.is_empty() {
        bail!("there is no service, and no process maps a pool: nothing was checked");
    }
    if let Some(group) = &args.group {
        keep_only(&mut findings, group)?;
    }
    let complete = say_missed(&findings.partial);
    for group in &findings.by_group {
        say_differences(group);
    }
    if args.json {
        output::line(serde_json::to_string_pretty(&findings)?)?;
    } else {
        output::bytes(audit_table::text(&table(&findings)).as_bytes())?;
    }
    if findings.cross_group_frames > 0 {
        say!("pagefold: groups are NOT isolated: {} frames are shared by two", findings.cross_group_frames);
    }
    Ok(if findings.cross_group_frames == 0 && complete && !unknown { Outcome::Done } else { Outcome::Partial })
}

/// Terms of the sum in which frames and engine differ by more than time explains, in the order of [`Savings`]. Zero
/// pages and tables are the engine's account on both sides.
fn differences(group: &audit::GroupFindings) -> [bool; 5] {
    let Some(engine) = &group.engine else { return [false; 5] };
    let terms = |s: &Savings| [s.folded_bytes, s.zero_bytes, s.pool_bytes, s.tables_bytes, s.mappings_bytes];
    let (frames, engine) = (terms(&group.savings), terms(engine));
    std::array::from_fn(|n| {
        let apart = frames[n].abs_diff(engine[n]);
        apart > ROUGHLY.0 && apart > frames[n].max(engine[n]) / ROUGHLY.1
    })
}

fn say_differences(group: &audit::GroupFindings) {
    if differences(group).contains(&true) {
        let engine = group.engine_saved_bytes.unwrap_or_default();
        let [engine, frames] = [engine, group.saved_bytes].map(cli::size::signed_bytes);
        say!("pagefold: group {}: the engine says that {engine} are saved, the frames say {frames}", group.name);
    }
}

/// Prints the processes that were not looked at. True if none of them is known to belong to a group.
fn say_missed(missed: &[Missed]) -> bool {
    let (of_groups, others): (Vec<_>, Vec<_>) = missed.iter().partition(|m| m.group.is_some());
    for m in &of_groups {
        let group = m.group.as_deref().unwrap_or_default();
        say!("pagefold: process {} of group {group} was not looked at: {}", m.pid, cli::printable(&m.reason));
    }
    if let Some(first) = others.first() {
        let reason = cli::printable(&first.reason);
        say!(
            "pagefold: not looked at whether other processes map a pool: {} of them, the first: {reason}",
            others.len()
        );
    }
    of_groups.is_empty()
}

/// Asks the services for their members and the engine's account.
fn ask(args: &Args) -> anyhow::Result<Vec<Engine>> {
    let services = Service::find(&args.service.meant())?;
    if services.is_empty() {
        say!("pagefold: no service answers: only processes that map a pool are looked at, none of them as a member");
    }
    services.iter().map(account).collect()
}

/// Members, groups and savings by one service's own account.
fn account(service: &Service) -> anyhow::Result<Engine> {
    let member = |m: MemberLine| Member {
        group: m.group,
        process: ProcessId { pid: m.identity.pid, start_ticks: m.identity.started },
    };
    let mut engine = Engine {
        service: service.place.dir().display().to_string(),
        members: service.members()?.into_iter().map(member).collect(),
        pids: vec![service.pid()?],
        ..Engine::default()
    };
    for group in service.groups()? {
        let state = service.show(&group.name)?;
        engine.groups.insert(group.name.clone());
        engine.pids.extend(state.worker_pid);
        if state.worker == api::ask::WorkerState::Running {
            engine.savings.insert(group.name, state.report.savings);
        }
    }
    Ok(engine)
}

fn keep_only(findings: &mut Findings, group: &str) -> anyhow::Result<()> {
    findings.by_group.retain(|g| g.name == group);
    // A service that was not asked may have another group of this name, which is left out.
    let is_ours = findings.by_group.iter().any(|g| g.service.is_some());
    findings.by_group.retain(|g| g.service.is_some() || !is_ours);
    if findings.by_group.is_empty() {
        return Err(Stop::Usage(format!("no group {group} has a member or a pool")).into());
    }
    (findings.saved_bytes, _) = audit::saved(&findings.by_group);
    (findings.frames_checked, findings.shared_within_group) = (0, 0);
    for found in &findings.by_group {
        findings.frames_checked += found.frames;
        findings.shared_within_group += found.shared_frames;
    }
    findings.cross_group.retain(|c| c.places.iter().any(|p| p.group == group || p.pool.as_deref() == Some(group)));
    Ok(())
}

/// The name of a group, with its service if several have a group of this name.
fn label(group: &audit::GroupFindings, all: &[audit::GroupFindings]) -> String {
    let is_one = all.iter().filter(|other| other.name == group.name).count() == 1;
    match &group.service {
        _ if is_one => group.name.clone(),
        Some(service) => format!("{} of {service}", group.name),
        None => format!("{} of another service", group.name),
    }
}

/// The findings as cells of the table.
fn table(findings: &Findings) -> audit_table::Audit {
    let group = |g: &audit::GroupFindings| audit_table::Group {
        name: label(g, &findings.by_group),
        members: g.members,
        other_processes: g.other_processes,
        figures: [g.frames, g.shared_frames, g.pool_mappings, g.pool_frames, g.broken_pages],
        savings: g.savings,
        engine: g.engine,
        differs: differences(g),
    };
    let crossing = |c: &audit::Crossing| {
        let place = |p: &audit::Place| {
            let pool = p.pool.as_ref().map_or(String::new(), |pool| format!(" in the pool of {pool}"));
            format!("process {} of {} at {:#x}{pool}", p.pid, p.group, p.address)
        };
        let ksm = if c.ksm { ", merged by the kernel (KSM)" } else { "" };
        format!("frame {:#x}{ksm}: {} and {}", c.frame, place(&c.places[0]), place(&c.places[1]))
    };
    audit_table::Audit {
        groups: findings.by_group.iter().map(group).collect(),
        saved_bytes: findings.saved_bytes,
        others: audit::saved(&findings.by_group).1,
        frames_checked: findings.frames_checked,
        cross_group_frames: findings.cross_group_frames,
        crossings: findings.cross_group.iter().map(crossing).collect(),
    }
}
