//! The number of mappings (VMAs) of the process, of which folding may use up a part.

use crate::cpu_time::cpu_time;
use rustix::time::ClockId;
use std::time::{Duration, Instant};

/// Shortest time between two counts of the mappings, and the share of a processor's time that counting may take: 10 s,
/// 1/2000. Mappings are also counted when an upper bound of their number has reached the most that are allowed.
const COUNT_EVERY: (Duration, u32) = (Duration::from_secs(10), 2000);
/// Time after which mappings are counted again, although nothing was folded since the last count: 60 s.
const RECOUNT: Duration = Duration::from_secs(60);

/// The number of this process's mappings, and their limit.
pub struct Vmas {
    /// The most that the whole process may have.
    most: u64,
    /// Whether `most` is half of the kernel's limit (`vm.max_map_count`), and changes with it.
    follows_kernel: bool,
    /// Number of mappings at the last count.
    count: u64,
    runs_since_count: u64,
    count_due: Instant,
    recount: Instant,
}

impl Vmas {
    /// Counts the mappings. `most`: the most that the whole process may have; `None`: half of the kernel's limit.
    pub fn new(most: Option<u64>, now: Instant) -> Self {
        Self {
            most: most.unwrap_or_else(half_of_all),
            follows_kernel: most.is_none(),
            count: count(),
            runs_since_count: 0,
            count_due: now,
            recount: now,
        }
    }

    /// Number of mappings at the last count.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Number of mappings from which on folding adds no more.
    pub const fn most(&self) -> u64 {
        self.most
    }

    /// Whether folding may make no more mappings, by the last count and an upper bound of what was made since.
    pub const fn are_spent(&self) -> bool {
        self.count + 2 * self.runs_since_count + 4 >= self.most
    }

    /// Whether [`Vmas::are_spent`] says so only by an upper bound that may be far too high. A new count is worth its
    /// time then.
    pub const fn are_far_from_known(&self) -> bool {
        self.are_spent() && self.runs_since_count > self.most / 16
    }

    /// Notes that a run was folded to slots, which makes at most two mappings.
    pub const fn note_run(&mut self) {
        self.runs_since_count += 1;
    }

    /// Makes the next count due at once.
    pub const fn hurry(&mut self, now: Instant) {
        self.count_due = now;
    }

    /// Counts the mappings anew and reads the kernel's limit again, if it is time for that. Returns whether it was.
    pub fn count_again(&mut self, now: Instant) -> bool {
        let is_due = now >= self.count_due || self.runs_since_count > 0 && self.are_spent();
        if is_due {
            let before = cpu_time(ClockId::ThreadCPUTime);
            if self.runs_since_count > 0 || self.are_spent() || now >= self.recount {
                (self.count, self.runs_since_count) = (count(), 0);
                self.recount = now + RECOUNT;
            }
            if self.follows_kernel {
                self.most = half_of_all();
            }
            let (pause, share) = COUNT_EVERY;
            self.count_due = now + pause.max((cpu_time(ClockId::ThreadCPUTime) - before) * share);
        }
        is_due
    }
}

/// Half of the mappings that the kernel allows a process: the other half is left to the program.
fn half_of_all() -> u64 {
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    limit.and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(65530) / 2
}

/// Counts this process's mappings.
fn count() -> u64 {
    let lines = |file: std::fs::File| -> std::io::Result<u64> {
        let (mut buffer, mut lines) = (vec![0; 64 << 10], 0);
        loop {
            match std::io::Read::read(&mut &file, &mut buffer)? {
                0 => return Ok(lines),
                n => lines += buffer[..n].iter().filter(|byte| **byte == b'\n').count() as u64,
            }
        }
    };
    std::fs::File::open("/proc/thread-self/maps").and_then(lines).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Once, the member's state said that no mappings are left, by the upper bound alone, until mappings were counted
    /// anew: on a busy machine after many minutes.
    #[test]
    fn mappings_are_counted_before_none_are_said_to_be_left() {
        let now = Instant::now();
        let mut vmas = Vmas::new(Some(10_000), now);
        vmas.count_again(now);
        (0..6000).for_each(|_| vmas.note_run());
        assert!(vmas.are_spent() && vmas.are_far_from_known());
        assert!(vmas.count_again(now));
        assert!(!vmas.are_spent() && vmas.count() > 0);
        assert!(!vmas.count_again(now), "it was counted a moment ago");
    }

    /// The list of an idle guest's thousands of mappings was read every ten seconds.
    #[test]
    fn mappings_are_counted_rarely_where_nothing_is_folded() {
        let now = Instant::now();
        let mut vmas = Vmas::new(Some(10_000), now);
        let mut counts = |runs: u64| {
            (vmas.count, vmas.runs_since_count, vmas.count_due) = (0, runs, now);
            vmas.count_again(now);
            vmas.count > 0
        };
        assert_eq!([0, 0, 1, 0].map(&mut counts), [true, false, true, false]);
    }
}
