//! Rows of the result: figures of all slices of one kind, their ratios to the slices of `off`, and whether these keep
//! their bounds.

use super::arms::Arm;
use super::burners::Host;
use super::loads::Member;
use super::slice::{Measured, Slice};
use crate::median::median;
use crate::ratio::{Verdict, interval};
use serde::Serialize;

/// Bound of the processor time per operation, over that in `off`: 2% more.
const CPU: Bar = Bar { ratio: 1.02, high: 1.02 };
/// Bound of the rate of operations in `off`, over that in another arm: 2% more.
const RATE: Bar = Bar { ratio: 1.0 / 0.98, high: 1.0 / 0.98 };
/// Bound of 99th percentiles in `on`, over those in `ksmd`: no more.
const KSMD: Bar = Bar { ratio: 1.0, high: 1.0 };
/// The load whose longest time has a bound.
const TICKER: &str = "ticker";
/// Bound of that load's longest time, in microseconds: 10 ms, and 30 ms in attached programs, whose threads are stopped
/// at times.
const LONGEST_US: (f64, f64) = (10_000.0, 30_000.0);

/// Bounds of a ratio, and of the upper end of its interval.
#[derive(Clone, Copy, Debug)]
pub struct Bar {
    pub ratio: f64,
    pub high: f64,
}

impl Bar {
    /// Bound of the 99th percentile, over that in `off`, with this load of the host.
    pub const fn on(host: Host) -> Self {
        match host {
            Host::Idle | Host::Busy => Self { ratio: 1.05, high: 1.10 },
            Host::Saturated => Self { ratio: 1.10, high: 1.10 },
        }
    }
}

/// A ratio of two arms' slices, over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Ratio {
    /// Median of the rounds.
    pub ratio: f64,
    /// Interval of the ratio by Student's t of the ratios' logarithms, 95%; `None` for one round.
    pub ci95: Option<[f64; 2]>,
    /// Number of rounds that have both slices.
    pub n: usize,
    /// Bound: of `p99` 1.05 (1.10 if saturated; the interval must end below 1.10), of `rate` at least 0.98, of
    /// `cpu_us_per_op` 1.02, of `p99_over_ksmd` 1.
    pub bar: f64,
    /// Whether ratio and interval keep the bound.
    pub verdict: Verdict,
}

/// Ratios of an arm to `off`.
#[derive(Clone, Debug, Serialize)]
pub struct OverOff {
    /// Of the 99th percentiles.
    pub p99: Ratio,
    /// Below 1 where fewer operations ended.
    pub rate: Ratio,
    /// Of the processor time per operation.
    pub cpu_us_per_op: Ratio,
}

/// Figures of a load in members of one kind, on a host with one load, in one arm. Times are in microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `redis`, `ticker`, `postgres` or `web`.
    pub load: &'static str,
    /// How its programs became members.
    pub member: Member,
    /// Load of the host.
    pub host: Host,
    /// `off`: nothing is folded. `folding`: on the way from there until no more is folded. `on`: pages that rest are
    /// folded. `rounds`: pages that rested are folded, and the agents' rounds go on, which write-protect. `still`:
    /// pages that rested are folded, and agents rest. `ksmd`: the kernel's own merger at 50,000 pages a second.
    pub arm: &'static str,
    /// Median of the slices' medians; in a guest, by its own clock.
    pub p50: f64,
    /// The same of 99th percentiles.
    pub p99: f64,
    /// The same of 99.9th percentiles.
    pub p999: f64,
    /// The longest of all slices.
    pub max: f64,
    /// Operations that ended in a second: median of the slices, as the next two.
    pub rate: f64,
    /// Processor time of the load's programs, without their agents, per operation; of a guest, all of QEMU's.
    pub cpu_us_per_op: f64,
    /// Net savings of the whole group; in the arm `ksmd`, its `general_profit`, for the whole host.
    pub saved_bytes: f64,
    /// Interval of the ratio of 99th percentiles to `off`.
    pub ci95: Option<[f64; 2]>,
    /// Ratios to `off`; `None` for `off`, and where there is no such arm.
    pub over_off: Option<OverOff>,
    /// Ratio of the 99th percentiles of `on` to those of `ksmd`; else `None`.
    pub p99_over_ksmd: Option<Ratio>,
    /// Of `ticker` in `on`: whether `max` is below 10 ms, or 30 ms where threads are stopped (`attached`). `None` for
    /// other rows.
    pub longest: Option<Verdict>,
    /// The slices, of which each ratio takes two of the same round.
    pub slices: Vec<Slice>,
}

impl Ratio {
    /// Judges the ratios of all rounds, which must not exceed the bound. Where a figure has a least value instead
    /// (`is_least`), `ratios` and `bar` are those of its inverse, and the result is inverted again.
    fn of(ratios: &[f64], bar: Bar, is_least: bool) -> Self {
        let (ratio, ci95) = (median(ratios), interval(ratios));
        let verdict = match ci95 {
            Some([_, high]) if ratio <= bar.ratio && high <= bar.high => Verdict::Within,
            Some([low, _]) if low > bar.ratio => Verdict::Over,
            _ => Verdict::Undecided,
        };
        let n = ratios.len();
        if is_least {
            let ci95 = ci95.map(|[low, high]| [1.0 / high, 1.0 / low]);
            return Self { ratio: 1.0 / ratio, ci95, n, bar: 1.0 / bar.ratio, verdict };
        }
        Self { ratio, ci95, n, bar: bar.ratio, verdict }
    }
}

/// Sorts slices into rows, in the order in which each row's first slice comes.
pub fn rows(all: &[Measured]) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for measured in all {
        match rows.iter_mut().find(|row| row.is_of(measured)) {
            Some(row) => row.slices.push(measured.slice.clone()),
            None => rows.push(Row::new(measured)),
        }
    }
    let others = rows.clone();
    rows.iter_mut().for_each(|row| row.judge(&others));
    rows
}

impl Row {
    fn new(measured: &Measured) -> Self {
        let Measured { load, member, host, arm, slice } = measured.clone();
        let none = f64::NAN;
        Self {
            load,
            member,
            host,
            arm,
            p50: none,
            p99: none,
            p999: none,
            max: none,
            rate: none,
            cpu_us_per_op: none,
            saved_bytes: none,
            ci95: None,
            over_off: None,
            p99_over_ksmd: None,
            longest: None,
            slices: vec![slice],
        }
    }

    fn is_of(&self, one: &Measured) -> bool {
        (self.load, self.member, self.host, self.arm) == (one.load, one.member, one.host, one.arm)
    }

    fn median(&self, figure: fn(&Slice) -> f64) -> f64 {
        median(&self.slices.iter().map(figure).collect::<Vec<_>>())
    }

    /// This row's figure over the other row's, for each round in which both have a slice.
    fn ratios(&self, other: &Self, figure: fn(&Slice) -> f64) -> Vec<f64> {
        let pair = |slice: &Slice| {
            let other = other.slices.iter().find(|other| other.round == slice.round)?;
            Some(figure(slice) / figure(other))
        };
        self.slices.iter().filter_map(pair).collect()
    }

    /// Fills in the medians, ratios and verdicts, which follow from the slices of this row and of the others.
    fn judge(&mut self, others: &[Self]) {
        let arm = |arm: Arm| {
            let is_like = |row: &&Self| (row.load, row.member, row.host) == (self.load, self.member, self.host);
            others.iter().filter(is_like).find(|row| row.arm == arm.name() && row.arm != self.arm)
        };
        let over_off = arm(Arm::Off).map(|off| OverOff {
            p99: Ratio::of(&self.ratios(off, |slice| slice.p99), Bar::on(self.host), false),
            rate: Ratio::of(&off.ratios(self, |slice| slice.rate), RATE, true),
            cpu_us_per_op: Ratio::of(&self.ratios(off, |slice| slice.cpu_us_per_op), CPU, false),
        });
        let is_on = self.arm == Arm::On.name();
        let over_ksmd = arm(Arm::Ksmd).filter(|_| is_on);
        let over_ksmd = over_ksmd.map(|ksmd| Ratio::of(&self.ratios(ksmd, |slice| slice.p99), KSMD, false));
        self.p50 = self.median(|slice| slice.p50);
        self.p99 = self.median(|slice| slice.p99);
        self.p999 = self.median(|slice| slice.p999);
        self.max = self.slices.iter().map(|slice| slice.max).fold(0.0, f64::max);
        self.rate = self.median(|slice| slice.rate);
        self.cpu_us_per_op = self.median(|slice| slice.cpu_us_per_op);
        self.saved_bytes = self.median(|slice| slice.saved_bytes as f64);
        self.ci95 = over_off.as_ref().and_then(|over| over.p99.ci95);
        let longest_us = if self.member == Member::Attached { LONGEST_US.1 } else { LONGEST_US.0 };
        let verdict = if self.max < longest_us { Verdict::Within } else { Verdict::Over };
        self.longest = (is_on && self.load == TICKER).then_some(verdict);
        (self.over_off, self.p99_over_ksmd) = (over_off, over_ksmd);
    }
}

#[cfg(test)]
mod tests {
    use super::super::samples::Window;
    use super::super::slice::{Look, Own};
    use super::*;

    fn measured(arm: &'static str, round: u32, took_us: u64, ended: usize) -> Measured {
        let before = Look { own: vec![Own::default()], ..Look::default() };
        let own = Own { cpu_s: 1.0, ..Own::default() };
        let after = Look { at_ns: 1_000_000_000, own: vec![own], ..Look::default() };
        let slice = Slice::of(round, [&before, &after], 0, &Window { took_ns: vec![took_us * 1000; 10], ended });
        Measured { load: TICKER, member: Member::Started, host: Host::Idle, arm, slice }
    }

    #[test]
    fn slices_pair_with_those_of_their_round() {
        let times = [("off", 1, 100, 1000), ("on", 1, 104, 970), ("on", 2, 208, 975), ("off", 2, 200, 1000)];
        let mut all: Vec<_> = times.map(|(arm, round, us, ended)| measured(arm, round, us, ended)).into();
        // A round without its pair counts for nothing.
        all.push(measured("on", 3, 10_000, 1000));
        let rows = rows(&all);
        assert_eq!(rows.iter().map(|row| (row.arm, row.slices.len())).collect::<Vec<_>>(), [("off", 2), ("on", 3)]);
        let (off, on) = (&rows[0], &rows[1]);
        assert!(off.over_off.is_none() && off.longest.is_none());
        let over = on.over_off.as_ref().unwrap();
        assert!((over.p99.ratio - 1.04).abs() < 1e-9 && over.p99.n == 2, "{over:?}");
        assert_eq!((over.p99.verdict, over.cpu_us_per_op.verdict), (Verdict::Within, Verdict::Within));
        assert!((0.97..0.975).contains(&over.rate.ratio) && (over.rate.bar - 0.98).abs() < 1e-9, "{over:?}");
        assert_eq!((on.p99, on.max, on.ci95), (208.0, 10_000.0, over.p99.ci95));
        assert_eq!((on.longest, on.p99_over_ksmd.is_none()), (Some(Verdict::Over), true));
    }

    #[test]
    fn ratio_is_within_only_with_its_interval() {
        let verdict = |ratios: &[f64]| Ratio::of(ratios, Bar::on(Host::Idle), false).verdict;
        assert_eq!(verdict(&[1.04, 1.05, 1.03, 1.04]), Verdict::Within);
        assert_eq!(verdict(&[1.0, 1.2, 0.9, 1.04]), Verdict::Undecided);
        assert_eq!(verdict(&[1.06, 1.07, 1.06, 1.07]), Verdict::Over);
        assert_eq!(verdict(&[1.0]), Verdict::Undecided);
        let least = Ratio::of(&[1.25, 1.25, 1.25], RATE, true);
        assert!(least.verdict == Verdict::Over && (least.ratio - 0.8).abs() < 1e-9, "{least:?}");
    }
}
