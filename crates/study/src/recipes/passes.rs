//! `kloster-t6.1`: how a bound on the memory of the census's index changes its number of passes and its time.

use super::{D256, GROUP, alike, as_guests, rep_of};
use crate::data::Length;
use crate::plan::Planned;
use crate::record::Measured;
use crate::rig::{Group, Rig};
use crate::stats;
use anyhow::Context;
use census::Findings;
use serde_json::json;
use std::time::Duration;
use survey::{Request, take};

/// The bounds: one half, one third and so on of the memory of the whole index.
const PARTS: [u64; 5] = [2, 3, 4, 6, 9];
/// Time limit for a VM to stand still.
const PATIENCE: Duration = Duration::from_secs(10);

/// The recipe of `kloster-t6.1`.
pub fn by_bound(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut nobody = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
    let guests = if planned.length == Length::Full { 8 } else { 4 };
    let vms = rig.vms(&alike(guests, rep_of(planned), D256), &mut nobody)?;
    // The guests are stopped, so that each pass finds the same memory: the paper reads dumps of memory.
    for guest in &vms.guests {
        guest.qmp(PATIENCE)?.execute("stop", json!({})).with_context(|| format!("cannot stop {}", guest.name))?;
    }
    let guests = as_guests(&vms)?;
    let whole = Pass::of(&take(&Request::of(&guests))?.0);
    let mut measured = Measured::default();
    let mut all = vec![whole];
    for part in PARTS {
        let index_bytes = Some((whole.index_mb * 1e6) as usize / part as usize);
        all.push(Pass::of(&take(&Request { index_bytes, ..Request::of(&guests) })?.0));
    }
    for pass in &all {
        measured.put_at("index_mb", pass.passes, pass.index_mb);
        measured.put_at("seconds", pass.passes, pass.seconds);
    }
    let of = |figure: fn(&Pass) -> f64| all.iter().map(figure).collect::<Vec<_>>();
    measured.put("product_spread", spread(&of(|p| p.index_mb * f64::from(p.passes))));
    measured.put("duplicates_spread", spread(&of(|p| p.duplicates)));
    measured.put("duplicates", whole.duplicates);
    let points: Vec<(f64, f64)> = all.iter().map(|p| (f64::from(p.passes), p.seconds)).collect();
    measured.put("r_squared", stats::r_squared(&points).context("all bounds took as many passes")?);
    Ok(measured)
}

/// What a census with one bound took.
#[derive(Clone, Copy)]
struct Pass {
    passes: u32,
    index_mb: f64,
    seconds: f64,
    duplicates: f64,
}

impl Pass {
    fn of(findings: &Findings) -> Self {
        Self {
            passes: findings.host.passes,
            index_mb: findings.host.index_bytes as f64 / 1e6,
            seconds: findings.host.seconds,
            duplicates: (findings.opportunity.within.total + findings.opportunity.between.total) as f64,
        }
    }
}

/// The largest value less the smallest, relative to the smallest.
fn spread(values: &[f64]) -> f64 {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    values.iter().copied().fold(0.0, f64::max) / least - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_is_relative_to_the_smallest() {
        assert!((spread(&[10.0, 11.0, 10.5]) - 0.1).abs() < 1e-9);
        assert_eq!(spread(&[3.0, 3.0]), 0.0);
    }
}
