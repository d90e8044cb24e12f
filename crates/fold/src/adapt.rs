//! A scan rate that follows its yield, for groups with `scan-rate = "adaptive"` (Kim, section 5.3).
//!
//! Each [`WINDOW`] is judged by the first row that fits:
//!
//! | in this window, the group | rate |
//! |---|---|
//! | took more processor time than its budget | half |
//! | took 1/100 of a processor, while tasks of the host waited for a processor in a tenth of the time | half |
//! | fingerprinted less than half of the pages that the rate allows | as before: the rate does not limit it |
//! | reclaimed a page for each [`Price::good`] of processor time | double, if the double processor time is within the budget and tasks seldom wait for a processor |
//! | reclaimed less than a page for each [`Price::poor`] | half |
//! | none of these | as before |
//!
//! Reclaimed pages are those that folded and were not written again within a minute. While tasks of the host wait for
//! memory, a page is worth eight times as much. Then a window with a good yield doubles the rate even if other tasks
//! wait for a processor. All processor time of the worker and of the agents counts.

use crate::group::Group;
use std::time::{Duration, Instant};

/// Time after which the rate is judged by the work of the group: 10 s, the same time as the kernel's `avg10` of waiting
/// tasks (PSI). It is long enough for agents to report their counters.
pub const WINDOW: Duration = Duration::from_secs(10);
/// Scan rate with which a group begins, in pages a second: 4096, or 16 MiB a second.
pub const FIRST: u32 = 4096;
/// Lowest scan rate of a group, in pages a second: 256, or 1 MiB a second.
pub const LOWEST: u32 = 256;
/// Highest scan rate of a group, in pages a second: 1,048,576, or 4 GiB a second.
pub const HIGHEST: u32 = 1 << 20;
/// A group that takes less than this part of a processor keeps its rate even if tasks wait for a processor: 1/100.
const LITTLE: f64 = 0.01;
/// If some task waited for a processor in this percentage of the time or more, the group is taken to delay other tasks.
const CROWDED_PERCENT: f64 = 10.0;
/// If some task waited for memory in this percentage of the time or more, the host counts as short of memory.
const SHORT_PERCENT: f64 = 1.0;

/// Processor time that a reclaimed page may take.
#[derive(Clone, Copy, Debug)]
struct Price {
    /// If a reclaimed page took no more processor time than this, the rate is doubled: about the time of reading a page
    /// from a swap device.
    good: Duration,
    /// If a reclaimed page took more processor time than this, the rate is halved.
    poor: Duration,
}

/// Prices while the host has memory: 100 us and 400 us.
const USUAL: Price = Price { good: Duration::from_micros(100), poor: Duration::from_micros(400) };
/// Prices while tasks wait for memory: 800 us and 3200 us.
const SHORT: Price = Price { good: Duration::from_micros(800), poor: Duration::from_micros(3200) };

/// What a group did in a window ([`WINDOW`]), and the pages that it reclaimed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Length of the window.
    pub time: Duration,
    /// Pages that were fingerprinted.
    pub hashed: u64,
    /// Pages that were folded, less those that were written again soon.
    pub reclaimed: u64,
    /// Processor time of worker and agents.
    pub cpu: Duration,
}

/// Parts of the last 10 s in which some task of the host waited, in percent. `None` on kernels without PSI.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Waiting {
    /// For a processor.
    pub cpu: Option<f64>,
    /// For memory.
    pub memory: Option<f64>,
}

/// The rate after a window, in pages a second, and the reason if the rate has changed. `budget_percent` is a percentage
/// of one processor.
pub fn next(rate: u32, budget_percent: u8, work: &Work, waiting: &Waiting) -> (u32, String) {
    let seconds = work.time.as_secs_f64().max(0.001);
    let (took, budget) = (work.cpu.as_secs_f64() / seconds, f64::from(budget_percent) / 100.0);
    let is_short = waiting.memory.is_some_and(|percent| percent >= SHORT_PERCENT);
    let price = if is_short { SHORT } else { USUAL };
    let costs = |most: Duration| work.cpu.as_secs_f64() <= most.as_secs_f64() * work.reclaimed as f64;
    let (is_good, is_poor) = (work.reclaimed > 0 && costs(price.good), !costs(price.poor));
    let crowd = waiting.cpu.filter(|percent| *percent >= CROWDED_PERCENT && !(is_short && is_good));
    let (slower, faster) = ((rate / 2).max(LOWEST), rate.saturating_mul(2).min(HIGHEST));
    let binds = work.hashed as f64 >= f64::from(rate) * seconds / 2.0;
    let yields = || {
        let memory = if is_short { ", while tasks waited for memory" } else { "" };
        let (reclaimed, ms) = (work.reclaimed, work.cpu.as_millis());
        format!("{reclaimed} pages were reclaimed for {ms} ms of processor time in {seconds:.0} s{memory}")
    };
    if took > budget {
        (slower, format!("it took {:.1}% of a processor, and may take {budget_percent}%", took * 100.0))
    } else if let Some(percent) = crowd.filter(|_| took >= LITTLE) {
        (slower, format!("tasks waited for a processor {percent:.0}% of the time, and it took {:.1}%", took * 100.0))
    } else if binds && is_good && crowd.is_none() && took * 2.0 <= budget {
        (faster, yields())
    } else if binds && is_poor {
        (slower, yields())
    } else {
        (rate, String::new())
    }
}

/// Counters of a group, which only grow.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counted {
    /// Pages that were fingerprinted.
    pub hashed: u64,
    /// Pages that were folded.
    pub folds: u64,
    /// Folded pages that were written again within a minute.
    pub short_folds: u64,
    /// Processor time of worker and agents.
    pub cpu: Duration,
}

impl Counted {
    /// The work since the counters were `then`. Members choose some of these numbers, so differences do not go below 0.
    fn since(&self, then: &Self, time: Duration) -> Work {
        let short = self.short_folds.saturating_sub(then.short_folds);
        Work {
            time,
            hashed: self.hashed.saturating_sub(then.hashed),
            reclaimed: self.folds.saturating_sub(then.folds).saturating_sub(short),
            cpu: self.cpu.saturating_sub(then.cpu),
        }
    }
}

/// The rate of a group, and the window that is under way.
#[derive(Clone, Debug)]
pub struct Adaptive {
    /// Most pages that the group's members together fingerprint in a second, at the moment.
    pub rate: u32,
    /// Reason of the last change of the rate; empty before the first change.
    pub reason: String,
    since: Instant,
    then: Counted,
}

impl Adaptive {
    /// Begins with the rate [`FIRST`].
    pub const fn new(now: Instant, counted: Counted) -> Self {
        Self { rate: FIRST, reason: String::new(), since: now, then: counted }
    }

    /// Whether the window is over.
    pub fn is_due(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= WINDOW
    }

    /// Judges the window that is over, and begins the next one. Returns whether the rate has changed.
    pub fn judge(&mut self, now: Instant, budget_percent: u8, counted: Counted, waiting: &Waiting) -> bool {
        let work = counted.since(&self.then, now.saturating_duration_since(self.since));
        (self.since, self.then) = (now, counted);
        let (rate, reason) = next(self.rate, budget_percent, &work, waiting);
        let changes = rate != self.rate;
        if changes {
            (self.rate, self.reason) = (rate, reason);
        }
        changes
    }
}

impl Group {
    /// Begins or ends a scan rate that follows its yield, by the settings. A fixed `scan_rate`, as the supervisor sets
    /// under memory pressure, takes precedence.
    pub(crate) fn begin_to_adapt(&mut self, now: Instant) {
        if self.settings.scan_budget_percent.is_none() || self.settings.scan_rate.is_some() {
            self.adaptive = None;
        } else if self.adaptive.is_none() {
            self.adaptive = Some(Adaptive::new(now, self.counted()));
        }
    }

    /// Judges the window if it is over. Tells the supervisor if the rate has changed.
    pub(crate) fn tick_rate(&mut self, now: Instant) {
        let Some(budget) = self.settings.scan_budget_percent else { return };
        let Some(mut adaptive) = self.adaptive.take_if(|adaptive| adaptive.is_due(now)) else { return };
        let waiting = Waiting { cpu: host::cpu_waited_percent(), memory: host::memory_stalled_percent() };
        let before = adaptive.rate;
        if adaptive.judge(now, budget, self.counted(), &waiting) {
            let Adaptive { rate, reason, .. } = &adaptive;
            self.event(format!("fingerprints up to {rate} pages a second, {before} before: {reason}"));
        }
        self.adaptive = Some(adaptive);
    }

    fn counted(&self) -> Counted {
        let mut done = self.former.done;
        self.members.values().for_each(|member| done.add(&member.stats.done));
        let cpu = host::own_cpu_time().saturating_add(Duration::from_micros(done.agent_cpu_us));
        Counted { hashed: done.pages_hashed, folds: done.folds, short_folds: done.short_folds, cpu }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: u8 = 10;
    const NOBODY: Waiting = Waiting { cpu: Some(0.0), memory: Some(0.0) };
    const CROWD: Waiting = Waiting { cpu: Some(10.0), memory: Some(0.0) };

    /// A group on a clock of its own. It fingerprints all that it may.
    struct Scene {
        adaptive: Adaptive,
        now: Instant,
        counted: Counted,
        /// Pages that fold when they are fingerprinted, one in so many.
        one_in: u64,
        /// Pages that are still to be fingerprinted.
        left: u64,
        /// Processor time of a fingerprint, and of a fold.
        costs: (Duration, Duration),
    }

    impl Scene {
        fn new(one_in: u64) -> Self {
            let now = Instant::now();
            let costs = (Duration::from_nanos(500), Duration::from_micros(4));
            Self {
                adaptive: Adaptive::new(now, Counted::default()),
                now,
                counted: Counted::default(),
                one_in,
                left: u64::MAX,
                costs,
            }
        }

        /// Lets windows pass, and returns the rate after each.
        fn pass(&mut self, windows: u32, waiting: &Waiting) -> Vec<u32> {
            (0..windows).map(|_| self.window(waiting)).collect()
        }

        fn window(&mut self, waiting: &Waiting) -> u32 {
            self.now += WINDOW;
            let hashed = (u64::from(self.adaptive.rate) * WINDOW.as_secs()).min(self.left);
            let folds = hashed / self.one_in;
            self.left -= hashed;
            self.counted.hashed += hashed;
            self.counted.folds += folds;
            let many = |each: Duration, count: u64| Duration::from_nanos(each.as_nanos() as u64 * count);
            self.counted.cpu += many(self.costs.0, hashed) + many(self.costs.1, folds);
            assert!(self.adaptive.is_due(self.now));
            self.adaptive.judge(self.now, BUDGET, self.counted, waiting);
            self.adaptive.rate
        }
    }

    #[test]
    fn rate_doubles_while_it_yields_until_the_budget_is_in_sight() {
        let mut scene = Scene::new(2);
        // A page takes 2.5 us, so that 32,768 pages a second take 8% of a processor.
        let rates = scene.pass(6, &NOBODY);
        assert_eq!(rates, [8192, 16_384, 32_768, 32_768, 32_768, 32_768]);
        assert!(scene.adaptive.reason.contains("81920 pages were reclaimed for 409 ms"), "{}", scene.adaptive.reason);
        // Folding takes more processor time now, so that the budget limits the rate.
        scene.costs.1 = Duration::from_micros(40);
        assert_eq!(scene.pass(5, &NOBODY), [16_384, 8192, 4096, 4096, 4096]);
        assert!(scene.adaptive.reason.contains("may take 10%"), "{}", scene.adaptive.reason);
    }

    #[test]
    fn rate_falls_to_its_least_where_nothing_folds_and_rises_again() {
        let mut scene = Scene::new(u64::MAX);
        assert_eq!(scene.pass(6, &NOBODY), [2048, 1024, 512, 256, 256, 256]);
        scene.one_in = 64;
        assert_eq!(scene.pass(3, &NOBODY), [512, 1024, 2048]);
    }

    #[test]
    fn rate_stays_while_there_is_less_to_do_than_it_allows() {
        let mut scene = Scene::new(2);
        scene.left = 40_960 + 81_920;
        assert_eq!(scene.pass(2, &NOBODY), [8192, 16_384]);
        assert_eq!(scene.pass(50, &NOBODY), [16_384; 50]);
    }

    #[test]
    fn rate_falls_while_others_wait_for_a_processor_that_it_takes() {
        let mut scene = Scene::new(2);
        scene.adaptive.rate = 32_768;
        // 2048 pages a second take 0.5% of a processor: nobody waits for that.
        assert_eq!(scene.pass(6, &CROWD), [16_384, 8192, 4096, 2048, 2048, 2048]);
        let few = Waiting { cpu: Some(9.9), ..NOBODY };
        assert_eq!(next(8192, BUDGET, &work(81_920, 40_960, 200), &few).0, 16_384);
        assert_eq!(next(8192, BUDGET, &work(81_920, 40_960, 200), &CROWD).0, 4096);
    }

    #[test]
    fn page_is_worth_more_while_tasks_wait_for_memory() {
        let short = Waiting { memory: Some(1.0), ..NOBODY };
        let rates = |reclaimed, cpu_ms| {
            [NOBODY, short].map(|waiting| next(4096, BUDGET, &work(40_960, reclaimed, cpu_ms), &waiting).0)
        };
        assert_eq!(rates(1000, 101), [4096, 8192]);
        assert_eq!(rates(1000, 401), [2048, 8192]);
        assert_eq!(rates(100, 321), [2048, 2048]);
        assert_eq!(rates(101, 321), [2048, 4096]);
        // A good yield counts then although others wait for a processor.
        let both = Waiting { cpu: Some(50.0), ..short };
        assert_eq!(next(4096, BUDGET, &work(40_960, 1000, 200), &both).0, 8192);
        assert_eq!(next(4096, BUDGET, &work(40_960, 0, 200), &both).0, 2048);
    }

    #[test]
    fn kernel_without_psi_is_judged_by_yield_and_budget() {
        let nothing = Waiting::default();
        assert_eq!(next(4096, BUDGET, &work(40_960, 20_480, 100), &nothing).0, 8192);
        assert_eq!(next(4096, BUDGET, &work(40_960, 20_480, 1001), &nothing).0, 2048);
    }

    #[test]
    fn bounds_hold_and_no_number_overflows() {
        assert_eq!(next(HIGHEST, 100, &work(u64::MAX, u64::MAX, 1), &NOBODY).0, HIGHEST);
        assert_eq!(next(LOWEST, 1, &work(u64::MAX, 0, 5000), &CROWD).0, LOWEST);
        assert_eq!(next(4096, BUDGET, &Work::default(), &NOBODY).0, 4096);
        let most = Counted { hashed: u64::MAX, folds: u64::MAX, short_folds: u64::MAX, cpu: Duration::MAX };
        assert_eq!(Counted::default().since(&most, WINDOW), Work { time: WINDOW, ..Work::default() });
        assert_eq!(most.since(&Counted::default(), WINDOW).reclaimed, 0);
    }

    fn work(hashed: u64, reclaimed: u64, cpu_ms: u64) -> Work {
        Work { time: WINDOW, hashed, reclaimed, cpu: Duration::from_millis(cpu_ms) }
    }
}
