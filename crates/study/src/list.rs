//! `pagefold study --list`.

use crate::data::{Length, Study};
use crate::runner::in_words;
use crate::state;
use cli::exit::Outcome;
use cli::output;
use report::{Align, Table};
use serde::Serialize;

/// A study in the list.
#[derive(Debug, Serialize)]
struct Listed<'a> {
    /// Its id.
    id: &'a str,
    /// The paper.
    paper: &'a str,
    /// The table, figure or section of the paper.
    #[serde(rename = "where")]
    place: &'a str,
    /// The subject.
    what: &'a str,
    /// Its priority: 1 is the highest.
    priority: u8,
    /// Features of the host that it needs.
    needs: &'a [String],
    /// Whether it can be run.
    available: bool,
    /// Why it cannot be run; `None` if it can.
    why_not: Option<&'a str>,
    /// Time of its short form, by a turn's time as it was measured once; `None` where it cannot be run.
    short_seconds: Option<f64>,
    /// The same of its full form.
    full_seconds: Option<f64>,
    /// Whether there is a result in docs/studies.md.
    result: bool,
    /// Number of its predictions that are decided.
    decided: usize,
    /// Number of its predictions that are not.
    undecided: usize,
    /// The smallest part of the paper's dose; `None` without a result, or where the paper tells none.
    dose: Option<f64>,
    /// Number of predictions that changed after a first result.
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
        short_seconds: study.estimate_s(Length::Short),
        full_seconds: study.estimate_s(Length::Full),
        result: state.is_some(),
        decided: state.map_or(0, |state| state.decided),
        undecided: state.map_or(0, |state| state.undecided),
        dose: state.and_then(|state| state.dose),
        changed: state.map_or(0, |state| state.changed),
    }
}

fn table(all: &[Listed<'_>]) -> Table {
    use Align::{Left, Right};
    let columns =
        [("STUDY", Left), ("WHERE", Left), ("P", Right), ("SHORT", Right), ("FULL", Right), ("WHAT", Left), ("", Left)];
    let mut table = Table::new(&columns);
    for study in all {
        let why_not = study.why_not.map_or_else(String::new, |why| format!("not available: {why}"));
        let priority = study.priority.to_string();
        let [short, full] = [study.short_seconds, study.full_seconds].map(|s| s.map_or_else(String::new, in_words));
        table.row([study.id, study.place, &priority, &short, &full, study.what, &why_not]);
    }
    table
}

#[cfg(test)]
mod tests {
    use crate::data;
    use crate::result;
    use std::collections::BTreeMap;
    use std::path::Path;

    /// Each result among the documents has its time, and the number of its turns.
    #[test]
    fn times_in_the_list_are_right_within_30_percent() {
        let studies = data::all();
        let documents = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/studies");
        let files = std::fs::read_dir(documents).expect("results").flatten().map(|entry| entry.path());
        let mut looked_at = 0;
        for file in files.filter(|path| path.extension().is_some_and(|ending| ending == "json")) {
            for result in result::read(&file).expect("results") {
                let study = studies.iter().find(|study| study.id == result.id).expect("its study");
                let form = study.form(result.form).expect("its form");
                let mut turns: BTreeMap<&str, usize> = BTreeMap::new();
                for record in &result.measured {
                    let of_arm = turns.entry(&record.arm).or_default();
                    *of_arm = record.n.max(*of_arm);
                }
                let time = |(arm, reps): (&str, usize)| {
                    (reps + usize::from(form.warm_up)) as f64 * study.turn_seconds(arm, form)
                };
                let estimated: f64 = turns.into_iter().map(time).sum();
                let ratio = result.seconds / estimated;
                assert!(
                    (1.0 / 1.3..1.3).contains(&ratio),
                    "{}: {:.0} s, not {estimated:.0}",
                    result.id,
                    result.seconds
                );
                looked_at += 1;
            }
        }
        assert!(looked_at > 40, "{looked_at}");
    }
}
