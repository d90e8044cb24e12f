//! How long a thread has been asleep. The kernel notes when a thread last ran (`se.exec_start` in its `sched`), by the
//! clock of the processor that it ran on. Where a hypervisor takes processors away, these clocks differ: each leaves
//! out the time that its processor was taken away for.
//!
//! The kernel moves threads that have just gone to sleep to other processors, and does not tell. So the clock that is
//! furthest behind counts. A thread may have slept for longer than this module says, never for less.

use crate::threads;
use rustix::process::Pid;
use rustix::thread::{CpuSet, gettid, sched_getaffinity, sched_setaffinity};
use std::fs;
use std::time::Duration;

/// Most processors whose clocks are compared before every use: 8. With more, no sleep is measured: each counts as zero.
const MOST: usize = 8;
/// Possible error of the comparison, which is subtracted from each sleep: 1 ms.
const COARSE: Duration = Duration::from_millis(1);

/// The scheduler clocks of the processors, as they were compared last.
#[derive(Debug, Default)]
pub struct Clocks {
    /// The time by the clock that was furthest behind when they were last compared.
    last: Option<Duration>,
}

/// A thread's sleep, as the kernel shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rest {
    /// When the thread last ran (`se.exec_start`), by the scheduler's clock of the processor on which it ran.
    pub since: Duration,
    /// Number of times that the thread had gone to sleep.
    pub count: u64,
}

impl Clocks {
    /// Compares all clocks, unless that would take too long. Clocks drift apart by the time that interrupts and a
    /// hypervisor take, so this is to be done before every use.
    pub fn refresh(&mut self) {
        let processors = processors();
        let few = processors.len() <= MOST;
        self.last = if few { processors.into_iter().map(look).min().flatten() } else { None };
    }

    /// The shortest time that a thread can have been asleep; zero where the kernel does not tell. Time since the clocks
    /// were compared is not counted.
    pub fn rested(&self, rest: Rest) -> Duration {
        self.last.map_or(Duration::ZERO, |clock| clock.saturating_sub(rest.since).saturating_sub(COARSE))
    }
}

/// A thread's sleep, as far as the kernel shows it.
pub fn rest(pid: u32, thread: Pid) -> Option<Rest> {
    let text = fs::read_to_string(threads::of(pid, thread, "sched")).ok()?;
    let field = |name: &str| text.lines().find(|line| line.starts_with(name))?.split_once(':').map(|(_, value)| value);
    let milliseconds: f64 = field("se.exec_start")?.trim().parse().ok()?;
    let count = field("nr_voluntary_switches")?.trim().parse().ok()?;
    (milliseconds > 0.0).then(|| Rest { since: Duration::from_secs_f64(milliseconds / 1000.0), count })
}

/// The processors that this thread may run on.
fn processors() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(None) else { return Vec::new() };
    (0..CpuSet::MAX_CPU).filter(|at| set.is_set(*at)).collect()
}

/// The time by a processor's scheduler clock. This thread reads it from its own `se.exec_start`, which a yield on that
/// processor renews.
fn look(processor: usize) -> Option<Duration> {
    let before = sched_getaffinity(None).ok()?;
    let mut there = CpuSet::new();
    there.set(processor);
    sched_setaffinity(None, &there).ok()?;
    std::thread::yield_now();
    let clock = rest(std::process::id(), gettid());
    let _ = sched_setaffinity(None, &before);
    clock.map(|clock| clock.since)
}
