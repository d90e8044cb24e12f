//! Decisions of an operator: guarantees, and memory that is never lent.

use anyhow::Context;
use guest::{Glob, Guest};
use host::MemoryLimits;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Decisions of an operator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// Guaranteed size of guests whose id or name matches, in bytes. The first that matches counts. A guest without one
    /// keeps all its RAM, and its QEMU is left alone.
    pub guaranteed: Vec<(Glob, u64)>,
    /// Memory that is never lent, in bytes; `None`: the usual reserve of the host.
    pub floor_bytes: Option<u64>,
    /// Control group whose memory limit stands for the host, as the kernel names it; `None`: all memory of the host.
    #[serde(default)]
    pub within: Option<String>,
}

impl Rules {
    /// Guaranteed size of a guest; `None` if no rule has one.
    pub(crate) fn guaranteed_bytes(&self, guest: &Guest) -> Option<u64> {
        let found = self.guaranteed.iter().find(|(glob, _)| glob.matches(&guest.id) || glob.matches(&guest.name));
        found.map(|(_, bytes)| *bytes)
    }

    /// Memory of the host, or of the control group that stands for it: all, and the part that is available.
    ///
    /// # Errors
    /// The kernel does not tell, or the control group has no limit.
    pub fn total_and_available(&self) -> anyhow::Result<(u64, u64)> {
        let Some(group) = &self.within else {
            let available = host::available_bytes().context("cannot tell how much memory is available")?;
            return Ok((host::ram_bytes(), available));
        };
        let found = MemoryLimits::find().and_then(|limits| limits.bound_and_left(group));
        found.with_context(|| format!("the control group {group} has no memory limit below the host's memory"))
    }

    /// Part of the last 10 s in which some task of the host waited for memory, in percent. `None` where a control group stands
    /// for the host.
    pub(crate) fn stalled_percent(&self) -> Option<f64> {
        if self.within.is_some() { None } else { host::memory_stalled_percent() }
    }

    /// Control groups that hold page cache: the one that stands for the host, or those of guests.
    pub fn caches(&self, guests: &[Guest]) -> BTreeSet<String> {
        if let Some(group) = &self.within {
            return BTreeSet::from([group.clone()]);
        }
        let Some(limits) = MemoryLimits::find() else { return BTreeSet::new() };
        let pids = guests.iter().flat_map(|guest| &guest.pids);
        pids.filter_map(|pid| limits.group_of(*pid)).filter(|group| group != "/").collect()
    }

    /// Memory that is never lent. The kernel's watermarks are those of all its memory, and no part of a control group's.
    pub(crate) fn floor_bytes(&self) -> u64 {
        let watermarks = if self.within.is_some() { None } else { host::high_watermark_bytes() };
        self.floor_bytes.unwrap_or_else(host::usual_reserve_bytes).saturating_add(watermarks.unwrap_or(0))
    }
}
