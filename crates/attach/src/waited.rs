//! How long a thread has been asleep. The kernel notes when a thread last ran (`se.exec_start` in its `sched`), by a
//! clock of the scheduler's. This thread's own note, made anew by a yield, tells what that clock shows.

use crate::threads;
use rustix::process::Pid;
use rustix::thread::gettid;
use std::fs;
use std::time::Duration;

/// The scheduler's clock.
pub fn now() -> Option<Duration> {
    std::thread::yield_now();
    last_run(&threads::of(std::process::id(), gettid(), "sched"))
}

/// How long a thread of a process has slept at the time `now`; zero where the kernel does not tell.
pub fn since(now: Option<Duration>, pid: u32, thread: Pid) -> Duration {
    let last = last_run(&threads::of(pid, thread, "sched"));
    now.zip(last).map_or(Duration::ZERO, |(now, last)| now.saturating_sub(last))
}

fn last_run(path: &str) -> Option<Duration> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with("se.exec_start"))?;
    let milliseconds: f64 = line.split_once(':')?.1.trim().parse().ok()?;
    (milliseconds >= 0.0).then(|| Duration::from_secs_f64(milliseconds / 1000.0))
}
