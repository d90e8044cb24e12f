//! Durations of operations, as a load's client reports them.

use anyhow::{bail, ensure};
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time to wait for operations, after which a load counts as having failed: 20 s.
const PATIENCE: Duration = Duration::from_secs(20);
/// Interval between two checks whether enough operations have come in: 10 ms.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// The monotonic clock in nanoseconds. All processes of a host share it, and say by it when operations are due.
pub fn now_ns() -> u64 {
    in_ns(clock_gettime(ClockId::Monotonic))
}

/// A time of a clock in nanoseconds.
pub fn in_ns(time: rustix::time::Timespec) -> u64 {
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// An operation that has ended: a request that was answered, a transaction, or a tick.
#[derive(Clone, Copy, Debug)]
struct Operation {
    due_ns: u64,
    took_ns: u64,
}

/// Operations that were due in an interval of time.
#[derive(Debug, PartialEq)]
pub struct Window {
    /// How long each of them took, in ascending order, in nanoseconds.
    pub took_ns: Vec<u64>,
    /// Number of operations that ended in the time.
    pub ended: usize,
}

/// Operations of one load. Its client adds to them, and the bench takes them.
#[derive(Default)]
pub struct Samples {
    all: Mutex<Vec<Operation>>,
    failed: Mutex<Option<String>>,
    is_over: AtomicBool,
    /// Longest time by which an operation may come in after one that was due later.
    disorder: Duration,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Samples {
    /// No operations yet. Each may come in this much later than one that was due after it.
    pub fn out_of_order(disorder: Duration) -> Self {
        Self { disorder, ..Self::default() }
    }

    /// Adds an operation that was due at this time and took this long from then on.
    pub fn add(&self, due_ns: u64, took_ns: u64) {
        locked(&self.all).push(Operation { due_ns, took_ns });
    }

    /// Notes why no more operations come in. After [`Self::end`], this is no failure.
    pub fn fail(&self, why: String) {
        if !self.is_over() {
            locked(&self.failed).get_or_insert(why);
        }
    }

    /// Tells the client to end.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Whether the client is to end.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Operations that were due between two times. Waits until all of them are over, and forgets those before.
    ///
    /// # Errors
    /// The load has failed, or stands still.
    pub fn take(&self, from_ns: u64, to_ns: u64) -> anyhow::Result<Window> {
        let (begin, enough_ns) = (Instant::now(), to_ns + u64::try_from(self.disorder.as_nanos())?);
        loop {
            if let Some(why) = &*locked(&self.failed) {
                bail!("{why}");
            }
            // Operations of one client come in nearly in the order in which they were due. Once one that was due
            // `disorder` after the interval is there, none of the interval is missing.
            if locked(&self.all).iter().rev().any(|operation| operation.due_ns >= enough_ns) {
                break;
            }
            ensure!(begin.elapsed() < PATIENCE, "no operation ends any more");
            std::thread::sleep(LOOK_EVERY);
        }
        let mut all = locked(&self.all);
        all.retain(|operation| operation.due_ns + operation.took_ns >= from_ns);
        let window = from_ns..to_ns;
        let due = all.iter().filter(|operation| window.contains(&operation.due_ns));
        let mut took_ns: Vec<u64> = due.map(|operation| operation.took_ns).collect();
        took_ns.sort_unstable();
        ensure!(!took_ns.is_empty(), "no operation was due in the slice");
        let ended = all.iter().filter(|operation| window.contains(&(operation.due_ns + operation.took_ns))).count();
        Ok(Window { took_ns, ended })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stall_counts_for_all_that_were_due_in_it() {
        let samples = Samples::default();
        // Due each millisecond; nothing is answered between the second and the fifth.
        for (due, answered) in [(0, 0), (1, 1), (2, 5), (3, 5), (4, 5), (5, 5), (6, 6)] {
            samples.add(due * 1_000_000, (answered - due) * 1_000_000);
        }
        let window = samples.take(1_000_000, 5_000_000).unwrap();
        assert_eq!(window, Window { took_ns: vec![0, 1_000_000, 2_000_000, 3_000_000], ended: 1 });
        assert_eq!(samples.take(5_000_000, 6_000_000).unwrap().ended, 4);
    }

    #[test]
    fn load_that_fails_says_why() {
        let samples = Samples::default();
        samples.fail("it hung up".to_owned());
        assert_eq!(samples.take(0, 1).unwrap_err().to_string(), "it hung up");
        let ended = Samples::default();
        ended.end();
        ended.fail("it hung up, as it was told to".to_owned());
        ended.add(1, 0);
        assert_eq!(ended.take(0, 1).unwrap_err().to_string(), "no operation was due in the slice");
    }
}
