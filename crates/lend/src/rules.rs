//! Decisions of an operator: guarantees, and memory that is never lent.

use guest::{Glob, Guest};
use serde::{Deserialize, Serialize};

/// Decisions of an operator.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// Guaranteed size of guests whose id or name matches, in bytes. The first that matches counts. A guest without one
    /// keeps all its RAM, and its QEMU is left alone.
    pub guaranteed: Vec<(Glob, u64)>,
    /// Memory that is never lent, in bytes; `None`: the usual reserve of the host.
    pub floor_bytes: Option<u64>,
}

impl Rules {
    /// Guaranteed size of a guest; `None` if no rule has one.
    pub(crate) fn guaranteed_bytes(&self, guest: &Guest) -> Option<u64> {
        let found = self.guaranteed.iter().find(|(glob, _)| glob.matches(&guest.id) || glob.matches(&guest.name));
        found.map(|(_, bytes)| *bytes)
    }

    /// Memory that is never lent, the kernel's watermarks included.
    pub(crate) fn floor_bytes(&self) -> u64 {
        let watermarks = host::high_watermark_bytes().unwrap_or(0);
        self.floor_bytes.unwrap_or_else(host::usual_reserve_bytes).saturating_add(watermarks)
    }
}
