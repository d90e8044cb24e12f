//! `pagefold study selftest`: each prediction is judged by made-up samples, some of which must make it hold, fail, or
//! stay undecided. An arm in which nothing was merged, or whose load did not run, must decide nothing. Samples that
//! must refute a prediction are drawn so that it is wrong, from the values that its figure can have. If no such value
//! refutes it, the prediction cannot fail, and is refused. So is a prediction that is not registered.

use crate::check::{Answer, Check, LEAST_N, Rule, Verdict, judge};
use crate::data::{Prediction, Study};
use crate::record::{MERGED, OPERATIONS, Sample, Samples};
use crate::register::Register;
use serde::Serialize;

/// Repetitions of the made-up runs.
const REPS: u32 = 5;
/// What is wrong with a prediction that no value refutes.
const CANNOT_FAIL: &str = "it cannot fail: its figure has no value that refutes it";
/// Made-up figure of arms with which others are compared.
const BASE: f64 = 1000.0;

/// A prediction, and the answers to its made-up samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tried {
    /// The study.
    pub id: String,
    /// The prediction.
    pub prediction: String,
    /// The cases that were answered wrongly, with the answer; empty if all were right.
    pub wrong: Vec<String>,
}

/// Made-up samples, and the verdict that they must lead to.
struct Case {
    name: &'static str,
    figures: Vec<f64>,
    merged: f64,
    operations: f64,
    must_be: Answer,
}

/// Tries the predictions of all studies that can be run.
pub fn all(studies: &[Study]) -> Vec<Tried> {
    let runnable = studies.iter().filter(|study| study.why_not().is_none());
    let register = Register::read();
    let of_study = |study: &Study| -> Vec<Tried> {
        let checked = study.predict.iter().filter_map(|says| Some((says, says.check()?)));
        checked.map(|(says, check)| one(study, &register, says, &check)).collect()
    };
    runnable.flat_map(of_study).collect()
}

fn one(study: &Study, register: &Register, says: &Prediction, check: &Check) -> Tried {
    let text = says.text.as_str();
    let unregistered = register.of(study, says, None).is_none().then(|| "it is not registered as it is".to_owned());
    let merges = check.arms().any(|arm| study.arm(arm).is_some_and(|arm| arm.merges));
    let has_load = study.metric(OPERATIONS).is_some();
    let refuted = refuted(study, check);
    let cannot_fail = refuted.is_none().then(|| CANNOT_FAIL.to_owned());
    let refuting = refuted.map(|figures| Case {
        name: "samples under its negation",
        figures,
        merged: 1.0,
        operations: 1.0,
        must_be: Answer::Fails,
    });
    let wrong = cases(check.rule, merges, has_load)
        .into_iter()
        .chain(refuting)
        .filter(|case| !is_of_bound(study, check, case))
        .filter_map(|case| {
            let verdict = judge(study, text, check, &made_up(study, check, &case));
            let right = verdict.verdict == case.must_be && explains(&verdict);
            (!right).then(|| format!("{}: {}, must be {}", case.name, verdict.verdict.name(), case.must_be.name()))
        });
    Tried {
        id: study.id.clone(),
        prediction: text.to_owned(),
        wrong: cannot_fail.into_iter().chain(wrong).chain(unregistered).collect(),
    }
}

/// Whether an undecided verdict says why.
fn explains(verdict: &Verdict) -> bool {
    (verdict.verdict == Answer::Undecided) == verdict.why.is_some()
}

fn cases(rule: Rule, merges: bool, has_load: bool) -> Vec<Case> {
    let (holding, bound) = match rule {
        Rule::Above(bound) => (bound + width(bound), bound),
        Rule::Below(bound) => (bound - width(bound), bound),
        Rule::Within(low, high) => (f64::midpoint(low, high), high),
    };
    let narrow = |at: f64| (0..REPS).map(|n| at + (f64::from(n) - 2.0) * 1e-3 * width(bound)).collect::<Vec<_>>();
    let wide = (0..REPS).map(|n| bound + (f64::from(n) - 2.0) * width(bound)).collect();
    let case = |name, figures: Vec<f64>, must_be| Case { name, figures, merged: 1.0, operations: 1.0, must_be };
    let few = narrow(holding).into_iter().take(LEAST_N - 1).collect();
    let mut cases = vec![
        case("samples that support it", narrow(holding), Answer::Holds),
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

/// Samples of values that the figure can have and that refute the prediction. `None` if no value refutes it.
fn refuted(study: &Study, check: &Check) -> Option<Vec<f64>> {
    let [least, most] = study.range(check);
    let below = |bound: f64| {
        (least < bound).then(|| if least.is_finite() { f64::midpoint(least, bound) } else { bound - width(bound) })
    };
    let above = |bound: f64| {
        (most > bound).then(|| if most.is_finite() { f64::midpoint(bound, most) } else { bound + width(bound) })
    };
    let (centre, bound) = match check.rule {
        Rule::Above(bound) => (below(bound)?, bound),
        Rule::Below(bound) => (above(bound)?, bound),
        Rule::Within(low, high) => above(high).map(|at| (at, high)).or_else(|| below(low).map(|at| (at, low)))?,
    };
    // The five values lie so close together that their interval does not reach the bound.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as f64 / f64::from(u32::MAX >> 1) - 0.5
    };
    Some((0..REPS).map(|_| centre + draw() * (centre - bound).abs() / 4.0).collect())
}

/// Whether this case's verdict would rest on a figure that is only a bound of the truth.
fn is_of_bound(study: &Study, check: &Check, case: &Case) -> bool {
    study.metric(&check.metric).is_some_and(|metric| metric.bound.is_some()) && case.must_be != Answer::Undecided
}

/// A distance from a bound that is certainly large enough to decide.
fn width(bound: f64) -> f64 {
    if bound == 0.0 { 1.0 } else { bound.abs() / 2.0 }
}

/// Samples from which the check computes the figures of this case.
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
    fn prediction_that_no_value_refutes_is_refused() {
        let mut study = crate::data::all().into_iter().find(|study| study.id == "kim-isolate").unwrap();
        let says =
            study.predict.iter().find(|says| says.check().is_some_and(|check| check.metric == "auc")).unwrap().clone();
        let wrong = |study: &Study| one(study, &Register::read(), &says, &says.check().unwrap()).wrong;
        assert!(wrong(&study).is_empty());
        study
            .metric
            .iter_mut()
            .filter(|metric| metric.name == "auc")
            .for_each(|metric| metric.range = Some([0.45, 0.55]));
        assert_eq!(wrong(&study), [CANNOT_FAIL]);
    }

    #[test]
    fn every_prediction_is_answered_rightly() {
        let tried = all(&crate::data::all());
        assert!(tried.len() >= 20, "{}", tried.len());
        for one in tried {
            assert!(one.wrong.is_empty(), "{}: {}: {:?}", one.id, one.prediction, one.wrong);
        }
    }
}
