//! `pagefold study selftest`: every prediction is fed with made-up samples that must hold, fail, and be undecided. An arm
//! that merged nothing, or whose load did not run, must decide nothing.

use crate::check::{Answer, Check, LEAST_N, Rule, Verdict, judge};
use crate::data::Study;
use crate::record::{MERGED, OPERATIONS, Sample, Samples};
use serde::Serialize;

/// Repetitions of the made-up runs.
const REPS: u32 = 5;
/// Made-up figure of an arm that others are compared with.
const BASE: f64 = 1000.0;

/// One prediction with what its made-up samples yielded.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tried {
    /// The study.
    pub id: String,
    /// The prediction.
    pub prediction: String,
    /// The cases that were answered wrongly, with the answer; empty if all were right.
    pub wrong: Vec<String>,
}

/// A made-up run and the answer that it must have.
struct Case {
    name: &'static str,
    figures: Vec<f64>,
    merged: f64,
    operations: f64,
    must_be: Answer,
}

/// Tries all predictions of the studies that can be run.
pub fn all(studies: &[Study]) -> Vec<Tried> {
    let runnable = studies.iter().filter(|study| study.why_not().is_none());
    let of_study = |study: &Study| -> Vec<Tried> {
        let checked = study.predict.iter().filter_map(|p| Some((p.text.clone(), p.check()?)));
        checked.map(|(text, check)| one(study, &text, &check)).collect()
    };
    runnable.flat_map(of_study).collect()
}

fn one(study: &Study, text: &str, check: &Check) -> Tried {
    let merges = check.arms().any(|arm| study.arm(arm).is_some_and(|arm| arm.merges));
    let has_load = study.metric(OPERATIONS).is_some();
    let wrong = cases(check.rule, merges, has_load).into_iter().filter_map(|case| {
        let verdict = judge(study, text, check, &made_up(study, check, &case));
        let right = verdict.verdict == case.must_be && explains(&verdict);
        (!right).then(|| format!("{}: {}, must be {}", case.name, verdict.verdict.name(), case.must_be.name()))
    });
    Tried { id: study.id.clone(), prediction: text.to_owned(), wrong: wrong.collect() }
}

/// Whether an undecided verdict says why.
fn explains(verdict: &Verdict) -> bool {
    (verdict.verdict == Answer::Undecided) == verdict.why.is_some()
}

fn cases(rule: Rule, merges: bool, has_load: bool) -> Vec<Case> {
    let (holding, failing, bound) = match rule {
        Rule::Above(bound) => (bound + width(bound), bound - width(bound), bound),
        Rule::Below(bound) => (bound - width(bound), bound + width(bound), bound),
        Rule::Within(low, high) => (f64::midpoint(low, high), high + (high - low), high),
    };
    let narrow = |at: f64| (0..REPS).map(|n| at + (f64::from(n) - 2.0) * 1e-3 * width(bound)).collect::<Vec<_>>();
    let wide = (0..REPS).map(|n| bound + (f64::from(n) - 2.0) * width(bound)).collect();
    let case = |name, figures: Vec<f64>, must_be| Case { name, figures, merged: 1.0, operations: 1.0, must_be };
    let few = narrow(holding).into_iter().take(LEAST_N - 1).collect();
    let mut cases = vec![
        case("samples that support it", narrow(holding), Answer::Holds),
        case("samples that refute it", narrow(failing), Answer::Fails),
        case("samples on both sides", wide, Answer::Undecided),
        case("too few samples", few, Answer::Undecided),
        case("no samples", Vec::new(), Answer::Undecided),
    ];
    if merges {
        cases.push(Case { merged: 0.0, ..case("nothing was merged", narrow(holding), Answer::Undecided) });
    }
    if has_load {
        cases.push(Case { operations: 0.0, ..case("the load did not run", narrow(holding), Answer::Undecided) });
    }
    cases
}

/// A distance from a bound that no reader would call close.
fn width(bound: f64) -> f64 {
    if bound == 0.0 { 1.0 } else { bound.abs() / 2.0 }
}

/// Samples in which the check's figure takes the case's values.
fn made_up(study: &Study, check: &Check, case: &Case) -> Samples {
    let mut samples = Samples::default();
    let figure = |value| Sample { metric: check.metric.clone(), x: check.x.clone(), value };
    for (rep, value) in case.figures.iter().enumerate() {
        let own = match (&check.over, &check.minus) {
            (Some(_), _) => value * BASE,
            (_, Some(_)) => value + BASE,
            _ => *value,
        };
        samples.add(&check.arm, rep as u32, &[figure(own)]);
        for other in check.arms().skip(1) {
            samples.add(other, rep as u32, &[figure(BASE)]);
        }
    }
    for rep in 0..case.figures.len().max(1) {
        for arm in check.arms() {
            if study.arm(arm).is_some_and(|arm| arm.merges) {
                samples.add(arm, rep as u32, &[Sample::new(MERGED, case.merged)]);
            }
            samples.add(arm, rep as u32, &[Sample::new(OPERATIONS, case.operations)]);
        }
    }
    samples
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_prediction_is_answered_rightly() {
        let tried = all(&crate::data::all());
        assert!(tried.len() >= 20, "{}", tried.len());
        for one in tried {
            assert!(one.wrong.is_empty(), "{}: {}: {:?}", one.id, one.prediction, one.wrong);
        }
    }
}
