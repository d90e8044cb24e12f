//! `kloster-t8.3`: the cost of each primitive of merging: comparing, hashing, copying, merging and breaking a page.

use super::GROUP;
use crate::guest::DOUBLES;
use crate::plan::Planned;
use crate::record::{MERGED, Measured};
use crate::rig::{Asked, Group, Rig, wait};
use anyhow::Context;
use serde_json::Value;
use std::time::Duration;

/// Time limit for all pages to be merged.
const PATIENCE: Duration = Duration::from_secs(60);

/// The recipe of `kloster-t8.3`.
pub fn costs(rig: &mut Rig, planned: &Planned) -> anyhow::Result<Measured> {
    let mut merger = rig.merger(&planned.arm, &[Group::of(GROUP)])?;
    let mut doubles = Asked::start(&mut merger, (GROUP, "doubles"), &["doubles"])?;
    let primitives = doubles.ask("primitives")?;
    let before = merger.cpu()?;
    merger.on()?;
    let mut merged = 0;
    wait(PATIENCE, || {
        merged = doubles.ask("touch")?["merged"].as_u64().unwrap_or(0);
        Ok(merged as usize >= DOUBLES * 98 / 100)
    })?;
    let merge_us = merger.cpu()?.since(&before).total() * 1e6 / (merged as f64).max(1.0);
    let breaks = doubles.ask("time")?;
    let mut measured = Measured::default();
    measured.put(MERGED, merged as f64);
    put(merge_us, &primitives, (merged > 0).then_some(&breaks), &mut measured)?;
    Ok(measured)
}

/// Puts the costs, from the answers of the process. Breaks are known only where something was merged.
fn put(merge_us: f64, primitives: &Value, breaks: Option<&Value>, measured: &mut Measured) -> anyhow::Result<()> {
    let of = |answer: &Value, name: &str| answer[name].as_f64().with_context(|| format!("no {name}: {answer}"));
    let hash_us = of(primitives, "hash_us")?;
    measured.put("merge_us", merge_us);
    measured.put("hash_over_zero", hash_us / of(primitives, "zero_us")?);
    measured.put("compare_over_hash", of(primitives, "compare_us")? / hash_us);
    measured.put("merge_over_hash", merge_us / hash_us);
    for (primitive, name) in
        [("zero test", "zero_us"), ("copy", "copy_us"), ("hash", "hash_us"), ("compare", "compare_us")]
    {
        measured.put_at("cost_us", primitive, of(primitives, name)?);
    }
    measured.put_at("cost_us", "merge", merge_us);
    if let Some(breaks) = breaks {
        measured.put_at("cost_us", "break", of(breaks, "p50_us")?);
        for (metric, name) in [("break_p50_us", "p50_us"), ("break_p99_us", "p99_us"), ("break_p999_us", "p999_us")] {
            measured.put(metric, of(breaks, name)?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn slowest_breaks_and_the_price_of_a_hash_are_put() {
        let primitives = json!({"zero_us": 0.5, "hash_us": 1.0, "compare_us": 1.5, "copy_us": 2.0});
        let breaks = json!({"count": 8000, "p50_us": 2.0, "p99_us": 8.0, "p999_us": 30.0});
        let of = |breaks: Option<&Value>, metric: &str| {
            let mut measured = Measured::default();
            put(4.0, &primitives, breaks, &mut measured).unwrap();
            measured.samples.iter().find(|s| s.metric == metric).map(|s| s.value)
        };
        assert_eq!(of(Some(&breaks), "break_p999_us"), Some(30.0));
        assert_eq!((of(Some(&breaks), "compare_over_hash"), of(None, "compare_over_hash")), (Some(1.5), Some(1.5)));
        assert_eq!((of(None, "break_p999_us"), of(None, "merge_over_hash")), (None, Some(4.0)));
    }
}
