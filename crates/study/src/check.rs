//! Verdicts: whether the samples of a run support a prediction. Nothing is read or written here.
//!
//! ```text
//!   samples of a metric in an arm, one a repetition
//!      -> over or minus another arm's, paired by repetition
//!      -> Student's 95% interval of the mean
//!      -> holds:     the interval lies on the stated side, or within the stated margin
//!         fails:     it lies wholly on the other side, or outside
//!         undecided: anything else, with the number of repetitions that would decide
//! ```
//! If an arm is to merge pages and none were merged in it, nothing can be concluded from it: its predictions stay
//! undecided, independent of the samples. The same holds for an arm whose load did not run.

use crate::data::{Bound, Prediction, Study};
use crate::dose;
use crate::record::{MERGED, OPERATIONS, Samples};
use crate::register::{Entry, Former, Register, Registration};
use crate::stats;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Least number of repetitions for a verdict.
pub const LEAST_N: usize = 3;
/// Largest number of repetitions that a verdict names as enough to decide. A prediction that needs more counts as
/// undecidable on this host.
const MOST_N: usize = 1000;
/// Length of the day in a text of date and time.
const DAY: usize = "2026-11-29".len();

/// A rule about the mean of a figure, by which a prediction is judged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// The mean is larger than this.
    Above(f64),
    /// The mean is smaller than this.
    Below(f64),
    /// The mean lies between these.
    Within(f64, f64),
}

/// A figure that is computed from samples, and the rule for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Check {
    /// The metric whose samples are taken.
    pub metric: String,
    /// The arm whose samples are taken.
    pub arm: String,
    /// The value of the variable at which it is taken, if it is taken at several.
    pub x: Option<String>,
    /// An arm by whose figure it is divided.
    pub over: Option<String>,
    /// An arm whose figure is subtracted.
    pub minus: Option<String>,
    /// The rule.
    pub rule: Rule,
}

/// The three possible verdicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// The samples support the prediction.
    Holds,
    /// The samples refute the prediction.
    Fails,
    /// The samples allow both.
    Undecided,
}

impl Answer {
    /// Name of the answer in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Holds => "holds",
            Self::Fails => "fails",
            Self::Undecided => "undecided",
        }
    }
}

/// A prediction with its verdict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// The prediction.
    pub prediction: String,
    /// The verdict.
    pub verdict: Answer,
    /// The mean of the figure; absent without samples.
    pub value: Option<f64>,
    /// Its 95% interval; absent of fewer than two samples.
    pub interval: Option<[f64; 2]>,
    /// The number of samples.
    pub n: usize,
    /// Of an undecided prediction, the number of samples like these that would decide, if 1000 would. Fewer than two tell nothing of
    /// that: it is the least number for any verdict then. Absent where an arm has nothing to say.
    pub needs_n: Option<usize>,
    /// Why it is undecided.
    pub why: Option<String>,
    /// The rule in words.
    pub rule: String,
    /// Since when it stands as it is. Absent in files without it.
    #[serde(default)]
    pub registered: Option<Registration>,
    /// The predictions that it took the place of after a first result, judged by the same samples.
    #[serde(default)]
    pub former: Vec<Former>,
    /// The date of the run by which it is judged, if that is another than the result's.
    #[serde(default)]
    pub run: Option<String>,
    /// Whether it is of this rig alone, because its arm has too low a dose of its own. Absent of an arm with the run's dose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub is_low_dose: Option<bool>,
}

/// Judges all predictions that have a rule by one run.
#[cfg(test)]
pub fn judge_all(study: &Study, samples: &Samples) -> Vec<Verdict> {
    judge_runs(study, &[Run { date: None, samples: samples.clone() }])
}

/// The samples of a run.
#[derive(Clone, Debug)]
pub struct Run {
    /// Date and time of the run, if they are known.
    pub date: Option<String>,
    /// The samples of the run.
    pub samples: Samples,
}

/// Judges all predictions that have a rule by runs, the last of which comes first. A prediction is judged by the first run that has all of
/// its arms. Where a study counts days, the mean of a day is a sample.
pub fn judge_runs(study: &Study, runs: &[Run]) -> Vec<Verdict> {
    let register = Register::read();
    let days = Run { date: runs.first().and_then(|run| run.date.clone()), samples: by_day(runs) };
    let runs = if study.by_day { std::slice::from_ref(&days) } else { runs };
    let of = |says: &Prediction| {
        let check = says.check()?;
        let is_whole = |run: &&Run| check.arms().all(|arm| run.samples.has_arm(arm));
        let run = runs.iter().find(is_whole).or(runs.first())?;
        let is_last = runs.first().is_some_and(|last| last.date == run.date);
        let former = register.former(study, says).map(|entry| former(study, entry, &run.samples));
        Some(Verdict {
            registered: register.of(study, says, run.date.as_deref()),
            former: former.collect(),
            run: run.date.clone().filter(|_| !is_last),
            is_low_dose: study.arm(&check.arm).and_then(|arm| dose::is_low_in(study, arm)),
            ..judge(study, &says.text, &check, &run.samples)
        })
    };
    study.predict.iter().filter_map(of).collect()
}

/// The samples of all runs, one for each day: the mean of the day's repetitions.
fn by_day(runs: &[Run]) -> Samples {
    let mut days: BTreeMap<&str, Vec<&Samples>> = BTreeMap::new();
    for run in runs {
        let day = run.date.as_deref().and_then(|date| date.get(..DAY)).unwrap_or_default();
        days.entry(day).or_default().push(&run.samples);
    }
    let mut all = Samples::default();
    for (n, runs) in days.values().enumerate() {
        all.add_means(n as u32, runs);
    }
    all
}

fn former(study: &Study, entry: &Entry, samples: &Samples) -> Former {
    let verdict = entry.check().map(|check| judge(study, &entry.says.text, &check, samples));
    Former {
        prediction: entry.says.text.clone(),
        rule: verdict.as_ref().map(|verdict| verdict.rule.clone()),
        since: entry.since.clone(),
        hash: entry.hash.clone(),
        verdict: verdict.as_ref().map(|verdict| verdict.verdict),
        value: verdict.as_ref().and_then(|verdict| verdict.value),
        interval: verdict.and_then(|verdict| verdict.interval),
    }
}

/// Judges one prediction.
pub fn judge(study: &Study, prediction: &str, check: &Check, samples: &Samples) -> Verdict {
    let (values, rule, back) = check.on_their_scale(check.values(samples));
    let half = stats::half_width(&values);
    let mean = (!values.is_empty()).then(|| stats::mean(&values));
    let interval = mean.zip(half).map(|(mean, half)| [mean - half, mean + half]);
    let silent = check.arms().find_map(|arm| silence(study, arm, samples));
    let answer = interval.map_or(Answer::Undecided, |i| rule.answer(i));
    let open = if values.len() < LEAST_N {
        Some(format!("at least {LEAST_N} repetitions are needed"))
    } else {
        (answer == Answer::Undecided).then(|| "the interval contains the bound".to_owned())
    };
    let silent = silent.or_else(|| {
        study.metric(&check.metric)?.bound.filter(|side| rule.rests_on(*side, answer, mean)).map(in_words_of)
    });
    let (verdict, needs_n, why) = match (silent, open) {
        (Some(why), _) => (Answer::Undecided, None, Some(why)),
        (None, None) => (answer, None, None),
        (None, Some(why)) => match rule.needs(&values) {
            None => (Answer::Undecided, None, Some(format!("{why}; more than {MOST_N} would be needed"))),
            needs => (Answer::Undecided, needs, Some(why)),
        },
    };
    let (value, interval, n) = (mean.map(back), interval.map(|ends| ends.map(back)), values.len());
    let (registered, former, run, is_low_dose) = (None, Vec::new(), None, None);
    let (prediction, rule) = (prediction.to_owned(), check.in_words());
    Verdict { prediction, verdict, value, interval, n, needs_n, why, rule, registered, former, run, is_low_dose }
}

fn in_words_of(side: Bound) -> String {
    let side = if side == Bound::Upper { "an upper" } else { "a lower" };
    format!("its figure is only {side} bound of what is asked")
}

/// Why nothing can be concluded from an arm: nothing was merged in it, or its load did not run. `None` if something
/// can.
fn silence(study: &Study, arm: &str, samples: &Samples) -> Option<String> {
    let none_of = |metric: &str| {
        let found = samples.of(metric, arm, None);
        found.is_empty() || found.iter().any(|(_, value)| *value <= 0.0)
    };
    let merges = study.arm(arm).is_some_and(|a| a.merges);
    if !samples.has_arm(arm) || merges && samples.of(MERGED, arm, None).is_empty() {
        return Some(format!("the arm {arm} was not run"));
    }
    if merges && none_of(MERGED) {
        return Some(format!("in the arm {arm} nothing was merged in some repetition: it cannot tell an effect"));
    }
    if study.metric(OPERATIONS).is_some() && none_of(OPERATIONS) {
        return Some(format!("in the arm {arm} the load did not run in some repetition"));
    }
    None
}

impl Check {
    /// All arms whose samples the check uses.
    pub fn arms(&self) -> impl Iterator<Item = &str> {
        [Some(&self.arm), self.over.as_ref(), self.minus.as_ref()].into_iter().flatten().map(String::as_str)
    }

    /// The figure for each repetition in which all arms of the check have a sample.
    fn values(&self, samples: &Samples) -> Vec<f64> {
        let of = |arm: &str| samples.of(&self.metric, arm, self.x.as_deref());
        let other = self.over.as_ref().or(self.minus.as_ref()).map(|arm| of(arm));
        let paired = of(&self.arm).into_iter().filter_map(|(rep, value)| {
            let Some(other) = &other else { return Some(value) };
            let (_, base) = other.iter().find(|(other, _)| *other == rep)?;
            if self.over.is_some() { (*base != 0.0).then(|| value / base) } else { Some(value - base) }
        });
        paired.filter(|v| v.is_finite()).collect()
    }

    /// The figures and the rule on the scale on which they are compared, and the function that leads back. Ratios are
    /// compared by their logarithms: otherwise noise alone makes both the mean of `a / b` and that of `b / a` larger
    /// than 1.
    fn on_their_scale(&self, values: Vec<f64>) -> (Vec<f64>, Rule, fn(f64) -> f64) {
        let is_positive = |value: &f64| *value > 0.0;
        match self.rule.map(f64::ln) {
            Some(rule) if self.over.is_some() && values.iter().all(is_positive) => {
                (values.into_iter().map(f64::ln).collect(), rule, f64::exp)
            }
            _ => (values, self.rule, |value| value),
        }
    }

    /// The rule as text.
    pub fn in_words(&self) -> String {
        let at = self.x.as_ref().map_or(String::new(), |x| format!(" at {x}"));
        let other = match (&self.over, &self.minus) {
            (Some(over), _) => format!(" over {over}"),
            (_, Some(minus)) => format!(" minus {minus}"),
            _ => String::new(),
        };
        let rule = match self.rule {
            Rule::Above(bound) => format!("above {bound}"),
            Rule::Below(bound) => format!("below {bound}"),
            Rule::Within(low, high) => format!("from {low} to {high}"),
        };
        format!("{} in {}{other}{at}: {rule}", self.metric, self.arm)
    }
}

impl Rule {
    /// The same rule on another scale. `None` if a bound has no value there.
    fn map(self, scale: fn(f64) -> f64) -> Option<Self> {
        let (rule, [from, to]) = match self {
            Self::Above(bound) => (Self::Above(scale(bound)), [bound; 2]),
            Self::Below(bound) => (Self::Below(scale(bound)), [bound; 2]),
            Self::Within(from, to) => (Self::Within(scale(from), scale(to)), [from, to]),
        };
        (scale(from).is_finite() && scale(to).is_finite()).then_some(rule)
    }

    /// The verdict for a mean whose 95% interval is this.
    fn answer(self, [low, high]: [f64; 2]) -> Answer {
        let (holds, fails) = match self {
            Self::Above(bound) => (low > bound, high < bound),
            Self::Below(bound) => (high < bound, low > bound),
            Self::Within(from, to) => (low >= from && high <= to, high < from || low > to),
        };
        match (holds, fails) {
            (true, _) => Answer::Holds,
            (_, true) => Answer::Fails,
            _ => Answer::Undecided,
        }
    }

    /// Whether this answer would take a figure that is only a bound of the truth for the truth itself.
    fn rests_on(self, side: Bound, answer: Answer, mean: Option<f64>) -> bool {
        let truth_may_be_lower = side == Bound::Upper;
        match (self, answer) {
            (_, Answer::Undecided) => false,
            (Self::Above(_), Answer::Holds) | (Self::Below(_), Answer::Fails) => truth_may_be_lower,
            (Self::Above(_), Answer::Fails) | (Self::Below(_), Answer::Holds) => !truth_may_be_lower,
            (Self::Within(..), Answer::Holds) => true,
            (Self::Within(from, _), Answer::Fails) => (mean.is_some_and(|mean| mean < from)) != truth_may_be_lower,
        }
    }

    /// Number of samples of the same mean and deviation that would decide; see [`Verdict::needs_n`].
    fn needs(self, values: &[f64]) -> Option<usize> {
        if values.len() < 2 {
            return Some(LEAST_N);
        }
        let mean = stats::mean(values);
        let gap = match self {
            Self::Above(bound) | Self::Below(bound) => (mean - bound).abs(),
            Self::Within(from, to) => (mean - from).abs().min((mean - to).abs()),
        };
        stats::n_that_decides(stats::deviation(values), gap, MOST_N).map(|n| n.max(LEAST_N))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Sample;

    fn study(arms: &str) -> Study {
        let text = format!(
            "paper = 'X'\ntitle = ''\nrig = ''\n[[study]]\nid = 'x'\nwhere = ''\nwhat = ''\npriority = 1\nneeds = []\nfound = ''\npredict = []\n{arms}"
        );
        #[derive(serde::Deserialize)]
        struct File {
            study: Vec<Study>,
        }
        toml::from_str::<File>(&text).unwrap().study.remove(0)
    }

    fn samples(of: &[(&str, &str, &[f64])]) -> Samples {
        let mut all = Samples::default();
        for (metric, arm, values) in of {
            for (rep, value) in values.iter().enumerate() {
                all.add(arm, rep as u32, &[Sample::new(metric, *value)]);
            }
        }
        all
    }

    fn check(rule: Rule) -> Check {
        Check { metric: "m".into(), arm: "a".into(), x: None, over: None, minus: None, rule }
    }

    #[test]
    fn interval_decides_and_says_how_many_would() {
        let study = study("");
        let answer = |rule, values: &[f64]| judge(&study, "", &check(rule), &samples(&[("m", "a", values)]));
        assert_eq!(answer(Rule::Above(1.0), &[2.0, 2.1, 1.9]).verdict, Answer::Holds);
        assert_eq!(answer(Rule::Above(1.0), &[0.2, 0.1, 0.3]).verdict, Answer::Fails);
        assert_eq!(answer(Rule::Below(1.0), &[0.2, 0.1, 0.3]).verdict, Answer::Holds);
        let open = answer(Rule::Above(1.0), &[2.0, 0.5, 1.5]);
        assert_eq!((open.verdict, open.n), (Answer::Undecided, 3));
        assert!(open.needs_n.is_some_and(|n| n > 3), "{open:?}");
        assert_eq!(answer(Rule::Within(0.0, 1.0), &[0.5, 0.5, 0.5]).verdict, Answer::Holds);
        assert_eq!(answer(Rule::Within(0.0, 1.0), &[0.0, 0.5, 1.0]).verdict, Answer::Undecided);
        assert_eq!(answer(Rule::Within(0.0, 1.0), &[2.0, 2.1, 2.2]).verdict, Answer::Fails);
        let few = answer(Rule::Above(1.0), &[5.0, 5.0]);
        assert_eq!((few.verdict, few.needs_n), (Answer::Undecided, Some(LEAST_N)));
        assert_eq!(answer(Rule::Within(0.0, 1.0), &[]).interval, None);
    }

    #[test]
    fn number_that_would_decide_is_named_only_where_it_is_known() {
        let study = study("");
        let needs = |values: &[f64]| {
            let verdict = judge(&study, "", &check(Rule::Above(1.0)), &samples(&[("m", "a", values)]));
            (verdict.needs_n, verdict.why.unwrap_or_default())
        };
        assert_eq!(needs(&[5.0]), (Some(LEAST_N), "at least 3 repetitions are needed".into()));
        assert_eq!(needs(&[0.999, 1.002]), (Some(74), "at least 3 repetitions are needed".into()));
        let never = "at least 3 repetitions are needed; more than 1000 would be needed";
        assert_eq!(needs(&[0.0, 2.001]), (None, never.into()));
        assert_eq!(
            needs(&[0.0, 2.001, 1.0]),
            (None, "the interval contains the bound; more than 1000 would be needed".into())
        );
        assert_eq!(needs(&[]), (None, "the arm a was not run".into()));
    }

    #[test]
    fn ratio_of_noise_is_one_both_ways() {
        let study = study("");
        let both = samples(&[("m", "a", &[1.0, 2.0, 4.0]), ("m", "b", &[4.0, 2.0, 1.0])]);
        for (arm, other) in [("a", "b"), ("b", "a")] {
            let over = Check { arm: arm.into(), over: Some(other.into()), ..check(Rule::Within(0.01, 100.0)) };
            let verdict = judge(&study, "", &over, &both);
            let [low, high] = verdict.interval.unwrap();
            assert!((verdict.value.unwrap() - 1.0).abs() < 1e-9 && (low * high - 1.0).abs() < 1e-9, "{verdict:?}");
        }
        // Figures that have no logarithm are compared as they are.
        let none = samples(&[("m", "a", &[0.0, 1.0, 2.0]), ("m", "b", &[1.0, 1.0, 1.0])]);
        let over = Check { over: Some("b".into()), ..check(Rule::Within(0.0, 3.0)) };
        assert_eq!(judge(&study, "", &over, &none).value, Some(1.0));
    }

    #[test]
    fn figures_of_two_arms_are_paired_by_repetition() {
        let study = study("");
        let both = samples(&[("m", "a", &[2.0, 20.0, 200.0]), ("m", "b", &[1.0, 10.0, 100.0])]);
        let over = Check { over: Some("b".into()), ..check(Rule::Within(1.9, 2.1)) };
        assert_eq!(judge(&study, "", &over, &both).verdict, Answer::Holds);
        let minus = Check { minus: Some("b".into()), ..check(Rule::Above(0.0)) };
        assert_eq!(judge(&study, "", &minus, &both).value, Some(37.0));
        let one_short = samples(&[("m", "a", &[2.0, 20.0, 200.0]), ("m", "b", &[1.0, 10.0])]);
        assert_eq!(judge(&study, "", &over, &one_short).n, 2);
    }

    #[test]
    fn arm_that_merged_nothing_or_did_not_work_says_nothing() {
        let study = study(
            "[[study.arms]]\nname = 'a'\ntext = ''\nmerges = true\n\
             [[study.metric]]\nname = 'operations'\nunit = ''\ntext = ''",
        );
        let judged = |merged: &[f64], operations: &[f64]| {
            let made = [("m", "a", &[1.0, 1.0, 1.0][..]), (MERGED, "a", merged), (OPERATIONS, "a", operations)];
            judge(&study, "", &check(Rule::Within(0.9, 1.1)), &samples(&made))
        };
        assert_eq!(judged(&[1.0; 3], &[1.0; 3]).verdict, Answer::Holds);
        for silent in [judged(&[1.0, 0.0, 1.0], &[1.0; 3]), judged(&[], &[1.0; 3]), judged(&[1.0; 3], &[0.0; 3])] {
            assert_eq!((silent.verdict, silent.needs_n), (Answer::Undecided, None), "{silent:?}");
        }
        let left_out = judged(&[], &[1.0; 3]).why;
        assert_eq!(left_out.as_deref(), Some("the arm a was not run"));
    }
}
