//! Printing a history: as a table of summaries, as CSV, as JSON.

use crate::read::answer;
use crate::store::Store;
use anyhow::Context;
use api::history::{History, Series, Wanted};
use cli::exit::Outcome;
use cli::{output, say};
use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

/// The form of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A line for each series.
    Table,
    /// A line for each point.
    Csv,
    /// One object.
    Json,
}

/// Answers a question from a file, and prints the answer.
///
/// # Errors
/// The file cannot be read, the question's times or step are not valid, or stdout cannot be written.
pub fn run(path: &Path, wanted: &Wanted, form: Form, now: i64) -> anyhow::Result<Outcome> {
    let read = Store::read(path).and_then(|store| answer(&store, wanted, now, None));
    let mut history = read.with_context(|| format!("cannot read {}", path.display()))?;
    history.make_printable();
    match form {
        Form::Json => output::line(serde_json::to_string(&history)?)?,
        Form::Csv => output::bytes(csv(&history.series).as_bytes())?,
        Form::Table => output::bytes(table(&history).as_bytes())?,
    }
    if form != Form::Json {
        history.notes.iter().for_each(|note| say!("pagefold: {}: {}", date(note.unix_s), note.text));
    }
    if history.damaged_blocks > 0 {
        say!("pagefold: {} blocks of {} could not be read", history.damaged_blocks, path.display());
        return Ok(Outcome::Partial);
    }
    Ok(Outcome::Done)
}

fn csv(all: &[Series]) -> String {
    let mut text = "unix_s,group,member,figure,value\n".to_owned();
    for Series { group, member, figure, points } in all {
        let member = member.as_deref().unwrap_or_default();
        for [at, value] in points {
            _ = writeln!(text, "{at},{group},{member},{figure},{value}");
        }
    }
    text
}

fn date(at: i64) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(u64::try_from(at).unwrap_or(0))).to_string()
}

fn row(series: &Series) -> [String; 9] {
    let values = || series.points.iter().map(|[_, value]| *value);
    let mean = values().map(i128::from).sum::<i128>() / (series.points.len().max(1) as i128);
    let number = |value: Option<i64>| value.unwrap_or(0).to_string();
    [
        series.group.clone(),
        series.member.clone().unwrap_or_default(),
        series.figure.clone(),
        series.points.first().map_or_else(String::new, |[at, _]| date(*at)),
        series.points.len().to_string(),
        number(values().min()),
        mean.to_string(),
        number(values().max()),
        number(values().next_back()),
    ]
}

fn table(history: &History) -> String {
    let heading = ["GROUP", "MEMBER", "FIGURE", "FROM", "POINTS", "LEAST", "MEAN", "MOST", "LAST"].map(str::to_owned);
    let rows: Vec<[String; 9]> = std::iter::once(heading).chain(history.series.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 9] = std::array::from_fn(width);
    let line = |row: &[String; 9]| {
        let cells = row.iter().zip(widths).enumerate();
        let cells =
            cells.map(|(n, (cell, width))| if n < 4 { format!("{cell:<width$}") } else { format!("{cell:>width$}") });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect::<String>() + &format!("a point is of {} s\n", history.step_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_rows_of_a_table_and_points_are_lines_of_csv() {
        let series = |member: Option<&str>, points: &[[i64; 2]]| Series {
            group: "acme".into(),
            member: member.map(str::to_owned),
            figure: "saved_bytes".into(),
            points: points.to_vec(),
        };
        let all = vec![series(None, &[[0, -4], [10, 8]]), series(Some("web1"), &[[20, 3]])];
        assert_eq!(
            csv(&all),
            "unix_s,group,member,figure,value\n0,acme,,saved_bytes,-4\n10,acme,,saved_bytes,8\n20,acme,web1,saved_bytes,3\n"
        );
        let table = table(&History { series: all, step_s: 10, ..History::default() });
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(
            lines[1].split_whitespace().collect::<Vec<_>>(),
            ["acme", "saved_bytes", "1970-01-01T00:00:00Z", "2", "-4", "2", "8", "8"]
        );
        assert!(lines[0].find("LEAST").unwrap() + 5 == lines[2].find(" 3 ").unwrap() + 2, "{table}");
    }
}
