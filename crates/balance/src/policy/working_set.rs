//! Each further MiB goes to the guest whose rate of page faults falls most by it.
//!
//! A guest has a curve: page faults a second by its size. Measured points are joined by lines. Beyond them, the rate is
//! assumed to fall as 1/size, which is slower than in any known cache. Below the memory that a guest needs to run at
//! all, each missing page counts as a fault every second.
//!
//! Memory is given out in chunks, above the guaranteed sizes. Memory that a guest has already counts a quarter more for
//! it than for others, so that memory moves only for a clear gain. Chunks that spare nobody a fault stay where they
//! are.

use super::{Policy, Wish, weighted, wishes};
use crate::facts::{Facts, GuestFacts};
use crate::share_out::share_out;

/// Number of chunks that memory is dealt out in, at most: 256.
const CHUNKS: u64 = 256;
/// Smallest chunk: 1 MiB.
const LEAST_CHUNK: u64 = 1 << 20;
/// Factor for the worth of memory to the guest that has it already: 5/4.
const HELD: f64 = 1.25;
/// Fewest faults a second that a chunk must spare: 0.1.
const LEAST_GAIN: f64 = 0.1;

/// Each chunk goes to the guest whose rate of page faults falls most by it.
pub struct WorkingSet;

impl Policy for WorkingSet {
    fn name(&self) -> &'static str {
        "working-set"
    }

    fn sizes(&self, facts: &Facts, lendable_bytes: u64) -> Vec<Wish> {
        let all = weighted(facts, |_| 1);
        let chunk = (lendable_bytes / CHUNKS).max(LEAST_CHUNK);
        let mut loans = vec![0_u64; all.len()];
        let mut left = lendable_bytes;
        while left > 0 {
            let open = (0..all.len()).filter(|n| all[*n].0 > 0 && loans[*n] < all[*n].1);
            let worth = |n: usize| worth(&facts.guests[n], loans[n], chunk);
            let best = open.map(|n| (worth(n), n)).filter(|(worth, _)| *worth >= LEAST_GAIN);
            let Some((_, n)) = best.max_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1))) else { break };
            let bytes = chunk.min(left).min(all[n].1.saturating_sub(loans[n]));
            loans[n] = loans[n].saturating_add(bytes);
            left = left.saturating_sub(bytes);
        }
        keep(facts, &all, &mut loans, left);
        wishes(facts, &loans, |n| reason(&facts.guests[n], chunk))
    }
}

/// Leaves memory that spares nobody a fault (`left` bytes) with the guests that have it.
fn keep(facts: &Facts, all: &[(u64, u64)], loans: &mut [u64], left: u64) {
    let more = facts.guests.iter().zip(all).zip(&*loans).map(|((guest, (weight, cap)), loan)| {
        let had = guest.loan_bytes().min(*cap).saturating_sub(*loan);
        (had.saturating_mul(*weight.min(&1)), had)
    });
    let shares = share_out(left, &more.collect::<Vec<_>>());
    loans.iter_mut().zip(shares).for_each(|(loan, share)| *loan = loan.saturating_add(share));
}

/// Faults a second that the next chunk spares a guest with this loan. A chunk that the guest has already counts a
/// quarter more.
fn worth(guest: &GuestFacts, loan: u64, chunk: u64) -> f64 {
    let size = guest.guaranteed_bytes.saturating_add(loan);
    let gain = faults_at(guest, size) - faults_at(guest, size.saturating_add(chunk));
    if size < guest.size_bytes() { gain * HELD } else { gain }
}

/// Faults a second of a guest of this size.
fn faults_at(guest: &GuestFacts, size: u64) -> f64 {
    let lacking = guest.needed_bytes().saturating_sub(size) as f64 / 4096.0;
    let now = guest.claims.map(|claims| (guest.size_bytes(), claims.faults_per_s));
    let points: Vec<(u64, f64)> = match guest.faults_by_size.is_empty() {
        true => now.into_iter().filter(|(size, _)| *size > 0).collect(),
        false => falling(&guest.faults_by_size),
    };
    lacking + on_curve(&points, size)
}

/// The same points without any rise: a guest does not have more faults because it is larger.
fn falling(points: &[(u64, f64)]) -> Vec<(u64, f64)> {
    let mut least = f64::INFINITY;
    let down = |(size, rate): &(u64, f64)| {
        least = least.min(*rate);
        (*size, least)
    };
    points.iter().map(down).collect()
}

/// The rate of page faults at a size, by points in ascending order of sizes. Between points it is interpolated.
fn on_curve(points: &[(u64, f64)], size: u64) -> f64 {
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return 0.0 };
    let beyond = |point: &(u64, f64)| point.1 * point.0 as f64 / size.max(4096) as f64;
    if size <= first.0 {
        return beyond(first);
    }
    if size >= last.0 {
        return beyond(last);
    }
    let above = points.partition_point(|(at, _)| *at < size);
    let (low, high) = (points[above.saturating_sub(1)], points[above]);
    let way = size.saturating_sub(low.0) as f64 / high.0.saturating_sub(low.0) as f64;
    low.1 + (high.1 - low.1) * way
}

fn reason(guest: &GuestFacts, chunk: u64) -> String {
    let size = guest.size_bytes();
    let spared = faults_at(guest, size) - faults_at(guest, size.saturating_add(chunk));
    format!("the next {} MiB spare it {spared:.1} faults a second", chunk >> 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Claims;
    use crate::test_world::guest;

    const M: u64 = 1 << 20;

    fn sizes(guests: Vec<GuestFacts>, lendable: u64) -> Vec<u64> {
        let facts = Facts { guests, ..Facts::default() };
        WorkingSet.sizes(&facts, lendable).iter().map(|wish| wish.size_bytes / M).collect()
    }

    /// A guest that has 128 of 256 MiB, needs so much, and has these faults by size in MiB.
    fn with_curve(needed: u64, points: &[(u64, f64)]) -> GuestFacts {
        let mut guest = guest("a", 256 * M, 64 * M);
        guest.actual_bytes = 128 * M;
        guest.resident_bytes = 100 * M;
        let available_bytes = 128 * M - needed * M;
        guest.claims = Some(Claims { total_bytes: 128 * M, available_bytes, ..Claims::default() });
        guest.faults_by_size = points.iter().map(|(size, rate)| (size * M, *rate)).collect();
        guest
    }

    #[test]
    fn memory_goes_where_it_spares_most_faults() {
        let flat = with_curve(40, &[(64, 5.0), (128, 5.0)]);
        let steep = with_curve(40, &[(64, 900.0), (128, 500.0), (192, 0.0)]);
        assert_eq!(sizes(vec![flat, steep], 128 * M), [64, 192]);
    }

    #[test]
    fn need_comes_before_faults() {
        let hungry = with_curve(120, &[]);
        let steep = with_curve(40, &[(64, 900.0), (256, 0.0)]);
        assert_eq!(sizes(vec![hungry, steep], 60 * M), [120, 68]);
    }

    #[test]
    fn memory_of_no_use_elsewhere_stays_where_it_is() {
        let (idle, other) = (with_curve(40, &[]), with_curve(40, &[]));
        assert_eq!(sizes(vec![idle, other], 128 * M), [128, 128]);
    }

    #[test]
    fn small_differences_move_nothing() {
        let (a, b) = (with_curve(40, &[(64, 500.0), (192, 0.0)]), with_curve(40, &[(64, 550.0), (192, 0.0)]));
        assert_eq!(sizes(vec![a, b], 128 * M), [128, 128]);
    }
}
