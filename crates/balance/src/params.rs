//! Constants of planning, in one place.

use std::time::Duration;

/// Constants of planning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Params {
    /// Least change of a guest's size, as a part of its RAM: 1/64.
    pub least_change_part: u64,
    /// Largest growth of a guest in one round, as a part of its RAM: 1/4.
    pub most_growth_part: u64,
    /// Time for which a guest that shrank does not grow, and the reverse: 60 s.
    pub cooldown: Duration,
    /// Time in which a loan must be back: 10 s.
    pub withdrawal: Duration,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            least_change_part: 64,
            most_growth_part: 4,
            cooldown: Duration::from_secs(60),
            withdrawal: Duration::from_secs(10),
        }
    }
}

impl Params {
    /// Least change of the size of a guest with `ram_bytes` of RAM, in bytes; a page at least.
    pub(crate) fn least_change_bytes(&self, ram_bytes: u64) -> u64 {
        ram_bytes.checked_div(self.least_change_part).unwrap_or(0).max(4096)
    }
}
