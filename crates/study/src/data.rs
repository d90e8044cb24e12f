//! Studies as data: experiments of five papers, what the papers found, and predictions that a run can refute. Each
//! paper has a file in `data/`. A study that has a recipe can be run.

use crate::check::{Check, Rule};
use crate::dose::Part;
use crate::recipes;
use serde::{Deserialize, Serialize};

/// Units of metrics that cannot be negative.
const AMOUNTS: [&str; 9] = ["s", "ms", "us", "pages", "pages/s", "/s", "reads/s", "operations/s", "processes"];
/// The files, in the order in which studies are listed.
const FILES: [&str; 5] = [
    include_str!("../data/agarwal.toml"),
    include_str!("../data/li.toml"),
    include_str!("../data/sonone.toml"),
    include_str!("../data/kloster.toml"),
    include_str!("../data/kim.toml"),
];

/// A paper, with its studies.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PaperFile {
    paper: String,
    title: String,
    rig: String,
    said: String,
    lacks: Option<String>,
    shown: Vec<String>,
    picture: String,
    study: Vec<Study>,
}

/// A paper.
#[derive(Clone, Debug)]
pub struct Paper {
    /// First author of the paper.
    pub paper: String,
    /// Title and year of the paper.
    pub title: String,
    /// Results of the paper, in a few sentences.
    pub said: String,
    /// The part of its rig that cannot be had here.
    pub lacks: Option<String>,
    /// Studies that docs/studies.md shows for this paper.
    pub shown: Vec<String>,
    /// The study with the picture that is shown for it.
    pub picture: String,
}

/// An experiment, table or figure of a paper.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Study {
    /// Name of the study on the command line.
    pub id: String,
    /// First author of the paper.
    #[serde(skip)]
    pub paper: String,
    /// Title and year of the paper.
    #[serde(skip)]
    pub title: String,
    /// The machine and programs of the paper.
    #[serde(skip)]
    pub rig: String,
    /// Table, figure or section.
    #[serde(rename = "where")]
    pub place: String,
    /// Subject of the study in a line.
    pub what: String,
    /// The study that measures the same in its turns. Where one command runs both, the turns are measured once.
    pub turns_of: Option<String>,
    /// Priority: 1 for studies that decide whether Pagefold keeps its promises, 3 for studies that are there for
    /// completeness only.
    pub priority: u8,
    /// Features of the host and programs that the study needs.
    pub needs: Vec<String>,
    /// Things to compare: mergers, or other settings.
    #[serde(default)]
    pub arms: Vec<Arm>,
    /// The variable that the study changes.
    #[serde(default)]
    pub variable: String,
    /// The load in the guests.
    #[serde(default)]
    pub workload: String,
    /// The paper's result.
    pub found: String,
    /// Figures that a run measures.
    #[serde(default)]
    pub metric: Vec<Metric>,
    /// Predictions.
    pub predict: Vec<Prediction>,
    /// Tables and pictures in which the paper's numbers stand beside those measured here.
    #[serde(default)]
    pub panel: Vec<Panel>,
    /// The quantities that make the paper's dose and the dose here: see `crate::dose`.
    #[serde(default)]
    pub dose: Vec<Part>,
    /// Whether runs of different days differ more than repetitions within one: `n` is the number of days then.
    #[serde(default)]
    pub by_day: bool,
    /// Differences between the paper's machine and this one, and why they matter.
    #[serde(default)]
    pub differs: Vec<String>,
    /// The form that ends within ten minutes.
    pub short: Option<Form>,
    /// The form that is published.
    pub full: Option<Form>,
    /// What is missing for a recipe, in a study without one.
    pub why_not: Option<String>,
}

/// One of the settings that a study compares.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arm {
    /// Name of the arm on the command line.
    pub name: String,
    /// What the arm does, in words.
    pub text: String,
    /// Whether pages are merged in the arm. If a run merges none, it concludes nothing about the arm.
    #[serde(default)]
    pub merges: bool,
    /// Whether the short form leaves it out.
    #[serde(default)]
    pub full_only: bool,
    /// Dose of the arm, in the order of the study's parts; empty if it is that of the form.
    #[serde(default)]
    pub dose: Vec<f64>,
    /// Seconds for one of its turns, as measured once; `None` if they are those of the form.
    pub turn_seconds: Option<f64>,
}

impl Arm {
    /// Whether runs of this form measure the arm.
    pub fn is_in(&self, length: Length) -> bool {
        length == Length::Full || !self.full_only
    }
}

/// A measured figure.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metric {
    /// Name of the metric in the JSON.
    pub name: String,
    /// Unit of the figure; empty for a number or a share.
    pub unit: String,
    /// What the figure means.
    pub text: String,
    /// Whether more or less of it is better; `None` where neither can be said.
    pub better: Option<Better>,
    /// Whether the figure is only a lower or upper bound of what the study asks for.
    pub bound: Option<Bound>,
    /// The values that the figure can have by its definition, such as 0 to 1 for a share.
    pub range: Option<[f64; 2]>,
}

/// The side on which a figure bounds the truth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// The truth is at least the figure.
    Lower,
    /// The truth is at most the figure.
    Upper,
}

/// The better direction of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// More is better.
    Higher,
    /// Less is better.
    Lower,
}

/// A statement that a run can refute. Without a rule, it is for readers alone.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prediction {
    /// The statement.
    pub text: String,
    metric: Option<String>,
    arm: Option<String>,
    x: Option<String>,
    over: Option<String>,
    minus: Option<String>,
    above: Option<f64>,
    below: Option<f64>,
    within: Option<[f64; 2]>,
    /// Why the prediction has no rule.
    pub not_asked: Option<String>,
}

/// How often a study is repeated, and how long that takes.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Form {
    /// Repetitions of each arm.
    pub reps: u32,
    /// Whether each arm has a first turn that is not counted.
    #[serde(default)]
    pub warm_up: bool,
    /// Seconds for a turn, as measured once; the first estimate of a run's time.
    pub turn_seconds: f64,
}

/// A table or a picture.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Panel {
    /// Heading of the panel.
    pub title: String,
    /// Whether the panel is a table, bars or lines.
    pub form: PanelForm,
    /// Unit of all values.
    pub unit: String,
    /// Name of what the columns of a panel stand for.
    pub along: String,
    /// Its values: columns of a table, groups of bars, or numbers on an axis.
    pub x: Vec<String>,
    /// Rows, bars or lines.
    pub series: Vec<Series>,
}

/// The form of a panel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PanelForm {
    /// A table.
    Table,
    /// Bars in groups.
    Bars,
    /// Lines over numbers.
    Lines,
}

/// A row of a panel.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Series {
    /// Name of the row.
    pub name: String,
    /// The paper's values, in the order of the panel's `x`; `nan` where it has none. Empty if it has no such row.
    #[serde(default)]
    pub paper: Vec<f64>,
    /// Metric whose measured values stand beside the paper's; `None` if nothing like it is measured.
    pub metric: Option<String>,
    /// Arm in which the metric is measured.
    pub arm: Option<String>,
}

/// The form of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Length {
    /// Ends within ten minutes.
    Short,
    /// For publishing.
    Full,
}

impl Length {
    /// Name of the form, as in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Short => "short",
            Self::Full => "full",
        }
    }
}

impl Study {
    /// Why the study cannot be run; `None` if it has a recipe.
    pub fn why_not(&self) -> Option<&str> {
        if recipes::of(&self.id).is_some() {
            return None;
        }
        Some(self.why_not.as_deref().unwrap_or("nobody has written its recipe"))
    }

    /// The form of this length; `None` if the study has none.
    pub fn form(&self, length: Length) -> Option<Form> {
        match length {
            Length::Short => self.short,
            Length::Full => self.full,
        }
    }

    /// Seconds for a run in this form, by the seconds for a turn as measured once. `None` if the study cannot be run.
    pub fn estimate_s(&self, length: Length) -> Option<f64> {
        let form = self.form(length).filter(|_| self.why_not().is_none())?;
        let arms = self.arms.iter().filter(|arm| arm.is_in(length));
        let round_s: f64 = arms.map(|arm| arm.turn_seconds.unwrap_or(form.turn_seconds)).sum();
        Some(f64::from(form.reps + u32::from(form.warm_up)) * round_s)
    }

    /// Seconds for a turn of this arm in this form, as measured once.
    pub fn turn_seconds(&self, arm: &str, form: Form) -> f64 {
        self.arm(arm).and_then(|arm| arm.turn_seconds).unwrap_or(form.turn_seconds)
    }

    /// Predictions without a rule, which are for readers only.
    pub fn not_asked(&self) -> impl Iterator<Item = &Prediction> {
        self.predict.iter().filter(|prediction| prediction.check().is_none())
    }

    /// The arm of this name.
    pub fn arm(&self, name: &str) -> Option<&Arm> {
        self.arms.iter().find(|arm| arm.name == name)
    }

    /// The values that the figure of a check can have; infinite where there is no limit.
    pub fn range(&self, check: &Check) -> [f64; 2] {
        const FREE: [f64; 2] = [f64::NEG_INFINITY, f64::INFINITY];
        let metric = self.metric(&check.metric);
        let is_amount = |metric: &&Metric| AMOUNTS.contains(&metric.unit.as_str());
        let amount = metric.filter(is_amount).map(|_| [0.0, f64::INFINITY]);
        let [low, high] = metric.and_then(|metric| metric.range).or(amount).unwrap_or(FREE);
        match (&check.over, &check.minus) {
            (Some(_), _) if low >= 0.0 => [0.0, f64::INFINITY],
            (Some(_), _) => FREE,
            (_, Some(_)) => [low - high, high - low],
            _ => [low, high],
        }
    }

    /// The metric of this name.
    pub fn metric(&self, name: &str) -> Option<&Metric> {
        self.metric.iter().find(|metric| metric.name == name)
    }
}

impl Prediction {
    /// Metric, arms and rule by which the prediction is judged; `None` if it is for readers only.
    pub fn check(&self) -> Option<Check> {
        let rule = match (self.above, self.below, self.within) {
            (Some(bound), None, None) => Rule::Above(bound),
            (None, Some(bound), None) => Rule::Below(bound),
            (None, None, Some([low, high])) => Rule::Within(low, high),
            _ => return None,
        };
        Some(Check {
            metric: self.metric.clone()?,
            arm: self.arm.clone()?,
            x: self.x.clone(),
            over: self.over.clone(),
            minus: self.minus.clone(),
            rule,
        })
    }
}

/// All studies, in the order of the papers.
pub fn all() -> Vec<Study> {
    files().flat_map(studies_of).collect()
}

/// All papers.
pub fn papers() -> Vec<Paper> {
    let of = |file: PaperFile| {
        let PaperFile { paper, title, said, lacks, shown, picture, .. } = file;
        Paper { paper, title, said, lacks, shown, picture }
    };
    files().map(of).collect()
}

fn files() -> impl Iterator<Item = PaperFile> {
    FILES.iter().map(|text| toml::from_str(text).expect("a test reads the studies' data"))
}

fn studies_of(file: PaperFile) -> Vec<Study> {
    let PaperFile { paper, title, rig, study, .. } = file;
    let with_paper = |study| Study { paper: paper.clone(), title: title.clone(), rig: rig.clone(), ..study };
    study.into_iter().map(with_paper).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::MERGED;
    use std::collections::BTreeSet;

    #[test]
    fn all_62_studies_are_there_once() {
        let all = all();
        let ids: BTreeSet<&str> = all.iter().map(|s| s.id.as_str()).collect();
        assert_eq!((all.len(), ids.len()), (62, 62));
        for study in &all {
            assert!(study.id.starts_with(&study.paper.to_lowercase()), "{}", study.id);
            assert!((1..=3).contains(&study.priority) && !study.what.is_empty() && !study.found.is_empty());
            assert!(!study.predict.is_empty(), "{} predicts nothing", study.id);
        }
        let first = all.iter().filter(|s| s.priority == 1).count();
        assert_eq!(first, 19, "of priority 1");
    }

    #[test]
    fn study_with_recipe_has_all_that_a_run_needs() {
        let runnable: Vec<Study> = all().into_iter().filter(|s| s.why_not().is_none()).collect();
        assert!(!runnable.is_empty());
        for study in &runnable {
            let id = &study.id;
            assert!(study.short.is_some() && study.full.is_some() && !study.arms.is_empty(), "{id}");
            assert!(study.predict.iter().any(|p| p.check().is_some()), "{id} checks nothing");
            assert!(!study.differs.is_empty() && !study.panel.is_empty() && !study.workload.is_empty(), "{id}");
            let named = |check: &Check| {
                let arms = [Some(&check.arm), check.over.as_ref(), check.minus.as_ref()];
                assert!(arms.into_iter().flatten().all(|arm| study.arm(arm).is_some()), "{id}: {check:?}");
                assert!(study.metric(&check.metric).is_some(), "{id}: {check:?}");
            };
            study.predict.iter().filter_map(Prediction::check).for_each(|check| named(&check));
            let is_short = |arm: &String| study.arm(arm).is_some_and(|arm| arm.is_in(Length::Short));
            let short = |check: &Check| [Some(&check.arm), check.over.as_ref()].into_iter().flatten().all(is_short);
            let decides = study.predict.iter().filter_map(Prediction::check).any(|check| short(&check));
            assert!(decides, "{id}: the short form has the arms of no prediction");
            for series in study.panel.iter().flat_map(|panel| &panel.series) {
                let known = |metric: &String| study.metric(metric).is_some();
                assert!(series.metric.as_ref().is_none_or(known), "{id}: {}", series.name);
                assert!(series.arm.as_ref().is_none_or(|arm| study.arm(arm).is_some()), "{id}: {}", series.name);
            }
            if study.arms.iter().any(|arm| arm.merges) {
                assert!(study.metric(MERGED).is_some(), "{id} must prove that something merged");
            }
        }
    }

    #[test]
    fn study_that_takes_turns_of_another_measures_the_same() {
        let all = all();
        let takers: Vec<&Study> = all.iter().filter(|study| study.turns_of.is_some()).collect();
        assert!(!takers.is_empty());
        for study in takers {
            let id = &study.id;
            let other = all.iter().find(|other| study.turns_of.as_ref() == Some(&other.id));
            let other = other.unwrap_or_else(|| panic!("{id} takes turns of a study that is not there"));
            assert_eq!(recipes::of(id).map(|r| r as usize), recipes::of(&other.id).map(|r| r as usize), "{id}");
            assert!(other.turns_of.is_none() && study.arms.iter().all(|arm| other.arm(&arm.name).is_some()), "{id}");
            for length in [Length::Short, Length::Full] {
                let form = |of: &Study| of.form(length).map(|form| (form.reps, form.warm_up, form.turn_seconds));
                assert_eq!(form(study), form(other), "{id}");
            }
        }
    }

    #[test]
    fn prediction_has_one_rule_at_most() {
        for study in all() {
            for p in &study.predict {
                let rules = [p.above.is_some(), p.below.is_some(), p.within.is_some()];
                let rules = rules.into_iter().filter(|r| *r).count();
                assert!(rules <= 1 && (rules == 1) == p.metric.is_some(), "{}: {}", study.id, p.text);
                assert!(p.metric.is_none() || p.check().is_some(), "{}: {}", study.id, p.text);
            }
        }
    }
}
