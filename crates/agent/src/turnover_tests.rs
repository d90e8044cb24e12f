//! Members that fill their memory again and again: what is folded of it, when all that is known of moments and of pages has its say.

use super::*;
use crate::table::bits::{Bits, CHUNK_PAGES};
use crate::table::chunk::Chunk;

const CHUNKS: u64 = 40;
const PAGES: u64 = CHUNKS * CHUNK_PAGES;
/// Seconds between two looks.
const LOOK: u32 = 2;

/// How a member works.
#[derive(Clone, Copy, Debug)]
struct Work {
    /// Its memory is filled every so many seconds, page after page, but for one page in twenty, which stays.
    period: u32,
    /// It is filled within so many.
    takes: u32,
    /// One page in so many is written half a period later too.
    half_way: u64,
}

impl Work {
    fn writes(self, page: u64, second: u32) -> bool {
        let filled = (page * u64::from(self.takes) / PAGES) as u32 / LOOK * LOOK;
        let is_again = page % self.half_way == 3 && second % self.period == (filled + self.period / 2) % self.period;
        page % 20 != 7 && (second % self.period == filled || is_again)
    }
}

/// From the tenth minute to the twenty-fifth: the part of folds that were for nothing, and the part of its time that a page is folded.
/// It begins with all pages folded, by a member that was at rest until now.
fn by_turns(work: Work) -> (f64, f64) {
    let start = Instant::now();
    let mut turnover = Turnover::new(start);
    let mut chunks: Vec<_> = (0..CHUNKS).map(|_| Chunk::new()).collect();
    let mut folds = Folds::NONE;
    for chunk in &mut chunks {
        chunk.mapped = Bits::span(0, CHUNK_PAGES);
        add(&mut folds.made, chunk.folded_at(chunk.mapped, (1, true)));
    }
    let (mut made, mut short, mut time, mut last_calm) = (0, 0, 0, 0);
    for second in (LOOK..1500).step_by(LOOK as usize) {
        let at = start + Duration::from_secs(second.into());
        let (mut changed, worth, calm) = (0, turnover.worth(at), turnover.calm(at));
        last_calm = calm.map_or(last_calm, |calm| second - calm.seconds);
        for (chunk, first) in chunks.iter_mut().zip((0..).step_by(CHUNK_PAGES as usize)) {
            let all = Bits::span(0, CHUNK_PAGES);
            let written = all.filter(|page| work.writes(first + page, second));
            add(&mut folds.short, chunk.ended(chunk.mapped.and(written), second));
            changed += chunk.written_at(written, (second, last_calm));
            chunk.mapped = chunk.mapped.without(written);
            let rested = chunk.without_left_alone(all.without(chunk.mapped).without(written), second);
            let rested = chunk.worth_folding(rested, second, (first, worth));
            add(&mut folds.made, chunk.folded_at(rested, (second, calm.is_some_and(|calm| calm.goes_on))));
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
fn what_stays_is_folded_and_what_does_not_is_tried() {
    // Filled again before a minute is over, or all the time: what stays, and what is tried.
    for period in [20, 50] {
        let (_, folded) = by_turns(Work { period, takes: 20, half_way: u64::MAX });
        assert!((0.04..0.08).contains(&folded), "{period}: {folded}");
    }
    for (period, half_way) in [(90, u64::MAX), (120, u64::MAX), (300, u64::MAX), (100, 50), (130, 30), (110, 15)] {
        let (short, folded) = by_turns(Work { period, takes: 20, half_way });
        let most = 1.0 - 15.0 / f64::from(period) - 1.0 / half_way as f64;
        assert!(short < 0.05 && folded > most - 0.05, "{period}, {half_way}: {short} {folded}");
    }
}

#[test]
fn what_a_member_that_never_rests_writes_seldom_is_folded() {
    for period in [80, 110, 160, 300] {
        let (short, folded) = by_turns(Work { period, takes: period, half_way: u64::MAX });
        assert!(short < 0.02 && folded > 0.95, "{period}: {short} {folded}");
    }
}
