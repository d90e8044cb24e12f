//! The overview of all results, on one page: the papers, what Pagefold does worse, and a line for each study. Pure.

use super::Item;
use crate::check::{Answer, Verdict};
use crate::data::{self, Paper, Study};
use crate::figure::figure;
use crate::losses::{self, Loss, Merger};
use crate::result::Outcome;
use crate::standing;
use crate::words;

/// Most losses that the page lists.
const LOSSES: usize = 10;

/// A paper with its results.
pub struct OfPaper<'a> {
    /// The paper.
    pub paper: Paper,
    /// Those studies of the paper that ran, with their results.
    pub items: Vec<Item<'a>>,
}

impl<'a> OfPaper<'a> {
    /// All papers of which a study ran.
    pub fn all(items: &[Item<'a>]) -> Vec<Self> {
        let of = |paper: Paper| {
            let items = items.iter().copied().filter(|(study, _)| study.paper == paper.paper).collect();
            Self { paper, items }
        };
        data::papers().into_iter().map(of).filter(|paper| !paper.items.is_empty()).collect()
    }

    /// The studies that are shown for the paper, each with what it found first.
    pub fn seen(&self) -> Vec<(&'a Study, String)> {
        let find = |id: &String| self.items.iter().find(|(study, _)| study.id == *id);
        let first = |(study, result): &Item<'a>| Some((*study, told(result, headline(result)?)));
        self.paper.shown.iter().filter_map(find).filter_map(first).collect()
    }

    /// How many predictions of the paper are decided, how many are not, and how many verdicts hold for this host alone.
    pub fn sure(&self) -> String {
        let low = here_alone(&self.items);
        let low = match low {
            0 => String::new(),
            1 => " One of these is of this rig alone.".to_owned(),
            more => format!(" {more} of these are of this rig alone."),
        };
        format!("{}.{low}", counts(&self.items))
    }
}

/// Verdicts by their number: `3 hold, 1 fails`.
pub fn counts(items: &[Item<'_>]) -> String {
    let verdicts = || items.iter().flat_map(|(_, result)| &result.verdicts);
    let of = |answer: Answer| verdicts().filter(|verdict| verdict.verdict == answer).count();
    let parts = [
        (of(Answer::Holds), "holds", "hold"),
        (of(Answer::Fails), "fails", "fail"),
        (of(Answer::Undecided), "is undecided", "are undecided"),
    ];
    let some = parts.into_iter().filter(|(n, ..)| *n > 0);
    let some: Vec<String> = some.map(|(n, one, more)| format!("{n} {}", if n == 1 { one } else { more })).collect();
    some.join(", ")
}

/// Number of decided predictions that hold for this host alone, because the dose was low.
pub fn here_alone(items: &[Item<'_>]) -> usize {
    let of = |(_, result): &Item<'_>| {
        let low = result.verdicts.iter().filter(|verdict| standing::is_low(result, verdict));
        low.filter(|verdict| verdict.verdict != Answer::Undecided).count()
    };
    items.iter().map(of).sum()
}

/// The verdict that stands for a study: the first decided one about Pagefold; if there is none, the first decided one;
/// if none is decided, the first.
pub fn headline(result: &Outcome) -> Option<&Verdict> {
    let decided = || result.verdicts.iter().filter(|verdict| verdict.verdict != Answer::Undecided);
    let is_ours = |verdict: &&Verdict| {
        let arms = verdict.rule.split(' ').skip_while(|word| *word != "in");
        arms.skip(1).take(1).any(|arm| losses::merger_of(arm.trim_end_matches(':')) == Some(Merger::Fold))
    };
    decided().find(is_ours).or(decided().next()).or(result.verdicts.first())
}

/// A verdict, the figure that was found, and the prediction.
pub fn told(result: &Outcome, verdict: &Verdict) -> String {
    let figure = Verdict { why: None, needs_n: None, ..verdict.clone() };
    format!("{}, {}. {}", standing::verdict(result, verdict), words::found(&figure), verdict.prediction)
}

/// The dose of a run in a word.
pub fn dose(result: &Outcome) -> String {
    let share = result.dose.as_ref().and_then(|dose| dose.share);
    share.map_or("not told".to_owned(), |share| match share {
        whole if whole >= 1.0 => "whole".to_owned(),
        most if most > 0.5 => figure(most),
        less => format!("1/{:.0}", 1.0 / less),
    })
}

/// The losses that are listed: of each study the decided one that is the largest in relation to the figure; the largest
/// comes first. Where the other arm's figure is 0, merging has a cost that the other does not have at all: these come
/// last.
pub fn losses<'a>(items: &[Item<'a>]) -> Vec<(&'a Study, Loss)> {
    let part = |loss: &Loss| {
        let (ours, theirs) = (loss.ours.1, loss.theirs.1);
        if theirs == 0.0 { 0.0 } else { (ours - theirs).abs() / ours.abs().max(theirs.abs()) }
    };
    let worst = |(study, result): &Item<'a>| {
        let decided = losses::of(study, &result.measured).into_iter().filter(|loss| loss.decided);
        decided.max_by(|a, b| part(a).total_cmp(&part(b))).map(|loss| (*study, loss))
    };
    let mut all: Vec<(&Study, Loss)> = items.iter().filter_map(worst).collect();
    all.sort_by(|(_, a), (_, b)| part(b).total_cmp(&part(a)));
    all.truncate(LOSSES);
    all
}

/// Studies without a result, by the reason.
pub fn missing(items: &[Item<'_>]) -> Vec<(String, Vec<String>)> {
    let mut by_reason: Vec<(String, Vec<String>)> = Vec::new();
    for study in data::all().iter().filter(|study| items.iter().all(|(with, _)| with.id != study.id)) {
        let why = study.why_not().unwrap_or("nobody has run it in its full form").to_owned();
        match by_reason.iter_mut().find(|(reason, _)| *reason == why) {
            Some((_, ids)) => ids.push(study.id.clone()),
            None => by_reason.push((why, vec![study.id.clone()])),
        }
    }
    by_reason
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::tests::empty;

    fn verdict(rule: &str, answer: Answer) -> Verdict {
        Verdict {
            prediction: rule.into(),
            verdict: answer,
            value: Some(1.0),
            interval: None,
            n: 3,
            needs_n: Some(9),
            why: Some("why".into()),
            rule: rule.into(),
            registered: None,
            former: Vec::new(),
            run: None,
            is_low_dose: None,
        }
    }

    #[test]
    fn decided_prediction_about_pagefold_stands_for_a_study() {
        let study = data::all().remove(0);
        let of = |verdicts: &[(&str, Answer)]| {
            let verdicts = verdicts.iter().map(|(rule, answer)| verdict(rule, *answer)).collect();
            let result = Outcome { verdicts, ..empty(&study) };
            headline(&result).map(|verdict| verdict.rule.clone())
        };
        let (open, ksm, fold) = ("m in fold-a: above 1", "m in ksm over fold: above 1", "m in fold: above 1");
        let all = [(open, Answer::Undecided), (ksm, Answer::Fails), (fold, Answer::Holds)];
        assert_eq!(of(&all).as_deref(), Some(fold));
        assert_eq!(of(&all[..2]).as_deref(), Some(ksm));
        assert_eq!(of(&all[..1]).as_deref(), Some(open));
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn every_study_is_with_its_result_or_has_a_reason() {
        let missing = missing(&[]);
        assert_eq!(missing.iter().map(|(_, ids)| ids.len()).sum::<usize>(), data::all().len());
    }

    #[test]
    fn papers_show_studies_of_their_own() {
        let all = data::all();
        for paper in data::papers() {
            assert!(!paper.said.is_empty() && !paper.shown.is_empty(), "{}", paper.paper);
            for id in paper.shown.iter().chain([&paper.picture]) {
                assert!(all.iter().any(|study| study.id == *id && study.paper == paper.paper), "{id}");
            }
        }
    }
}
