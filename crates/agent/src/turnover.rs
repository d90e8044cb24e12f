//! How fast a member's memory changes, and which of its pages are worth folding at a given time.
//!
//! A fold is *short-lived* when the member writes the page again or discards it within a minute ([`LIFE`]): it was made for
//! nothing.
//! Everything here serves one aim: at most 1 fold in 20 is short-lived.
//!
//! Members write by fits and starts. In a *burst*, a member writes much memory that was at rest. In the *quiet
//! interval* after it, it writes little more than the pages that it writes all the time. The pages that a burst has
//! filled stay until the next burst. So they are folded as soon as a quiet interval has begun, unless the next burst is
//! expected soon:
//!
//! ```text
//!            changes at a rate above 1/20 of all pages a minute, which in a row
//!            add up to more than 1/20 of all pages and 1/4 of the decayed peak burst size
//!   QUIET INTERVAL ---------------------------------------------------------------> BURST
//!         ^                                                                           |
//!         `---------------------------------------------------------------------------'
//!            4 s below that rate
//! ```
//!
//! | state | pages that the agent folds |
//! |---|---|
//! | quiet interval expected to go on, from its 64th second on | all that have rested for a round |
//! | quiet interval expected to go on, before that | all that were not written for 4 s |
//! | quiet interval expected to end soon | those of open ages, but none that the last burst filled |
//! | burst | those of open ages |
//!
//! **Gaps.** A quiet interval of less than 16 s may be a gap within a burst. A burst that follows one need not reach
//! 1/4 of the peak, and counts as the same burst.
//!
//! **Expectation.** A quiet interval is expected to go on for another 64 s by the lengths of the last 8. At most one of
//! them may have ended within the 64 s that lie ahead of the length which this one has reached. Intervals of less than
//! 2/3 of that length are left out: they tell nothing of this one. Before its 16th second, 2 of the 8 must also have
//! outlived those 64 s. A member that has no quiet interval behind it is exempt.
//!
//! **Ages.** The age of a page is the time since it was last written. Folds and short-lived folds are counted by age
//! when they are made, for ten ages that double from 2 s to 1024 s. They open and close each age:
//!
//! ```text
//!   folds of this age, lately            the age is
//!   fewer than 1 in 20 were short-lived  open
//!   1 in 20 or more were                 closed
//!   too few are known                    open if a page so old has outlived a burst, else closed
//! ```
//!
//! Of a closed age, only *probe pages* are folded: a few pages here and there, which show what becomes of them. When
//! their folds last, the age opens again. While a quiet interval is expected to end soon, the ages of pages that the
//! last burst may have filled count as closed. The next burst is likely to write these pages again.
//!
//! Folds in quiet intervals that are expected to go on are not counted. They would say little, since they are of those
//! pages alone that nothing else had folded before. Nor could probe pages tell: huge pages are split only when half of
//! their pages would fold.

use std::time::{Duration, Instant};

/// Time that a page must stay unwritten after it was folded, else the fold is short-lived: 60 s.
pub const LIFE: Duration = Duration::from_secs(60);
/// Tolerated share of short-lived folds: 1 in 20.
const SHORT_ONE_IN: f64 = 20.0;
/// Share of all pages that a burst must fill: 1/20 a minute to go on, and 1/20 in a row to begin.
const FILLED_ONE_IN: f64 = 20.0;
/// Share of the decayed peak burst size that a burst must fill to begin: 1/4.
const PEAK_ONE_IN: f64 = 4.0;
/// Half-life of the peak burst size: 300 s.
const PEAK_HALF_LIFE: Duration = Duration::from_secs(300);
/// Shortest time over which the rate of changes is measured: 2 s.
const STEP: Duration = Duration::from_secs(2);
/// Number of changed pages in one step that never make a burst, however small the member is.
const FEW_PAGES: u64 = 64;
/// Length of a burst from which on the agent looks at the member seldom: 60 s. It may notice the end some seconds late.
const LONG_BURST: Duration = Duration::from_secs(60);
/// Length from which on a burst shows which pages stay: 96 s. During it, a page that was not written for 2/3 of this
/// time (64 s) counts as one that outlives the burst.
const CYCLIC_BURST: Duration = Duration::from_secs(96);
/// Seconds without a burst that begin a quiet interval.
const QUIET_SECONDS: u32 = 4;
/// Length of a quiet interval, in seconds, from which on every page that has rested for a round is folded.
const LONG_QUIET_SECONDS: u32 = 64;
/// Half-life of the counts of folds: 300 s.
const FOLDS_HALF_LIFE: Duration = Duration::from_secs(300);
/// Length of the parts of time by which recent folds are counted: 10 s.
const PART: Duration = Duration::from_secs(10);
/// Number of parts after which it is known whether a fold was short-lived: 80 s in all.
const PARTS: usize = 8;
/// Fewest folds of an age from which anything is learned; of an age that does not last, fewest short-lived ones.
const ENOUGH_FOLDS: f64 = 30.0;
/// Highest number of past folds that count in a closed age. Probe pages are few, and must be able to outweigh the past.
const CLOSED_FOLDS: f64 = 600.0;
/// Highest share of short-lived ones among the past folds that count in a closed age: 1 in 10. The reason is the same.
const CLOSED_SHORT_ONE_IN: f64 = 10.0;
/// Number of past quiet intervals that are remembered.
const REMEMBERED: usize = 8;
/// Time that a quiet interval must be expected to go on, in seconds: the life of a fold, and 4 s of rest before it.
const SOON_SECONDS: u32 = LIFE.as_secs() as u32 + 4;
/// Number of past quiet intervals that must have gone on for as long, when this one is shorter than a gap may be.
const SEEN_INTERVALS: usize = 2;
/// Length of a quiet interval, in seconds, below which it may be a gap within a burst.
const GAP_SECONDS: u32 = 16;
/// Seconds without a write after which a page is folded in a quiet interval that is expected to go on.
const RESTED_SECONDS: u32 = 4;
/// Length of the first part of a quiet interval, in seconds, in which pages that the burst left behind are still being
/// folded.
const SETTLED_SECONDS: u32 = 16;

/// Seconds without a write after which a page is at rest. Only writes to pages at rest count as changes: they show that
/// something new has begun.
pub const REST: u32 = 12;

/// Lower bounds of the ages that are told apart, in seconds.
const AGES: [u32; 10] = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
/// Number of moments of folds: moment 0, from which nothing is learned, and one for each of the ages (see [`moment`]).
pub const MOMENTS: usize = 1 + AGES.len();
/// Lowest age, in seconds, that is open while too little is known of its folds; [`Turnover::first_old`] raises it.
const OLD_SECONDS: u32 = 128;
/// Share of pieces of memory that are probe pages, for each age: 1 in 256.
const PROBE_ONE_IN: u64 = 256;
/// Length of such a piece, in pages.
const PROBE_PIECE_PAGES: u64 = 16;

/// Numbers of pages, by moment.
pub type ByMoment = [u64; MOMENTS];

/// Adds `more` to `sum`, moment by moment.
pub fn add(sum: &mut ByMoment, more: ByMoment) {
    sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
}

const _: () = assert!(MOMENTS <= 16, "the moment of a page's last fold takes four bits");

/// The moment of a fold: the number of the page's age, counted from 1. Moment 0 is that of folds in a quiet interval
/// that is expected to go on, and of pages below the first age. Pages that were never seen written (`seconds` is
/// `None`) have it, too.
pub fn moment(is_quiet: bool, seconds: Option<u32>) -> usize {
    seconds.filter(|_| !is_quiet).map_or(0, |seconds| AGES.partition_point(|begin| *begin <= seconds))
}

/// The age for which the page with this number is a probe page, if it is one.
fn probe_of(page: u64) -> Option<usize> {
    let piece = (page / PROBE_PIECE_PAGES).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    Some((piece % PROBE_ONE_IN) as usize).filter(|age| (1..MOMENTS).contains(age))
}

/// The pages that are worth folding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worth {
    /// All that have rested for a round.
    All,
    /// All that were not written for [`RESTED_SECONDS`].
    Rested,
    /// Those of the open ages, one bit for each, and probe pages.
    Ages(u16),
}

impl Worth {
    /// Whether the page with this number may be folded, which was last written `seconds` ago.
    pub fn allows(self, page: u64, seconds: u32) -> bool {
        let age = moment(false, Some(seconds));
        match self {
            Self::All => true,
            Self::Rested => seconds >= RESTED_SECONDS,
            Self::Ages(open) => open >> age & 1 == 1 || probe_of(page) == Some(age),
        }
    }
}

/// How much changes, and so how often the agent looks at the member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Little changes. Pages that rest are worth folding whenever the agent finds them.
    Little,
    /// Little changes. Which pages are worth folding depends on the time, so the agent must not be late.
    Some,
    /// A burst goes on, or has ended within the last [`SETTLED_SECONDS`].
    Much,
    /// A burst has gone on for [`LONG_BURST`]. The agent does not watch for its end.
    MuchForLong,
}

/// A time in which little changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuietInterval {
    /// Its length until the time asked about.
    pub seconds: u32,
    /// Whether it is expected to go on for [`SOON_SECONDS`].
    pub goes_on: bool,
}

/// Pages that were folded, and short-lived folds, by moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Folds {
    /// Pages that were folded.
    pub made: ByMoment,
    /// Folds that are known to have been short-lived.
    pub short: ByMoment,
}

impl Folds {
    /// None.
    pub const NONE: Self = Self { made: [0; MOMENTS], short: [0; MOMENTS] };
}

/// How fast the member's memory changes: its bursts, its quiet intervals, and its short-lived folds.
#[derive(Debug)]
pub struct Turnover {
    /// Pages that have changed in the current step.
    changed: u64,
    /// The beginning of the current step.
    since: Instant,
    /// Pages that have changed in a row: in the last steps whose rate was that of a burst; 0 if the last one's was not.
    filled: u64,
    /// The beginning of the first of these steps.
    filled_since: Instant,
    /// The peak burst size, in pages, decayed by [`PEAK_HALF_LIFE`].
    peak: f64,
    /// The beginning of the last burst. A member begins with one.
    burst_since: Instant,
    /// The end of the last step that was part of a burst.
    last_burst: Instant,
    /// Lengths of past quiet intervals in seconds, the latest first; 0 for none.
    intervals: [u32; REMEMBERED],
    /// Folds of the current part of time, and of the parts before it.
    lately: [ByMoment; PARTS],
    /// The beginning of the current part.
    lately_since: Instant,
    /// Folds among `lately` that were short-lived.
    lately_short: [f64; MOMENTS],
    /// Folds before those in `lately`, decayed by [`FOLDS_HALF_LIFE`].
    made: [f64; MOMENTS],
    /// Folds among `made` that were short-lived.
    short: [f64; MOMENTS],
}

impl Turnover {
    /// Of a member in which nothing has changed.
    pub const fn new(now: Instant) -> Self {
        Self {
            changed: 0,
            since: now,
            filled: 0,
            filled_since: now,
            peak: 0.0,
            burst_since: now,
            last_burst: now,
            intervals: [0; REMEMBERED],
            lately: [[0; MOMENTS]; PARTS],
            lately_since: now,
            lately_short: [0.0; MOMENTS],
            made: [0.0; MOMENTS],
            short: [0.0; MOMENTS],
        }
    }

    /// Records that the program has run for `age` and is idle. Unless a burst was seen, it is in a quiet interval then.
    /// Of a program that was attached while it ran, nothing else is known of the time before.
    pub fn begin_quiet(&mut self, age: Duration, now: Instant) {
        if self.peak == 0.0 && self.last_burst == self.burst_since {
            let quiet = age.min(Duration::from_secs(LONG_QUIET_SECONDS.into()));
            self.last_burst = now.checked_sub(quiet).map_or(self.last_burst, |since| since.min(self.last_burst));
        }
    }

    /// Records that `changed` of the member's `pages` were written after they had been at rest.
    pub fn add(&mut self, changed: u64, pages: u64, now: Instant) {
        self.changed += changed;
        let time = now.saturating_duration_since(self.since);
        if time < STEP {
            return;
        }
        let one_in = pages as f64 / FILLED_ONE_IN;
        let is_much =
            self.changed > FEW_PAGES && self.changed as f64 > one_in * time.as_secs_f64() / LIFE.as_secs_f64();
        if self.filled == 0 {
            self.filled_since = self.since;
        }
        self.filled = if is_much { self.filled + self.changed } else { 0 };
        self.peak *= decay(time, PEAK_HALF_LIFE);
        // The state when this step began.
        let (quiet, filled) = (self.quiet(self.since), self.filled.min(pages) as f64);
        let is_large = filled * PEAK_ONE_IN > self.peak || quiet.is_some_and(|quiet| quiet.seconds < GAP_SECONDS);
        if is_much && (quiet.is_none() || filled > one_in && is_large) {
            // Steps may be longer than the shortest quiet interval. A burst that goes on throughout has none in it.
            let seconds = self.filled_since.saturating_duration_since(self.last_burst).as_secs() as u32;
            if seconds >= QUIET_SECONDS {
                self.intervals.rotate_right(1);
                self.intervals[0] = seconds;
            }
            if seconds >= GAP_SECONDS {
                self.burst_since = self.filled_since;
            }
            (self.last_burst, self.peak) = (now, self.peak.max(filled));
        }
        (self.changed, self.since) = (0, now);
    }

    /// The quiet interval; `None` in a burst.
    pub fn quiet(&self, now: Instant) -> Option<QuietInterval> {
        let seconds = now.saturating_duration_since(self.last_burst).as_secs() as u32;
        let is_soon_over = |quiet: &&u32| **quiet + **quiet / 2 > seconds && **quiet < seconds + SOON_SECONDS;
        let were_seen =
            self.intervals.iter().filter(|quiet| **quiet >= seconds + SOON_SECONDS).count() >= SEEN_INTERVALS;
        let is_known = were_seen || seconds >= GAP_SECONDS || self.intervals == [0; REMEMBERED];
        let goes_on = is_known && self.intervals.iter().filter(is_soon_over).count() <= 1;
        // Until the next step ends, the burst may well be going on.
        (seconds >= QUIET_SECONDS && self.since > self.last_burst).then_some(QuietInterval { seconds, goes_on })
    }

    /// Counts the pages that were folded since the last call, and the folds that have proved short-lived since.
    pub fn judge(&mut self, folds: &Folds, now: Instant) {
        while now.saturating_duration_since(self.lately_since) >= PART {
            let over = self.lately.iter().all(|folds| *folds == [0; MOMENTS]);
            self.lately_since = if over { now } else { self.lately_since + PART };
            for moment in 0..MOMENTS {
                self.judge_oldest(moment);
            }
            self.lately.rotate_right(1);
            self.lately[0] = [0; MOMENTS];
        }
        for moment in 0..MOMENTS {
            self.lately[0][moment] += folds.made[moment];
            self.lately_short[moment] += folds.short[moment] as f64;
        }
    }

    /// Adds the folds of the oldest part to those that are judged, and with them their share of the recent short-lived
    /// ones.
    fn judge_oldest(&mut self, moment: usize) {
        let (made, all) = (self.lately[PARTS - 1][moment] as f64, self.lately_made(moment));
        let short = if made < all { self.lately_short[moment] * made / all } else { self.lately_short[moment] };
        self.lately_short[moment] -= short;
        let fade = decay(PART, FOLDS_HALF_LIFE);
        let (mut made_before, mut short_before) = (self.made[moment] * fade, self.short[moment] * fade);
        if self.lasts(moment) == Some(false) {
            let weight = CLOSED_FOLDS / made_before.max(CLOSED_FOLDS);
            short_before = short_before.min(made_before / CLOSED_SHORT_ONE_IN) * weight;
            made_before *= weight;
        }
        self.made[moment] = made_before + made;
        self.short[moment] = short_before + short;
    }

    /// The pages that are worth folding.
    pub fn worth(&self, now: Instant) -> Worth {
        match self.quiet(now) {
            Some(QuietInterval { goes_on: true, seconds: LONG_QUIET_SECONDS.. }) => Worth::All,
            Some(QuietInterval { goes_on: true, .. }) => Worth::Rested,
            quiet => {
                let old = self.first_old(quiet, now);
                // The last burst of writes may have filled pages of this age. They were written before this quiet
                // interval, and are not old enough to have outlived a burst.
                let is_of_the_burst =
                    |age| quiet.is_some_and(|quiet| age >= moment(false, Some(quiet.seconds)) && age < old);
                let is_open = |age| !is_of_the_burst(age) && self.lasts(age).unwrap_or(age >= old);
                Worth::Ages((1..MOMENTS).fold(0, |open, age| open | u16::from(is_open(age)) << age))
            }
        }
    }

    /// How much changes.
    pub fn change(&self, now: Instant) -> Change {
        match (self.worth(now), self.quiet(now)) {
            (Worth::All, _) => Change::Little,
            (_, Some(QuietInterval { seconds: SETTLED_SECONDS.., .. })) => Change::Some,
            (_, None) if now.saturating_duration_since(self.burst_since) >= LONG_BURST => Change::MuchForLong,
            _ => Change::Much,
        }
    }

    /// The first age at which a page is taken to have outlived a burst.
    ///
    /// - After twice the longest quiet interval and [`SOON_SECONDS`], a page is too old to have been filled by the last
    ///   burst. The last age is an exception: it has no upper bound, and such a page may be of it when quiet intervals
    ///   are long.
    /// - In a burst that has reached [`CYCLIC_BURST`], and in a gap of it, 2/3 of that length is enough.
    fn first_old(&self, quiet: Option<QuietInterval>, now: Instant) -> usize {
        let longest = self.intervals.iter().copied().max().unwrap_or(0);
        let burst = now.saturating_duration_since(self.burst_since);
        let goes_on = quiet.is_none_or(|quiet| quiet.seconds < GAP_SECONDS);
        let old = if goes_on && burst >= CYCLIC_BURST {
            (CYCLIC_BURST * 2 / 3).as_secs() as u32
        } else {
            longest.saturating_mul(2).saturating_add(SOON_SECONDS).max(OLD_SECONDS)
        };
        (1 + AGES.partition_point(|begin| *begin < old)).min(AGES.len())
    }

    /// Whether folds of this moment last; `None` while too few are known.
    fn lasts(&self, moment: usize) -> Option<bool> {
        let (made, short) = (self.made[moment], self.short[moment] + self.lately_short[moment]);
        let are_few = short * SHORT_ONE_IN < made + self.lately_made(moment);
        (if are_few { made } else { short } >= ENOUGH_FOLDS).then_some(are_few)
    }

    fn lately_made(&self, moment: usize) -> f64 {
        self.lately.iter().map(|folds| folds[moment]).sum::<u64>() as f64
    }
}

/// The share that is left after `time` of a quantity with this half-life.
///
/// It does without the C library's mathematics: else everything that a member executes would load that, too.
fn decay(time: Duration, half_life: Duration) -> f64 {
    let lives = time.as_secs_f64() / half_life.as_secs_f64();
    let whole = lives as i32;
    let exponent = (f64::from(whole) - lives) * std::f64::consts::LN_2;
    // The first terms of the exponential series. The exponent is between -ln 2 and 0, so the others are below 10^-9.
    let of_part = (1..=10).rev().fold(1.0, |sum, n| 1.0 + exponent / f64::from(n) * sum);
    of_part * 0.5_f64.powi(whole)
}

#[cfg(test)]
#[path = "turnover_tests.rs"]
mod simulation;

#[cfg(test)]
mod tests;
