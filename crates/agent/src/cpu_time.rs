//! Processor time.

use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// Processor time used by the thread or process that `clock` stands for.
pub fn cpu_time(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}
