//! `./x test`: runs every test of the workspace by cargo-nextest. At the end it prints how many passed, failed and were
//! skipped, and why.
//!
//! ```text
//!  cargo nextest run --> target/nextest/default/junit.xml --> Summary --> text, and JSON for `--json FILE`
//! ```
//!
//! `.config/nextest.toml` says which tests run beside each other, and for how long. A test that cannot run here says
//! `skipped: ` and the reason on stderr, and passes; it is counted as skipped.

use anyhow::{Context, Result, ensure};
use roxmltree::{Document, Node, ParsingOptions};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Start of the line by which a test says that it cannot run here.
const SKIPPED: &str = "skipped: ";

/// Number of tests in the list of the slowest.
const SLOWEST: usize = 10;

/// Outcome of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Passed,
    Failed,
    Skipped,
}

/// A test that has run.
#[derive(Debug, Serialize)]
struct Test {
    name: String,
    program: String,
    seconds: f64,
    outcome: Outcome,
    /// Reason why it was skipped.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip)]
    retries: usize,
}

/// Results of all tests.
#[derive(Debug, Serialize)]
pub struct Summary {
    passed: usize,
    failed: usize,
    skipped: usize,
    seconds: f64,
    retries: usize,
    tests: Vec<Test>,
}

impl Summary {
    /// Whether tests have run and none failed.
    pub fn is_good(&self) -> bool {
        self.failed == 0 && !self.tests.is_empty()
    }

    fn of(tests: Vec<Test>, seconds: f64) -> Self {
        let count = |outcome| tests.iter().filter(|test| test.outcome == outcome).count();
        let (passed, failed, skipped) = (count(Outcome::Passed), count(Outcome::Failed), count(Outcome::Skipped));
        Self { passed, failed, skipped, seconds, retries: tests.iter().map(|test| test.retries).sum(), tests }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut slowest: Vec<&Test> = self.tests.iter().collect();
        slowest.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        writeln!(f, "\nThe slowest:")?;
        for test in slowest.iter().take(SLOWEST) {
            writeln!(f, "  {:6.1} s  {} {}", test.seconds, test.program, test.name)?;
        }
        let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
        for reason in self.tests.iter().filter_map(|test| test.reason.as_deref()) {
            *reasons.entry(reason).or_default() += 1;
        }
        reasons.iter().try_for_each(|(reason, count)| writeln!(f, "  skipped, {count}: {reason}"))?;
        let late = self.tests.iter().filter(|test| test.retries > 0 && test.outcome != Outcome::Failed);
        late.into_iter()
            .try_for_each(|test| writeln!(f, "  passed at the second try only: {} {}", test.program, test.name))?;
        let failed = self.tests.iter().filter(|test| test.outcome == Outcome::Failed);
        failed.into_iter().try_for_each(|test| writeln!(f, "  failed: {} {}", test.program, test.name))?;
        let seconds = self.seconds.round() as u64;
        writeln!(f, "{} tests in {} min {} s", self.tests.len(), seconds / 60, seconds % 60)?;
        writeln!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// Runs the tests that `words` select, as `cargo nextest run` takes them; all without any. Writes the results to
/// `json`, too.
///
/// # Errors
/// Nothing can be built, or the runner has left no results.
pub fn run(words: &[String], json: Option<&Path>) -> Result<Summary> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    let results = target.join("nextest/default/junit.xml");
    match fs::remove_file(&results) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(e).with_context(|| format!("cannot remove {}", results.display()));
        }
        _ => {}
    }
    let began = Instant::now();
    let mut nextest = Command::new("cargo");
    nextest.args(["nextest", "run", "--workspace"]).args(words);
    let status = nextest.status().context("cannot run cargo nextest")?;
    let text = fs::read_to_string(&results)
        .with_context(|| format!("cargo nextest ended with {status} and left no {}", results.display()))?;
    let mut summary = Summary::of(parse(&text)?, began.elapsed().as_secs_f64());
    if !status.success() && summary.failed == 0 {
        summary.failed = 1;
        eprintln!("cargo nextest ended with {status}, and no test has failed");
    }
    if let Some(file) = json {
        fs::write(file, serde_json::to_string_pretty(&summary)? + "\n")
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(summary)
}

/// Reads the tests of a JUnit file.
fn parse(text: &str) -> Result<Vec<Test>> {
    let options = ParsingOptions { nodes_limit: 1 << 20, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).context("the runner's results are no JUnit file")?;
    let tests: Vec<_> = document.descendants().filter(|node| node.has_tag_name("testcase")).map(test).collect();
    ensure!(!tests.is_empty(), "no test was selected");
    Ok(tests)
}

fn test(case: Node<'_, '_>) -> Test {
    let word = |name| case.attribute(name).unwrap_or_default().to_owned();
    let has = |name: &str| case.children().any(|child| child.has_tag_name(name));
    let errors = case.children().filter(|child| child.has_tag_name("system-err")).filter_map(|child| child.text());
    let mut lines = errors.flat_map(str::lines);
    let reason = lines.find_map(reason);
    let is_again = |child: &Node<'_, '_>| {
        ["flakyFailure", "rerunFailure", "flakyError", "rerunError"].contains(&child.tag_name().name())
    };
    let outcome = match (has("failure") || has("error"), &reason) {
        (true, _) => Outcome::Failed,
        (false, Some(_)) => Outcome::Skipped,
        (false, None) => Outcome::Passed,
    };
    Test {
        name: word("name"),
        program: word("classname"),
        seconds: word("time").parse().unwrap_or_default(),
        reason: reason.filter(|_| outcome == Outcome::Skipped),
        outcome,
        retries: case.children().filter(is_again).count(),
    }
}

/// The reason in a line by which a test says that it is skipped. A test within a program may put its name before it.
fn reason(line: &str) -> Option<String> {
    let (name, reason) = line.split_once(SKIPPED)?;
    let is_name = name.is_empty() || name.strip_suffix(": ").is_some_and(|name| !name.contains(char::is_whitespace));
    is_name.then(|| reason.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESULTS: &str = r#"<testsuites><testsuite name="host">
        <testcase name="a::b" classname="host" time="0.25"><system-err>a skipped: no</system-err></testcase>
        <testcase name="c" classname="host::x" time="61.5"><failure type="test failure"/><system-err>skipped: x</system-err></testcase>
        <testcase name="d" classname="host::x" time="1"><system-err>so
skipped: no KVM here: permission denied
skipped: twice</system-err></testcase>
        <testcase name="e" classname="host::x" time="2"><flakyFailure/></testcase>
    </testsuite></testsuites>"#;

    #[test]
    fn passed_failed_and_skipped_are_told_apart() {
        let summary = Summary::of(parse(RESULTS).unwrap(), 64.6);
        assert_eq!((summary.passed, summary.failed, summary.skipped, summary.retries), (2, 1, 1, 1));
        assert!(!summary.is_good());
        let text = summary.to_string();
        assert!(text.ends_with("4 tests in 1 min 5 s\n2 passed, 1 failed, 1 skipped\n"), "{text}");
        assert!(text.contains("skipped, 1: no KVM here: permission denied\n"), "{text}");
        assert!(text.contains("  passed at the second try only: host::x e\n  failed: host::x c\n"), "{text}");
        assert!(text.contains("The slowest:\n    61.5 s  host::x c\n     2.0 s  host::x e\n"), "{text}");
    }

    #[test]
    fn json_names_program_and_outcome_of_each_test() {
        let json = serde_json::to_value(Summary::of(parse(RESULTS).unwrap(), 64.6)).unwrap();
        assert_eq!(json["tests"][0]["outcome"], "passed");
        assert_eq!((&json["tests"][1]["program"], &json["tests"][1]["outcome"]), (&"host::x".into(), &"failed".into()));
        assert_eq!(json["tests"][2]["reason"], "no KVM here: permission denied");
        assert_eq!((&json["retries"], &json["seconds"]), (&1.into(), &64.6.into()));
    }

    #[test]
    fn run_without_tests_is_an_error() {
        assert!(parse("<testsuites/>").is_err());
        assert!(parse("no XML").is_err());
    }
}
