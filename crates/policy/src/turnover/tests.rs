//! Bursts, quiet intervals and ages, as single calls show them.

use super::*;
use crate::params::TODAY;

const PROBES: Probes = TODAY.judged.probes;
const SELDOM: Cadence = TODAY.seldom;
const BUSY: Cadence = TODAY.busy;
const BUSIEST: Cadence = TODAY.busiest;
/// The cadence in a burst that has gone on for longer than `Bursts::long`.
const LONG: Cadence = Cadence { is_little: false, ..SELDOM };

#[test]
fn quiet_interval_follows_a_burst() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut turnover = Turnover::new(&TODAY, start);
    let quiet = |turnover: &Turnover, second| turnover.quiet(at(second)).map(|quiet| quiet.seconds);
    // A member begins with a burst. An idle member writes some pages all the time.
    (1..100).for_each(|second| turnover.add(80, 100_000, at(second)));
    assert_eq!([3, 4, 99].map(|second| quiet(&turnover, second)), [None, Some(4), Some(99)]);
    assert_eq!([63, 64].map(|second| turnover.worth(at(second))), [Worth::Rested(4), Worth::All]);
    let change = [3, 15, 16, 63, 64].map(|second| turnover.cadence(at(second)));
    assert_eq!(change, [BUSIEST, BUSIEST, BUSY, BUSY, SELDOM]);
    // A burst does not begin when some memory is filled, but when much is.
    turnover.add(4000, 100_000, at(101));
    turnover.add(80, 100_000, at(103));
    assert_eq!(quiet(&turnover, 103), Some(103));
    turnover.add(4000, 100_000, at(105));
    turnover.add(30_000, 100_000, at(107));
    turnover.add(300, 100_000, at(109));
    assert_eq!(quiet(&turnover, 112), None);
    assert!(matches!(turnover.worth(at(112)), Worth::Ages(..)));
    assert_eq!(turnover.cadence(at(112)), BUSIEST);
    // Until the next step ends, the burst may be going on.
    assert_eq!(quiet(&turnover, 117), None);
    turnover.add(0, 100_000, at(117));
    assert_eq!(turnover.quiet(at(117)), Some(QuietInterval { seconds: 8, goes_on: false }));
    // For some minutes, less than a quarter of that size is no burst.
    turnover.add(0, 100_000, at(125));
    turnover.add(5200, 100_000, at(150));
    turnover.add(0, 100_000, at(152));
    assert_eq!(quiet(&turnover, 152), Some(43));
    turnover.add(0, 100_000, at(1498));
    turnover.add(5200, 100_000, at(1500));
    assert_eq!(quiet(&turnover, 1500), None);
    assert_eq!(turnover.last_burst, at(1500));
    // A long step may end in a burst; one that changes a few pages does not, however small the member is.
    turnover.add(100_000, 100_000, at(2000));
    assert_eq!(quiet(&turnover, 2000), None);
    turnover.add(TODAY.bursts.few_pages, 1000, at(2010));
    assert_eq!(quiet(&turnover, 2010), Some(10));
    // Steps of six seconds in a burst are not taken for quiet intervals.
    let intervals = turnover.intervals;
    (2020..2050).step_by(6).for_each(|second| turnover.add(20_000, 100_000, at(second)));
    assert_eq!((turnover.intervals[0], &turnover.intervals[1..]), (10, &intervals[..REMEMBERED - 1]));
}

#[test]
fn idle_program_begins_with_the_quiet_interval_that_it_is_in() {
    let start = Instant::now() + Duration::from_secs(1000);
    let at = |second| start + Duration::from_secs(second);
    let begun = |age| {
        let mut turnover = Turnover::new(&TODAY, start);
        turnover.begin_quiet(Duration::from_secs(age), at(1));
        turnover
    };
    assert_eq!(begun(500).worth(at(1)), Worth::All);
    assert_eq!(begun(500).quiet(at(2)), Some(QuietInterval { seconds: TODAY.quiet.long + 1, goes_on: true }));
    // A program that has just started is in a burst. The quiet interval of one that is a few seconds old is as long.
    assert_eq!([0, 3, 5].map(|age| begun(age).quiet(at(2)).map(|quiet| quiet.seconds)), [None, Some(4), Some(6)]);
    // A burst that was seen counts.
    let mut turnover = Turnover::new(&TODAY, start);
    turnover.add(60_000, 100_000, at(3));
    turnover.begin_quiet(Duration::from_secs(500), at(4));
    assert_eq!(turnover.quiet(at(5)), None);
    let mut turnover = begun(500);
    turnover.add(60_000, 100_000, at(3));
    assert_eq!(turnover.quiet(at(5)), None);
}

#[test]
fn short_gap_does_not_end_burst() {
    let start = Instant::now();
    let at = |second| start + Duration::from_secs(second);
    let mut turnover = Turnover::new(&TODAY, start);
    turnover.add(0, 100_000, at(98));
    turnover.add(60_000, 100_000, at(100));
    // No changes for two seconds, then changes of less than a quarter of the peak, again and again.
    for begin in (100..118).step_by(6) {
        let changed = [0, 6000, 3000];
        for (second, changed) in (begin + 2..).step_by(2).zip(changed) {
            turnover.add(changed, 100_000, at(second));
            assert_eq!(turnover.quiet(at(second + 1)), None, "{second}");
        }
    }
    assert_eq!((turnover.intervals[0], turnover.intervals[1]), (98, 0));
    // No changes for eight seconds, then changes of a twentieth of all pages in a row.
    for (second, changed) in (120..).step_by(2).zip([0, 0, 0, 0, 3000, 3000]) {
        turnover.add(changed, 100_000, at(second));
    }
    assert_eq!((turnover.quiet(at(135)), &turnover.intervals[..2]), (None, &[8, 98][..]));
    // No changes for four seconds. But no quiet interval after a burst was seen to go on.
    [132, 134].iter().for_each(|second| turnover.add(0, 100_000, at(*second)));
    assert_eq!(turnover.quiet(at(145)), Some(QuietInterval { seconds: 15, goes_on: false }));
    assert_eq!(turnover.worth(at(146)), Worth::Rested(4));
}

#[test]
fn long_burst_is_told_from_next_one() {
    let start = Instant::now();
    let at = |second| start + Duration::from_secs(second);
    let mut turnover = Turnover::new(&TODAY, start);
    turnover.add(0, 100_000, at(98));
    let mut changes = |seconds: std::ops::RangeInclusive<u64>, changed: u64| {
        let mut change = BUSIEST;
        for second in seconds.step_by(4) {
            turnover.add(changed, 100_000, at(second));
            change = turnover.cadence(at(second + 3));
        }
        change
    };
    assert_eq!(changes(102..=154, 20_000), BUSIEST);
    assert_eq!(changes(158..=300, 20_000), LONG);
    // A gap does not begin another burst.
    assert_eq!(changes(302..=306, 0), BUSIEST);
    assert_eq!(changes(310..=314, 20_000), LONG);
    // The agent looks closely at the pages that the burst leaves behind.
    assert_eq!(changes(318..=326, 0), BUSIEST);
    assert_eq!(changes(330..=346, 0), BUSY);
    // The next burst begins anew. It is noticed only once it has filled a quarter of the peak.
    assert_eq!(changes(350..=354, 20_000), BUSIEST);
    assert_eq!(changes(358..=402, 20_000), BUSIEST);
    assert_eq!(changes(406..=406, 20_000), LONG);
}

#[test]
fn quiet_interval_goes_on_as_those_before_did() {
    let start = Instant::now();
    // The seconds at which the expectation changes, in a quiet interval after others of these lengths. At first, it is
    // not expected to go on.
    let goes_on_after = |intervals: &[u64]| {
        let (mut turnover, mut now) = (Turnover::new(&TODAY, start), start);
        for quiet in intervals {
            now += Duration::from_secs(*quiet);
            turnover.add(0, 100_000, now);
            now += TODAY.bursts.step;
            turnover.add(50_000, 100_000, now);
        }
        turnover.add(0, 100_000, now + TODAY.bursts.step);
        let goes_on = |seconds| turnover.quiet(now + Duration::from_secs(seconds)).is_some_and(|quiet| quiet.goes_on);
        (1..1000).filter(|second| goes_on(second - 1) != goes_on(*second)).collect::<Vec<_>>()
    };
    assert_eq!([goes_on_after(&[]), goes_on_after(&[30]), goes_on_after(&[30, 30])], [[4], [16], [45]]);
    // Two past intervals must have gone on before the present one is expected to.
    assert_eq!([goes_on_after(&[90]), goes_on_after(&[90, 67])], [vec![16], vec![16, 27, 100]]);
    assert_eq!(goes_on_after(&[90, 90]), [4, 27, 135]);
    // Quiet intervals are told from gaps within bursts.
    assert_eq!(goes_on_after(&[6, 90, 6, 91, 8, 92]), [9, 28, 136]);
    // One past interval that was soon over does not change the expectation; two do.
    assert_eq!(goes_on_after(&[90, 90, 90, 90, 90, 90, 20, 90]), [4, 27, 135]);
    assert_eq!(goes_on_after(&[90, 90, 20, 90, 90, 90, 20, 90]), [135]);
    // Only the last eight count.
    assert_eq!(goes_on_after(&[20, 20, 200, 200, 200, 200, 200, 200, 200]), [4, 137, 300]);
}

#[test]
fn age_that_outlives_burst_is_open() {
    // The first open age in a burst that follows a quiet interval of this length.
    let old_after = |quiet: u64| {
        let start = Instant::now();
        let (mut turnover, end) = (Turnover::new(&TODAY, start), start + Duration::from_secs(quiet));
        turnover.add(0, 100_000, end);
        turnover.add(50_000, 100_000, end + TODAY.bursts.step);
        let worth = turnover.worth(end + TODAY.bursts.step);
        let page = (0..).find(|page| probe_of(PROBES, *page).is_none()).unwrap();
        (0..2000).find(|seconds| worth.allows(page, *seconds))
    };
    assert_eq!([0, 32, 33, 90, 300, 5000].map(old_after), [128, 128, 256, 256, 1024, 1024].map(Some));
}

#[test]
fn age_that_long_burst_left_alone_is_open() {
    let start = Instant::now();
    let at = |second| start + Duration::from_secs(second);
    let mut turnover = Turnover::new(&TODAY, start);
    let writes = |turnover: &mut Turnover, seconds: std::ops::Range<u64>, changed| {
        seconds.step_by(2).for_each(|second| turnover.add(changed, 100_000, at(second)));
    };
    writes(&mut turnover, 2..42, 0);
    writes(&mut turnover, 42..44, 10_000);
    writes(&mut turnover, 44..84, 0);
    writes(&mut turnover, 84..212, 10_000);
    let page = (0..).find(|page| probe_of(PROBES, *page).is_none()).unwrap();
    let old = |turnover: &Turnover, second| {
        let worth = turnover.worth(at(second));
        (0..2000).find(|seconds| worth.allows(page, *seconds))
    };
    assert_eq!([177, 178].map(|second| old(&turnover, second)), [Some(256), Some(64)]);
    // The age is closed when its folds are seen not to last.
    let mut folds = Folds::NONE;
    (folds.made[6], folds.short[6]) = (1000, 100);
    turnover.judge(&folds, at(211));
    assert_eq!(old(&turnover, 212), Some(128));
    // A gap changes nothing. Once the burst is over, the next one may write all that it has filled.
    writes(&mut turnover, 212..250, 0);
    assert_eq!([225, 226].map(|second| old(&turnover, second)), [Some(128), Some(256)]);
    writes(&mut turnover, 250..260, 20_000);
    assert_eq!((turnover.quiet(at(259)), old(&turnover, 259)), (None, Some(256)));
}

#[test]
fn pages_of_last_burst_are_left_alone_before_next_one() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut turnover = Turnover::new(&TODAY, start);
    for (quiet, burst) in [(50, 52), (102, 104)] {
        turnover.add(0, 100_000, at(quiet));
        turnover.add(50_000, 100_000, at(burst));
    }
    // Folds at ages of 8 to 64 s were seen to last, and none at lower ones.
    let mut folds = Folds::NONE;
    folds.made[3..6].fill(10_000);
    turnover.judge(&folds, at(1));
    turnover.judge(&Folds::NONE, at(104));
    turnover.add(0, 100_000, at(106));
    let page = (0..).find(|page| probe_of(PROBES, *page).is_none()).unwrap();
    let open = |second| {
        let worth = turnover.worth(at(second));
        [9, 31, 32, 63, 127, 255, 256].map(|age| worth.allows(page, age))
    };
    assert_eq!(open(106), [true, true, true, true, false, false, true]);
    // 45 s into a quiet interval that is expected to last for 50 s.
    assert_eq!(open(149), [true, true, false, false, false, false, true]);
}

#[test]
fn ages_are_told_apart_and_have_probe_pages() {
    let ages = [None, Some(0), Some(1), Some(2), Some(8), Some(1023), Some(u32::MAX)].map(|age| moment(false, age));
    assert_eq!(ages, [0, 0, 0, 1, 3, 9, 10]);
    assert_eq!([None, Some(0), Some(1000)].map(|age| moment(true, age)), [0, 0, 0]);
    let tried = |seconds| (0..1 << 17).filter(|page| Worth::Ages(0, PROBES).allows(*page, seconds)).count();
    for seconds in [2, 20, 2000] {
        assert!(tried(seconds).abs_diff((1 << 17) / 256) < 200, "{}", tried(seconds));
    }
    assert_eq!(tried(1), 0);
    let page = (0..).find(|page| probe_of(PROBES, *page).is_none()).unwrap();
    let allows = |worth: Worth, seconds: &[u32]| seconds.iter().map(|age| worth.allows(page, *age)).collect::<Vec<_>>();
    assert_eq!(allows(Worth::Ages(1 << moment(false, Some(64)), PROBES), &[32, 64, 128]), [false, true, false]);
    assert_eq!(allows(Worth::Rested(4), &[3, 4, 1000]), [false, true, true]);
    assert_eq!(allows(Worth::All, &[0]), [true]);
}

#[test]
fn probe_pages_that_last_open_their_age_again() {
    const AGE: usize = 5;
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let folds = |made, short| {
        let mut folds = Folds::NONE;
        (folds.made[AGE], folds.short[AGE]) = (made, short);
        folds
    };
    let mut turnover = Turnover::new(&TODAY, start);
    turnover.judge(&folds(30_000, 0), at(1));
    turnover.judge(&folds(0, 20_000), at(40));
    assert_eq!(turnover.lasts(AGE), Some(false));
    for round in 1..=5 {
        turnover.judge(&folds(130, 0), at(round * 120));
    }
    assert_eq!(turnover.lasts(AGE), Some(true));
}

#[test]
fn decay_is_a_power_of_one_half() {
    let share = |time: f64| decay(Duration::from_secs_f64(time), Duration::from_secs(10));
    for time in [0.0, 0.1, 3.0, 9.999, 10.0, 25.0, 101.5, 1e7] {
        assert!((share(time) - 0.5_f64.powf(time / 10.0)).abs() < 1e-9, "{time}: {}", share(time));
    }
}
