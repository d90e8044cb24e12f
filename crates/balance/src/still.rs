//! Decides which rounds of balancing are left out because nothing happens. A round asks every guest for its size, which
//! is costly on a host with many guests.
//!
//! | condition | reason |
//! |---|---|
//! | the last look had nothing to do, and left no driver in doubt | a guest on its way is watched |
//! | available memory has moved by less than 1/256 of the host's since, and is above the floor | no guest takes or frees memory unseen |
//! | the last round was not passed over | a driver's fault, or a new guest, is seen a round later at most |

use crate::facts::HostFacts;

/// Change of available memory below which a round may be left out, as a part of the host's memory: 1/256.
const MOVED: u64 = 256;

/// The host's available memory at the last round, for deciding whether another round is needed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stillness {
    /// Memory that was available then; `None` if there was something to do, or the last round was left out.
    available_bytes: Option<u64>,
}

impl Stillness {
    /// Notes the host's memory at a round, and whether that round had nothing to do.
    pub fn note(&mut self, host: &HostFacts, had_nothing_to_do: bool) {
        self.available_bytes = had_nothing_to_do.then_some(host.available_bytes);
    }

    /// Whether the next round can be left out, with `available_bytes` available now. The round after it is not left
    /// out.
    pub fn passes_over(&mut self, host: &HostFacts, available_bytes: u64) -> bool {
        let is_same = |before: u64| before.abs_diff(available_bytes) < host.total_bytes / MOVED;
        self.available_bytes.take().is_some_and(is_same) && available_bytes >= host.floor_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_is_passed_over_once_and_only_while_nothing_happens() {
        let host = HostFacts { total_bytes: 2560, available_bytes: 1000, floor_bytes: 500, ..HostFacts::default() };
        let mut still = Stillness::default();
        assert!(!still.passes_over(&host, 1000), "nobody has looked");
        still.note(&host, true);
        assert!(still.passes_over(&host, 1009));
        assert!(!still.passes_over(&host, 1009), "two in a row");
        still.note(&host, false);
        assert!(!still.passes_over(&host, 1000), "there was something to do");
        for moved in [990, 1010] {
            still.note(&host, true);
            assert!(!still.passes_over(&host, moved), "memory has moved");
        }
        let full = HostFacts { available_bytes: 499, ..host };
        still.note(&full, true);
        assert!(!still.passes_over(&full, 499), "below the floor");
    }
}
