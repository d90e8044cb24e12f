//! When the agent's thread next searches for written pages, and whether the member is idle: both by processor time.

use crate::cpu_time::cpu_time;
use crate::turnover::Change;
use rustix::time::ClockId;
use std::time::{Duration, Instant};

/// Shortest time between two searches for written pages among the folded: 1 s.
const BROKEN_EVERY: Duration = Duration::from_secs(1);
/// Cost of fingerprinting a written page: 500 ns.
const FINGERPRINT_COST: Duration = Duration::from_nanos(500);
/// Share of a processor below which a member is idle: 1/10.
const IDLE_SHARE: u32 = 10;
/// Time over which a member's use of processors is measured: 1 s.
const WINDOW: Duration = Duration::from_secs(1);

/// The last search for written pages among the folded. Its cost is processor time: for the search itself, and for
/// fingerprinting the broken pages whose time has come.
pub struct Looks {
    last: Instant,
    cost: Duration,
}

impl Looks {
    /// As if a search had just been made at no cost.
    pub const fn new(now: Instant) -> Self {
        Self { last: now, cost: Duration::ZERO }
    }

    /// A search that took this processor time, after which `due` pages are to be fingerprinted.
    pub fn took(now: Instant, looking: Duration, due: u32) -> Self {
        Self { last: now, cost: looking + FINGERPRINT_COST * due }
    }

    /// Whether the next search is due, `rest` after the last one at the earliest. To be asked anew each time: much may have
    /// begun to change since the last one.
    pub fn is_due(&self, now: Instant, change: Change, rest: Duration) -> bool {
        // Searches may take this part of a processor: one in `share`.
        let share = match change {
            Change::Little | Change::MuchForLong => 1000,
            Change::Some => 200,
            Change::Much => 25,
        };
        now >= self.last + BROKEN_EVERY.max(self.cost * share).max(rest)
    }
}

/// Processor time of this process but for this thread, over time.
pub struct Activity {
    at: Instant,
    used: Duration,
    idle: bool,
}

impl Activity {
    /// Beginning with this moment.
    pub fn new(now: Instant) -> Self {
        Self { at: now, used: Self::used(), idle: false }
    }

    fn used() -> Duration {
        cpu_time(ClockId::ProcessCPUTime).saturating_sub(cpu_time(ClockId::ThreadCPUTime))
    }

    /// Whether the member used next to no processor time in the last second or so.
    pub fn is_idle(&mut self, now: Instant) -> bool {
        let time = now - self.at;
        if time >= WINDOW {
            let used = Self::used();
            self.idle = used.saturating_sub(self.used) * IDLE_SHARE < time;
            (self.at, self.used) = (now, used);
        }
        self.idle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_pages_are_looked_for_sooner_in_burst() {
        let last = Instant::now();
        let at = |seconds| last + Duration::from_secs(seconds);
        let dear = Looks { last, cost: Duration::from_millis(20) };
        assert_eq!(
            [
                (19, Change::Little),
                (20, Change::Little),
                (3, Change::Some),
                (4, Change::Some),
                (0, Change::Much),
                (1, Change::Much),
                (19, Change::MuchForLong),
            ]
            .map(|(seconds, change)| dear.is_due(at(seconds), change, Duration::ZERO)),
            [false, true, false, true, false, true, false]
        );
        let cheap = Looks { last, cost: Duration::from_micros(20) };
        assert_eq!([0, 1].map(|seconds| cheap.is_due(at(seconds), Change::Some, Duration::ZERO)), [false, true]);
        // Pages that are to be fingerprinted add to the cost.
        let many = Looks::took(last, Duration::from_millis(20), 40_000);
        assert_eq!([7, 8].map(|seconds| many.is_due(at(seconds), Change::Some, Duration::ZERO)), [false, true]);
        let at_rest = |seconds| cheap.is_due(at(seconds), Change::Little, Duration::from_secs(10));
        assert_eq!([9, 10].map(at_rest), [false, true]);
    }
}
