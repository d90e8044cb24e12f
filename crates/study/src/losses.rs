//! Losses: figures in which Pagefold does worse than ksmd, or than a host on which nothing is merged. Readers see them
//! first. Nothing is read or written here.
//!
//! Names of arms are `LOAD-MERGER-SETTING`, of which load and setting may be absent: `fio-low-fold-equal`, `ksm-default`, `off`. An arm
//! of Pagefold is compared with arms of the same load:
//!
//! | setting of Pagefold's arm | settings of the other merger's arms |
//! |---|---|
//! | none | none, and any that no arm of Pagefold has, such as a rate of ksmd's |
//! | one | the same; without such an arm none; without that, any |

use crate::check::LEAST_N;
use crate::data::{Better, Study};
use crate::figure::figure;
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

/// A merger, by its part of an arm's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merger {
    /// Pagefold.
    Fold,
    /// ksmd.
    Ksm,
    /// Nobody.
    Off,
}

/// The parts of an arm's name.
#[derive(Debug, PartialEq, Eq)]
struct Named {
    load: String,
    merger: Merger,
    setting: String,
}

impl Named {
    /// Takes an arm's name apart. `None` if it names no merger.
    fn of(arm: &str) -> Option<Self> {
        let parts: Vec<&str> = arm.split('-').collect();
        let merger = |part: &&str| match *part {
            "fold" => Some(Merger::Fold),
            "ksm" => Some(Merger::Ksm),
            "off" => Some(Merger::Off),
            _ => None,
        };
        let (at, merger) = parts.iter().enumerate().find_map(|(at, part)| Some((at, merger(part)?)))?;
        Some(Self { load: parts[..at].join("-"), merger, setting: parts[at + 1..].join("-") })
    }
}

/// The merger in the name of an arm, if there is one.
pub fn merger_of(arm: &str) -> Option<Merger> {
    Named::of(arm).map(|named| named.merger)
}

/// Whether an arm of Pagefold is compared with this other arm, by the table in the module's documentation.
fn are_compared(study: &Study, ours: &str, theirs: &str) -> bool {
    let (Some(ours), Some(theirs)) = (Named::of(ours), Named::of(theirs)) else { return false };
    if ours.merger != Merger::Fold || theirs.merger == Merger::Fold || ours.load != theirs.load {
        return false;
    }
    let has = |merger: Merger, setting: &str| {
        let named = study.arms.iter().filter_map(|arm| Named::of(&arm.name));
        named.filter(|arm| arm.load == ours.load).any(|arm| arm.merger == merger && arm.setting == setting)
    };
    match (ours.setting.as_str(), theirs.setting.as_str()) {
        (own, other) if own == other => true,
        ("", other) => !has(Merger::Fold, other),
        (own, other) => !has(theirs.merger, own) && (other.is_empty() || !has(theirs.merger, "")),
    }
}

/// All losses of a study, the decided ones first. Differences that are not visible in the printed digits are left out.
pub fn of(study: &Study, measured: &[Record]) -> Vec<Loss> {
    let mut losses = Vec::new();
    for ours in measured {
        let Some(metric) = study.metric(&ours.metric) else { continue };
        let Some(better) = metric.better else { continue };
        let is_alike = |r: &&Record| r.metric == ours.metric && r.x == ours.x && are_compared(study, &ours.arm, &r.arm);
        for theirs in measured.iter().filter(is_alike) {
            let worse: Vec<f64> = differences(ours, theirs, better);
            let mean = stats::mean(&worse);
            if worse.is_empty() || mean <= 0.0 || figure(ours.mean) == figure(theirs.mean) {
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

/// By how much Pagefold's figure is worse, for each repetition that both arms have.
fn differences(ours: &Record, theirs: &Record, better: Better) -> Vec<f64> {
    let worse = |(rep, own): (u32, f64)| {
        let (_, other) = theirs.by_rep().find(|(of, _)| *of == rep)?;
        Some(if better == Better::Lower { own - other } else { other - own })
    };
    ours.by_rep().filter_map(worse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data;

    fn study(id: &str) -> Study {
        data::all().into_iter().find(|s| s.id == id).expect("a study")
    }

    fn record(arm: &str, samples: &[f64]) -> Record {
        Record {
            metric: "merge_us".into(),
            arm: arm.into(),
            x: None,
            unit: "us".into(),
            n: samples.len(),
            mean: stats::mean(samples),
            half_width: None,
            reps: (0..samples.len() as u32).collect(),
            samples: samples.into(),
        }
    }

    #[test]
    fn worse_figure_is_a_loss_and_a_better_one_is_not() {
        let study = study("kloster-t8.3");
        let ksm = record("ksm", &[1.0, 1.1, 0.9]);
        let worse = of(&study, &[record("fold", &[2.0, 2.1, 1.9]), ksm.clone()]);
        assert_eq!(worse.iter().map(|l| (l.decided, l.n)).collect::<Vec<_>>(), [(true, 3)]);
        let unsure = of(&study, &[record("fold", &[0.5, 4.0, 0.9]), ksm.clone()]);
        assert_eq!(unsure.iter().map(|l| l.decided).collect::<Vec<_>>(), [false]);
        assert_eq!(of(&study, &[record("fold", &[0.5, 0.6, 0.4]), ksm.clone()]), []);
        let few = of(&study, &[record("fold", &[2.0, 2.0]), record("ksm", &[1.0, 1.0])]);
        assert!(!few[0].decided);
    }

    #[test]
    fn figures_are_paired_by_repetition_and_those_that_print_alike_are_no_loss() {
        let study = study("kloster-t8.3");
        let ksm = record("ksm", &[1.0, 10.0, 100.0, 1000.0]);
        let fold = Record { reps: vec![1, 2, 3], ..record("fold", &[11.0, 101.0, 1001.0]) };
        let worse = of(&study, &[fold, ksm]);
        assert_eq!(worse.iter().map(|l| (l.decided, l.n)).collect::<Vec<_>>(), [(true, 3)]);
        assert_eq!(of(&study, &[record("fold", &[4e-4; 3]), record("ksm", &[0.0; 3])]), [], "0 and 0");
    }

    /// The pairs of arms that are compared, of a study with arms of these names.
    fn pairs(arms: &[&str]) -> String {
        let mut study = study("kloster-t8.3");
        let like = study.arms[0].clone();
        study.arms = arms.iter().map(|name| data::Arm { name: (*name).to_owned(), ..like.clone() }).collect();
        let all = arms.iter().flat_map(|ours| arms.iter().map(move |theirs| (ours, theirs)));
        let compared = all.filter(|(ours, theirs)| are_compared(&study, ours, theirs));
        compared.map(|(ours, theirs)| format!("{ours}:{theirs}")).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn arms_are_compared_by_load_and_setting() {
        for (arms, expected) in [
            (&["off", "ksm", "fold"][..], "fold:off fold:ksm"),
            (&["ksm", "fold-across", "fold-within"], "fold-across:ksm fold-within:ksm"),
            (&["off", "ksm", "fold", "fold-filtered"], "fold:off fold:ksm fold-filtered:off fold-filtered:ksm"),
            (&["ksm-default", "ksm", "fold"], "fold:ksm-default fold:ksm"),
            (&["ksm-10k", "ksm-50k", "fold", "off"], "fold:ksm-10k fold:ksm-50k fold:off"),
            (
                &["ksm", "ksm-smart", "fold", "ksm-container", "fold-container"],
                "fold:ksm fold:ksm-smart fold-container:ksm-container",
            ),
            (&["ksm-vm", "fold-vm", "ksm-container", "fold-container"], "fold-vm:ksm-vm fold-container:ksm-container"),
            (&["ksm-640", "ksm-480", "ksm-384", "fold-640"], "fold-640:ksm-640"),
            (
                &["off-blind", "ksm-blind", "fold-blind", "fold-aware"],
                "fold-blind:off-blind fold-blind:ksm-blind fold-aware:off-blind fold-aware:ksm-blind",
            ),
            (
                &["fio-low-ksm-equal", "fio-low-fold-equal", "fio-low-1-9", "mr-low-fold-equal", "mr-low-9-1"],
                "fio-low-fold-equal:fio-low-ksm-equal",
            ),
            (
                &["fio-low-ksm-equal", "fio-low-fold-equal", "fio-low-fold-se"],
                "fio-low-fold-equal:fio-low-ksm-equal fio-low-fold-se:fio-low-ksm-equal",
            ),
            (&["debian", "mixed-kernels", "no-video", "global", "vm-apache"], ""),
        ] {
            assert_eq!(pairs(arms), expected, "{arms:?}");
        }
    }

    #[test]
    fn each_arm_of_a_merger_is_compared_in_real_studies() {
        for study in data::all() {
            let named =
                |merger| study.arms.iter().map(|a| a.name.as_str()).filter(move |a| merger_of(a) == Some(merger));
            let (ours, theirs): (Vec<_>, Vec<_>) =
                (named(Merger::Fold).collect(), named(Merger::Ksm).chain(named(Merger::Off)).collect());
            for ours in &ours {
                let compared = theirs.iter().filter(|theirs| are_compared(&study, ours, theirs));
                let same_load = |theirs: &&&str| Named::of(theirs).map(|a| a.load) == Named::of(ours).map(|a| a.load);
                let same_rig = |theirs: &&&str| theirs.ends_with("container") == ours.ends_with("container");
                assert!(compared.clone().all(|theirs| same_rig(&theirs)), "{}: {ours}", study.id);
                assert!(compared.count() > 0 || !theirs.iter().any(|a| same_load(&a)), "{}: {ours}", study.id);
            }
        }
    }
}
