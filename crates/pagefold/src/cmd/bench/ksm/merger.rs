//! The two that are compared, as the bench sees them.

use super::curve::Progress;
use super::equal::Guest;
use super::folding::AgentStalls;
use serde::Serialize;
use std::process::Command;

/// Somebody who merges pages of guests that were started for it.
pub trait Merger {
    /// As JSON calls it.
    fn name(&self) -> &'static str;
    /// A command to start such that its memory can be merged.
    fn command(&self, name: &str) -> anyhow::Result<Command>;
    /// How the lab is to start its guests.
    fn fold(&self) -> anyhow::Result<Option<lab::Fold>>;
    /// Processes other than the guests whose memory is part of the price.
    fn own_pids(&self) -> anyhow::Result<Vec<u32>>;
    /// The guests are there, their processes are these; nothing is merged yet.
    fn meet(&mut self, guests: &[Guest]) -> anyhow::Result<()>;
    /// Begins to merge, as fast as it can.
    fn on(&mut self) -> anyhow::Result<()>;
    /// Processor time it has used so far, all told.
    fn cpu_s(&self) -> anyhow::Result<f64>;
    /// What it has done so far.
    fn progress(&self) -> anyhow::Result<Progress>;
    /// What it knows about pages, and how it went.
    fn account(&self) -> anyhow::Result<Account>;
    /// Ends it; the guests have gone.
    fn off(&mut self) -> anyhow::Result<()>;
}

/// How often pages were merged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Folds {
    /// Pages.
    pub all: u64,
    /// That had been merged before.
    pub again: u64,
    /// That did not stay so for a minute or so.
    pub short: u64,
}

/// What a merger keeps, and says of itself.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Account {
    /// Memory for its bookkeeping, without the kernel's mappings.
    pub metadata_bytes: u64,
    /// Looks at pages, again and again.
    pub pages_scanned: Option<u64>,
    /// Pages broken in mappings of the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub broken_pages: Option<u64>,
    /// Pages merged, again and again, of those the ones that had been merged before and were written, and those that were written
    /// within a minute or so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub folds: Option<Folds>,
    /// How long agents kept pages out of reach, by their own account.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_stalls: Option<AgentStalls>,
    /// Pages that could not be merged, by reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failures: Option<std::collections::BTreeMap<String, u64>>,
    /// Processor time, by who used it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_by_part_s: Option<std::collections::BTreeMap<&'static str, f64>>,
}
