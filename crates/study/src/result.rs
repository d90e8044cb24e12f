//! The result of a run, in the shape that `pagefold study --json` prints and that is committed.

use crate::check::{self, Verdict};
use crate::data::{Length, Study};
use crate::record::{ArmTimeline, Record, Samples};
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The result of one study.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// The study.
    pub id: String,
    /// The form that was run.
    pub form: Length,
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
    /// The host.
    pub host: HostFacts,
    /// Time of all turns.
    pub seconds: f64,
    /// The estimate of that time before the first turn.
    pub estimated_seconds: f64,
}

impl Outcome {
    /// The same with the paper's numbers and the predictions as the study has them, and verdicts from the samples. So
    /// results outlive changes of a study's texts and bounds.
    pub fn judged_anew(self, study: &Study) -> Self {
        let verdicts = check::judge_all(study, &Samples::of_records(&self.measured));
        Self { verdicts, reported: reported(study), ..self }
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
    /// Whether the program was built without optimisation for speed.
    pub debug_build: bool,
}

impl HostFacts {
    /// Reads them.
    pub fn read() -> Self {
        let ksm = host::Ksm::read().unwrap_or_default();
        Self {
            kernel: host::Kernel::this().release,
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            ram_bytes: host::ram_bytes(),
            smart_scan: ksm.smart_scan,
            advisor_mode: ksm.advisor_mode,
            pagefold: env!("CARGO_PKG_VERSION").to_owned(),
            debug_build: cfg!(debug_assertions),
        }
    }
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
/// It cannot be read, or holds something else.
pub fn read(path: &Path) -> anyhow::Result<Vec<Outcome>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is no result of pagefold study --json", path.display()))
}
