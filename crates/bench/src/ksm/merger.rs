//! The two mergers that are compared, as the bench sees them.

use super::account::Slots;
use super::curve::Progress;
use super::equal::Guest;
use super::folding::AgentStalls;
use audit::contents::Taken;
use page::{HostVirt, Savings};
use serde::Serialize;
use std::process::Command;
use wire::Why;

/// A program that merges pages of guests: ksmd or Pagefold. The guests are started for it.
pub trait Merger {
    /// Name of the merger in the JSON.
    fn name(&self) -> &'static str;
    /// A command to which the arguments of a hidden command of this program are added, for a process whose memory the
    /// merger can merge.
    fn command(&self, name: &str) -> anyhow::Result<Command>;
    /// The setting by which the lab starts its guests for this merger.
    fn fold(&self) -> anyhow::Result<Option<lab::Fold>>;
    /// Processes of the merger whose memory counts as part of its cost.
    fn own_pids(&self) -> anyhow::Result<Vec<u32>>;
    /// Tells the merger the guests' processes, before anything is merged.
    fn meet(&mut self, guests: &[Guest]) -> anyhow::Result<()>;
    /// Begins to merge, as fast as it can.
    fn on(&mut self) -> anyhow::Result<()>;
    /// Processor time in seconds that the merger has used since it started.
    fn cpu_s(&self) -> anyhow::Result<f64>;
    /// Number of merged pages and processor time up to this moment.
    fn progress(&self) -> anyhow::Result<Progress>;
    /// Memory for the merger's bookkeeping, and its statistics.
    fn account(&self) -> anyhow::Result<Account>;
    /// The merger's account of its pool; `None` for ksmd, which has none.
    fn slots(&self) -> anyhow::Result<Option<Slots>>;
    /// Net savings, computed from what the guests' page tables show (`taken`) and from the merger's account.
    fn savings(&self, taken: &Taken) -> anyhow::Result<Savings>;
    /// Why each of these pages is not merged. They are in order of process and address.
    fn why(&self, pages: &[(u32, HostVirt)]) -> anyhow::Result<Vec<Why>>;
    /// Ends the merger. The guests have ended before.
    fn off(&mut self) -> anyhow::Result<()>;
}

/// Numbers of folds: how often pages were merged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Folds {
    /// All folds, in pages.
    pub all: u64,
    /// Folds of pages that had been merged before.
    pub again: u64,
    /// Folds that did not last for about a minute.
    pub short: u64,
}

/// A merger's bookkeeping and its own report.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Account {
    /// Memory for its bookkeeping, without the kernel's mappings.
    pub metadata_bytes: u64,
    /// Number of page scans; a page counts as often as it was scanned.
    pub pages_scanned: Option<u64>,
    /// Broken pages in mappings of the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub broken_pages: Option<u64>,
    /// Number of folds; a page counts as often as it was folded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folds: Option<Folds>,
    /// How long agents kept pages out of reach, by their own account.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_stalls: Option<AgentStalls>,
    /// Pages that could not be merged, by reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failures: Option<std::collections::BTreeMap<String, u64>>,
    /// Processor time of each part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_by_part_s: Option<std::collections::BTreeMap<&'static str, f64>>,
}
