//! `kloster-t8.3`: the cost of each primitive.

use super::GROUP;
use crate::guest::DOUBLES;
use crate::plan::Planned;
use crate::record::{MERGED, Measured};
use crate::rig::{Asked, Group, Rig, wait};
use anyhow::Context;
use std::time::Duration;

/// Time limit for all pages to be merged.
const PATIENCE: Duration = Duration::from_secs(60);

/// `kloster-t8.3`.
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
    let of =
        |answer: &serde_json::Value, name: &str| answer[name].as_f64().with_context(|| format!("no {name}: {answer}"));
    let mut measured = Measured::default();
    measured.put(MERGED, merged as f64);
    measured.put("merge_us", merge_us);
    let hash_us = of(&primitives, "hash_us")?;
    measured.put("hash_over_zero", hash_us / of(&primitives, "zero_us")?);
    measured.put("merge_over_hash", merge_us / hash_us);
    for (primitive, name) in
        [("zero test", "zero_us"), ("copy", "copy_us"), ("hash", "hash_us"), ("compare", "compare_us")]
    {
        measured.put_at("cost_us", primitive, of(&primitives, name)?);
    }
    measured.put_at("cost_us", "merge", merge_us);
    if merged > 0 {
        measured.put_at("cost_us", "break", of(&breaks, "p50_us")?);
        measured.put("break_p50_us", of(&breaks, "p50_us")?);
        measured.put("break_p99_us", of(&breaks, "p99_us")?);
    }
    Ok(measured)
}
