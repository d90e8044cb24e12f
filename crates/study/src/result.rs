//! The result of a run, in the form that `pagefold study --json` prints and that is kept with the documents.

use crate::check::{self, Run, Verdict};
use crate::data::{Arm, Length, Study};
use crate::dose::Dose;
use crate::record::{ArmKsm, ArmTimeline, Record, Samples};
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::hash::Hasher;
use std::path::Path;
use twox_hash::XxHash3_64;

/// The result of one study.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The study.
    pub id: String,
    /// The form that was run.
    pub form: Length,
    /// The arms of the run. Empty in files without it.
    #[serde(default)]
    pub arms: Vec<String>,
    /// Repetitions of each arm. Absent in files without it.
    #[serde(default)]
    pub reps: Option<u32>,
    /// Date and time of its end, UTC; of older files, those at which they were committed.
    #[serde(default)]
    pub date: Option<String>,
    /// The dose against the paper's. Absent in files without it.
    #[serde(default)]
    pub dose: Option<Dose>,
    /// A verdict for each prediction that has a rule.
    pub verdicts: Vec<Verdict>,
    /// The paper's numbers.
    pub reported: Vec<Reported>,
    /// The measured figures.
    pub measured: Vec<Record>,
    /// Figures over time, of the first repetition of each arm.
    pub timelines: Vec<ArmTimeline>,
    /// Things that a reader should know, as the run found them.
    pub notes: Vec<String>,
    /// ksmd's settings in each arm. Empty in files without it.
    #[serde(default)]
    pub ksm: Vec<ArmKsm>,
    /// The host at rest.
    pub host: HostFacts,
    /// Time of all turns.
    pub seconds: f64,
    /// The estimate of that time before the first turn.
    pub estimated_seconds: f64,
    /// Earlier runs, without verdicts: of a study that counts days, or with arms that this one lacks. The last comes first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<Outcome>,
}

impl Outcome {
    /// The result with the paper's numbers and the predictions as the study has them today, and new verdicts from the
    /// same samples. So a result stays of use when texts or bounds of its study change.
    pub fn judged_anew(self, study: &Study) -> Self {
        let run = |of: &Self| Run { date: of.date.clone(), samples: Samples::of_records(&of.measured) };
        let runs: Vec<Run> = [&self].into_iter().chain(&self.earlier).map(run).collect();
        let verdicts = check::judge_runs(study, &runs);
        let dose = Some(Dose::of(study, self.form));
        Self { verdicts, dose, reported: reported(study), ..self }
    }

    /// The command that repeats this run. A file that does not name arms and repetitions gets those that were measured.
    pub fn command(&self, study: &Study) -> String {
        let mut command = format!("pagefold study {} --{}", self.id, self.form.name());
        let measured = self.measured.iter().map(|record| record.n).max();
        let reps = self.reps.map(|reps| reps as usize).or(measured).unwrap_or(0);
        // Writing to a string cannot fail.
        if reps > 0 && study.form(self.form).is_none_or(|form| form.reps as usize != reps) {
            let _ = write!(command, " --reps {reps}");
        }
        let was_run = |arm: &&Arm| {
            let is_measured = self.arms.is_empty() && self.measured.iter().any(|record| record.arm == arm.name);
            is_measured || self.arms.contains(&arm.name)
        };
        let arms: Vec<&Arm> = study.arms.iter().filter(was_run).collect();
        if !study.arms.iter().all(|arm| arm.is_in(self.form) == was_run(&arm)) {
            let names: Vec<&str> = arms.iter().map(|arm| arm.name.as_str()).collect();
            let _ = write!(command, " --arm {}", names.join(","));
        }
        command
    }
}

/// One row of the paper's numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reported {
    /// The table or picture.
    pub panel: String,
    /// The row.
    pub series: String,
    /// Unit of the values.
    pub unit: String,
    /// The column of each value.
    pub x: Vec<String>,
    /// The values; absent where the paper has none.
    pub values: Vec<Option<f64>>,
}

/// Facts about the host that figures depend on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostFacts {
    /// Kernel release.
    pub kernel: String,
    /// Model of the processors. Absent in files without it.
    #[serde(default)]
    pub cpu_model: Option<String>,
    /// Number of processors.
    pub cpus: usize,
    /// Memory.
    pub ram_bytes: u64,
    /// `smart_scan` of ksmd.
    pub smart_scan: Option<u64>,
    /// `advisor_mode` of ksmd.
    pub advisor_mode: Option<String>,
    /// Version of Pagefold.
    pub pagefold: String,
    /// XXH3-64 of the programs `pagefold` and `pagefold-lab`, in hexadecimal. Absent in files without it, and where they cannot be
    /// read.
    #[serde(default)]
    pub build: Option<String>,
    /// Whether the program was built without optimisation for speed.
    pub debug_build: bool,
}

/// XXH3-64 of `pagefold`, which folds, and of this program, which measures; `None` if one cannot be read.
fn build() -> Option<String> {
    let mut hasher = XxHash3_64::new();
    // The running program's own file is read, even if another one lies at its path by now.
    for program in [cli::pagefold(), Path::new(cli::OWN_PROGRAM)] {
        hasher.write(&std::fs::read(program).ok()?);
    }
    Some(format!("{:016x}", hasher.finish()))
}

impl HostFacts {
    /// Reads the facts of this host.
    pub fn read() -> Self {
        let ksm = host::Ksm::read().unwrap_or_default();
        Self {
            kernel: host::Kernel::this().release,
            cpu_model: cpu_model(),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            ram_bytes: host::ram_bytes(),
            smart_scan: ksm.smart_scan,
            advisor_mode: ksm.advisor_mode,
            pagefold: env!("CARGO_PKG_VERSION").to_owned(),
            build: build(),
            debug_build: cfg!(debug_assertions),
        }
    }

    /// Processors and kernel, as text.
    pub fn of_host(&self) -> String {
        let model = self.cpu_model.as_deref().unwrap_or("of a model that was not recorded");
        format!("Linux {}, {} processors {model}, {}", self.kernel, self.cpus, cli::bytes(self.ram_bytes))
    }

    /// Version and build of Pagefold, as text.
    pub fn of_pagefold(&self) -> String {
        let build = self.build.as_ref().map_or(", build not recorded".to_owned(), |build| format!(", build {build}"));
        let debug = if self.debug_build { ", a build for development" } else { "" };
        format!("{}{build}{debug}", self.pagefold)
    }
}

/// Model of the first processor, from `/proc/cpuinfo`; `None` if the kernel names none.
fn cpu_model() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let (_, model) = text.lines().find(|line| line.starts_with("model name"))?.split_once(':')?;
    Some(model.trim().to_owned())
}

/// The paper's numbers of a study.
pub fn reported(study: &Study) -> Vec<Reported> {
    let rows = |panel: &crate::data::Panel| -> Vec<Reported> {
        let of_panel = panel.series.iter().filter(|series| !series.paper.is_empty());
        let row = |series: &crate::data::Series| Reported {
            panel: panel.title.clone(),
            series: series.name.clone(),
            unit: panel.unit.clone(),
            x: panel.x.clone(),
            values: series.paper.iter().map(|v| v.is_finite().then_some(*v)).collect(),
        };
        of_panel.map(row).collect()
    };
    study.panel.iter().flat_map(rows).collect()
}

/// Reads results from a file that `--json` wrote.
///
/// # Errors
/// The file cannot be read, or holds something else.
pub fn read(path: &Path) -> anyhow::Result<Vec<Outcome>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is no result of pagefold study --json", path.display()))
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::data;

    /// A result without figures.
    pub fn empty(study: &Study) -> Outcome {
        Outcome {
            id: study.id.clone(),
            form: Length::Short,
            arms: Vec::new(),
            reps: None,
            verdicts: Vec::new(),
            reported: Vec::new(),
            measured: Vec::new(),
            timelines: Vec::new(),
            notes: Vec::new(),
            ksm: Vec::new(),
            host: HostFacts::default(),
            seconds: 1.0,
            estimated_seconds: 1.0,
            date: None,
            dose: None,
            earlier: Vec::new(),
        }
    }

    #[test]
    fn command_has_arms_and_repetitions_that_are_not_those_of_the_form() {
        let study = data::all().into_iter().find(|s| s.id == "sonone-fig2").unwrap();
        let form: Vec<String> = study.arms.iter().map(|arm| arm.name.clone()).collect();
        let of = |arms: &[String], reps| Outcome { arms: arms.to_vec(), reps, ..empty(&study) }.command(&study);
        let usual = study.short.unwrap().reps;
        assert_eq!(of(&form, Some(usual)), "pagefold study sonone-fig2 --short");
        assert_eq!(
            of(&["fold".into(), "ksm".into()], Some(9)),
            "pagefold study sonone-fig2 --short --reps 9 --arm ksm,fold"
        );
        let record = |arm: &str, n| Record {
            metric: "m".into(),
            arm: arm.into(),
            x: None,
            unit: String::new(),
            n,
            mean: 1.0,
            half_width: None,
            reps: Vec::new(),
            samples: vec![1.0; n],
        };
        let old = Outcome { measured: vec![record("fold", 8), record("ksm", 9)], ..empty(&study) };
        assert_eq!(old.command(&study), "pagefold study sonone-fig2 --short --reps 9 --arm ksm,fold");
        let full = Outcome { form: Length::Full, arms: form, reps: Some(study.full.unwrap().reps), ..empty(&study) };
        assert_eq!(full.command(&study), "pagefold study sonone-fig2 --full");
    }

    #[test]
    fn host_facts_tell_the_build() {
        let facts = HostFacts::read();
        assert!(facts.build.as_ref().is_some_and(|build| build.len() == 16), "{facts:?}");
        assert_eq!(
            HostFacts { pagefold: "1".into(), debug_build: true, ..HostFacts::default() }.of_pagefold(),
            "1, build not recorded, a build for development"
        );
    }
}
