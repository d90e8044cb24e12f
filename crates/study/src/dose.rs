//! The dose of a run: how much of the paper's quantities it has (seconds of load, guests, passes, data against memory).
//! If that is below a third, verdicts hold for this host alone, and say nothing about the paper.

use crate::data::{Arm, Length, Study};
use serde::{Deserialize, Serialize};

/// Part of the paper's dose below which nothing is claimed about the paper: a third.
const LEAST: f64 = 1.0 / 3.0;

/// One quantity of a study's dose, such as the number of guests.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// What the quantity is, with its unit.
    pub what: String,
    /// The quantity in the paper; `None` where the paper tells none.
    pub paper: Option<f64>,
    /// The quantity in the short form of the study.
    pub short: f64,
    /// The quantity in the full form of the study.
    pub full: f64,
}

/// Whether verdicts about an arm with a dose of its own hold for this host alone. `None` for an arm that has the dose
/// of its form.
pub fn is_low_in(study: &Study, arm: &Arm) -> Option<bool> {
    let shares = study.dose.iter().zip(&arm.dose).filter_map(|(part, here)| Some(here / part.paper?));
    let is_low = shares.min_by(f64::total_cmp).is_some_and(|share| share < LEAST);
    (!arm.dose.is_empty()).then_some(is_low)
}

/// The dose of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dose {
    /// Its parts: meaning, the paper's, and ours.
    pub parts: Vec<(String, Option<f64>, f64)>,
    /// The smallest part of the paper's; absent where the paper tells none.
    pub share: Option<f64>,
    /// Whether that is below a third.
    pub is_low: bool,
}

impl Dose {
    /// The dose of a study in a form.
    pub fn of(study: &Study, length: Length) -> Self {
        let here = |part: &Part| if length == Length::Short { part.short } else { part.full };
        let parts: Vec<_> = study.dose.iter().map(|part| (part.what.clone(), part.paper, here(part))).collect();
        let shares = parts.iter().filter_map(|(_, paper, here)| Some(here / (*paper)?));
        let share = shares.min_by(f64::total_cmp);
        Self { parts, share, is_low: share.is_some_and(|share| share < LEAST) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data;

    #[test]
    fn smallest_part_is_the_dose() {
        let mut study = data::all().remove(0);
        let part = |paper, short| Part { what: "s".into(), paper, short, full: 9.0 };
        study.dose = vec![part(Some(10.0), 9.0), part(Some(10.0), 3.0), part(None, 0.1)];
        let of = |length| (Dose::of(&study, length).share, Dose::of(&study, length).is_low);
        assert_eq!((of(Length::Short), of(Length::Full)), ((Some(0.3), true), (Some(0.9), false)));
        study.dose = vec![part(None, 1.0)];
        assert_eq!(Dose::of(&study, Length::Short).share, None);
    }

    #[test]
    fn arm_with_a_dose_of_its_own_is_judged_by_it() {
        let mut study = data::all().into_iter().find(|study| study.id == "sonone-t2").unwrap();
        let is_low = |study: &Study, arm: &str| is_low_in(study, study.arm(arm).unwrap());
        assert!(Dose::of(&study, Length::Full).is_low);
        assert_eq!((is_low(&study, "fold"), is_low(&study, "slices-fold")), (None, Some(false)));
        study.arms.iter_mut().filter(|arm| arm.name == "slices-fold").for_each(|arm| arm.dose[0] = 1.0);
        assert_eq!(is_low(&study, "slices-fold"), Some(true));
        for study in data::all() {
            for arm in study.arms.iter().filter(|arm| !arm.dose.is_empty()) {
                assert_eq!(arm.dose.len(), study.dose.len(), "{}: {}", study.id, arm.name);
            }
        }
    }

    #[test]
    fn every_study_with_a_recipe_tells_its_dose() {
        for study in data::all().iter().filter(|study| study.why_not().is_none()) {
            assert!(!study.dose.is_empty(), "{}", study.id);
        }
    }
}
