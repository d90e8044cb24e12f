//! How fast a member's memory changes, and which of its pages are worth folding at a given time.
//!
//! A fold is *short-lived* when the member writes the page again or discards it within a minute ([`LIFE`]): it was made
//! for nothing. Everything here serves one aim: at most 1 fold in 20 is short-lived.
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

use crate::params::{AGES, Cadence, LIFE, MOMENTS, PARTS, Params, Probes, REMEMBERED};
use std::time::{Duration, Instant};

/// Numbers of pages, by moment.
pub type ByMoment = [u64; MOMENTS];

/// Adds `more` to `sum`, moment by moment.
pub fn add(sum: &mut ByMoment, more: ByMoment) {
    sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
}

/// The moment of a fold: the number of the page's age, counted from 1. Moment 0 is that of folds in a quiet interval
/// that is expected to go on, and of pages below the first age. Pages that were never seen written (`seconds` is
/// `None`) have it, too.
pub fn moment(is_quiet: bool, seconds: Option<u32>) -> usize {
    seconds.filter(|_| !is_quiet).map_or(0, |seconds| AGES.partition_point(|begin| *begin <= seconds))
}

/// The age for which the page with this number is a probe page; `None` if it is a probe page for no age.
fn probe_of(probes: Probes, page: u64) -> Option<usize> {
    let piece = (page / probes.piece_pages).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    Some((piece % probes.one_in) as usize).filter(|age| (1..MOMENTS).contains(age))
}

/// The rule by which pages are worth folding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worth {
    /// All pages that have rested for a round.
    All,
    /// All pages that were not written for so many seconds.
    Rested(u32),
    /// Pages of the open ages (bit `n` stands for age `n`), and probe pages.
    Ages(u16, Probes),
}

impl Worth {
    /// Whether the page with this number, which was last written `seconds` ago, may be folded.
    pub fn allows(self, page: u64, seconds: u32) -> bool {
        let age = moment(false, Some(seconds));
        match self {
            Self::All => true,
            Self::Rested(least) => seconds >= least,
            Self::Ages(open, probes) => open >> age & 1 == 1 || probe_of(probes, page) == Some(age),
        }
    }
}

/// A time without a burst: the member writes little more than the pages that it writes all the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuietInterval {
    /// Its length in seconds, until the time asked about.
    pub seconds: u32,
    /// Whether it is expected to go on for another minute ([`Quiet::soon`](crate::params::Quiet)).
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
    /// No folds.
    pub const NONE: Self = Self { made: [0; MOMENTS], short: [0; MOMENTS] };
}

/// How fast the member's memory changes: its bursts, its quiet intervals, and its short-lived folds.
#[derive(Debug)]
pub struct Turnover {
    params: &'static Params,
    /// Pages that have changed in the current step ([`Bursts::step`](crate::params::Bursts)).
    changed: u64,
    /// The beginning of the current step.
    since: Instant,
    /// Pages that have changed in a row: in the last steps whose rate was that of a burst; 0 if the last one's was not.
    filled: u64,
    /// The beginning of the first of these steps.
    filled_since: Instant,
    /// The peak burst size, in pages, decayed.
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
    /// Folds that were made before those in `lately`, decayed.
    made: [f64; MOMENTS],
    /// Folds among `made` that were short-lived.
    short: [f64; MOMENTS],
}

impl Turnover {
    /// The turnover of a member in which nothing has changed so far.
    pub const fn new(params: &'static Params, now: Instant) -> Self {
        Self {
            params,
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

    /// Records that the program started `age` ago and is idle now. Unless a burst was seen, it is in a quiet interval
    /// then. If the agent was attached to a running program, this is all that is known of the time before.
    pub fn begin_quiet(&mut self, age: Duration, now: Instant) {
        if self.peak == 0.0 && self.last_burst == self.burst_since {
            let quiet = age.min(Duration::from_secs(self.params.quiet.long.into()));
            self.last_burst = now.checked_sub(quiet).map_or(self.last_burst, |since| since.min(self.last_burst));
        }
    }

    /// Records that `changed` of the member's `pages` pages were written after they had been at rest.
    pub fn add(&mut self, changed: u64, pages: u64, now: Instant) {
        let bursts = &self.params.bursts;
        self.changed += changed;
        let time = now.saturating_duration_since(self.since);
        if time < bursts.step {
            return;
        }
        let one_in = pages as f64 / bursts.filled_one_in;
        let is_much =
            self.changed > bursts.few_pages && self.changed as f64 > one_in * time.as_secs_f64() / LIFE.as_secs_f64();
        if self.filled == 0 {
            self.filled_since = self.since;
        }
        self.filled = if is_much { self.filled + self.changed } else { 0 };
        self.peak *= decay(time, bursts.peak_half_life);
        // The state when this step began.
        let (quiet, filled) = (self.quiet(self.since), self.filled.min(pages) as f64);
        let is_large =
            filled * bursts.peak_one_in > self.peak || quiet.is_some_and(|quiet| quiet.seconds < bursts.gap_seconds);
        if is_much && (quiet.is_none() || filled > one_in && is_large) {
            // Steps may be longer than the shortest quiet interval. A burst that goes on throughout has none in it.
            let seconds = self.filled_since.saturating_duration_since(self.last_burst).as_secs() as u32;
            if seconds >= self.params.quiet.begins_after {
                self.intervals.rotate_right(1);
                self.intervals[0] = seconds;
            }
            if seconds >= bursts.gap_seconds {
                self.burst_since = self.filled_since;
            }
            (self.last_burst, self.peak) = (now, self.peak.max(filled));
        }
        (self.changed, self.since) = (0, now);
    }

    /// The quiet interval that the member is in; `None` in a burst.
    pub fn quiet(&self, now: Instant) -> Option<QuietInterval> {
        let (p, gap) = (&self.params.quiet, self.params.bursts.gap_seconds);
        let seconds = now.saturating_duration_since(self.last_burst).as_secs() as u32;
        let is_soon_over = |quiet: &&u32| **quiet + **quiet / 2 > seconds && **quiet < seconds + p.soon;
        let were_seen = self.intervals.iter().filter(|quiet| **quiet >= seconds + p.soon).count() >= p.seen;
        let is_known = were_seen || seconds >= gap || self.intervals == [0; REMEMBERED];
        let goes_on = is_known && self.intervals.iter().filter(is_soon_over).count() <= 1;
        // Until the next step ends, the burst may well be going on.
        (seconds >= p.begins_after && self.since > self.last_burst).then_some(QuietInterval { seconds, goes_on })
    }

    /// Counts the pages that were folded since the last call, and the folds that have proved short-lived since.
    pub fn judge(&mut self, folds: &Folds, now: Instant) {
        let part = self.params.judged.part;
        while now.saturating_duration_since(self.lately_since) >= part {
            let over = self.lately.iter().all(|folds| *folds == [0; MOMENTS]);
            self.lately_since = if over { now } else { self.lately_since + part };
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

    /// Adds the folds of the oldest part of time to those by which ages are judged, together with their share of the
    /// recent short-lived folds.
    fn judge_oldest(&mut self, moment: usize) {
        let p = &self.params.judged;
        let (made, all) = (self.lately[PARTS - 1][moment] as f64, self.lately_made(moment));
        let short = if made < all { self.lately_short[moment] * made / all } else { self.lately_short[moment] };
        self.lately_short[moment] -= short;
        let fade = decay(p.part, p.half_life);
        let (mut made_before, mut short_before) = (self.made[moment] * fade, self.short[moment] * fade);
        if self.lasts(moment) == Some(false) {
            let weight = p.closed / made_before.max(p.closed);
            short_before = short_before.min(made_before / p.closed_short_one_in) * weight;
            made_before *= weight;
        }
        self.made[moment] = made_before + made;
        self.short[moment] = short_before + short;
    }

    /// The rule by which pages are worth folding at this time.
    pub fn worth(&self, now: Instant) -> Worth {
        let p = &self.params.quiet;
        match self.quiet(now) {
            Some(QuietInterval { goes_on: true, seconds }) if seconds >= p.long => Worth::All,
            Some(QuietInterval { goes_on: true, .. }) => Worth::Rested(p.rested),
            quiet => {
                let old = self.first_old(quiet, now);
                // The last burst of writes may have filled pages of this age. They were written before this quiet
                // interval, and are not old enough to have outlived a burst.
                let is_of_the_burst =
                    |age| quiet.is_some_and(|quiet| age >= moment(false, Some(quiet.seconds)) && age < old);
                let is_open = |age| !is_of_the_burst(age) && self.lasts(age).unwrap_or(age >= old);
                let open = (1..MOMENTS).fold(0, |open, age| open | u16::from(is_open(age)) << age);
                Worth::Ages(open, self.params.judged.probes)
            }
        }
    }

    /// How often the agent looks at the member.
    ///
    /// | state | numbers |
    /// |---|---|
    /// | a burst, or the first seconds behind one | `busiest` |
    /// | a burst that has gone on for long: the agent does not watch for its end | `seldom` |
    /// | a quiet interval that is settled, in which the time decides which pages are worth folding | `busy` |
    /// | all pages that rest are worth folding | `seldom` |
    pub fn cadence(&self, now: Instant) -> Cadence {
        let Params { bursts, quiet: expected, seldom, busy, busiest, .. } = self.params;
        match (self.worth(now), self.quiet(now)) {
            (Worth::All, _) => *seldom,
            (_, Some(quiet)) if quiet.seconds >= expected.settled => *busy,
            (_, None) if now.saturating_duration_since(self.burst_since) >= bursts.long => {
                Cadence { is_little: false, ..*seldom }
            }
            _ => *busiest,
        }
    }

    /// The first age at which a page is taken to have outlived a burst.
    ///
    /// - The last burst filled no page whose age is at least twice the longest quiet interval, plus the time for which
    ///   a quiet interval must be expected to go on. The last age is an exception: it has no upper bound, and when
    ///   quiet intervals are long, a page that the last burst filled may be of it.
    /// - In a burst that is long enough to show which pages outlive it ([`Bursts::cyclic`](crate::params::Bursts)), and
    ///   in a gap within it, 2/3 of that length is enough.
    fn first_old(&self, quiet: Option<QuietInterval>, now: Instant) -> usize {
        let longest = self.intervals.iter().copied().max().unwrap_or(0);
        let burst = now.saturating_duration_since(self.burst_since);
        let Params { bursts, quiet: expected, judged, .. } = self.params;
        let goes_on = quiet.is_none_or(|quiet| quiet.seconds < bursts.gap_seconds);
        let old = if goes_on && burst >= bursts.cyclic {
            (bursts.cyclic * 2 / 3).as_secs() as u32
        } else {
            longest.saturating_mul(2).saturating_add(expected.soon).max(judged.old_seconds)
        };
        (1 + AGES.partition_point(|begin| *begin < old)).min(AGES.len())
    }

    /// Whether folds of this moment last; `None` while too few are known.
    fn lasts(&self, moment: usize) -> Option<bool> {
        let p = &self.params.judged;
        let (made, short) = (self.made[moment], self.short[moment] + self.lately_short[moment]);
        let are_few = short * p.short_one_in < made + self.lately_made(moment);
        (if are_few { made } else { short } >= p.enough).then_some(are_few)
    }

    fn lately_made(&self, moment: usize) -> f64 {
        self.lately.iter().map(|folds| folds[moment]).sum::<u64>() as f64
    }
}

/// The share of a quantity with this half-life that is left after `time`.
///
/// The C library's `exp2` is not used: everything that a member executes would load its mathematical library, too.
fn decay(time: Duration, half_life: Duration) -> f64 {
    let lives = time.as_secs_f64() / half_life.as_secs_f64();
    let whole = lives as i32;
    let exponent = (f64::from(whole) - lives) * std::f64::consts::LN_2;
    // The first terms of the exponential series. The exponent is between -ln 2 and 0, so the others are below 10^-9.
    let of_part = (1..=10).rev().fold(1.0, |sum, n| 1.0 + exponent / f64::from(n) * sum);
    of_part * 0.5_f64.powi(whole)
}

#[cfg(test)]
mod tests;
