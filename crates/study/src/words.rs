//! Rules, verdicts and losses as sentences, in which arms are called by their titles.

use crate::check::{Check, Rule, Verdict};
use crate::data::Study;
use crate::figure::figure;
use crate::losses::Loss;
use std::fmt::Write as _;

/// The rule of a verdict and what was found, as a sentence.
pub fn of_verdict(study: &Study, verdict: &Verdict) -> String {
    let check = study.predict.iter().filter(|says| says.text == verdict.prediction).find_map(|says| says.check());
    let Some(check) = check else { return format!("{}; found {}", verdict.rule, found(verdict)) };
    format!("{}; found {}", of_rule(study, &check), found(&within(study, &check, verdict)))
}

/// The verdict with its interval cut to the values that the figure can have: an area under a curve is at most 1.
fn within(study: &Study, check: &Check, verdict: &Verdict) -> Verdict {
    let range = study.metric(&check.metric).and_then(|metric| metric.range);
    let range = range.filter(|_| check.over.is_none() && check.minus.is_none());
    let interval = verdict.interval.map(|ends| match range {
        Some([low, high]) => ends.map(|end| end.clamp(low, high)),
        None => ends,
    });
    Verdict { interval, ..verdict.clone() }
}

/// The figure of a verdict with its interval and the number of samples, as text.
pub fn found(verdict: &Verdict) -> String {
    let value = verdict.value.map_or("no samples".to_owned(), figure);
    let interval =
        verdict.interval.map_or(String::new(), |[low, high]| format!(" ({} to {})", figure(low), figure(high)));
    let mut text = format!("{value}{interval}, n = {}", verdict.n);
    if let Some(why) = &verdict.why {
        let _ = write!(text, "; {why}");
    }
    // Fewer than two samples have no variance from which a number could be computed.
    if let Some(needs) = verdict.needs_n.filter(|_| verdict.n >= 2) {
        let _ = write!(text, "; n = {needs} would decide");
    }
    text
}

fn of_rule(study: &Study, check: &Check) -> String {
    let metric = study.metric(&check.metric).map_or(check.metric.as_str(), |metric| metric.text.as_str());
    let at = check.x.as_ref().map_or(String::new(), |x| format!(" ({x})"));
    let other = match (&check.over, &check.minus) {
        (Some(over), _) => format!(", divided by the same with \"{}\",", title(study, over)),
        (_, Some(minus)) => format!(", less the same with \"{}\",", title(study, minus)),
        _ => String::new(),
    };
    let rule = match check.rule {
        Rule::Above(bound) => format!("more than {bound}"),
        Rule::Below(bound) => format!("less than {bound}"),
        Rule::Within(low, high) => format!("{low} to {high}"),
    };
    format!("{metric}{at} with \"{}\"{other} was to be {rule}", title(study, &check.arm))
}

/// The title of an arm.
fn title<'a>(study: &'a Study, arm: &'a str) -> &'a str {
    study.arm(arm).map_or(arm, |arm| arm.text.as_str())
}

/// A loss as a sentence.
pub fn of_loss(study: &Study, loss: &Loss) -> String {
    let at = loss.x.as_ref().map_or(String::new(), |x| format!(" ({x})"));
    let side = |(arm, mean): &(String, f64)| {
        format!("{} with \"{}\"", format!("{} {}", figure(*mean), loss.unit).trim_end(), title(study, arm))
    };
    let sure = if loss.decided { "decided" } else { "undecided" };
    format!("{}{at}: {}, {} (n = {}, {sure})", loss.text, side(&loss.ours), side(&loss.theirs), loss.n)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::Answer;
    use crate::data;

    fn verdict(n: usize, needs_n: Option<usize>, why: Option<&str>) -> Verdict {
        Verdict {
            prediction: String::new(),
            verdict: Answer::Undecided,
            value: None,
            interval: None,
            n,
            needs_n,
            why: why.map(str::to_owned),
            rule: "m".into(),
            registered: None,
            former: Vec::new(),
            run: None,
            is_low_dose: None,
        }
    }

    #[test]
    fn number_that_would_decide_is_told_of_two_repetitions_or_more() {
        let words = |n, needs_n, why| found(&verdict(n, needs_n, Some(why)));
        assert_eq!(words(5, Some(9), "why"), "no samples, n = 5; why; n = 9 would decide");
        assert_eq!(words(1, Some(3), "at least 3"), "no samples, n = 1; at least 3");
        assert_eq!(words(0, None, "the arm a was not run"), "no samples, n = 0; the arm a was not run");
    }

    #[test]
    fn interval_of_a_probability_ends_at_one() {
        let study = data::all().into_iter().find(|study| study.id == "kim-isolate").expect("a study");
        let says = study.predict.iter().find(|says| says.check().is_some_and(|check| check.metric == "auc"));
        let (value, interval) = (Some(0.98), Some([0.9, 1.06]));
        let prediction = says.expect("a prediction").text.clone();
        let text = of_verdict(&study, &Verdict { prediction, value, interval, ..verdict(3, None, None) });
        assert!(text.ends_with("found 0.98 (0.9 to 1), n = 3"), "{text}");
    }

    #[test]
    fn rule_is_a_sentence_and_arms_have_their_titles() {
        let study = data::all().into_iter().find(|study| study.id == "sonone-t2").expect("a study");
        let says = study.predict.iter().find(|says| says.check().is_some_and(|check| check.arm == "fold"));
        let verdict = Verdict { prediction: says.expect("a prediction").text.clone(), ..verdict(0, None, None) };
        let text = of_verdict(&study, &verdict);
        assert!(
            text.contains("with \"Pagefold, all guests in one group\", divided by the same with \"nobody merges\""),
            "{text}"
        );
        assert!(text.ends_with("was to be 0.95 to 1.05; found no samples, n = 0"), "{text}");
    }
}
