//! Findings, for people and for programs.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::{Finding, Rule};

/// All findings, in the order of files and lines.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    /// The findings.
    pub findings: Vec<Finding>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        for finding in &self.findings {
            writeln!(f, "{}:{}: {}: {}", finding.file, finding.line, finding.rule.name(), finding.text)?;
        }
        match self.findings.len() {
            0 => writeln!(f, "All words are as they should be."),
            number => writeln!(f, "{number} findings; the rules stand in CONTRIBUTING.md, section \"Words\""),
        }
    }
}

impl Report {
    /// A table of findings by room and rule.
    pub fn summary(&self) -> String {
        let mut counts: BTreeMap<&str, BTreeMap<Rule, usize>> = BTreeMap::new();
        for finding in &self.findings {
            *counts.entry(room(&finding.file)).or_default().entry(finding.rule).or_default() += 1;
        }
        let total = self.findings.iter().fold(BTreeMap::new(), |mut total: BTreeMap<Rule, usize>, finding| {
            *total.entry(finding.rule).or_default() += 1;
            total
        });
        let heads = Rule::ALL.map(|rule| format!("{:>10}", rule.name()));
        let mut text = format!("{:<16}{}{:>10}\n", "", heads.concat(), "all");
        for (room, counts) in counts.iter().chain([(&"all", &total)]) {
            let cells = Rule::ALL.map(|rule| format!("{:>10}", counts.get(&rule).unwrap_or(&0)));
            text += &format!("{room:<16}{}{:>10}\n", cells.concat(), counts.values().sum::<usize>());
        }
        text
    }
}

/// The room of a file: its crate, `docs`, `fuzz`, or the file itself.
fn room(file: &str) -> &str {
    let inside = file.strip_prefix("crates/").unwrap_or(file);
    inside.split('/').next().unwrap_or(inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_counts_by_room_and_rule() {
        let finding = |file: &str, rule| Finding { file: file.into(), line: 1, rule, text: "a".into(), last: 1 };
        let findings = vec![finding("crates/host/src/a.rs", Rule::Term), finding("docs/a.md", Rule::Length)];
        let report = Report { findings };
        let rows: Vec<Vec<String>> =
            report.summary().lines().map(|line| line.split_whitespace().map(String::from).collect()).collect();
        assert_eq!(rows[2], ["host", "1", "0", "0", "0", "0", "0", "1"]);
        assert_eq!(rows[1], ["docs", "0", "1", "0", "0", "0", "0", "1"]);
        assert_eq!(rows[3][7], "2");
        assert!(report.to_string().starts_with("crates/host/src/a.rs:1: term: a\n"));
    }
}
