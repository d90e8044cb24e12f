//! How fast the contents of a member's memory change, and when its pages are worth folding.
//!
//! What is folded and written again within a minute was folded for nothing. Members write by fits and starts: in a *burst* they
//! fill memory that was at rest, then there is *calm*, and little changes but what changes all the time. So what was just
//! filled is folded as soon as a calm has come, and stays until the next burst; what is folded late in a calm does not,
//! if the next one is near. While a burst goes on, a page goes by its age, the time since it was written.
//!
//! ```text
//!       a twentieth is filled in a row, and
//!       no small part of what the last bursts did
//!    CALM -----------------------------------> BURST
//!   fold what has rested, unless folds        fold what is of an age at which
//!   so long after a burst did not last        folds were seen to last
//!      ^                                        |
//!      `----------------------------------------'
//!         for some seconds, not so
//! ```
//!
//! How long a calm has lasted, or how old a page is in a burst, is the *moment* of a fold. Of each moment it is counted how many
//! folds there were and how many were for nothing; where those are more than one in twenty, or that is not known yet and the page
//! is young in a burst, nothing is folded but a few pages of that age here and there, to see what becomes of them (*scouts*). When
//! these last, the age is open again. A moment of a calm is open again when two calms have gone on for a minute after it: for scouts, no
//! huge pages would be split.

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
/// In a calm that has lasted for so long, pages are folded when they have rested for a round.
const QUIET: Duration = Duration::from_secs(64);
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
/// A calm stands for so many folds, where there are none because they did not last.
const CALM_WEIGHT: f64 = 300.0;
/// What was not written for so many seconds has rested, in a calm; and in a burst.
const RESTED: (u32, u32) = (4, 8);

/// What was not written for so many seconds was at rest, and that it is written says that something new has begun.
pub const REST: u32 = 12;

/// When ages begin that are told apart in a burst, in seconds.
const AGES: [u32; 8] = [8, 16, 32, 64, 128, 256, 512, 1024];
/// The same of calms; a time that is shorter belongs to the burst.
const CALMS: [u32; 5] = [4, 20, 40, 64, 128];
/// By when in such a time, what is to be folded is: the first is soon over with it.
const FOLDED_BY: [u32; 5] = [8, 40, 64, 128, 256];
/// Moments: the page was never seen written, or it is younger; the ages in a burst; the times in a calm.
pub const MOMENTS: usize = 1 + AGES.len() + CALMS.len();
/// The first age that is thought to stay even in a burst, until it is seen not to.
const OLD: usize = 5;
/// The first of a calm, and the last.
const CALM: usize = 1 + AGES.len();
const LONG: usize = MOMENTS - 1;
/// One piece of memory in so many has scouts of one moment, another those of the next.
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

/// The moment of a page that was written so many seconds ago, if that was seen, after so many seconds of calm.
pub fn moment(calm: Option<u32>, seconds: Option<u32>) -> usize {
    let begun = |begins: &[u32], seconds: u32| begins.partition_point(|begin| *begin <= seconds);
    match (calm, seconds) {
        (_, None) => 0,
        (Some(calm), _) => CALM + begun(&CALMS, calm).saturating_sub(1),
        (None, Some(seconds)) => begun(&AGES, seconds),
    }
}

/// Of which moment the page with this number is a scout, if it is one.
fn scout_of(page: u64) -> Option<usize> {
    let piece = (page / SCOUT_PAGES).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    Some((piece % SCOUTS) as usize).filter(|moment| (1..CALM).contains(moment))
}

/// Which pages are worth folding now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worth {
    /// All that have rested for a round.
    All,
    /// Those of these moments, and scouts.
    Moments {
        /// One bit for each.
        open: u16,
        /// How long it has been calm, in seconds.
        calm: Option<u32>,
    },
}

impl Worth {
    /// Whether the page with this number may be folded, which was written so many seconds ago.
    pub fn allows(self, page: u64, seconds: u32) -> bool {
        let Self::Moments { open, calm } = self else { return true };
        let moment = moment(calm, Some(seconds));
        let rested = if calm.is_some() { RESTED.0 } else { RESTED.1 };
        seconds >= rested && (open >> moment & 1 == 1 || scout_of(page) == Some(moment))
    }
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
    /// Pages that changed since much began to, and the most that there were lately.
    filled: u64,
    largest: f64,
    /// Until when there was a burst. One begins as a burst.
    last_burst: Instant,
    /// Of so many moments of this calm it was seen whether folds would have lasted.
    calms_judged: usize,
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
            largest: 0.0,
            last_burst: now,
            calms_judged: 0,
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
        self.filled = if is_much { self.filled + self.changed } else { 0 };
        self.largest *= half(time, BURST_HALF_LIFE);
        let (calm, filled) = (self.calm(now), self.filled as f64);
        let is_burst = is_much && (calm.is_none() || filled > one_in && filled * SMALLEST > self.largest);
        if let Some(calm) = calm {
            self.judge_calm(calm, is_burst);
        }
        if is_burst {
            (self.last_burst, self.largest, self.calms_judged) = (now, self.largest.max(filled), 0);
        }
        (self.changed, self.since) = (0, now);
    }

    /// It has been calm for so many seconds, and no longer if that is over. Counts for each moment at which nothing was folded in it whether
    /// folds would have lasted.
    fn judge_calm(&mut self, seconds: u32, is_over: bool) {
        for (moment, (begin, folded)) in (CALM..).zip(CALMS.into_iter().zip(FOLDED_BY)).skip(self.calms_judged) {
            let lasts = u64::from(seconds) >= u64::from(folded) + LIFE.as_secs();
            if !lasts && (seconds < begin || !is_over) {
                break;
            }
            self.calms_judged += 1;
            if self.lasts(moment) == Some(false) {
                self.made[moment] += CALM_WEIGHT;
                self.short[moment] += if lasts { 0.0 } else { CALM_WEIGHT };
            }
        }
    }

    /// For how many seconds it has been calm; `None` in a burst.
    pub fn calm(&self, now: Instant) -> Option<u32> {
        let calm = now.saturating_duration_since(self.last_burst).as_secs() as u32;
        (calm >= CALMS[0]).then_some(calm)
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
        let calm = self.calm(now);
        let (mut open, mut lasts) = (0, true);
        for moment in 1..MOMENTS {
            let unless_known = match moment {
                OLD..=CALM | LONG => true,
                0..OLD => false,
                // The later, the nearer is the next burst.
                _ => lasts,
            };
            lasts = self.lasts(moment).unwrap_or(unless_known);
            open |= u16::from(lasts) << moment;
        }
        let is_quiet = calm
            .is_some_and(|calm| u64::from(calm) >= QUIET.as_secs() && open >> moment(Some(calm), Some(calm)) & 1 == 1);
        if is_quiet { Worth::All } else { Worth::Moments { open, calm } }
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
        // One begins as a burst. Who does nothing writes some pages all the time.
        (1..100).for_each(|second| turnover.add(80, 100_000, at(second)));
        assert_eq!((turnover.calm(at(3)), turnover.calm(at(4)), turnover.calm(at(99))), (None, Some(4), Some(99)));
        assert_eq!(turnover.worth(at(99)), Worth::All);
        // Nor is it one when some memory is filled, but when much is.
        turnover.add(4000, 100_000, at(101));
        turnover.add(80, 100_000, at(103));
        assert_eq!(turnover.calm(at(103)), Some(103));
        turnover.add(4000, 100_000, at(105));
        turnover.add(4000, 100_000, at(107));
        turnover.add(300, 100_000, at(109));
        assert_eq!(turnover.calm(at(112)), None);
        assert!(matches!(turnover.worth(at(117)), Worth::Moments { calm: Some(8), .. }));
        (110..180).for_each(|second| turnover.add(80, 100_000, at(second)));
        assert_eq!(turnover.worth(at(173)), Worth::All);
        // However long nobody looked, or however few pages there are.
        turnover.add(100_000, 100_000, at(1000));
        assert_eq!(turnover.calm(at(1000)), None);
        turnover.add(FEW, 1000, at(1010));
        assert_eq!(turnover.calm(at(1010)), Some(10));
    }

    #[test]
    fn moments_are_told_apart_and_have_scouts() {
        let ages = [None, Some(0), Some(7), Some(8), Some(16), Some(1023), Some(u32::MAX)].map(|age| moment(None, age));
        assert_eq!(ages, [0, 0, 0, 1, 2, 7, 8]);
        let calms = [4, 19, 20, 100, u32::MAX].map(|calm| moment(Some(calm), Some(0)));
        assert_eq!(moment(Some(100), None), 0);
        assert_eq!(calms, [CALM, CALM, CALM + 1, CALM + 3, LONG]);
        let tried = |calm, seconds| {
            let closed = Worth::Moments { open: 0, calm };
            (0..1 << 17).filter(|page| closed.allows(*page, seconds)).count()
        };
        for seconds in [8, 20, 2000] {
            assert!(tried(None, seconds).abs_diff((1 << 17) / 256) < 200, "{}", tried(None, seconds));
        }
        assert_eq!((tried(None, 7), tried(Some(4), 4), tried(Some(200), 1000)), (0, 0, 0));
        let page = (0..).find(|page| scout_of(*page).is_none()).unwrap();
        let open = 1 << moment(Some(4), Some(4)) | 1 << moment(None, Some(64));
        let allows = |calm, seconds| Worth::Moments { open, calm }.allows(page, seconds);
        assert_eq!([allows(Some(4), 4), allows(Some(4), 3), allows(Some(20), 4)], [true, false, false]);
        assert_eq!([allows(None, 64), allows(None, 32), allows(None, 128)], [true, false, false]);
    }

    #[test]
    fn scouts_that_last_open_their_age_again() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let folds = |made, short| {
            let mut folds = Folds::NONE;
            (folds.made[OLD], folds.short[OLD]) = (made, short);
            folds
        };
        let mut turnover = Turnover::new(start);
        turnover.judge(&folds(30_000, 0), at(1));
        turnover.judge(&folds(0, 20_000), at(40));
        assert_eq!(turnover.lasts(OLD), Some(false));
        for round in 1..=5 {
            turnover.judge(&folds(130, 0), at(round * 120));
        }
        assert_eq!(turnover.lasts(OLD), Some(true));
    }

    #[test]
    fn two_calms_that_go_on_open_their_moments_again() {
        let start = Instant::now();
        let mut turnover = Turnover::new(start);
        let mut folds = Folds::NONE;
        (folds.made[CALM], folds.short[CALM]) = (30_000, 30_000);
        (folds.made[CALM + 1], folds.short[CALM + 1]) = (30_000, 30_000);
        turnover.judge(&folds, start);
        // A burst of 20 s, and then a calm of so many seconds. What is a tenth of a burst does not end it.
        let mut now = 0;
        let mut calm = |turnover: &mut Turnover, seconds: u64| {
            for second in (0..20 + seconds).step_by(2) {
                let changed = if second < 20 || second == 40 { 6000 } else { 10 };
                turnover.add(changed, 100_000, start + Duration::from_secs(now + second));
                turnover.judge(&Folds::NONE, start + Duration::from_secs(now + second));
            }
            now += 20 + seconds;
            [CALM, CALM + 1].map(|moment| turnover.lasts(moment))
        };
        assert_eq!(calm(&mut turnover, 30), [Some(false); 2]);
        assert_eq!(calm(&mut turnover, 80), [Some(false); 2]);
        assert_eq!(calm(&mut turnover, 40), [Some(false); 2]);
        assert_eq!(calm(&mut turnover, 80), [Some(false); 2]);
        assert_eq!(calm(&mut turnover, 80), [Some(true), Some(false)]);
    }
}
