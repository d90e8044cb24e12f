//! How fast the contents of a member's memory change, and when its pages are worth folding.
//!
//! What is folded and written again within a minute was folded for nothing. Members write by fits and starts: in a *burst* they
//! fill memory that was at rest, then there is *calm*, and little changes but what changes all the time. So what was just
//! filled is folded as soon as a calm has come, and stays until the next burst, whenever that is. It is thought to be soon if
//! more than one of the calms before ended within a minute or so from where this one is, or if this one has but begun and calms were
//! not yet seen to go on; then, and while a burst goes on, a page goes by its age, the time since it was written. In such a calm, what
//! the last burst filled is left alone, however old it is.
//!
//! ```text
//!       a twentieth is filled in a row, and
//!       no small part of what the last bursts did
//!    CALM -----------------------------------> BURST
//!   fold what has rested, unless calms        fold what is of an age at which
//!   as long as this were soon over            folds were seen to last
//!      ^                                        |
//!      `----------------------------------------'
//!         for some seconds, not so
//! ```
//!
//! Of each age it is counted how many folds there were and how many were for nothing; where those are more than one in twenty, or
//! that is not known yet and the page may not have outlived a burst so far, nothing is folded but a few pages of that age here and
//! there, to see what becomes of them (*scouts*). When these last, the age is open again. Calms are known by their lengths alone:
//! what was folded in them says little, since that is only what nothing else had folded before; and scouts could not tell, since
//! huge pages are split only when half of them would fold.

use std::time::{Duration, Instant};

/// What must not be written for so long after it was folded.
pub const LIFE: Duration = Duration::from_secs(60);
/// One page of so many may be.
const ONE_IN: f64 = 20.0;
/// What is filled is a burst when it is one part in so many of what the largest one filled lately, which fades by half in this time.
const SMALLEST: f64 = 4.0;
const BURST_HALF_LIFE: Duration = Duration::from_secs(300);
/// More than one page in twenty a minute, for so long, is much; so few pages are not. A burst begins when one page in twenty has
/// been filled in a row, and lasts for as long as much is.
const BURST: Duration = Duration::from_secs(2);
const FEW: u64 = 64;
/// A burst that has lasted for so long is looked at seldom: then its end may be seen some seconds later. One that has lasted for so
/// much longer is thought to write again within half of that time what it ever does.
const LONG: Duration = Duration::from_secs(60);
const LONGEST: Duration = Duration::from_secs(128);
/// A burst is over when it has not been so for so many seconds; in a calm that has lasted for so many, pages are folded when they
/// have rested for a round.
const CALM_SECONDS: u32 = 4;
const QUIET_SECONDS: u32 = 64;
/// Folds count half after this time.
const FOLDS_HALF_LIFE: Duration = Duration::from_secs(300);
/// Folds are counted by parts of so long; after so many parts it is known whether one was for nothing.
const PART: Duration = Duration::from_secs(10);
const JUDGED: usize = 8;
/// From fewer folds than this, nothing is learned.
const ENOUGH: f64 = 30.0;
/// However many folds there were, they count for no more than this beside those of scouts, and however many of them were for nothing,
/// for no more than one in so many: scouts are few, and are to tell when it is over that folds do not last.
const WEIGHT: (f64, f64) = (600.0, 10.0);
/// So many calms are remembered. This one is thought to go on when no more than one of them was over so many seconds from now, but for
/// those that were so much shorter than this one is already that they tell nothing of it; and when so many of them did go on for that
/// time, or this one is more than a breath already.
const REMEMBERED: usize = 8;
const SOON: u32 = LIFE.as_secs() as u32 + 4;
const SEEN: usize = 2;
/// A calm that has not lasted for so many seconds may be a breath that a burst takes.
const BREATH: u32 = 16;
/// What was not written for so many seconds has rested, in a calm.
const RESTED: u32 = 4;
/// For so many seconds of a calm, what the burst has left behind is still being folded.
const SETTLED: u32 = 16;

/// What was not written for so many seconds was at rest, and that it is written says that something new has begun.
pub const REST: u32 = 12;

/// When ages begin that are told apart in a burst, in seconds.
const AGES: [u32; 9] = [4, 8, 16, 32, 64, 128, 256, 512, 1024];
/// Moments of folds: none that is learned from, in a calm, or of a page that was never seen written or is younger; and the ages.
pub const MOMENTS: usize = 1 + AGES.len();
/// An age is thought to stay, until it is seen not to, from so many seconds on, and from twice the longest calm that is remembered
/// and [`SOON`] on: what the last burst filled is not so old while this one goes on, but where that is of the longest.
const OLD: u32 = 128;
/// One piece of memory in so many has scouts of one age, another those of the next.
const SCOUTS: u64 = 256;
/// Pages of such a piece.
const SCOUT_PAGES: u64 = 16;

/// Numbers of pages, by moment.
pub type ByMoment = [u64; MOMENTS];

/// Adds some to others.
pub fn add(sum: &mut ByMoment, more: ByMoment) {
    sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
}

const _: () = assert!(MOMENTS <= 16, "the moment of a page's last fold takes four bits");

/// The moment of a fold, in a calm or not, of a page that was written so many seconds ago, if that was seen.
pub fn moment(is_calm: bool, seconds: Option<u32>) -> usize {
    seconds.filter(|_| !is_calm).map_or(0, |seconds| AGES.partition_point(|begin| *begin <= seconds))
}

/// Of which age the page with this number is a scout, if it is one.
fn scout_of(page: u64) -> Option<usize> {
    let piece = (page / SCOUT_PAGES).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    Some((piece % SCOUTS) as usize).filter(|age| (1..MOMENTS).contains(age))
}

/// Which pages are worth folding now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worth {
    /// All that have rested for a round.
    All,
    /// All that have rested for some seconds.
    Rested,
    /// Those of these ages, one bit for each, and scouts.
    Ages(u16),
}

impl Worth {
    /// Whether the page with this number may be folded, which was written so many seconds ago.
    pub fn allows(self, page: u64, seconds: u32) -> bool {
        let age = moment(false, Some(seconds));
        match self {
            Self::All => true,
            Self::Rested => seconds >= RESTED,
            Self::Ages(open) => open >> age & 1 == 1 || scout_of(page) == Some(age),
        }
    }
}

/// How much there is to see, and so how often to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Little changes, and what rests is folded whenever that is seen.
    Little,
    /// Little changes, but it depends on the moment what is folded.
    Some,
    /// Much has begun to change, or has just done so.
    Much,
    /// Much changes, and has for long: its end is not waited for.
    MuchForLong,
}

/// A time in which little changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Calm {
    /// How long it has lasted.
    pub seconds: u32,
    /// Whether it is thought to go on for a minute.
    pub goes_on: bool,
}

/// Pages that were folded, by moment, and those of them that were folded for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Folds {
    /// All.
    pub made: ByMoment,
    /// For nothing.
    pub short: ByMoment,
}

impl Folds {
    /// None.
    pub const NONE: Self = Self { made: [0; MOMENTS], short: [0; MOMENTS] };
}

/// See the module.
#[derive(Debug)]
pub struct Turnover {
    /// Pages that changed since then.
    changed: u64,
    since: Instant,
    /// Pages that changed since much began to, since when that is, and the most that there were lately.
    filled: u64,
    filled_since: Instant,
    largest: f64,
    /// Since when and until when there was a burst. One begins as a burst.
    burst_since: Instant,
    last_burst: Instant,
    /// For how many seconds the last calms lasted, the last one first; 0 where there was none.
    calms: [u32; REMEMBERED],
    /// Folds of the part that began then, and of the ones before.
    lately: [ByMoment; JUDGED],
    lately_since: Instant,
    /// How many of these were for nothing.
    lately_short: [f64; MOMENTS],
    /// Folds before that, and those for nothing.
    made: [f64; MOMENTS],
    short: [f64; MOMENTS],
}

impl Turnover {
    /// Nothing has changed yet.
    pub const fn new(now: Instant) -> Self {
        Self {
            changed: 0,
            since: now,
            filled: 0,
            filled_since: now,
            largest: 0.0,
            burst_since: now,
            last_burst: now,
            calms: [0; REMEMBERED],
            lately: [[0; MOMENTS]; JUDGED],
            lately_since: now,
            lately_short: [0.0; MOMENTS],
            made: [0.0; MOMENTS],
            short: [0.0; MOMENTS],
        }
    }

    /// Takes in that so many of so many pages have changed that were at rest.
    pub fn add(&mut self, changed: u64, pages: u64, now: Instant) {
        self.changed += changed;
        let time = now.saturating_duration_since(self.since);
        if time < BURST {
            return;
        }
        let one_in = pages as f64 / ONE_IN;
        let is_much = self.changed > FEW && self.changed as f64 > one_in * time.as_secs_f64() / LIFE.as_secs_f64();
        if self.filled == 0 {
            self.filled_since = self.since;
        }
        self.filled = if is_much { self.filled + self.changed } else { 0 };
        self.largest *= half(time, BURST_HALF_LIFE);
        // Whether it was calm when these pages began to be written.
        let (calm, filled) = (self.calm(self.since), self.filled.min(pages) as f64);
        let may_be_one = filled * SMALLEST > self.largest || calm.is_some_and(|calm| calm.seconds < BREATH);
        if is_much && (calm.is_none() || filled > one_in && may_be_one) {
            // Where nobody looked for some seconds of a burst, there was no calm.
            let seconds = self.filled_since.saturating_duration_since(self.last_burst).as_secs() as u32;
            if seconds >= CALM_SECONDS {
                self.calms.rotate_right(1);
                self.calms[0] = seconds;
            }
            if seconds >= BREATH {
                self.burst_since = self.filled_since;
            }
            (self.last_burst, self.largest) = (now, self.largest.max(filled));
        }
        (self.changed, self.since) = (0, now);
    }

    /// Whether it is calm; `None` in a burst.
    pub fn calm(&self, now: Instant) -> Option<Calm> {
        let seconds = now.saturating_duration_since(self.last_burst).as_secs() as u32;
        let is_soon_over = |calm: &&u32| **calm + **calm / 2 > seconds && **calm < seconds + SOON;
        let were_seen = self.calms.iter().filter(|calm| **calm >= seconds + SOON).count() >= SEEN;
        let is_known = were_seen || seconds >= BREATH || self.calms == [0; REMEMBERED];
        let goes_on = is_known && self.calms.iter().filter(is_soon_over).count() <= 1;
        // Before anybody has looked again, the burst may well go on.
        (seconds >= CALM_SECONDS && self.since > self.last_burst).then_some(Calm { seconds, goes_on })
    }

    /// Takes in what was folded, and folded for nothing, since this was last called.
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

    /// Adds the oldest folds to those that are judged, with their part of what was for nothing lately.
    fn judge_oldest(&mut self, moment: usize) {
        let (made, all) = (self.lately[JUDGED - 1][moment] as f64, self.lately_made(moment));
        let short = if made < all { self.lately_short[moment] * made / all } else { self.lately_short[moment] };
        self.lately_short[moment] -= short;
        let fade = half(PART, FOLDS_HALF_LIFE);
        let (mut made_before, mut short_before) = (self.made[moment] * fade, self.short[moment] * fade);
        if self.lasts(moment) == Some(false) {
            let (most, one_in) = WEIGHT;
            let weight = most / made_before.max(most);
            short_before = short_before.min(made_before / one_in) * weight;
            made_before *= weight;
        }
        self.made[moment] = made_before + made;
        self.short[moment] = short_before + short;
    }

    /// Which pages are worth folding now.
    pub fn worth(&self, now: Instant) -> Worth {
        match self.calm(now) {
            Some(Calm { goes_on: true, seconds: QUIET_SECONDS.. }) => Worth::All,
            Some(Calm { goes_on: true, .. }) => Worth::Rested,
            calm => {
                let old = self.first_old(calm, now);
                // As old as the last burst, or not so much older that it has outlived one: what the next one may well write again.
                let is_of_the_burst =
                    |age| calm.is_some_and(|calm| age >= moment(false, Some(calm.seconds)) && age < old);
                let is_open = |age| !is_of_the_burst(age) && self.lasts(age).unwrap_or(age >= old);
                Worth::Ages((1..MOMENTS).fold(0, |open, age| open | u16::from(is_open(age)) << age))
            }
        }
    }

    /// How much there is to see.
    pub fn change(&self, now: Instant) -> Change {
        match (self.worth(now), self.calm(now)) {
            (Worth::All, _) => Change::Little,
            (_, Some(Calm { seconds: SETTLED.., .. })) => Change::Some,
            (_, None) if now.saturating_duration_since(self.burst_since) >= LONG => Change::MuchForLong,
            _ => Change::Much,
        }
    }

    /// The first age that is thought to stay, until it is seen not to.
    fn first_old(&self, calm: Option<Calm>, now: Instant) -> usize {
        let longest = self.calms.iter().copied().max().unwrap_or(0);
        let burst = now.saturating_duration_since(self.burst_since);
        let goes_on = calm.is_none_or(|calm| calm.seconds < BREATH);
        let old = if goes_on && burst >= LONGEST {
            (LONGEST / 2).as_secs() as u32
        } else {
            longest.saturating_mul(2).saturating_add(SOON).max(OLD)
        };
        (1 + AGES.partition_point(|begin| *begin < old)).min(AGES.len())
    }

    /// Whether folds of this moment last, if that is known.
    fn lasts(&self, moment: usize) -> Option<bool> {
        let (made, short) = (self.made[moment], self.short[moment] + self.lately_short[moment]);
        let are_few = short * ONE_IN < made + self.lately_made(moment);
        (if are_few { made } else { short } >= ENOUGH).then_some(are_few)
    }

    fn lately_made(&self, moment: usize) -> f64 {
        self.lately.iter().map(|folds| folds[moment]).sum::<u64>() as f64
    }
}

/// What is left after some time of what fades by half in another.
fn half(time: Duration, half_life: Duration) -> f64 {
    0.5_f64.powf(time.as_secs_f64() / half_life.as_secs_f64())
}

#[cfg(test)]
#[path = "turnover_tests.rs"]
mod by_turns;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calm_follows_a_burst() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut turnover = Turnover::new(start);
        let calm = |turnover: &Turnover, second| turnover.calm(at(second)).map(|calm| calm.seconds);
        // One begins as a burst. Who does nothing writes some pages all the time.
        (1..100).for_each(|second| turnover.add(80, 100_000, at(second)));
        assert_eq!([3, 4, 99].map(|second| calm(&turnover, second)), [None, Some(4), Some(99)]);
        assert_eq!([63, 64].map(|second| turnover.worth(at(second))), [Worth::Rested, Worth::All]);
        let change = [3, 15, 16, 63, 64].map(|second| turnover.change(at(second)));
        assert_eq!(change, [Change::Much, Change::Much, Change::Some, Change::Some, Change::Little]);
        // Nor is it one when some memory is filled, but when much is.
        turnover.add(4000, 100_000, at(101));
        turnover.add(80, 100_000, at(103));
        assert_eq!(calm(&turnover, 103), Some(103));
        turnover.add(4000, 100_000, at(105));
        turnover.add(30_000, 100_000, at(107));
        turnover.add(300, 100_000, at(109));
        assert_eq!(calm(&turnover, 112), None);
        assert!(matches!(turnover.worth(at(112)), Worth::Ages(_)));
        assert_eq!(turnover.change(at(112)), Change::Much);
        // Until somebody has looked again, it may go on.
        assert_eq!(calm(&turnover, 117), None);
        turnover.add(0, 100_000, at(117));
        assert_eq!(turnover.calm(at(117)), Some(Calm { seconds: 8, goes_on: false }));
        // What is less than a quarter of that is none, some minutes long.
        turnover.add(0, 100_000, at(125));
        turnover.add(5200, 100_000, at(150));
        turnover.add(0, 100_000, at(152));
        assert_eq!(calm(&turnover, 152), Some(43));
        turnover.add(0, 100_000, at(1498));
        turnover.add(5200, 100_000, at(1500));
        assert_eq!(calm(&turnover, 1500), None);
        assert_eq!(turnover.last_burst, at(1500));
        // However long nobody looked, or however few pages there are.
        turnover.add(100_000, 100_000, at(2000));
        assert_eq!(calm(&turnover, 2000), None);
        turnover.add(FEW, 1000, at(2010));
        assert_eq!(calm(&turnover, 2010), Some(10));
        // Who looks at a burst every six seconds sees no calms in it.
        let calms = turnover.calms;
        (2020..2050).step_by(6).for_each(|second| turnover.add(20_000, 100_000, at(second)));
        assert_eq!((turnover.calms[0], &turnover.calms[1..]), (10, &calms[..REMEMBERED - 1]));
    }

    #[test]
    fn a_burst_that_takes_a_breath_goes_on() {
        let start = Instant::now();
        let at = |second| start + Duration::from_secs(second);
        let mut turnover = Turnover::new(start);
        turnover.add(0, 100_000, at(98));
        turnover.add(60_000, 100_000, at(100));
        // Nothing for two seconds, then less than a quarter of what there was, again and again.
        for begin in (100..118).step_by(6) {
            let changed = [0, 6000, 3000];
            for (second, changed) in (begin + 2..).step_by(2).zip(changed) {
                turnover.add(changed, 100_000, at(second));
                assert_eq!(turnover.calm(at(second + 1)), None, "{second}");
            }
        }
        assert_eq!((turnover.calms[0], turnover.calms[1]), (98, 0));
        // Nothing for eight seconds, then a twentieth in a row.
        for (second, changed) in (120..).step_by(2).zip([0, 0, 0, 0, 3000, 3000]) {
            turnover.add(changed, 100_000, at(second));
        }
        assert_eq!((turnover.calm(at(135)), &turnover.calms[..2]), (None, &[8, 98][..]));
        // For four seconds, nothing; but no calm after a burst was seen to go on.
        [132, 134].iter().for_each(|second| turnover.add(0, 100_000, at(*second)));
        assert_eq!(turnover.calm(at(145)), Some(Calm { seconds: 15, goes_on: false }));
        assert_eq!(turnover.worth(at(146)), Worth::Rested);
    }

    #[test]
    fn bursts_may_last_for_long() {
        let start = Instant::now();
        let at = |second| start + Duration::from_secs(second);
        let mut turnover = Turnover::new(start);
        turnover.add(0, 100_000, at(98));
        let mut changes = |seconds: std::ops::RangeInclusive<u64>, changed: u64| {
            let mut change = Change::Much;
            for second in seconds.step_by(4) {
                turnover.add(changed, 100_000, at(second));
                change = turnover.change(at(second + 3));
            }
            change
        };
        assert_eq!(changes(102..=154, 20_000), Change::Much);
        assert_eq!(changes(158..=300, 20_000), Change::MuchForLong);
        // A breath does not make it another one.
        assert_eq!(changes(302..=306, 0), Change::Much);
        assert_eq!(changes(310..=314, 20_000), Change::MuchForLong);
        // What it leaves is looked at closely.
        assert_eq!(changes(318..=326, 0), Change::Much);
        assert_eq!(changes(330..=346, 0), Change::Some);
        // The next one begins anew, though it is seen only once it has filled a quarter of what that one may have.
        assert_eq!(changes(350..=354, 20_000), Change::Much);
        assert_eq!(changes(358..=402, 20_000), Change::Much);
        assert_eq!(changes(406..=406, 20_000), Change::MuchForLong);
    }

    #[test]
    fn a_calm_goes_on_as_those_before_did() {
        let start = Instant::now();
        // After calms of so many seconds: from when on, until when and so on another one is thought to go on.
        let goes_on_after = |calms: &[u64]| {
            let (mut turnover, mut now) = (Turnover::new(start), start);
            for calm in calms {
                now += Duration::from_secs(*calm);
                turnover.add(0, 100_000, now);
                now += BURST;
                turnover.add(50_000, 100_000, now);
            }
            turnover.add(0, 100_000, now + BURST);
            let goes_on = |seconds| turnover.calm(now + Duration::from_secs(seconds)).is_some_and(|calm| calm.goes_on);
            (1..1000).filter(|second| goes_on(second - 1) != goes_on(*second)).collect::<Vec<_>>()
        };
        assert_eq!([goes_on_after(&[]), goes_on_after(&[30]), goes_on_after(&[30, 30])], [[4], [16], [45]]);
        // It is not known before two have.
        assert_eq!([goes_on_after(&[90]), goes_on_after(&[90, 67])], [vec![16], vec![16, 27, 100]]);
        assert_eq!(goes_on_after(&[90, 90]), [4, 27, 135]);
        // Longer calms are told from short ones that interrupt bursts.
        assert_eq!(goes_on_after(&[6, 90, 6, 91, 8, 92]), [9, 28, 136]);
        // One may have been soon over, and two may not.
        assert_eq!(goes_on_after(&[90, 90, 90, 90, 90, 90, 20, 90]), [4, 27, 135]);
        assert_eq!(goes_on_after(&[90, 90, 20, 90, 90, 90, 20, 90]), [135]);
        // What was long ago is forgotten.
        assert_eq!(goes_on_after(&[20, 20, 200, 200, 200, 200, 200, 200, 200]), [4, 137, 300]);
    }

    #[test]
    fn what_has_outlived_a_burst_is_thought_to_stay() {
        // In a burst, after a calm of so many seconds: from which age on.
        let old_after = |calm: u64| {
            let start = Instant::now();
            let (mut turnover, end) = (Turnover::new(start), start + Duration::from_secs(calm));
            turnover.add(0, 100_000, end);
            turnover.add(50_000, 100_000, end + BURST);
            let worth = turnover.worth(end + BURST);
            let page = (0..).find(|page| scout_of(*page).is_none()).unwrap();
            (0..2000).find(|seconds| worth.allows(page, *seconds))
        };
        assert_eq!([0, 32, 33, 90, 300, 5000].map(old_after), [128, 128, 256, 256, 1024, 1024].map(Some));
    }

    #[test]
    fn what_a_long_burst_has_left_alone_is_thought_to_stay() {
        let start = Instant::now();
        let at = |second| start + Duration::from_secs(second);
        let mut turnover = Turnover::new(start);
        let writes = |turnover: &mut Turnover, seconds: std::ops::Range<u64>, changed| {
            seconds.step_by(2).for_each(|second| turnover.add(changed, 100_000, at(second)));
        };
        writes(&mut turnover, 2..42, 0);
        writes(&mut turnover, 42..44, 10_000);
        writes(&mut turnover, 44..84, 0);
        writes(&mut turnover, 84..212, 10_000);
        let page = (0..).find(|page| scout_of(*page).is_none()).unwrap();
        let old = |turnover: &Turnover, second| {
            let worth = turnover.worth(at(second));
            (0..2000).find(|seconds| worth.allows(page, *seconds))
        };
        assert_eq!([209, 210].map(|second| old(&turnover, second)), [Some(256), Some(64)]);
        // Until it is seen not to.
        let mut folds = Folds::NONE;
        (folds.made[5], folds.short[5]) = (1000, 100);
        turnover.judge(&folds, at(211));
        assert_eq!(old(&turnover, 212), Some(128));
        // It may take a breath; when it is over, the next one may write all that it has filled.
        writes(&mut turnover, 212..250, 0);
        assert_eq!([225, 226].map(|second| old(&turnover, second)), [Some(128), Some(256)]);
        writes(&mut turnover, 250..260, 20_000);
        assert_eq!((turnover.calm(at(259)), old(&turnover, 259)), (None, Some(256)));
    }

    #[test]
    fn what_a_burst_filled_is_left_alone_before_the_next() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut turnover = Turnover::new(start);
        for (calm, burst) in [(50, 52), (102, 104)] {
            turnover.add(0, 100_000, at(calm));
            turnover.add(50_000, 100_000, at(burst));
        }
        // Folds of pages of 8 to 64 s were seen to last, and none of younger ones.
        let mut folds = Folds::NONE;
        folds.made[2..5].fill(10_000);
        turnover.judge(&folds, at(1));
        turnover.judge(&Folds::NONE, at(104));
        turnover.add(0, 100_000, at(106));
        let page = (0..).find(|page| scout_of(*page).is_none()).unwrap();
        let open = |second| {
            let worth = turnover.worth(at(second));
            [9, 31, 32, 63, 127, 255, 256].map(|age| worth.allows(page, age))
        };
        assert_eq!(open(106), [true, true, true, true, false, false, true]);
        // 45 s into a calm that is thought to last for fifty.
        assert_eq!(open(149), [true, true, false, false, false, false, true]);
    }

    #[test]
    fn ages_are_told_apart_and_have_scouts() {
        let ages = [None, Some(0), Some(3), Some(4), Some(8), Some(1023), Some(u32::MAX)].map(|age| moment(false, age));
        assert_eq!(ages, [0, 0, 0, 1, 2, 8, 9]);
        assert_eq!([None, Some(0), Some(1000)].map(|age| moment(true, age)), [0, 0, 0]);
        let tried = |seconds| (0..1 << 17).filter(|page| Worth::Ages(0).allows(*page, seconds)).count();
        for seconds in [4, 20, 2000] {
            assert!(tried(seconds).abs_diff((1 << 17) / 256) < 200, "{}", tried(seconds));
        }
        assert_eq!(tried(3), 0);
        let page = (0..).find(|page| scout_of(*page).is_none()).unwrap();
        let allows =
            |worth: Worth, seconds: &[u32]| seconds.iter().map(|age| worth.allows(page, *age)).collect::<Vec<_>>();
        assert_eq!(allows(Worth::Ages(1 << moment(false, Some(64))), &[32, 64, 128]), [false, true, false]);
        assert_eq!(allows(Worth::Rested, &[3, 4, 1000]), [false, true, true]);
        assert_eq!(allows(Worth::All, &[0]), [true]);
    }

    #[test]
    fn scouts_that_last_open_their_age_again() {
        const AGE: usize = 5;
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let folds = |made, short| {
            let mut folds = Folds::NONE;
            (folds.made[AGE], folds.short[AGE]) = (made, short);
            folds
        };
        let mut turnover = Turnover::new(start);
        turnover.judge(&folds(30_000, 0), at(1));
        turnover.judge(&folds(0, 20_000), at(40));
        assert_eq!(turnover.lasts(AGE), Some(false));
        for round in 1..=5 {
            turnover.judge(&folds(130, 0), at(round * 120));
        }
        assert_eq!(turnover.lasts(AGE), Some(true));
    }
}
