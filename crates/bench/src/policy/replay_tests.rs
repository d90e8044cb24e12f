//! Simulated members that fill their memory again and again: how much of it is folded, and how many folds are
//! short-lived.

use super::*;
use crate::policy::textbook::{RENTAL, Textbook};
use ::policy::{QuietInterval, TODAY};

/// Size of a simulated member, in pages.
const PAGES: u64 = 40 * CHUNK_PAGES;
/// Time between two looks, in seconds.
const LOOK: u32 = 2;

/// How a member writes its memory.
#[derive(Clone, Copy, Debug)]
struct Work {
    /// Seconds after which it fills its memory again, page after page. One page in twenty is never written.
    period: u32,
    /// Seconds that this takes.
    takes: u32,
    /// One page in this many is written half a period later too.
    half_way: u64,
}

impl Work {
    fn writes(self, page: u64, second: u32) -> bool {
        let filled = (page * u64::from(self.takes) / PAGES) as u32 / LOOK * LOOK;
        let is_again = page % self.half_way == 3 && second % self.period == (filled + self.period / 2) % self.period;
        page % 20 != 7 && (second % self.period == filled || is_again)
    }

    fn trace(self) -> Trace {
        let look = |second| (0..PAGES).filter(|page| self.writes(*page, second)).map(|page| (page, 1)).collect();
        Trace { pages: PAGES, look_seconds: LOOK, written: (LOOK..1500).step_by(LOOK as usize).map(look).collect() }
    }
}

/// The share of short-lived folds, and the share of its time that a page is folded, from the tenth minute to the
/// twenty-fifth. The member was at rest before the first minute, and all of its pages are folded then.
fn simulate(work: Work) -> (f64, f64) {
    let (trace, mut rule) = (work.trace(), Today::new(&TODAY));
    rule.history.set_time(1, Some(QuietInterval { seconds: 1, goes_on: true }));
    let folded: Vec<Bits> = chunks(range((0, PAGES))).map(|(_, pages)| pages).collect();
    (0..).zip(&folded).for_each(|(key, pages)| rule.folded(key, *pages));
    let score = replay_on(folded, &trace, &mut rule, 600);
    (score.short_share, score.folded_share)
}

#[test]
fn pages_that_stay_are_folded_and_others_only_probed() {
    // Filled again before a minute is over: only pages that are never written are folded, and probe pages.
    for period in [20, 50] {
        let (_, folded) = simulate(Work { period, takes: 20, half_way: u64::MAX });
        assert!((0.04..0.08).contains(&folded), "{period}: {folded}");
    }
    for (period, half_way) in [(90, u64::MAX), (120, u64::MAX), (300, u64::MAX), (100, 50), (130, 30), (110, 15)] {
        let (short, folded) = simulate(Work { period, takes: 20, half_way });
        let most = 1.0 - 15.0 / f64::from(period) - 1.0 / half_way as f64;
        assert!(short < 0.05 && folded > most - 0.05, "{period}, {half_way}: {short} {folded}");
    }
}

#[test]
fn pages_written_seldom_are_folded_without_quiet_intervals() {
    for period in [80, 110, 160, 300] {
        let (short, folded) = simulate(Work { period, takes: period, half_way: u64::MAX });
        assert!(short < 0.02 && folded > 0.95, "{period}: {short} {folded}");
    }
}

/// A page that is written at each of these seconds, and 99 that never are.
fn trace(seconds: u32, written: &[u32]) -> Trace {
    let look = |second| written.iter().filter(|at| **at == second).map(|_| (50, 1)).collect();
    Trace { pages: 100, look_seconds: 2, written: (2..=seconds).step_by(2).map(look).collect() }
}

/// A rule that folds all pages that were not written since the look before.
struct Always;

impl Rule for Always {
    fn begin(&mut self, _: u32) {}
    fn written(&mut self, _: u64, _: Bits, _: Bits) {}
    fn admit(&mut self, _: u64, rested: Bits) -> Bits {
        rested
    }
    fn folded(&mut self, _: u64, _: Bits) {}
    fn end(&mut self, _: u64) {}
}

#[test]
fn rests_that_are_long_enough_are_possible_and_others_short_lived() {
    let score = replay(&trace(200, &[40, 60, 120, 190]), &mut Always, 0);
    // Folds at seconds 2, 42, 62 and 122; three of them end within a minute.
    assert_eq!((score.folds, score.short_share), (99 + 5, 3.0 / 104.0));
    assert_eq!(score.merged_of_possible, 1.0);
    let score = replay(&trace(200, &[40, 60, 130, 140]), &mut Always, 0);
    assert_eq!((score.folds, score.short_share), (99 + 5, 3.0 / 104.0));
    assert_eq!(score.cpu_s, f64::from(104 * 4 + 4 * 3 + 4) / 1e6);
}

#[test]
fn textbook_rule_waits_longer_where_folds_are_short() {
    // A page that is written every 20 s, and pages that never are.
    let written: Vec<u32> = (1..100).map(|n| n * 20).collect();
    let score = |rule: &mut Textbook| replay(&trace(2000, &written), rule, 0);
    let textbook = score(&mut Textbook::new(&RENTAL));
    let always = replay(&trace(2000, &written), &mut Always, 0);
    assert!(textbook.folds < always.folds / 2 + 100, "{textbook:?} {always:?}");
    assert!(textbook.merged_of_possible > 0.9, "{textbook:?}");
}
