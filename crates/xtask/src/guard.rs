//! `./x bench guard`: compares the cost of folding with the last record.
//!
//! ```text
//!  pagefold bench ksm --image synthetic --json --> ratios of this run --.
//!  docs/figures/guard.json --> the last record -------------------------+--> table; the file, with --write
//! ```
//!
//! Ratios to ksmd's figures of the same run, so that a faster machine or a busier one changes little.

use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::files;

/// The records, the oldest first.
const RECORDS: &str = "docs/figures/guard.json";
/// Growth of a cost that has to be explained or mended: a tenth.
const GROWTH: f64 = 1.1;

/// Figures of one run: medians of its rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Record {
    /// The day of the run.
    date: String,
    /// The commit that was measured.
    commit: String,
    /// Number of rounds.
    rounds: usize,
    /// Processor time until 99% are merged, as a ratio to ksmd's.
    cpu: f64,
    /// Wall time until 99% are merged, as a ratio to ksmd's.
    wall: f64,
    /// Merged pages, as a ratio to ksmd's.
    merged: f64,
    /// Processor time for each merged page, in microseconds. It depends on the machine, and is not judged.
    us_per_page: f64,
}

/// This run beside the last record.
pub struct Report {
    now: Record,
    last: Option<Record>,
}

/// Compares a bench's output with the last record, and adds it to the records if `write` says so.
pub fn compare(root: &Path, output: &Path, (date, commit): (&str, &str), write: bool) -> Result<Report> {
    let json = fs::read_to_string(output).with_context(|| format!("cannot read {}", output.display()))?;
    let output: Value = serde_json::from_str(&json).context("the bench has printed no JSON")?;
    let now = record(&output, date, commit)?;
    let mut records: Vec<Record> =
        serde_json::from_str(&files::read(root, RECORDS)?).with_context(|| format!("cannot read {RECORDS}"))?;
    let last = records.last().cloned();
    if write {
        records.push(now.clone());
        let text = serde_json::to_string_pretty(&records)? + "\n";
        fs::write(root.join(RECORDS), text).with_context(|| format!("cannot write {RECORDS}"))?;
    }
    Ok(Report { now, last })
}

fn record(output: &Value, date: &str, commit: &str) -> Result<Record> {
    let rounds = output.get("rounds").and_then(Value::as_array).context("the bench has printed no rounds")?;
    let median = |of: &dyn Fn(&Value) -> Option<f64>| {
        let mut all: Vec<f64> = rounds.iter().filter_map(of).collect();
        all.sort_by(f64::total_cmp);
        all.get(all.len() / 2).copied()
    };
    let side = |round: &Value, side: &str, field: &str| round.get(side)?.get(field)?.as_f64();
    let ratio = |field: &str| {
        median(&|round| Some(side(round, "pagefold", field)? / side(round, "ksmd", field)?))
            .with_context(|| format!("no round has {field} of both sides: 99% were not merged"))
    };
    let us_per_page = median(&|round| side(round, "pagefold", "cpu_us_per_merged_page"));
    let rounded = |value: f64| (value * 1000.0).round() / 1000.0;
    Ok(Record {
        date: date.into(),
        commit: commit.into(),
        rounds: rounds.len(),
        cpu: rounded(ratio("cpu_s")?),
        wall: rounded(ratio("wall_s")?),
        merged: rounded(ratio("merged_pages")?),
        us_per_page: rounded(us_per_page.context("no round has merged a page")?),
    })
}

impl Report {
    /// Names of the costs that have grown by more than a tenth, and `merged` if fewer pages are merged by as much.
    fn worse(&self) -> Vec<&'static str> {
        let Some(last) = &self.last else { return Vec::new() };
        let of = [("cpu", self.now.cpu, last.cpu), ("wall", self.now.wall, last.wall)];
        let mut worse: Vec<_> =
            of.into_iter().filter(|(_, now, last)| *now > last * GROWTH).map(|(name, ..)| name).collect();
        if self.now.merged * GROWTH < last.merged {
            worse.push("merged");
        }
        worse
    }

    /// Whether nothing has become worse by a tenth.
    pub fn is_good(&self) -> bool {
        self.worse().is_empty()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        writeln!(f, "{:<10}  {:<12}  {:>7}  {:>8}  {:>6}  {:>7}", "run", "commit", "cpu", "wall", "merged", "us/page")?;
        for (name, each) in [("last", self.last.as_ref()), ("this", Some(&self.now))] {
            let Some(Record { commit, cpu, wall, merged, us_per_page, .. }) = each else { continue };
            writeln!(f, "{name:<10}  {commit:<12}  {cpu:>7.3}  {wall:>8.3}  {merged:>6.3}  {us_per_page:>7.1}")?;
        }
        writeln!(
            f,
            "cpu, wall and merged are ratios to ksmd's of the same run, medians of {} rounds.",
            self.now.rounds
        )?;
        match &self.worse()[..] {
            [] => Ok(()),
            worse => writeln!(
                f,
                "Worse by a tenth: {}. Mend it, or say why in the commit that records it.",
                worse.join(", ")
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn output(cpu: f64, merged: u64) -> Value {
        let round = |cpu: f64| {
            json!({
                "ksmd": {"cpu_s": 2.0, "wall_s": 2.0, "merged_pages": 1000},
                "pagefold": {"cpu_s": cpu, "wall_s": 4.0, "merged_pages": merged, "cpu_us_per_merged_page": 20.0},
            })
        };
        json!({"rounds": [round(cpu), round(cpu * 9.0), round(cpu / 9.0)]})
    }

    #[test]
    fn a_tenth_more_is_told() {
        let of = |cpu, merged| record(&output(cpu, merged), "2026-11-29", "abc").unwrap();
        let last = of(2.0, 1000);
        assert_eq!((last.cpu, last.wall, last.merged, last.rounds), (1.0, 2.0, 1.0, 3));
        let worse = |now| Report { now, last: Some(last.clone()) }.worse();
        assert!(worse(of(2.1, 990)).is_empty());
        assert_eq!(worse(of(2.3, 1000)), ["cpu"]);
        assert_eq!(worse(of(1.0, 900)), ["merged"]);
    }

    #[test]
    fn run_that_merged_too_little_is_an_error() {
        let mut output = output(2.0, 500);
        for round in output["rounds"].as_array_mut().unwrap() {
            round["pagefold"]["cpu_s"] = Value::Null;
        }
        assert!(record(&output, "d", "c").unwrap_err().to_string().contains("99%"));
    }
}
