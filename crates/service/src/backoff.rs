//! The wait between the end of a child process and its next start.
//!
//! The wait doubles with each failure, from 0.1 s to 10 s. After a run of a minute, the wait begins at 0.1 s again.

use std::time::{Duration, Instant};

/// A child that ran for 60 s or longer was all right: its end counts as the first failure again.
const ALL_RIGHT_AFTER: Duration = Duration::from_secs(60);
/// Wait after a first failure, and the longest wait: 0.1 s and 10 s.
const WAIT: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// The failures of one child, in a row.
#[derive(Debug, Default)]
pub struct Backoff {
    /// The wait after the last failure; `None` if there was no failure.
    wait: Option<Duration>,
    not_before: Option<Instant>,
}

impl Backoff {
    /// Notes that the child has ended at `now`, `ran` after its start, or could not be started.
    pub fn failed(&mut self, ran: Duration, now: Instant) {
        let wait = page::doubled(self.wait.filter(|_| ran < ALL_RIGHT_AFTER), WAIT);
        (self.wait, self.not_before) = (Some(wait), Some(now + wait));
    }

    /// Whether a failure has been noted.
    pub const fn has_failed(&self) -> bool {
        self.wait.is_some()
    }

    /// Time from which on the child may be started, which may be in the past. Without a failure it is `now`.
    pub fn start_at(&self, now: Instant) -> Instant {
        self.not_before.unwrap_or(now)
    }

    /// Forgets all failures.
    pub fn reset(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_doubles_until_child_runs_for_a_minute() {
        let now = Instant::now();
        let mut backoff = Backoff::default();
        assert!(!backoff.has_failed() && backoff.start_at(now) == now);
        let wait = |backoff: &mut Backoff, ran| {
            backoff.failed(Duration::from_secs(ran), now);
            (backoff.start_at(now) - now).as_millis()
        };
        let waits: Vec<u128> = (0..9).map(|_| wait(&mut backoff, 59)).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        (0..100).for_each(|_| assert_eq!(wait(&mut backoff, 0), 10_000));
        assert_eq!((wait(&mut backoff, 60), wait(&mut backoff, 0)), (100, 200));
        assert!(backoff.has_failed());
        backoff.reset();
        assert!(!backoff.has_failed() && backoff.start_at(now) == now);
    }
}
