//! The register of predictions: since when each has its present form, and a hash of its words, its rule and its arms.
//! Entries of `data/register.toml` are never changed or removed. `pagefold study selftest` refuses a prediction that
//! has no entry.
//!
//! ```text
//!   a prediction that is as it was before the first result of its study      registered
//!   one that took the place of another after that result                     changed: shown with both texts, and both are judged
//!   one that came after that result, and took no other's place               added
//! ```

use crate::check::{Answer, Check};
use crate::data::{Prediction, Study};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fmt::Write as _;

/// Number of bytes of a hash that are kept.
const HASH_BYTES: usize = 8;

/// An entry of the register.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The study.
    pub id: String,
    /// Date and time from which on the prediction stood like this, UTC.
    pub since: String,
    /// Hash of the prediction, see [`hash_of`].
    pub hash: String,
    /// The prediction itself.
    pub says: Prediction,
    /// The text of the later prediction that took its place.
    pub became: Option<String>,
}

/// When a study had its first result.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct First {
    id: String,
    date: String,
}

/// The register.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Register {
    first: Vec<First>,
    entry: Vec<Entry>,
}

/// The registration of a prediction, as it stands in a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// Date and time from which on it stood like this, UTC.
    pub since: String,
    /// Hash of its words, its rule and its arms.
    pub hash: String,
    /// Whether it came after the first result of its study.
    pub after_first_result: bool,
    /// Whether it came after the run by which it is judged.
    pub after_its_figure: bool,
    /// Whether it took the place of others after the first result.
    pub changed: bool,
}

impl Register {
    /// Reads the register, which is a part of the program.
    pub fn read() -> Self {
        toml::from_str(include_str!("../data/register.toml")).expect("a test reads the register")
    }

    /// The registration of a study's prediction; `None` if it has none. `run` is the date of the run by which it is
    /// judged, if known.
    pub fn of(&self, study: &Study, says: &Prediction, run: Option<&str>) -> Option<Registration> {
        let hash = hash_of(study, says);
        let entry = self.entry.iter().find(|entry| entry.id == study.id && entry.hash == hash)?;
        let first = self.first.iter().find(|first| first.id == study.id).map(|first| first.date.as_str());
        Some(Registration {
            since: entry.since.clone(),
            hash,
            after_first_result: first.is_some_and(|first| first < entry.since.as_str()),
            after_its_figure: run.is_some_and(|run| run < entry.since.as_str()),
            changed: self.former(study, says).next().is_some(),
        })
    }

    /// The predictions in whose place this one stands, if they were changed after the study's first result.
    pub fn former(&self, study: &Study, says: &Prediction) -> impl Iterator<Item = &Entry> {
        self.entry.iter().filter(|entry| entry.id == study.id && entry.became.as_ref() == Some(&says.text))
    }

    /// Texts of the study's predictions that have no entry for their present form.
    #[cfg(test)]
    pub fn lacks(&self, study: &Study) -> Vec<String> {
        let is_unknown = |says: &&Prediction| self.of(study, says, None).is_none();
        let of =
            |says: &Prediction| format!("{}: {}: not registered, hash {}", study.id, says.text, hash_of(study, says));
        study.predict.iter().filter(is_unknown).map(of).collect()
    }
}

/// Hash of a prediction: of the study's name, the words, the rule in words, and the arms with their texts, each on a
/// line.
pub fn hash_of(study: &Study, says: &Prediction) -> String {
    let mut text = format!("{}\n{}\n", study.id, says.text);
    if let Some(check) = says.check() {
        text.push_str(&check.in_words());
        text.push('\n');
        for name in check.arms() {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name}: {}", study.arm(name).map_or("", |arm| arm.text.as_str()));
        }
    }
    let hash = Sha256::digest(text.as_bytes());
    hash.iter().take(HASH_BYTES).fold(String::new(), |mut hex, byte| {
        // Writing to a string cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// A former prediction with its verdict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Former {
    /// The prediction.
    pub prediction: String,
    /// Its rule in words; absent of one that was for readers alone.
    pub rule: Option<String>,
    /// Date and time from which on it stood like this, UTC.
    pub since: String,
    /// Hash of its words, its rule and its arms.
    pub hash: String,
    /// The verdict by the samples; absent of one without a rule.
    pub verdict: Option<Answer>,
    /// The mean of its figure.
    pub value: Option<f64>,
    /// Its 95% interval.
    pub interval: Option<[f64; 2]>,
}

impl Entry {
    /// Metric, arms and rule by which the prediction is judged; `None` if it is for readers only.
    pub fn check(&self) -> Option<Check> {
        self.says.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data;

    #[test]
    fn every_prediction_is_registered_as_it_is() {
        let register = Register::read();
        let lacks: Vec<String> = data::all().iter().flat_map(|study| register.lacks(study)).collect();
        assert!(lacks.is_empty(), "append them to data/register.toml, with today's date:\n{}", lacks.join("\n"));
    }

    #[test]
    fn former_predictions_lead_to_one_that_is_there() {
        let studies = data::all();
        for entry in Register::read().entry {
            let study = studies.iter().find(|study| study.id == entry.id).expect("a study");
            let is_there = |text: &String| study.predict.iter().any(|says| says.text == *text);
            assert!(entry.became.as_ref().is_none_or(is_there), "{}: {:?}", entry.id, entry.became);
        }
    }

    #[test]
    fn prediction_whose_bound_or_arm_changes_is_not_registered() {
        let register = Register::read();
        let mut study = data::all().into_iter().find(|study| study.id == "li-exp2-2").unwrap();
        assert!(register.lacks(&study).is_empty());
        study.arms[0].text.push('x');
        assert!(!register.lacks(&study).is_empty());
    }
}
