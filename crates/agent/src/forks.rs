//! What forks cost. A child gets a copy of every mapping of its parent, and frees it when it ends or executes another
//! program. Folding short runs makes many mappings. And as long as anything is folded, the forking thread waits until
//! the follower has read the kernel's message about the child. In a program that forks often, this takes more time than
//! folding is worth.
//!
//! ```text
//!   each fork:  + TELLING + mappings x COST  -->  [ spent ]  -->  - SHARE of the time
//!                                          | more than BURST
//!                                          v
//!   mappings are given back, until forks take no more than SHARE or none is left; nothing is folded for a while (REST)
//! ```
//!
//! The kernel reports forks only while something is folded. So after that time, folding is tried again.
//!
//! The same is done, and no mapping stays, when as many children live as can be followed (`keeper.rs`).
//!
//! A fork that goes through the hook waits while mappings are given back ([`wait`]). Otherwise each fork would copy all
//! mappings that are left, and keep the agent from changing mappings as long as that takes.

use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time that one mapping adds to a fork and to the end of its child, in microseconds. Measured: 1.05 to 2.5.
const COST_US: u64 = 2;
/// Time for which a fork waits until the follower and the keeper know of the child, in microseconds. Measured: 120.
const TELLING_US: u64 = 120;
/// Share of the time that forks may spend because of folding: 1/20.
const SHARE: u32 = 20;
/// Time that forks may spend because of folding beyond that share: 50 ms.
const BURST: Duration = Duration::from_millis(50);
/// Fewest forks, since their cost was last 0, that count as too many.
const FEWEST: u64 = 4;
/// Shortest and longest time for which nothing is folded after forks cost too much: 1 min, 1 h.
const REST: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3600));

/// Longest time that a fork waits for mappings to be given back: 100 ms.
const WAIT_LONGEST: Duration = Duration::from_millis(100);
/// Time after which a waiting fork checks again whether it may go on: 500 us.
const WAIT_STEP: Duration = Duration::from_micros(500);

/// Until when forks wait, in nanoseconds of the monotonic clock. It lies at most [`WAIT_LONGEST`] ahead, so neither a
/// child that inherits it nor a program whose agent has ended waits for long.
static WAIT_UNTIL: AtomicU64 = AtomicU64::new(0);

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Makes the program's forks wait for at most [`WAIT_LONGEST`], or lets them go on (`begins` is false). For the agent's
/// thread.
pub fn have_wait(begins: bool) {
    let until = if begins { now_ns() + WAIT_LONGEST.as_nanos() as u64 } else { 0 };
    WAIT_UNTIL.store(until, Ordering::Relaxed);
}

/// Waits while mappings are given back. For a thread of the program that is about to fork.
pub fn wait() {
    while now_ns() < WAIT_UNTIL.load(Ordering::Relaxed) {
        std::thread::sleep(WAIT_STEP);
    }
}

/// The cost of this process's forks, and the times in which nothing is folded because of it (rests).
pub struct Forks {
    spent: Duration,
    /// Time of the last call of [`Forks::add`], and last time at which `spent` was 0.
    looked: Instant,
    began: Instant,
    /// Forks since `began`.
    forks: u64,
    /// When the last rest ends or ended.
    until: Option<Instant>,
    /// Length of the last rest.
    rest: Option<Duration>,
    /// Whether the last rest began because too many children live, and not because of the cost of forks.
    are_too_many: bool,
}

impl Forks {
    /// The state before the first fork.
    pub const fn new(now: Instant) -> Self {
        let (spent, looked, began) = (Duration::ZERO, now, now);
        Self { spent, looked, began, forks: 0, until: None, rest: None, are_too_many: false }
    }

    /// Counts `forks` since the last call, in a process in which folding has made `mappings` mappings. If they cost too
    /// much, begins a rest, and returns the most mappings that may stay.
    pub fn add(&mut self, forks: u64, mappings: u64, now: Instant) -> Option<u64> {
        self.spent = self.spent.saturating_sub((now - self.looked) / SHARE);
        self.looked = now;
        if self.spent.is_zero() {
            (self.began, self.forks) = (now, 0);
        }
        self.forks += forks;
        self.spent += Duration::from_micros(forks * (TELLING_US + mappings * COST_US));
        if self.spent <= BURST || self.forks < FEWEST {
            return None;
        }
        let tolerated = u64::try_from(((now - self.began) / SHARE).as_micros()).unwrap_or(u64::MAX);
        // Half of the tolerated number, because mappings are given back by whole pieces, and not one by one.
        let most = (tolerated / self.forks).saturating_sub(TELLING_US) / COST_US / 2;
        self.begin_to_rest(now);
        self.are_too_many = false;
        (self.spent, self.forks, self.began) = (BURST / 2, 0, now);
        Some(most)
    }

    /// Begins a rest because as many children live as can be followed: further children must not inherit any folded
    /// page.
    pub fn find_too_many(&mut self, now: Instant) {
        self.begin_to_rest(now);
        self.are_too_many = true;
    }

    /// Whether the last rest began because too many children live.
    pub const fn are_too_many(&self) -> bool {
        self.are_too_many
    }

    fn begin_to_rest(&mut self, now: Instant) {
        let rest = match (self.until, self.rest) {
            // A rest that is not over keeps its length.
            (Some(until), Some(rest)) if now < until => rest,
            (Some(until), Some(rest)) if now < until + rest => page::doubled(Some(rest), REST),
            _ => page::doubled(None, REST),
        };
        (self.rest, self.until) = (Some(rest), Some(now + rest));
    }

    /// Time until the rest ends; `None` if folding may go on.
    pub fn rests(&self, now: Instant) -> Option<Duration> {
        self.until.map(|until| until.saturating_duration_since(now)).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn fork_storm_is_noticed_within_a_burst() {
        let mut now = Instant::now();
        let mut forks = Forks::new(now);
        let dear = (1..20).find_map(|n| {
            now += MS * 11;
            forks.add(1, 10_000, now).map(|most| (n, most))
        });
        let (n, most) = dear.unwrap();
        assert!((4..=5).contains(&n) && most < 1000, "after {n} forks, {most} may stay");
        assert_eq!([forks.rests(now), forks.rests(now + REST.0)], [Some(REST.0), None]);
    }

    #[test]
    fn fork_waits_while_mappings_are_given_back_and_not_for_ever() {
        let waited = || {
            let begin = Instant::now();
            wait();
            begin.elapsed()
        };
        let ends_early = || {
            let begin = Instant::now();
            have_wait(true);
            let first = std::thread::scope(|scope| {
                let waiting = scope.spawn(waited);
                std::thread::sleep(MS * 20);
                have_wait(false);
                waiting.join().unwrap()
            });
            first > MS * 10 && waited() < MS * 10 && begin.elapsed() < WAIT_LONGEST
        };
        // A busy machine may take several tries. If nothing ended the wait, each would take the longest time.
        assert!((0..10).any(|_| ends_early()));
        let begin = Instant::now();
        have_wait(true);
        // Nobody ends it.
        wait();
        assert!(begin.elapsed() >= WAIT_LONGEST);
    }

    #[test]
    fn storm_in_which_telling_alone_is_too_dear_leaves_no_mapping() {
        let mut now = Instant::now();
        let mut forks = Forks::new(now);
        let most = (1..1000).find_map(|_| {
            now += MS;
            forks.add(1, 100, now)
        });
        assert_eq!(most, Some(0));
    }

    #[test]
    fn rare_forks_and_forks_of_few_mappings_cost_nothing() {
        let begin = Instant::now();
        let mut forks = Forks::new(begin);
        // A server that saves itself once a minute, with as many mappings as there may be.
        assert!((1..100).all(|n| forks.add(1, 65_000, begin + Duration::from_secs(60) * n).is_none()));
        let mut forks = Forks::new(begin);
        // Ten forks in a second, with two thousand mappings: 4% of the time.
        assert!((1..10_000).all(|n| forks.add(1, 2000, begin + MS * 100 * n).is_none()));
        // Ten forks in a second, with ten thousand mappings: 20% of the time.
        assert!((10_000..10_100).any(|n| forks.add(1, 10_000, begin + MS * 100 * n).is_some()));
    }

    #[test]
    fn mappings_that_stay_cost_less_than_is_tolerated() {
        let mut now = Instant::now();
        let mut forks = Forks::new(now);
        let mut mappings = 40_000;
        for _ in 0..100_000 {
            now += MS * 20;
            mappings = forks.add(1, mappings, now).unwrap_or(mappings);
        }
        assert!((100..=500).contains(&mappings), "{mappings} mappings at 50 forks a second");
    }

    #[test]
    fn rest_doubles_where_forks_go_on_and_begins_anew_after_quiet() {
        let mut now = Instant::now();
        let mut forks = Forks::new(now);
        let storm = |forks: &mut Forks, now: &mut Instant| {
            while forks.add(1, 10_000, *now).is_none() {
                *now += MS * 11;
            }
            forks.rests(*now).unwrap()
        };
        let first = storm(&mut forks, &mut now);
        now += first;
        assert_eq!([first, storm(&mut forks, &mut now)], [REST.0, REST.0 * 2]);
        now += REST.0 * 20;
        assert_eq!(storm(&mut forks, &mut now), REST.0);
        for _ in 0..20 {
            now += forks.rests(now).unwrap();
            storm(&mut forks, &mut now);
        }
        assert_eq!(forks.rests(now), Some(REST.1));
    }
}
