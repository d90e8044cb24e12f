//! The mappings of the process, of which folding may spend some.

use crate::cpu_time::cpu_time;
use rustix::time::ClockId;
use std::time::{Duration, Instant};

/// Shortest time between two counts of the mappings, and their share of a processor: 10 s, 1/2000. Mappings are also
/// counted when an upper bound of those made since leaves none to spend.
const COUNT_EVERY: (Duration, u32) = (Duration::from_secs(10), 2000);
/// Time between two counts in a process in which nothing was folded since the last one: 60 s.
const RECOUNT: Duration = Duration::from_secs(60);

/// The mappings of this process.
pub struct Vmas {
    /// The most that the whole process may have.
    most: u64,
    /// Whether that follows the kernel's limit.
    follows_kernel: bool,
    /// Their number at the last count.
    count: u64,
    runs_since_count: u64,
    count_due: Instant,
    recount: Instant,
}

impl Vmas {
    /// Counts them. `most`: the most that the whole process may have, if that is not to follow the kernel's limit.
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

    /// Mappings at the last count.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// Number of mappings from which on folding adds no more.
    pub const fn most(&self) -> u64 {
        self.most
    }

    /// Whether no more may be spent: by the last count, and an upper bound of those that were made since.
    pub const fn are_spent(&self) -> bool {
        self.count + 2 * self.runs_since_count + 4 >= self.most
    }

    /// Whether they seem to be spent, and many of them are no more than an upper bound.
    pub const fn are_far_from_known(&self) -> bool {
        self.are_spent() && self.runs_since_count > self.most / 16
    }

    /// Notes that a run was folded to slots.
    pub const fn note_run(&mut self) {
        self.runs_since_count += 1;
    }

    /// Makes the next count due at once.
    pub const fn hurry(&mut self, now: Instant) {
        self.count_due = now;
    }

    /// Counts them anew and reads the kernel's limit again, if it is time for that. Says whether it was.
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

/// Half of the mappings that the kernel allows: the other half stays the program's own.
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

    /// By the account alone, a state said that no mappings are left, until they were counted anew: on a busy machine after many
    /// minutes.
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
