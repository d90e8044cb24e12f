//! `./x test`: runs every test program of the workspace, and ends with how many tests passed, failed and were skipped, and why.
//!
//! ```text
//!  cargo test --no-run --message-format=json --> programs --> each one runs in its package's directory --> outcomes --> summary
//! ```
//!
//! Programs run one after the other, because many of them measure; those that only wait for timers run beside the others
//! ([`BESIDE`]). Within a program, tests run at the same time: as many as there are processors, and more where they mostly wait
//! ([`WAITING`]).
//!
//! Time limits and figures fail by the noise of the machine, too. Tests of programs that look at nothing else ([`SECOND_TRY`])
//! are tried once more if they fail, alone and at the end. The summary names those that passed only then. A test that looks at
//! what memory holds has one try: a lost write may show once in a thousand.
//!
//! A test that cannot run here says `skipped: ` and the reason on stderr, and passes; it is counted as skipped.

mod outcome;

use anyhow::{Context, Result, bail};
use outcome::Outcome;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Test programs whose tests mostly wait, and the number of their tests, each with a service of its own, that run at the same time.
const WAITING: [(&str, usize); 3] = [("exact", 3), ("failures", 4), ("torture", 3)];

/// Test programs that wait for timers most of the time, and neither measure nor need a processor. They have no guests and no
/// large pools: others count the host's guests, and audit all of its pools.
const BESIDE: [&str; 3] = ["folding", "hostile", "lifetime"];

/// Test programs that compare figures, or wait for something within a time limit, and look at no member's memory.
const SECOND_TRY: [&str; 20] = [
    "balance",
    "bench",
    "bench_balance",
    "bench_ksm",
    "bench_overhead",
    "bench_serve",
    "census",
    "churn",
    "explain",
    "families",
    "frames",
    "insight",
    "lab",
    "operator",
    "prometheus",
    "restarts",
    "service",
    "study",
    "web",
    "web_crowd",
];

/// A test program.
#[derive(Debug, PartialEq)]
struct Program {
    package: String,
    target: String,
    executable: PathBuf,
    /// Directory of the package.
    directory: PathBuf,
}

impl Program {
    fn name(&self) -> String {
        format!("{} {}", self.package, self.target)
    }
}

/// Results of all programs.
#[derive(Debug, Default)]
pub struct Summary {
    passed: usize,
    /// Program and name of each failed test.
    failed: Vec<String>,
    /// Program and name of each test that passed at the second try only.
    late: Vec<String>,
    /// Number of skipped tests by reason.
    skipped: BTreeMap<String, usize>,
    elapsed: Duration,
}

impl Summary {
    /// Whether no test failed.
    pub fn is_good(&self) -> bool {
        self.failed.is_empty()
    }

    fn add(&mut self, program: &str, outcome: Outcome) {
        self.late.extend(outcome.late.iter().map(|test| format!("{program}: {test}")));
        self.passed += outcome.passed;
        self.failed.extend(outcome.failed.iter().map(|test| format!("{program}: {test}")));
        for reason in outcome.skipped {
            *self.skipped.entry(reason).or_default() += 1;
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let skipped: usize = self.skipped.values().sum();
        let seconds = self.elapsed.as_secs();
        let failed = self.failed.len();
        writeln!(
            f,
            "\n{} passed, {failed} failed, {skipped} skipped in {} min {} s",
            self.passed,
            seconds / 60,
            seconds % 60
        )?;
        for (reason, count) in &self.skipped {
            writeln!(f, "  skipped, {count}: {reason}")?;
        }
        self.late.iter().try_for_each(|test| writeln!(f, "  passed at the second try only: {test}"))?;
        self.failed.iter().try_for_each(|test| writeln!(f, "  failed: {test}"))
    }
}

/// Runs all test programs. Each one's results are printed when it has ended, with its output if a test failed.
///
/// # Errors
/// Cargo cannot build them, or one cannot be started.
pub fn run() -> Result<Summary> {
    let programs = build()?;
    let (began, mut summary) = (Instant::now(), Summary::default());
    let (beside, others): (Vec<_>, Vec<_>) = programs.iter().partition(|program| BESIDE.contains(&&*program.target));
    let (waited, ran) = thread::scope(|scope| {
        let waiting = scope.spawn(|| run_all(&beside));
        let ran = run_all(&others);
        (waiting.join().unwrap_or_else(|panic| resume_unwind(panic)), ran)
    });
    for (program, mut outcome) in ran?.into_iter().chain(waited?) {
        if SECOND_TRY.contains(&&*program.target) {
            print!("{}", try_again(program, &mut outcome)?);
        }
        summary.add(&program.name(), outcome);
    }
    summary.elapsed = began.elapsed();
    Ok(summary)
}

/// Runs the tests that failed once more, each by itself. Those that pass now did not fail. Returns all that the others said.
fn try_again(program: &Program, outcome: &mut Outcome) -> Result<String> {
    let mut said = String::new();
    for test in std::mem::take(&mut outcome.failed) {
        let (second, text) = run_program(program, &["--exact", &test])?;
        if second.failed.is_empty() && second.passed == 1 {
            outcome.passed += 1;
            outcome.late.push(test);
        } else {
            said.push_str(&format!("\n{}, once more:\n{text}\n", program.name()));
            outcome.failed.push(test);
        }
    }
    Ok(said)
}

/// Runs programs one after the other. Returns each one's outcome.
fn run_all<'a>(programs: &[&'a Program]) -> Result<Vec<(&'a Program, Outcome)>> {
    let run = |program: &&'a Program| {
        let started = Instant::now();
        let (outcome, text) = run_program(program, &[])?;
        // Of a program that went well, the harness's own lines; of another one, all that was said.
        let said: String = match outcome.failed.is_empty() {
            true => text.lines().filter(|line| line.starts_with("test ")).map(|line| format!("{line}\n")).collect(),
            false => text,
        };
        println!("\n{}: {:.1} s\n{said}", program.name(), started.elapsed().as_secs_f64());
        Ok((*program, outcome))
    };
    programs.iter().map(run).collect()
}

fn run_program(program: &Program, words: &[&str]) -> Result<(Outcome, String)> {
    let mut command = Command::new(&program.executable);
    command
        .args(words)
        .arg("--show-output")
        .current_dir(&program.directory)
        .env("CARGO_MANIFEST_DIR", &program.directory);
    if let Some((_, threads)) = WAITING.iter().find(|(target, _)| *target == program.target) {
        command.arg(format!("--test-threads={threads}")).env("PAGEFOLD_TEST_SERVICES", threads.to_string());
    }
    let both = command.stdin(Stdio::null()).output();
    let output = both.with_context(|| format!("cannot run {}", program.executable.display()))?;
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let mut outcome = Outcome::parse(&text);
    if !output.status.success() && outcome.failed.is_empty() {
        // It was killed, or ended itself.
        outcome.failed.push(format!("(the program ended with {})", output.status));
    }
    Ok((outcome, text))
}

/// A message of cargo's, as far as it matters.
#[derive(Deserialize)]
struct Message {
    executable: Option<PathBuf>,
    manifest_path: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// Builds all test programs.
fn build() -> Result<Vec<Program>> {
    let mut cargo = Command::new("cargo");
    cargo.args(["test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]);
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot run cargo")?;
    if !output.status.success() {
        bail!("cargo cannot build the tests");
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    Ok(messages.lines().filter_map(|line| program(serde_json::from_str(line).ok()?)).collect())
}

fn program(message: Message) -> Option<Program> {
    let directory = message.manifest_path?.parent()?.to_owned();
    message.profile.filter(|profile| profile.test)?;
    let package = directory.file_name()?.to_string_lossy().into_owned();
    Some(Program { package, target: message.target?.name, executable: message.executable?, directory })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn test_programs_are_told_from_other_artifacts() {
        let of = |text: &str| program(serde_json::from_str(text).unwrap());
        let test = r#"{"reason":"compiler-artifact","manifest_path":"/r/crates/host/Cargo.toml","target":{"name":"x"},
            "profile":{"test":true},"executable":"/r/target/debug/deps/x-1"}"#;
        let found = of(test).unwrap();
        assert_eq!((&*found.package, &*found.target, found.directory.to_str()), ("host", "x", Some("/r/crates/host")));
        assert_eq!(of(&test.replace("true", "false")), None);
        assert_eq!(of(&test.replace("\"/r/target/debug/deps/x-1\"", "null")), None);
        assert_eq!(of(r#"{"reason":"build-finished","success":true}"#), None);
    }

    /// A program in the harness's manner, which fails at the first try and passes at the second, and one that fails at both.
    #[test]
    fn failed_test_is_tried_once_more_by_itself() {
        let dir = tempfile::tempdir().unwrap();
        let script = "#!/bin/sh\ncase $2 in flaky) echo 'test flaky ... ok' ;; bad) echo 'test bad ... FAILED'; exit 101 ;; esac\n";
        let executable = dir.path().join("x");
        fs::write(&executable, script).unwrap();
        fs::set_permissions(&executable, Permissions::from_mode(0o755)).unwrap();
        let (package, target) = ("host".to_owned(), "x".to_owned());
        let program = Program { package, target, executable, directory: dir.path().to_owned() };
        let mut outcome = Outcome { passed: 3, failed: vec!["flaky".into(), "bad".into()], ..Outcome::default() };
        assert!(try_again(&program, &mut outcome).unwrap().contains("test bad"));
        assert_eq!(
            (outcome.passed, &*outcome.failed, &*outcome.late),
            (4, &["bad".to_owned()][..], &["flaky".to_owned()][..])
        );
    }

    #[test]
    fn summary_counts_skipped_tests_by_reason() {
        let mut summary = Summary::default();
        let skipped = vec!["no KVM".to_owned(), "no KVM".to_owned()];
        summary.add("host x", Outcome { passed: 3, failed: vec!["a".into()], skipped, late: vec!["b".into()] });
        let text = summary.to_string();
        assert!(text.contains("3 passed, 1 failed, 2 skipped"), "{text}");
        assert!(
            text.contains("  skipped, 2: no KVM\n  passed at the second try only: host x: b\n  failed: host x: a\n"),
            "{text}"
        );
        assert!(!summary.is_good());
    }
}
