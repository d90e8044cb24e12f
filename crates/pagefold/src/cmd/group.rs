//! `pagefold group`: the list of groups, their state, and changes of their settings.

use crate::cmd::absent::add_absent;
use crate::cmd::which::Which;
use anyhow::bail;
use api::ask::{GroupLine, GroupState};
use api::change::{Change, HugePages, ScanRate, parse_fold, parse_zero_pages};
use api::client::Service;
use api::control::{Fold, GroupReport, Settings, ZeroPolicy};
use api::name;
use clap::{ArgAction, Subcommand};
use cli::exit::{Outcome, Stop};
use cli::output;
use serde::Serialize;

/// Arguments of `pagefold group`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  pagefold group list
  pagefold group show acme --json
  pagefold group set acme --fold off             leave what is folded, fold nothing more
  pagefold group set acme --fold unfold          make all pages private again, if there is memory for it
  pagefold group set acme --scan-rate 50000 --huge-pages never")]
pub struct Args {
    #[command(subcommand)]
    action: Action,
    #[command(flatten)]
    service: Which,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Action {
    /// The groups that you may deal with
    List,
    /// How a group does: members, pages, savings, costs
    Show {
        /// The group
        #[arg(value_parser = name::parse_group)]
        group: String,
    },
    /// Run a group differently from now on
    Set(SetArgs),
}

#[derive(clap::Args)]
struct SetArgs {
    /// The group
    #[arg(value_parser = name::parse_group)]
    group: String,
    /// Pages that may be fingerprinted a second in the whole group, or auto
    #[arg(long, value_name = "auto|N")]
    scan_rate: Option<ScanRate>,
    /// Treatment of pages of zeros: share, ignore or when-idle
    #[arg(long, value_name = "POLICY", value_parser = parse_zero_pages)]
    zero_pages: Option<ZeroPolicy>,
    /// Split a huge page when so many percent of it would fold, or never
    #[arg(long, value_name = "never|N%")]
    huge_pages: Option<HugePages>,
    /// on; off: leave what is folded and fold nothing more; unfold: make everything private again
    #[arg(long, value_name = "on|off|unfold", value_parser = parse_fold)]
    fold: Option<Fold>,
    /// Fold pages of a member only with pages of the same member
    #[arg(long, value_name = "BOOL", action = ArgAction::Set)]
    intra_member_only: Option<bool>,
}

/// A group's state, in the shape that `show --json` prints.
#[derive(Serialize)]
struct Shown<'a> {
    name: &'a str,
    settings: &'a Settings,
    worker: api::ask::WorkerState,
    worker_pid: Option<u32>,
    segments: usize,
    #[serde(flatten)]
    report: &'a GroupReport,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    match &args.action {
        Action::List => list(args),
        Action::Show { group } => show(args, group),
        Action::Set(set) => change(args, set),
    }
}

fn list(args: &Args) -> anyhow::Result<Outcome> {
    let mut groups = Vec::new();
    for service in Service::find(&args.service.meant())? {
        groups.extend(service.groups()?);
    }
    if args.json {
        output::line(serde_json::to_string_pretty(&groups)?)?;
    } else if groups.is_empty() {
        output::line("no groups: start a member with pagefold run --group NAME -- CMD")?;
    } else {
        output::bytes(groups_table(&groups).as_bytes())?;
    }
    Ok(Outcome::Done)
}

/// The service that has the group.
fn find(args: &Args, group: &str) -> anyhow::Result<Service> {
    let mut known = Vec::new();
    for service in Service::find(&args.service.meant())? {
        let groups = service.groups()?;
        if groups.iter().any(|g| g.name == group) {
            return Ok(service);
        }
        known.extend(groups.into_iter().map(|g| g.name));
    }
    if known.is_empty() {
        bail!("there is no group {group}, and no other that you may deal with: see pagefold run and pagefold serve");
    }
    bail!("there is no group {group} that you may deal with; there are {}", known.join(", "))
}

fn show(args: &Args, group: &str) -> anyhow::Result<Outcome> {
    let service = find(args, group)?;
    let mut state = service.show(group)?;
    add_absent(&mut state.report, group, &service.members()?);
    if args.json {
        let GroupState { name, settings, worker, worker_pid, segments, report } = &state;
        let shown = Shown { name, settings, worker: *worker, worker_pid: *worker_pid, segments: *segments, report };
        output::line(serde_json::to_string_pretty(&shown)?)?;
    } else {
        output::bytes(report::group_table::text(&state.name, &words_of(&state), &state.report).as_bytes())?;
    }
    Ok(Outcome::Done)
}

fn change(args: &Args, set: &SetArgs) -> anyhow::Result<Outcome> {
    let change = Change {
        scan_rate: set.scan_rate,
        zero_pages: set.zero_pages,
        huge_pages: set.huge_pages,
        fold: set.fold,
        intra_member_only: set.intra_member_only,
    };
    if change.is_empty() {
        return Err(Stop::Usage("nothing to set: see pagefold group set --help".into()).into());
    }
    find(args, &set.group)?.set(&set.group, change)?;
    Ok(Outcome::Done)
}

fn groups_table(groups: &[GroupLine]) -> String {
    use report::{Align, Table};
    let columns =
        [("group", Align::Left), ("members", Align::Right), ("worker", Align::Left), ("settings", Align::Left)];
    let mut table = Table::new(&columns);
    for g in groups {
        table.row([g.name.clone(), g.members.to_string(), worker_word(g.worker).into(), settings_words(&g.settings)]);
    }
    table.to_string()
}

const fn worker_word(worker: api::ask::WorkerState) -> &'static str {
    use api::ask::WorkerState;
    match worker {
        WorkerState::None => "none",
        WorkerState::Starting => "starting",
        WorkerState::Running => "running",
    }
}

/// The settings in words; those at their defaults are left out.
fn settings_words(s: &Settings) -> String {
    let usual = Settings::default();
    let mut words = vec![
        match s.fold {
            Fold::On => "folds",
            Fold::Off => "fold off: leaves what is folded, folds nothing more",
            Fold::Unfold => "unfold: all pages are private again, or will be soon",
        }
        .to_owned(),
    ];
    words.extend(s.scan_rate.map(|rate| format!("scans {rate} pages/s")));
    if s.zero_pages != usual.zero_pages {
        let policy = if s.zero_pages == ZeroPolicy::Ignore { "left alone" } else { "folded when idle" };
        words.push(format!("pages of zeros {policy}"));
    }
    if s.split_huge_at_percent != usual.split_huge_at_percent {
        words.push(match s.split_huge_at_percent {
            None => "huge pages stay whole".to_owned(),
            Some(percent) => format!("splits huge pages at {percent}%"),
        });
    }
    if s.intra_member_only {
        words.push("each member by itself".to_owned());
    }
    words.join("; ")
}

fn words_of(state: &GroupState) -> String {
    let worker = match (state.worker, state.worker_pid) {
        (_, Some(pid)) => format!("worker {}, process {pid}", worker_word(state.worker)),
        (worker, None) => format!("worker {}", worker_word(worker)),
    };
    format!("{}; {worker}", settings_words(&state.settings))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changed_settings_are_shown() {
        assert_eq!(settings_words(&Settings::default()), "folds");
        let other = Settings {
            scan_rate: Some(9),
            zero_pages: ZeroPolicy::Ignore,
            split_huge_at_percent: None,
            fold: Fold::Off,
            intra_member_only: true,
            ..Settings::default()
        };
        let words = settings_words(&other);
        for part in ["fold off", "9 pages/s", "zeros left alone", "stay whole", "by itself"] {
            assert!(words.contains(part), "{words}");
        }
    }
}
