//! When the agent's thread next searches for written pages among the folded ones, and whether the member is idle. Both
//! are judged by processor time.

use crate::cpu_time::cpu_time;
use policy::Cadence;
use rustix::time::ClockId;
use std::time::{Duration, Instant};

/// Shortest time between two searches for written pages among the folded: 1 s.
const BROKEN_EVERY: Duration = Duration::from_secs(1);
/// Processor time for fingerprinting a written page: 500 ns.
const FINGERPRINT_COST: Duration = Duration::from_nanos(500);
/// Share of one processor's time below which a member is idle: 1/10.
const IDLE_SHARE: u32 = 10;
/// Time over which a member's use of processor time is measured: 1 s.
const WINDOW: Duration = Duration::from_secs(1);

/// The last search for written pages among the folded. Its cost is processor time: for the search itself, and for
/// fingerprinting the broken pages whose time has come.
pub struct Looks {
    last: Instant,
    cost: Duration,
}

impl Looks {
    /// The state as if a search had just been made at no cost.
    pub const fn new(now: Instant) -> Self {
        Self { last: now, cost: Duration::ZERO }
    }

    /// A search that took this processor time, after which `due` pages are to be fingerprinted.
    pub fn took(now: Instant, looking: Duration, due: u32) -> Self {
        Self { last: now, cost: looking + FINGERPRINT_COST * due }
    }

    /// Whether the next search is due: `rest` after the last one at the earliest, and later if searches take too much
    /// time. The answer may become true sooner than it seemed, because `cadence` changes when much begins to change.
    pub fn is_due(&self, now: Instant, cadence: Cadence, rest: Duration) -> bool {
        now >= self.last + BROKEN_EVERY.max(self.cost * cadence.searches).max(rest)
    }
}

/// Processor time of this process without the calling thread, over time.
pub struct Activity {
    at: Instant,
    used: Duration,
    idle: bool,
}

impl Activity {
    /// Begins to measure at this moment.
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
    use policy::TODAY;

    #[test]
    fn written_pages_are_looked_for_sooner_in_burst() {
        let last = Instant::now();
        let at = |seconds| last + Duration::from_secs(seconds);
        let dear = Looks { last, cost: Duration::from_millis(20) };
        assert_eq!(
            [
                (19, TODAY.seldom),
                (20, TODAY.seldom),
                (3, TODAY.busy),
                (4, TODAY.busy),
                (0, TODAY.busiest),
                (1, TODAY.busiest),
            ]
            .map(|(seconds, cadence)| dear.is_due(at(seconds), cadence, Duration::ZERO)),
            [false, true, false, true, false, true]
        );
        let cheap = Looks { last, cost: Duration::from_micros(20) };
        assert_eq!([0, 1].map(|seconds| cheap.is_due(at(seconds), TODAY.busy, Duration::ZERO)), [false, true]);
        // Pages that are to be fingerprinted add to the cost.
        let many = Looks::took(last, Duration::from_millis(20), 40_000);
        assert_eq!([7, 8].map(|seconds| many.is_due(at(seconds), TODAY.busy, Duration::ZERO)), [false, true]);
        let at_rest = |seconds| cheap.is_due(at(seconds), TODAY.seldom, Duration::from_secs(10));
        assert_eq!([9, 10].map(at_rest), [false, true]);
    }
}
