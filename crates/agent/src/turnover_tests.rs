//! Simulated members that fill their memory again and again: how much of it is folded, and how many folds are
//! short-lived. The simulation uses all that is known of moments (`turnover`) and of single pages (`table::chunk`).

use super::*;
use crate::table::bits::{Bits, CHUNK_PAGES};
use crate::table::chunk::Chunk;

/// Size of a simulated member, in chunks.
const CHUNKS: u64 = 40;
const PAGES: u64 = CHUNKS * CHUNK_PAGES;
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
}

/// The share of short-lived folds, and the share of its time that a page is folded, from the tenth minute to the
/// twenty-fifth. The member was at rest before the first minute, and all of its pages are folded then.
fn simulate(work: Work) -> (f64, f64) {
    let start = Instant::now();
    let mut turnover = Turnover::new(start);
    let mut chunks: Vec<_> = (0..CHUNKS).map(|_| Chunk::new()).collect();
    let mut folds = Folds::NONE;
    for chunk in &mut chunks {
        chunk.mapped = Bits::span(0, CHUNK_PAGES);
        add(&mut folds.made, chunk.folded_at(chunk.mapped, (1, true)));
    }
    let (mut made, mut short, mut time, mut last_quiet) = (0, 0, 0, 0);
    for second in (LOOK..1500).step_by(LOOK as usize) {
        let at = start + Duration::from_secs(second.into());
        let (mut changed, worth, quiet) = (0, turnover.worth(at), turnover.quiet(at));
        last_quiet = quiet.map_or(last_quiet, |quiet| second - quiet.seconds);
        for (chunk, first) in chunks.iter_mut().zip((0..).step_by(CHUNK_PAGES as usize)) {
            let all = Bits::span(0, CHUNK_PAGES);
            let written = all.filter(|page| work.writes(first + page, second));
            add(&mut folds.short, chunk.ended(chunk.mapped.and(written), second));
            changed += chunk.written_at(written, (second, last_quiet));
            chunk.mapped = chunk.mapped.without(written);
            let rested = chunk.without_left_alone(all.without(chunk.mapped).without(written), second);
            let rested = chunk.worth_folding(rested, second, (first, worth));
            add(&mut folds.made, chunk.folded_at(rested, (second, quiet.is_some_and(|quiet| quiet.goes_on))));
            chunk.mapped = chunk.mapped.or(rested);
            time += if second >= 600 { chunk.mapped.count() } else { 0 };
        }
        turnover.add(changed, PAGES, at);
        turnover.judge(&folds, at);
        if second >= 600 {
            made += folds.made.iter().sum::<u64>();
            short += folds.short.iter().sum::<u64>();
        }
        folds = Folds::NONE;
    }
    (short as f64 / made.max(1) as f64, time as f64 / (PAGES * 450) as f64)
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

#[test]
fn decay_is_a_power_of_one_half() {
    let share = |time: f64| super::decay(Duration::from_secs_f64(time), Duration::from_secs(10));
    for time in [0.0, 0.1, 3.0, 9.999, 10.0, 25.0, 101.5, 1e7] {
        assert!((share(time) - 0.5_f64.powf(time / 10.0)).abs() < 1e-9, "{time}: {}", share(time));
    }
}
