//! A slice: a time in which the arm and the host's load stay the same, and one load's figures in it.

use super::burners::Host;
use super::loads::Member;
use super::samples::Window;
use serde::Serialize;

/// Everything that is read when a slice begins and when it ends.
#[derive(Clone, Debug, Default)]
pub struct Look {
    /// When it was read, in nanoseconds.
    pub at_ns: u64,
    /// Each load's programs.
    pub own: Vec<Own>,
    /// Processor time of agents, worker, prover, supervisor, helpers and ksmd, in seconds.
    pub folding_cpu_s: f64,
    /// Pages that are folded.
    pub folded_pages: u64,
    /// Pages that were written since they were folded.
    pub broken_pages: u64,
    /// Folds since the group is there.
    pub folds: u64,
    /// Memory that folding saves, net of what it takes.
    pub saved_bytes: i64,
}

/// Totals of a load's programs since they started.
#[derive(Clone, Copy, Debug, Default)]
pub struct Own {
    /// Processor time without their agents, in seconds.
    pub cpu_s: f64,
    /// Time in which threads but the agents' could have run, and waited for a processor, in seconds.
    pub waited_s: f64,
    /// Page faults that needed no disk, the agents' among them.
    pub minor_faults: u64,
}

/// Figures of a load in a slice. Times are in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Slice {
    /// The round, from 1 on.
    pub round: u32,
    /// Its length.
    pub seconds: f64,
    /// Number of operations that were due in it.
    pub operations: usize,
    /// Median of the times of operations.
    pub p50: f64,
    /// 99th percentile of these.
    pub p99: f64,
    /// 99.9th percentile of these.
    pub p999: f64,
    /// The longest of these.
    pub max: f64,
    /// Operations that ended in it, a second.
    pub rate: f64,
    /// Processor time of the load's programs per operation.
    pub cpu_us_per_op: f64,
    /// Time in which threads of the load's programs, but not their agents', could have run, and waited for a processor.
    pub waited_us_per_op: f64,
    /// Page faults of these programs that needed no disk.
    pub faults_per_op: f64,
    /// Processor time of agents, worker, prover, supervisor, helpers of attached programs, and ksmd in its arm, in
    /// percent of one processor.
    pub folding_cpu_percent: f64,
    /// Pages of members that map a slot, at its begin and end; in the arm `ksmd`, pages that it has merged.
    pub folded_pages: [u64; 2],
    /// Pages at its end that were written since they were folded.
    pub broken_pages: u64,
    /// Number of folds in it.
    pub folds: u64,
    /// Net savings at its end.
    pub saved_bytes: i64,
}

/// A slice, and where it belongs.
#[derive(Clone, Debug)]
pub struct Measured {
    pub load: &'static str,
    pub member: Member,
    pub host: Host,
    pub arm: &'static str,
    pub slice: Slice,
}

impl Slice {
    /// The figures of the load with this number in the scene, between two readings.
    pub fn of(round: u32, [before, after]: [&Look; 2], load: usize, window: &Window) -> Self {
        let seconds = (after.at_ns - before.at_ns) as f64 / 1e9;
        let [own_before, own] = [before, after].map(|look| look.own.get(load).copied().unwrap_or_default());
        let operations = window.took_ns.len() as f64;
        let us = |permille| percentile(&window.took_ns, permille) as f64 / 1e3;
        Self {
            round,
            seconds,
            operations: window.took_ns.len(),
            p50: us(500),
            p99: us(990),
            p999: us(999),
            max: us(1000),
            rate: window.ended as f64 / seconds,
            cpu_us_per_op: (own.cpu_s - own_before.cpu_s) * 1e6 / operations,
            waited_us_per_op: (own.waited_s - own_before.waited_s) * 1e6 / operations,
            faults_per_op: own.minor_faults.saturating_sub(own_before.minor_faults) as f64 / operations,
            folding_cpu_percent: (after.folding_cpu_s - before.folding_cpu_s) * 100.0 / seconds,
            folded_pages: [before.folded_pages, after.folded_pages],
            broken_pages: after.broken_pages,
            folds: after.folds.saturating_sub(before.folds),
            saved_bytes: after.saved_bytes,
        }
    }
}

/// Percentile, in thousandths, of values in ascending order: the least value that this share of them does not exceed. 0
/// if there are no values.
fn percentile(sorted: &[u64], permille: usize) -> u64 {
    let rank = (sorted.len() * permille).div_ceil(1000).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentile_is_the_nearest_rank() {
        let all: Vec<u64> = (1..=1000).collect();
        assert_eq!([500, 990, 999, 1000].map(|permille| percentile(&all, permille)), [500, 990, 999, 1000]);
        assert_eq!([500, 990, 1000].map(|permille| percentile(&[7, 8, 9], permille)), [8, 9, 9]);
        assert_eq!(percentile(&[], 500), 0);
    }

    #[test]
    fn slice_is_the_difference_of_two_looks() {
        let look = |at_s: u64, cpu_s: f64, folding_cpu_s, folded_pages, folds| Look {
            at_ns: at_s * 1_000_000_000,
            own: vec![Own::default(), Own { cpu_s, waited_s: cpu_s * 2.0, minor_faults: folds }],
            folding_cpu_s,
            folded_pages,
            folds,
            ..Look::default()
        };
        let (before, after) = (look(10, 1.0, 3.0, 500, 70), look(12, 1.5, 3.2, 480, 75));
        let window = Window { took_ns: vec![1000, 2000, 3000, 500_000], ended: 3 };
        let slice = Slice::of(2, [&before, &after], 1, &window);
        assert_eq!((slice.p50, slice.p99, slice.max), (2.0, 500.0, 500.0));
        assert_eq!((slice.rate, slice.operations, slice.folds), (1.5, 4, 5));
        assert_eq!((slice.cpu_us_per_op, slice.waited_us_per_op), (125_000.0, 250_000.0));
        assert_eq!((slice.faults_per_op, slice.folded_pages), (1.25, [500, 480]));
        assert!((slice.folding_cpu_percent - 10.0).abs() < 1e-9);
    }
}
