//! Figures in which Pagefold does worse than ksmd, or than nobody merging: a reader sees them first. Pure.

use crate::check::LEAST_N;
use crate::data::{Better, Study};
use crate::record::Record;
use crate::stats;

/// A figure in which Pagefold does worse.
#[derive(Clone, Debug, PartialEq)]
pub struct Loss {
    /// The metric, in words.
    pub text: String,
    /// Value of the variable, if the metric is taken at several.
    pub x: Option<String>,
    /// The unit.
    pub unit: String,
    /// Our arm, and its mean.
    pub ours: (String, f64),
    /// The other arm, and its mean.
    pub theirs: (String, f64),
    /// Whether the 95% interval of the paired differences excludes 0.
    pub decided: bool,
    /// Number of repetitions.
    pub n: usize,
}

/// End of the names of arms with containers. They are compared with one another, since a VM takes more whoever merges.
const CONTAINER: &str = "-container";

/// All losses of a study, the decided ones first.
pub fn of(study: &Study, measured: &[Record]) -> Vec<Loss> {
    let mut losses = Vec::new();
    for ours in measured.iter().filter(|r| r.arm.starts_with("fold")) {
        let Some(metric) = study.metric(&ours.metric) else { continue };
        let Some(better) = metric.better else { continue };
        let is_alike = |r: &Record| r.arm.ends_with(CONTAINER) == ours.arm.ends_with(CONTAINER);
        let same = |r: &&Record| r.metric == ours.metric && r.x == ours.x && !r.arm.starts_with("fold") && is_alike(r);
        for theirs in measured.iter().filter(same) {
            let worse: Vec<f64> = differences(ours, theirs, better);
            let mean = stats::mean(&worse);
            if worse.is_empty() || mean <= 0.0 {
                continue;
            }
            let half = stats::half_width(&worse).filter(|_| worse.len() >= LEAST_N);
            losses.push(Loss {
                text: metric.text.clone(),
                x: ours.x.clone(),
                unit: metric.unit.clone(),
                ours: (ours.arm.clone(), ours.mean),
                theirs: (theirs.arm.clone(), theirs.mean),
                decided: half.is_some_and(|half| mean > half),
                n: worse.len(),
            });
        }
    }
    losses.sort_by_key(|loss| !loss.decided);
    losses
}

/// By how much ours is worse in each repetition.
fn differences(ours: &Record, theirs: &Record, better: Better) -> Vec<f64> {
    let worse = |(ours, theirs): (&f64, &f64)| match better {
        Better::Lower => ours - theirs,
        Better::Higher => theirs - ours,
    };
    ours.samples.iter().zip(&theirs.samples).map(worse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(arm: &str, samples: &[f64]) -> Record {
        Record {
            metric: "merge_us".into(),
            arm: arm.into(),
            x: None,
            unit: "us".into(),
            n: samples.len(),
            mean: stats::mean(samples),
            half_width: None,
            samples: samples.into(),
        }
    }

    #[test]
    fn worse_figure_is_a_loss_and_a_better_one_is_not() {
        let study = crate::data::all().into_iter().find(|s| s.metric("merge_us").is_some()).unwrap();
        let ksm = record("ksm", &[1.0, 1.1, 0.9]);
        let worse = of(&study, &[record("fold", &[2.0, 2.1, 1.9]), ksm.clone()]);
        assert_eq!(worse.iter().map(|l| (l.decided, l.n)).collect::<Vec<_>>(), [(true, 3)]);
        let unsure = of(&study, &[record("fold", &[0.5, 4.0, 0.9]), ksm.clone()]);
        assert_eq!(unsure.iter().map(|l| l.decided).collect::<Vec<_>>(), [false]);
        assert_eq!(of(&study, &[record("fold", &[0.5, 0.6, 0.4]), ksm.clone()]), []);
        let in_container = record("ksm-container", &[1.0, 1.1, 0.9]);
        assert_eq!(of(&study, &[record("fold", &[2.0, 2.1, 1.9]), in_container]), []);
        let few = of(&study, &[record("fold", &[2.0, 2.0]), record("ksm", &[1.0, 1.0])]);
        assert!(!few[0].decided);
    }
}
