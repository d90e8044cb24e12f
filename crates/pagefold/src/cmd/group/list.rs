//! `pagefold group list`: all groups, what each saves and costs, and the totals.

use super::{Args, words};
use api::ask::GroupLine;
use api::client::Service;
use api::shown::ListedGroup;
use cli::exit::Outcome;
use cli::size::{mib, signed_mib};
use cli::{output, say};
use page::Savings;
use report::{Align, Table};
use serde::Serialize;

/// A group, and its settings in words.
#[derive(Serialize)]
struct Listed {
    #[serde(flatten)]
    group: ListedGroup,
    #[serde(skip)]
    words: String,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<Outcome> {
    let (mut groups, mut outcome) = (Vec::new(), Outcome::Done);
    for service in args.services()? {
        let lines = service.groups()?;
        // A service of an earlier version does not know this question.
        for trouble in service.troubles().unwrap_or_default() {
            say!("pagefold: {}", cli::printable(&trouble.detail));
        }
        for line in lines {
            let (listed, complete) = ask(&service, line);
            groups.push(listed);
            outcome = if complete { outcome } else { Outcome::Partial };
        }
    }
    if args.json {
        output::line(serde_json::to_string_pretty(&groups)?)?;
    } else if groups.is_empty() {
        output::line("no groups: start a member with pagefold run --group NAME -- CMD")?;
    } else {
        output::bytes(table(&groups).to_string().as_bytes())?;
    }
    Ok(outcome)
}

/// The group with its worker's figures, and whether the service has told these.
fn ask(service: &Service, line: GroupLine) -> (Listed, bool) {
    let words = words::settings(&line.settings, line.configured);
    let report = match service.show(&line.name) {
        Ok(state) => Some(state.report),
        Err(e) => {
            say!("pagefold: group {}: {}", line.name, cli::printable(&format!("{e:#}")));
            None
        }
    };
    (Listed { group: ListedGroup::new(line, report.as_ref()), words }, report.is_some())
}

fn table(groups: &[Listed]) -> Table {
    let right = |name| (name, Align::Right);
    let mut table = Table::new(&[
        ("group", Align::Left),
        right("members"),
        ("worker", Align::Left),
        right("gross MiB"),
        right("costs MiB"),
        right("saved MiB"),
        right("CPU s"),
        ("settings", Align::Left),
    ]);
    let (mut all, mut cpu_s) = (Savings::default(), 0.0);
    for Listed { group: g, words } in groups {
        let mut words = words.clone();
        if g.no_room.is_some() {
            words += "; POOL FULL";
        }
        if g.waits_for_room.is_some() {
            words += "; WAITS FOR ROOM";
        }
        table.row(row(&g.name, g.members, words::worker(g.worker), g.savings.as_ref(), g.cpu_s, words));
        all += g.savings.unwrap_or_default();
        cpu_s += g.cpu_s.unwrap_or_default();
    }
    let members = groups.iter().fold(0, |sum: usize, g| sum.saturating_add(g.group.members));
    if groups.len() > 1 {
        table.row(row("total", members, "", Some(&all), Some(cpu_s), String::new()));
    }
    table
}

fn row(
    name: &str,
    members: usize,
    worker: &str,
    savings: Option<&Savings>,
    cpu_s: Option<f64>,
    words: String,
) -> [String; 8] {
    let figure = |of: fn(&Savings) -> String| savings.map_or("-".to_owned(), of);
    [
        name.to_owned(),
        members.to_string(),
        worker.to_owned(),
        figure(|s| mib(s.gross_bytes())),
        figure(|s| mib(s.cost_bytes())),
        figure(|s| signed_mib(s.saved_bytes())),
        cpu_s.map_or("-".to_owned(), |s| format!("{s:.1}")),
        words,
    ]
}
