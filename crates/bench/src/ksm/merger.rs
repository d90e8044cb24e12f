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

/// A program that merges pages of guests that were started for it.
pub trait Merger {
    /// Name in JSON.
    fn name(&self) -> &'static str;
    /// A command for a process whose memory can be merged.
    fn command(&self, name: &str) -> anyhow::Result<Command>;
    /// The setting by which the lab starts its guests for this merger.
    fn fold(&self) -> anyhow::Result<Option<lab::Fold>>;
    /// Processes besides the guests whose memory is part of the price.
    fn own_pids(&self) -> anyhow::Result<Vec<u32>>;
    /// Tells the merger the guests' processes, before anything is merged.
    fn meet(&mut self, guests: &[Guest]) -> anyhow::Result<()>;
    /// Begins to merge, as fast as it can.
    fn on(&mut self) -> anyhow::Result<()>;
    /// Processor time used since the merger started.
    fn cpu_s(&self) -> anyhow::Result<f64>;
    /// Work done up to this moment.
    fn progress(&self) -> anyhow::Result<Progress>;
    /// Bookkeeping and statistics.
    fn account(&self) -> anyhow::Result<Account>;
    /// Its account of the pool, if it has one.
    fn slots(&self) -> anyhow::Result<Option<Slots>>;
    /// Net savings, by these places of the guests' and its own account.
    fn savings(&self, taken: &Taken) -> anyhow::Result<Savings>;
    /// Why each of these pages, in order by process and address, is not merged.
    fn why(&self, pages: &[(u32, HostVirt)]) -> anyhow::Result<Vec<Why>>;
    /// Ends the merger, after the guests have ended.
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
