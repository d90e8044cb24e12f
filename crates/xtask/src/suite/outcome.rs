//! The output of one test program, as the standard test harness writes it with `--show-output`.

/// Start of the line by which a test says that it cannot run here.
const SKIPPED: &str = "skipped: ";

/// Outcome of a test program.
#[derive(Debug, Default, PartialEq)]
pub struct Outcome {
    /// Number of tests that passed and were not skipped.
    pub passed: usize,
    /// Names of tests that failed.
    pub failed: Vec<String>,
    /// Names of tests that failed, and passed when they were tried once more.
    pub late: Vec<String>,
    /// Reason of each skipped test.
    pub skipped: Vec<String>,
}

impl Outcome {
    /// Reads the output.
    pub fn parse(text: &str) -> Self {
        let mut outcome = Self::default();
        // Behind the list of verdicts follows what tests have printed, which may hold verdicts of a program that a test ran.
        let mut is_list = true;
        // Within the output of one test, only the first reason counts.
        let mut may_skip = false;
        for line in text.lines() {
            is_list &= line != "successes:" && line != "failures:";
            let verdict = line.strip_prefix("test ").filter(|_| is_list).and_then(|line| line.rsplit_once(" ... "));
            if let Some((test, verdict)) = verdict {
                match verdict {
                    "ok" => outcome.passed += 1,
                    "FAILED" => outcome.failed.push(test.to_owned()),
                    ignored if ignored.starts_with("ignored") => outcome.skipped.push(ignored.to_owned()),
                    _ => {}
                }
            } else if line.starts_with("---- ") && line.ends_with(" stdout ----") {
                may_skip = true;
            } else if let Some((_, reason)) = line.split_once(SKIPPED).filter(|(name, _)| may_skip && is_name(name)) {
                may_skip = false;
                outcome.skipped.push(reason.trim().to_owned());
                outcome.passed = outcome.passed.saturating_sub(1);
            }
        }
        outcome
    }
}

/// Whether this is what may stand before [`SKIPPED`]: nothing, or the name of the test.
fn is_name(text: &str) -> bool {
    text.is_empty() || text.strip_suffix(": ").is_some_and(|name| !name.contains(char::is_whitespace))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passed_failed_and_skipped_are_told_apart() {
        let text = "running 4 tests\ntest a::b ... ok\ntest c ... FAILED\ntest d ... ok\ntest e ... ignored, takes an hour\n\
            \nsuccesses:\n\n---- d stdout ----\nskipped: no KVM here: permission denied\nskipped: twice\n\n\nfailures:\n";
        let skipped = vec!["ignored, takes an hour".to_owned(), "no KVM here: permission denied".to_owned()];
        assert_eq!(
            Outcome::parse(text),
            Outcome { passed: 1, failed: vec!["c".into()], skipped, ..Outcome::default() }
        );
    }

    #[test]
    fn verdicts_that_a_test_has_printed_are_not_counted() {
        let text = "test a ... FAILED\ntest b ... ok\n\nsuccesses:\n\n---- b stdout ----\nb: skipped: no AF_ALG\n\nfailures:\n\n\
            ---- a stdout ----\ntest a ... FAILED\ntest c ... ok\na that was skipped: no\n";
        let (failed, skipped) = (vec!["a".to_owned()], vec!["no AF_ALG".to_owned()]);
        assert_eq!(Outcome::parse(text), Outcome { passed: 0, failed, skipped, ..Outcome::default() });
    }

    #[test]
    fn skipped_outside_a_test_is_no_skip() {
        assert_eq!(Outcome::parse("skipped: by a child of the program\ntest a ... ok\n").passed, 1);
    }
}
