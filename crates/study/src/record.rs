//! What a run has measured: samples, one a repetition; their means with intervals; timelines; and ksmd's knobs.

use crate::data::Study;
use crate::ksm::KsmSettings;
use crate::plan::Planned;
use crate::stats;
use serde::{Deserialize, Serialize};

/// The metric that each arm with merging has: merged pages, by page frames. If it is 0, nothing can be concluded from
/// the arm.
pub const MERGED: &str = "merged_pages";
/// The metric of studies with a load: the operations that the load did.
pub const OPERATIONS: &str = "operations";
/// Most points of a timeline that are kept in a result.
const POINTS: usize = 120;

/// One figure of one turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The metric.
    pub metric: String,
    /// Value of the variable, of a metric that is taken at several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub x: Option<String>,
    /// The figure.
    pub value: f64,
}

impl Sample {
    /// A figure that is taken once a turn.
    pub fn new(metric: &str, value: f64) -> Self {
        Self { metric: metric.to_owned(), x: None, value }
    }

    /// A figure at one value of the variable.
    pub fn at(metric: &str, x: impl ToString, value: f64) -> Self {
        Self { metric: metric.to_owned(), x: Some(x.to_string()), value }
    }
}

/// A figure over time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// Its name.
    pub name: String,
    /// Its unit.
    pub unit: String,
    /// Seconds and figure, about one a second.
    pub points: Vec<(f64, f64)>,
    /// Seconds, and what happened then.
    pub events: Vec<(f64, String)>,
}

impl Timeline {
    /// The timeline with at most `POINTS` points.
    fn thinned(mut self) -> Self {
        let step = self.points.len().div_ceil(POINTS).max(1);
        let last = self.points.last().copied();
        self.points = self.points.into_iter().step_by(step).collect();
        if self.points.last() != last.as_ref() {
            self.points.extend(last);
        }
        for point in &mut self.points {
            point.0 = (point.0 * 10.0).round() / 10.0;
        }
        self
    }
}

/// All that one turn measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Its figures.
    pub samples: Vec<Sample>,
    /// Its timelines.
    #[serde(default)]
    pub timelines: Vec<Timeline>,
    /// Things that a reader should know.
    #[serde(default)]
    pub notes: Vec<String>,
}

impl Measured {
    /// Adds a figure that is taken once a turn.
    pub fn put(&mut self, metric: &str, value: f64) {
        self.samples.push(Sample::new(metric, value));
    }

    /// Adds a figure at one value of the variable.
    pub fn put_at(&mut self, metric: &str, x: impl ToString, value: f64) {
        self.samples.push(Sample::at(metric, x, value));
    }

    /// Adds a remark for readers.
    pub fn note(&mut self, text: impl Into<String>) {
        self.notes.push(text.into());
    }

    /// Without figures that are infinite or not a number, which JSON cannot express. A note names each of them.
    fn finite(mut self) -> Self {
        let mut notes: Vec<String> = Vec::new();
        self.samples.retain(|Sample { metric, x, value }| {
            let at = x.as_ref().map_or(String::new(), |x| format!(" at {x}"));
            if !value.is_finite() {
                notes.push(format!("left out: {metric}{at} was {value}"));
            }
            value.is_finite()
        });
        for Timeline { name, points, events, .. } in &mut self.timelines {
            let before = points.len() + events.len();
            points.retain(|(at, value)| at.is_finite() && value.is_finite());
            events.retain(|(at, _)| at.is_finite());
            let dropped = before - points.len() - events.len();
            if dropped > 0 {
                notes.push(format!("left out of {name} over time: points without a number, {dropped}"));
            }
        }
        notes.into_iter().for_each(|note| self.note(note));
        self
    }
}

/// Settings of ksmd in an arm.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArmKsm {
    /// The arm.
    pub arm: String,
    /// The settings at the end of its turns.
    #[serde(flatten)]
    pub settings: KsmSettings,
}

/// ksmd's knobs in each arm. If they differed between turns of an arm, it has an entry for each different setting.
pub fn ksm_settings(turns: &[Turn]) -> Vec<ArmKsm> {
    let mut all: Vec<ArmKsm> = Vec::new();
    for turn in turns {
        let found = turn.ksm.clone().map(|settings| ArmKsm { arm: turn.arm.clone(), settings });
        all.extend(found.filter(|found| !all.contains(found)));
    }
    all
}

/// A turn that was measured, as it is kept on disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// The arm.
    pub arm: String,
    /// Number of the repetition, from 0.
    pub rep: u32,
    /// Time that it took.
    pub seconds: f64,
    /// Settings of ksmd at its end.
    #[serde(default)]
    pub ksm: Option<KsmSettings>,
    /// Its findings.
    #[serde(flatten)]
    pub measured: Measured,
}

impl Turn {
    /// A turn that was measured.
    pub fn new(planned: &Planned, seconds: f64, ksm: Option<KsmSettings>, measured: Measured) -> Self {
        Self { arm: planned.arm.clone(), rep: planned.rep.unwrap_or(0), seconds, ksm, measured: measured.finite() }
    }
}

/// The samples of all turns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Samples(Vec<(String, u32, Sample)>);

impl Samples {
    /// The samples of these turns.
    pub fn of_turns(turns: &[Turn]) -> Self {
        let mut all = Self::default();
        for turn in turns {
            all.add(&turn.arm, turn.rep, &turn.measured.samples);
        }
        all
    }

    /// The samples of records.
    pub fn of_records(records: &[Record]) -> Self {
        let mut all = Self::default();
        for record in records {
            for (rep, value) in record.by_rep() {
                all.add(&record.arm, rep, &[Sample { metric: record.metric.clone(), x: record.x.clone(), value }]);
            }
        }
        all
    }

    /// Adds the samples of one repetition of an arm.
    pub fn add(&mut self, arm: &str, rep: u32, samples: &[Sample]) {
        self.0.extend(samples.iter().map(|sample| (arm.to_owned(), rep, sample.clone())));
    }

    /// Adds the means over several runs of each figure, as one repetition.
    pub fn add_means(&mut self, rep: u32, runs: &[&Self]) {
        let mut figures: Vec<(&str, &Sample, Vec<f64>)> = Vec::new();
        for (arm, _, sample) in runs.iter().flat_map(|run| &run.0) {
            let is_known = |(of, known, _): &&mut (&str, &Sample, Vec<f64>)| {
                of == arm && known.metric == sample.metric && known.x == sample.x
            };
            match figures.iter_mut().find(is_known) {
                Some((.., values)) => values.push(sample.value),
                None => figures.push((arm, sample, vec![sample.value])),
            }
        }
        for (arm, sample, values) in figures {
            self.add(arm, rep, &[Sample { value: stats::mean(&values), ..sample.clone() }]);
        }
    }

    /// Whether there are samples of this arm.
    pub fn has_arm(&self, arm: &str) -> bool {
        self.0.iter().any(|(of, ..)| of == arm)
    }

    /// Repetition and figure of a metric in an arm, in the order of repetitions: at this value of the variable, or
    /// without `x` the figures that are taken once a turn.
    pub fn of(&self, metric: &str, arm: &str, x: Option<&str>) -> Vec<(u32, f64)> {
        let wanted =
            |(of, _, sample): &&(String, u32, Sample)| of == arm && sample.metric == metric && sample.x.as_deref() == x;
        let mut found: Vec<(u32, f64)> = self.0.iter().filter(wanted).map(|(_, rep, s)| (*rep, s.value)).collect();
        found.sort_by_key(|(rep, _)| *rep);
        found
    }

    /// A record for each metric, arm and value of the variable.
    pub fn records(&self, study: &Study) -> Vec<Record> {
        let mut records: Vec<Record> = Vec::new();
        for (arm, _, sample) in &self.0 {
            let is_known = |r: &Record| r.metric == sample.metric && r.arm == *arm && r.x == sample.x;
            if !records.iter().any(is_known) {
                records.push(self.record(study, arm, sample));
            }
        }
        records
    }

    fn record(&self, study: &Study, arm: &str, of: &Sample) -> Record {
        let (reps, samples): (Vec<u32>, Vec<f64>) = self.of(&of.metric, arm, of.x.as_deref()).into_iter().unzip();
        Record {
            metric: of.metric.clone(),
            arm: arm.to_owned(),
            x: of.x.clone(),
            unit: study.metric(&of.metric).map_or_else(String::new, |metric| metric.unit.clone()),
            n: samples.len(),
            mean: stats::mean(&samples),
            half_width: stats::half_width(&samples),
            reps,
            samples,
        }
    }
}

/// A measured figure over all repetitions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The metric.
    pub metric: String,
    /// The arm.
    pub arm: String,
    /// Value of the variable, of a metric that is taken at several.
    pub x: Option<String>,
    /// The unit; empty for a number or a share.
    pub unit: String,
    /// Number of repetitions.
    pub n: usize,
    /// Their mean.
    pub mean: f64,
    /// Half the width of the mean's 95% interval; absent of a single repetition.
    pub half_width: Option<f64>,
    /// Number of the repetition of each figure, from 0. Empty in files without it: figures go by their places there.
    #[serde(default)]
    pub reps: Vec<u32>,
    /// The single figures, in the order of the repetitions.
    pub samples: Vec<f64>,
}

impl Record {
    /// Number of the repetition, and the figure, for each sample.
    pub fn by_rep(&self) -> impl Iterator<Item = (u32, f64)> {
        let rep = |place: usize| self.reps.get(place).copied().unwrap_or(place as u32);
        self.samples.iter().enumerate().map(move |(place, value)| (rep(place), *value))
    }
}

/// A timeline of one arm: that of its first repetition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArmTimeline {
    /// The arm.
    pub arm: String,
    /// The timeline.
    #[serde(flatten)]
    pub timeline: Timeline,
}

/// The timelines of the first repetition of each arm, with fewer points.
pub fn timelines(turns: &[Turn]) -> Vec<ArmTimeline> {
    let first = turns.iter().filter(|turn| turn.rep == 0);
    let of_turn = |turn: &Turn| {
        let arm = turn.arm.clone();
        turn.measured
            .timelines
            .clone()
            .into_iter()
            .map(move |t| ArmTimeline { arm: arm.clone(), timeline: t.thinned() })
    };
    first.flat_map(of_turn).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Length;

    #[test]
    fn figures_are_kept_apart_by_arm_and_variable() {
        let mut samples = Samples::default();
        samples.add("b", 1, &[Sample::new("m", 3.0)]);
        samples.add("b", 0, &[Sample::new("m", 1.0), Sample::at("m", 5, 9.0)]);
        samples.add("a", 0, &[Sample::new("m", 7.0)]);
        assert_eq!(samples.of("m", "b", None), [(0, 1.0), (1, 3.0)]);
        assert_eq!(samples.of("m", "b", Some("5")), [(0, 9.0)]);
        assert_eq!(samples.of("m", "c", None), []);
    }

    #[test]
    fn records_yield_their_samples_again() {
        let study = crate::data::all().remove(0);
        let mut samples = Samples::default();
        samples.add("a", 0, &[Sample::new("m", 1.0), Sample::at("n", 5, 9.0)]);
        samples.add("a", 1, &[Sample::new("m", 2.0)]);
        let again = Samples::of_records(&samples.records(&study));
        assert_eq!(again.of("m", "a", None), [(0, 1.0), (1, 2.0)]);
        assert_eq!(again.of("n", "a", Some("5")), [(0, 9.0)]);
    }

    #[test]
    fn figures_go_by_their_repetition_also_when_one_lacks_some() {
        let study = crate::data::all().remove(0);
        let mut samples = Samples::default();
        for rep in [0, 2, 3] {
            samples.add("a", rep, &[Sample::new("m", f64::from(rep))]);
        }
        let mut records = samples.records(&study);
        assert_eq!((&records[0].reps[..], records[0].n), (&[0, 2, 3][..], 3));
        assert_eq!(Samples::of_records(&records), samples);
        records[0].reps.clear();
        assert_eq!(Samples::of_records(&records).of("m", "a", None), [(0, 0.0), (1, 2.0), (2, 3.0)], "of an old file");
        let old = r#"{"metric":"m","arm":"a","x":null,"unit":"","n":1,"mean":1.0,"half_width":null,"samples":[1.0]}"#;
        assert!(serde_json::from_str::<Record>(old).unwrap().reps.is_empty());
    }

    #[test]
    fn figure_that_is_no_number_is_left_out_with_a_note() {
        let mut measured = Measured::default();
        measured.put("m", 1.0);
        measured.put("m", f64::NAN);
        measured.put_at("n", 5, f64::INFINITY);
        let points = vec![(0.0, 1.0), (1.0, f64::NAN)];
        measured.timelines.push(Timeline { name: "saved".into(), points, ..Timeline::default() });
        let planned = Planned { arm: "a".into(), rep: Some(1), length: Length::Short };
        let turn = Turn::new(&planned, 1.0, None, measured);
        assert_eq!(turn.measured.samples, [Sample::new("m", 1.0)]);
        assert_eq!(turn.measured.timelines[0].points, [(0.0, 1.0)]);
        assert_eq!(
            turn.measured.notes,
            [
                "left out: m was NaN",
                "left out: n at 5 was inf",
                "left out of saved over time: points without a number, 1"
            ]
        );
        assert_eq!(serde_json::from_str::<Turn>(&serde_json::to_string(&turn).unwrap()).unwrap(), turn);
    }

    #[test]
    fn settings_of_ksmd_stand_once_for_each_arm_that_has_them() {
        let settings = |run| KsmSettings { run, ..KsmSettings::default() };
        let turn =
            |arm: &str, rep, ksm| Turn { arm: arm.into(), rep, seconds: 1.0, ksm, measured: Measured::default() };
        let turns =
            [turn("ksm", 0, Some(settings(1))), turn("off", 0, Some(settings(0))), turn("ksm", 1, Some(settings(1)))];
        let found = ksm_settings(&[&turns[..], &[turn("old", 0, None)]].concat());
        assert_eq!(
            found.iter().map(|of| (of.arm.as_str(), of.settings.run)).collect::<Vec<_>>(),
            [("ksm", 1), ("off", 0)]
        );
    }

    #[test]
    fn thinned_timeline_keeps_its_end() {
        let points = (0..1001).map(|n| (f64::from(n), 1.0)).collect();
        let thin = Timeline { points, ..Timeline::default() }.thinned();
        assert!(thin.points.len() <= POINTS + 1);
        assert_eq!(thin.points.last(), Some(&(1000.0, 1.0)));
    }
}
