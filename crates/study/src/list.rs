//! `pagefold study --list`.

use crate::data::Study;
use crate::state;
use cli::exit::Outcome;
use cli::output;
use report::{Align, Table};
use serde::Serialize;

/// A study in the list.
#[derive(Debug, Serialize)]
struct Listed<'a> {
    id: &'a str,
    paper: &'a str,
    #[serde(rename = "where")]
    place: &'a str,
    what: &'a str,
    priority: u8,
    needs: &'a [String],
    available: bool,
    why_not: Option<&'a str>,
    /// Whether there is a result among the documents.
    result: bool,
    decided: usize,
    undecided: usize,
    /// The part of the paper's dose; absent without a result, or where the paper tells none.
    dose: Option<f64>,
    /// Predictions that changed after a first result.
    changed: usize,
}

/// Prints the list.
pub fn print(studies: &[Study], as_json: bool) -> anyhow::Result<Outcome> {
    let all: Vec<Listed<'_>> = studies.iter().map(listed).collect();
    if as_json {
        output::line(serde_json::to_string_pretty(&all)?)?;
    } else {
        output::bytes(table(&all).to_string().as_bytes())?;
    }
    Ok(Outcome::Done)
}

fn listed(study: &Study) -> Listed<'_> {
    let Study { id, paper, place, what, priority, needs, .. } = study;
    let why_not = study.why_not();
    let state = state::of(id);
    Listed {
        id,
        paper,
        place,
        what,
        priority: *priority,
        needs,
        available: why_not.is_none(),
        why_not,
        result: state.is_some(),
        decided: state.map_or(0, |state| state.decided),
        undecided: state.map_or(0, |state| state.undecided),
        dose: state.and_then(|state| state.dose),
        changed: state.map_or(0, |state| state.changed),
    }
}

fn table(all: &[Listed<'_>]) -> Table {
    use Align::{Left, Right};
    let columns = [("STUDY", Left), ("WHERE", Left), ("P", Right), ("WHAT", Left), ("", Left)];
    let mut table = Table::new(&columns);
    for study in all {
        let why_not = study.why_not.map_or_else(String::new, |why| format!("not available: {why}"));
        let priority = study.priority.to_string();
        table.row([study.id, study.place, &priority, study.what, &why_not]);
    }
    table
}
