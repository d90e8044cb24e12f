//! `pagefold group show`: one group, once or again and again.

use super::{Args, find, words};
use crate::cmd::absent::look;
use anyhow::Context;
use api::ask::GroupState;
use api::client::Service;
use api::enrol::NotAttached;
use api::name;
use api::shown::{self, ShownGroup};
use cli::exit::{Outcome, Stop};
use cli::output;
use report::group_table;
use std::io::IsTerminal;
use std::time::Duration;

/// Sequence that a terminal takes as: go to the upper left corner, and clear what follows.
const CLEAR: &str = "\x1b[H\x1b[J";

/// Most lines in a list of processes that are not attached.
const MOST_LINES: usize = 20;

/// Arguments of `pagefold group show`.
#[derive(clap::Args)]
pub struct ShowArgs {
    /// The group
    #[arg(value_parser = name::parse_group)]
    group: String,
    /// Show each member of a family: of a member and its forked children, which otherwise have one line
    #[arg(long, value_name = "MEMBER", conflicts_with = "json")]
    family: Option<String>,
    /// Show it again every so many seconds; with --json, one object a line [default: 2 seconds]
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2",
          value_parser = clap::value_parser!(u32).range(1..))]
    watch: Option<u32>,
    /// Stop after so many rounds
    #[arg(long, value_name = "N", requires = "watch", value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
}

/// Runs the command.
pub fn run(args: &Args, show: &ShowArgs) -> anyhow::Result<Outcome> {
    let Some(seconds) = show.watch else {
        let state = ask(&find(args, &show.group)?, &show.group)?;
        if let Some(family) = show.family.as_ref().filter(|f| !state.report.members.iter().any(|m| m.family == **f)) {
            return Err(Stop::Usage(format!("group {} has no family {family}", show.group)).into());
        }
        if args.json {
            output::line(serde_json::to_string_pretty(&ShownGroup::from(state))?)?;
        } else {
            output::bytes(text(&state, show).as_bytes())?;
        }
        return Ok(Outcome::Done);
    };
    let clear = std::io::stdout().is_terminal();
    for round in 0..show.rounds.unwrap_or(u32::MAX) {
        if round > 0 {
            std::thread::sleep(Duration::from_secs(seconds.into()));
        }
        // Each round finds the service anew: it may have been started again meanwhile.
        let state = ask(&find(args, &show.group)?, &show.group)?;
        match (args.json, clear, round) {
            (true, ..) => output::line(serde_json::to_string(&ShownGroup::from(state))?)?,
            (false, true, _) => output::bytes(format!("{CLEAR}{}", text(&state, show)).as_bytes())?,
            (false, false, 0) => output::bytes(text(&state, show).as_bytes())?,
            (false, false, _) => output::bytes(format!("\n{}", text(&state, show)).as_bytes())?,
        }
    }
    Ok(Outcome::Done)
}

/// Asks for a group's state, and adds what to do about its members.
fn ask(service: &Service, group: &str) -> anyhow::Result<GroupState> {
    let mut state = service.show(group).with_context(|| format!("cannot show group {group}"))?;
    shown::complete(&mut state, &service.members()?, look);
    Ok(state)
}

fn text(state: &GroupState, show: &ShowArgs) -> String {
    let limits = (&state.settings, &state.pool_limit);
    let text = group_table::text(&state.name, &words::of(state), limits, &state.report, show.family.as_deref());
    words::fit(state.fit.as_ref()) + &text + &not_attached(&state.not_attached)
}

/// Processes that a rule fits and that could not be attached, and forked children that are no members, with the
/// reasons. Empty if there are none.
fn not_attached(all: &[NotAttached]) -> String {
    let line = |one: &&NotAttached| {
        let NotAttached { pid, program, why, again_s, family, .. } = *one;
        let again = again_s.map_or_else(String::new, |seconds| format!("; it is tried again in {seconds} s"));
        let family = family.as_ref().map_or_else(String::new, |family| format!(", of {family}"));
        format!("process {pid} ({program}{family}): {why}{again}\n")
    };
    let (children, others): (Vec<_>, Vec<_>) = all.iter().partition(|one| one.family.is_some());
    let section = |title: &str, all: &[&NotAttached], rest: &str| {
        let lines: String = all.iter().take(MOST_LINES).map(line).collect();
        match (all.is_empty(), all.len().saturating_sub(MOST_LINES)) {
            (true, _) => String::new(),
            (false, 0) => format!("\n{title}\n{lines}"),
            (false, more) => format!("\n{title}\n{lines}and {more} others: see {rest}\n"),
        }
    };
    section("Not attached, though a rule fits", &others, "pagefold enrol plan")
        + &section("Forked by members, and not attached", &children, "--json")
}
