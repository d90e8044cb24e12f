//! How long a thread has been asleep. The kernel notes when a thread last ran (`se.exec_start` in its `sched`), by the
//! clock of the processor that it ran on. Where a hypervisor takes processors away, these clocks differ: each leaves out
//! the time that its processor was taken away for.
//!
//! The kernel moves threads that have just gone to sleep to other processors, and does not tell. So the clock that is
//! furthest behind counts. A thread may have slept for longer than is said here, never for less.

use crate::threads;
use rustix::process::Pid;
use rustix::thread::{CpuSet, gettid, sched_getaffinity, sched_setaffinity};
use std::fs;
use std::time::{Duration, Instant};

/// Most processors whose clocks are compared before every use, where they differ.
const MOST: usize = 8;
/// Difference from which on clocks differ: 1 ms.
const DIFFERENCE: Duration = Duration::from_millis(1);
/// Time after which clocks that did not differ are compared again: 60 s.
const EVERY: Duration = Duration::from_secs(60);

/// The clocks of the processors.
#[derive(Debug)]
pub struct Clocks {
    /// The time by the clock that is furthest behind, and when it was that.
    last: Option<(Duration, Instant)>,
    differ: bool,
    compared: Instant,
}

/// A thread's sleep, as the kernel shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rest {
    /// When the thread last ran, by a clock of this module's.
    pub since: Duration,
    /// How often it had gone to sleep.
    pub count: u64,
}

impl Clocks {
    /// Compares all clocks.
    pub fn new() -> Self {
        let mut this = Self { last: None, differ: true, compared: Instant::now() };
        this.compare();
        this
    }

    fn compare(&mut self) {
        let all: Vec<(Duration, Instant)> = processors().into_iter().filter_map(look).collect();
        let now = Instant::now();
        let behind = |(clock, then): &(Duration, Instant)| *clock + (now - *then);
        let (first, last) = (all.iter().map(behind).min(), all.iter().map(behind).max());
        self.differ = first.zip(last).is_none_or(|(first, last)| last - first > DIFFERENCE);
        // Where clocks differ, they stand still at times.
        let first = if self.differ { all.iter().map(|(clock, _)| *clock).min() } else { first };
        (self.last, self.compared) = (first.map(|first| (first, now)), now);
    }

    /// Looks at the clocks again, if that is needed.
    pub fn refresh(&mut self) {
        if self.differ && processors().len() > MOST {
            self.last = None;
        } else if self.differ || self.compared.elapsed() > EVERY {
            self.compare();
        }
    }

    /// How long a thread has rested at least; zero where the kernel does not tell. Clocks that leave out time may have gone
    /// on by less than this process has, so only their last comparison counts.
    pub fn rested(&self, rest: Rest) -> Duration {
        let Some((clock, then)) = self.last else { return Duration::ZERO };
        let since = if self.differ { Duration::ZERO } else { then.elapsed() };
        (clock + since).saturating_sub(rest.since).saturating_sub(DIFFERENCE)
    }
}

impl Default for Clocks {
    fn default() -> Self {
        Self::new()
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

/// A processor's clock, and when it showed that. This thread's own note, made anew by a yield on that processor, tells.
fn look(processor: usize) -> Option<(Duration, Instant)> {
    let before = sched_getaffinity(None).ok()?;
    let mut there = CpuSet::new();
    there.set(processor);
    sched_setaffinity(None, &there).ok()?;
    std::thread::yield_now();
    let clock = rest(std::process::id(), gettid());
    // Behind the look: if this thread lost its processor meanwhile, the clock is taken to be further behind than it is.
    let then = Instant::now();
    let _ = sched_setaffinity(None, &before);
    clock.map(|clock| (clock.since, then))
}
