//! State of the results that are kept with the documents, for `pagefold study --list`. `./x studies` writes it to
//! `data/state.json`.

use crate::check::Answer;
use crate::result::Outcome;
use serde::{Deserialize, Serialize};
use std::sync::LazyLock;

/// The state of a study with a result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The study.
    pub id: String,
    /// Predictions that hold or fail.
    pub decided: usize,
    /// Predictions that are undecided.
    pub undecided: usize,
    /// The part of the paper's dose; absent where the paper tells none.
    pub dose: Option<f64>,
    /// Predictions that changed after a first result.
    pub changed: usize,
}

impl State {
    /// The state of a result.
    pub fn new(result: &Outcome) -> Self {
        let is_open = |answer: Answer| answer == Answer::Undecided;
        let undecided = result.verdicts.iter().filter(|verdict| is_open(verdict.verdict)).count();
        let changed = result.verdicts.iter().filter(|v| v.registered.as_ref().is_some_and(|r| r.changed)).count();
        Self {
            id: result.id.clone(),
            decided: result.verdicts.len() - undecided,
            undecided,
            dose: result.dose.as_ref().and_then(|dose| dose.share),
            changed,
        }
    }
}

/// The state of the study of this name, if it has a result.
pub fn of(id: &str) -> Option<&'static State> {
    static ALL: LazyLock<Vec<State>> = LazyLock::new(|| {
        serde_json::from_str(include_str!("../data/state.json")).expect("a test reads the state of the results")
    });
    ALL.iter().find(|state| state.id == id)
}
