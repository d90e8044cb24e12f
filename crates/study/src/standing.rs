//! Describes how far a verdict can be trusted: whether it holds for this host alone, since when its prediction is
//! registered, and the dose of its run.

use crate::check::{Answer, Verdict};
use crate::dose::Dose;
use crate::figure::figure;
use crate::register::Former;
use crate::result::Outcome;

/// Why a prediction has no verdict, if the study does not say.
const NOT_ASKED: &str = "no figure of this study decides it";

/// Name of the verdict. If the dose was low, the text says that it holds for this host alone.
pub fn verdict(result: &Outcome, verdict: &Verdict) -> String {
    let here_alone = if is_low(result, verdict) && verdict.verdict != Answer::Undecided { " here alone" } else { "" };
    format!("{}{here_alone}", verdict.verdict.name())
}

/// Whether a verdict rests on a low dose: its arm's own, or the run's.
pub fn is_low(result: &Outcome, verdict: &Verdict) -> bool {
    let of_run = result.dose.as_ref().is_some_and(|dose| dose.is_low);
    verdict.is_low_dose.unwrap_or(of_run)
}

/// Marks of a prediction: that it was changed or added after a first result, and the earlier run by which it is judged,
/// if it is.
pub fn marks(verdict: &Verdict) -> Vec<String> {
    let mut marks = Vec::new();
    match &verdict.registered {
        None => marks.push("not registered".to_owned()),
        Some(r) if r.changed => marks.push(format!("changed on {}, after a first result", day(&r.since))),
        Some(r) if r.after_its_figure => marks.push(format!("written on {}, when its figure was known", day(&r.since))),
        Some(r) if r.after_first_result => marks.push(format!("added on {}, after a first result", day(&r.since))),
        Some(_) => {}
    }
    marks.extend(verdict.former.iter().map(former));
    marks.extend(verdict.run.as_deref().map(|run| format!("by the run of {}", minute(run))));
    marks
}

fn former(former: &Former) -> String {
    let answer = former.verdict.map_or("not asked", Answer::name);
    let value = former.value.map_or(String::new(), |value| format!(" {}", figure(value)));
    let interval = former.interval.map_or(String::new(), |[a, b]| format!(" ({} to {})", figure(a), figure(b)));
    let rule = former.rule.as_ref().map_or(String::new(), |rule| format!("; {rule}"));
    format!("before, since {}: \"{}\" {answer}{value}{interval}{rule}", day(&former.since), former.prediction)
}

/// Why a prediction has no rule.
pub fn not_asked(prediction: &crate::data::Prediction) -> &str {
    prediction.not_asked.as_deref().unwrap_or(NOT_ASKED)
}

/// A dose as text.
pub fn dose(dose: &Dose) -> String {
    let part = |(what, paper, here): &(String, Option<f64>, f64)| {
        format!(
            "{what} {} of {}",
            figure(*here),
            paper.map_or("a number that the paper does not tell".to_owned(), figure)
        )
    };
    let parts: Vec<String> = dose.parts.iter().map(part).collect();
    let low = if dose.is_low { ". Below a third: verdicts are of this rig, and none is about the paper" } else { "" };
    format!("{}{low}", parts.join("; "))
}

/// Host, date, arms, repetitions and dose of a run, each as a title and a text.
pub fn facts(result: &Outcome) -> Vec<(&'static str, String)> {
    let date = result.date.as_deref().map_or("not recorded".to_owned(), minute);
    let n = result.measured.iter().map(|record| record.n).max().unwrap_or(0);
    let mut measured: Vec<&str> = Vec::new();
    for record in &result.measured {
        if !measured.contains(&record.arm.as_str()) {
            measured.push(&record.arm);
        }
    }
    let mut facts = vec![
        ("host", result.host.of_host()),
        ("Pagefold", result.host.of_pagefold()),
        ("run", format!("{date}; repetitions {n} of {}", measured.join(", "))),
    ];
    facts.extend(result.dose.as_ref().map(|of| ("dose", dose(of))));
    let earlier = |run: &Outcome| run.date.as_deref().map_or("not recorded".to_owned(), minute);
    let earlier: Vec<String> = result.earlier.iter().map(earlier).collect();
    if !earlier.is_empty() {
        facts.push(("runs before", earlier.join(", ")));
    }
    facts
}

/// The day in a text of date and time.
fn day(date: &str) -> &str {
    date.split('T').next().unwrap_or(date)
}

/// A date and time without seconds.
fn minute(date: &str) -> String {
    date.get(..16).unwrap_or(date).replace('T', " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{data, result};

    fn committed(id: &str) -> Outcome {
        let study = data::all().into_iter().find(|study| study.id == id).expect("a study");
        let path = format!("{}/../../docs/studies/{id}.json", env!("CARGO_MANIFEST_DIR"));
        result::read(std::path::Path::new(&path)).expect("a result").remove(0).judged_anew(&study)
    }

    fn one<'a>(result: &'a Outcome, arm_and_metric: &str) -> &'a Verdict {
        result.verdicts.iter().find(|verdict| verdict.rule.starts_with(arm_and_metric)).expect("a verdict")
    }

    #[test]
    fn balloon_of_equal_size_is_judged_by_its_own_run_and_shown_with_its_former_text() {
        let result = committed("li-exp2-2");
        let equal = one(&result, "freed_per_mb_in_all in fold-aware");
        assert_eq!((equal.verdict, equal.run.as_deref()), (Answer::Fails, Some("2026-11-28T14:53:52Z")));
        assert!((equal.value.unwrap() - 0.900).abs() < 0.001);
        assert!(marks(equal).iter().any(|mark| mark.starts_with("before, since 2026-11-26: ")), "{:?}", marks(equal));
        let priced = one(&result, "freed_per_mb_in_all in fold-priced");
        assert!(priced.registered.as_ref().is_some_and(|r| r.after_its_figure) && priced.run.is_none());
    }

    #[test]
    fn days_are_counted_where_runs_differ_more_than_repetitions() {
        let result = committed("kloster-t8.3");
        assert_eq!(one(&result, "merge_us in fold over ksm").n, 4);
    }

    #[test]
    fn low_dose_claims_nothing_about_the_paper_and_bounds_decide_nothing() {
        let result = committed("kloster-fig8.1");
        let web = one(&result, "p99_ms in fold over off at web");
        assert_eq!(verdict(&result, web), "fails here alone");
        let bounded = committed("agarwal-t6.4");
        assert!(bounded.verdicts.iter().all(|verdict| verdict.verdict == Answer::Undecided));
    }
}
