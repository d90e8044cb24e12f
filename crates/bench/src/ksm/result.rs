//! Two turns side by side: the time that each took to the same point, and the medians of many rounds.

use super::measure::Turn;
use super::options::{Image, Options};
use crate::median::median;
use serde::Serialize;
use serde_json::{Map, Value};

/// Most points of a curve that are printed.
const CURVE_POINTS: usize = 200;
/// A side counts as done when it has merged 99% of the share of equal pages that ksmd merged in the end.
const IN_FULL: f64 = 0.99;

/// Pagefold's figures over ksmd's; absent where Pagefold never got there.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Ratios {
    /// Processor time until a side has merged 99% of the share of equal pages that ksmd merged in the end.
    pub cpu: Option<f64>,
    /// Time until then.
    pub wall: Option<f64>,
    /// Pages merged in the end, each side's as a share of the pages that were equal in its turn.
    pub merged: Option<f64>,
    /// Frames saved in the end, as such shares; the memory of Pagefold's own in its members counts against it.
    pub frames_saved: Option<f64>,
    /// Processor time while guests are idle, at the same reaction time.
    pub steady_cpu: Option<f64>,
    /// Median time of first writes to merged pages.
    pub break_p50: Option<f64>,
}

/// One turn of each side.
#[derive(Clone, Debug, Serialize)]
pub struct Round {
    /// ksmd's turn.
    ksmd: Turn,
    /// Pagefold's turn.
    pagefold: Turn,
    /// Pagefold's figures over ksmd's.
    ratio: Ratios,
}

/// The result of the bench.
#[derive(Debug, Serialize)]
pub struct Bench {
    /// Image of the guests.
    image: Image,
    /// Number of guests.
    guests: u64,
    /// Memory of each guest.
    memory_bytes: u64,
    /// Seconds for which idle guests are measured.
    steady_s: u64,
    /// Whether ksmd maps pages of zeros to the kernel's zero page.
    use_zero_pages: bool,
    /// Number of pages that can be merged at all, where that is known.
    superfluous_pages: Option<u64>,
    /// Medians of ksmd's turns, with the fields of a turn but for `curve`.
    pub ksmd: Value,
    /// Medians of Pagefold's turns, in the same form.
    pub pagefold: Value,
    /// Medians of the ratios.
    pub ratio: Ratios,
    /// The single rounds.
    rounds: Vec<Round>,
}

impl Round {
    /// Compares the turns of the two sides in one round.
    pub fn of(mut ksmd: Turn, mut pagefold: Turn) -> Self {
        let in_full = share(&ksmd, ksmd.merged_pages as f64) * IN_FULL;
        for turn in [&mut ksmd, &mut pagefold] {
            let reached = turn.curve.reached((turn.equal_pages as f64 * in_full) as u64);
            (turn.wall_s, turn.cpu_s) = (reached.map(|p| p.seconds), reached.map(|p| p.so_far.cpu_s));
            turn.curve = turn.curve.thinned(CURVE_POINTS);
        }
        let shares = |of: fn(&Turn) -> f64| over(Some(share(&pagefold, of(&pagefold))), Some(share(&ksmd, of(&ksmd))));
        let ratio = Ratios {
            cpu: over(pagefold.cpu_s, ksmd.cpu_s),
            wall: over(pagefold.wall_s, ksmd.wall_s),
            merged: shares(|turn| turn.merged_pages as f64),
            frames_saved: shares(|turn| turn.frames_saved as f64),
            steady_cpu: steady_ratio(&ksmd, &pagefold),
            break_p50: over(Some(pagefold.first_writes.p50_us), Some(ksmd.first_writes.p50_us)),
        };
        Self { ksmd, pagefold, ratio }
    }
}

/// Pages as a share of those that could be merged in this turn.
fn share(turn: &Turn, pages: f64) -> f64 {
    pages / turn.equal_pages.max(1) as f64
}

fn over(ours: Option<f64>, theirs: Option<f64>) -> Option<f64> {
    Some(ours? / theirs.filter(|t| *t > 0.0)?)
}

/// Pagefold's processor time while guests are idle over ksmd's, if ksmd slept between its batches until it reacted as
/// slowly. Then it would use proportionally less processor time.
fn steady_ratio(ksmd: &Turn, pagefold: &Turn) -> Option<f64> {
    let slowed = over(ksmd.reaction_s, pagefold.reaction_s)?.min(1.0);
    over(Some(pagefold.steady_cpu_s_per_s), Some(ksmd.steady_cpu_s_per_s * slowed))
}

impl Bench {
    /// Computes the medians of all rounds.
    pub fn of(o: &Options, rounds: Vec<Round>) -> Self {
        let turns = |of: fn(&Round) -> &Turn| {
            let values = rounds
                .iter()
                .map(|r| serde_json::to_value(of(r)).expect("these types have no maps with keys other than text"));
            median_of(&values.collect::<Vec<_>>())
        };
        let ratios = |of: fn(&Ratios) -> Option<f64>| {
            let all: Vec<f64> = rounds.iter().map(|r| of(&r.ratio).unwrap_or(f64::INFINITY)).collect();
            Some(median(&all)).filter(|m| m.is_finite())
        };
        let made = super::layout::superfluous(o.guests, o.memory / page::PAGE_BYTES as u64);
        Self {
            image: o.image,
            guests: o.guests,
            memory_bytes: o.memory,
            steady_s: o.steady,
            use_zero_pages: o.use_zero_pages,
            superfluous_pages: (o.image == Image::Synthetic).then_some(made + super::probe::SUPERFLUOUS),
            ksmd: turns(|r| &r.ksmd),
            pagefold: turns(|r| &r.pagefold),
            ratio: Ratios {
                cpu: ratios(|r| r.cpu),
                wall: ratios(|r| r.wall),
                merged: ratios(|r| r.merged),
                frames_saved: ratios(|r| r.frames_saved),
                steady_cpu: ratios(|r| r.steady_cpu),
                break_p50: ratios(|r| r.break_p50),
            },
            rounds,
        }
    }
}

/// The median of each number in values of the same shape. A number that one of them lacks is left out, and so are
/// lists.
fn median_of(values: &[Value]) -> Value {
    match values.first() {
        Some(Value::Object(first)) => {
            let mut medians = Map::new();
            for key in first.keys().filter(|key| !first[*key].is_array()) {
                let of_key: Vec<Value> = values.iter().map(|v| v.get(key).cloned().unwrap_or(Value::Null)).collect();
                medians.insert(key.clone(), median_of(&of_key));
            }
            Value::Object(medians)
        }
        Some(Value::Number(_)) => {
            let numbers: Option<Vec<f64>> = values.iter().map(Value::as_f64).collect();
            let Some(numbers) = numbers else { return Value::Null };
            let median = median(&numbers);
            let whole = values.iter().all(|v| v.is_i64() || v.is_u64()) && median.fract() == 0.0;
            if whole { Value::from(median as i64) } else { Value::from(median) }
        }
        _ => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn medians_keep_the_shape() {
        let rounds = [
            json!({"a": 1, "b": {"c": 2.5}, "d": null, "curve": [1]}),
            json!({"a": 5, "b": {"c": 0.5}, "d": 1, "curve": []}),
            json!({"a": 3, "b": {"c": 1.5}, "d": 2, "curve": [2]}),
        ];
        assert_eq!(median_of(&rounds), json!({"a": 3, "b": {"c": 1.5}, "d": null}));
        assert_eq!(median_of(&rounds[..2]), json!({"a": 3, "b": {"c": 1.5}, "d": null}));
        assert_eq!(over(Some(1.0), Some(4.0)), Some(0.25));
        assert_eq!((over(None, Some(4.0)), over(Some(1.0), Some(0.0))), (None, None));
    }
}
