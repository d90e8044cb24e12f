//! Break storms and the walk in memory: kinds of work of the program `storms`, which is looked for beside this program.

use super::{STORM, USUAL, Workload};
use crate::serving::beside;
use crate::side::Side;
use anyhow::Context;
use serde::Deserialize;

/// File name of the program.
const STORMS: &str = "storms";

/// Passes over the memory that the kind `discard` discards. All of it is folded before the first pass.
const DISCARD_PASSES: u64 = 8;
/// Seconds of pause before each further pass: enough for memory to be folded again.
const DISCARD_REST: &str = "6";

pub const ALLOCATE: Workload = Workload {
    name: "allocate",
    unit: "malloc and free of 4 KiB to 4 MiB",
    cap: STORM,
    floor: 0,
    needs: &[],
    recipe: |side| storm(side, "allocate", side.amount(600_000, 2000)),
};

pub const DISCARD: Workload = Workload {
    name: "discard",
    unit: "discard of 1 to 64 pages, written again",
    cap: STORM,
    floor: 30_000,
    needs: &[],
    recipe: |side| storm(side, "discard", side.amount(DISCARD_PASSES, 1)),
};

pub const FORK: Workload = Workload {
    name: "fork",
    unit: "fork with 5,000 folded runs",
    cap: STORM,
    floor: 4900,
    needs: &[],
    recipe: |side| storm(side, "fork", side.amount(2000, 50)),
};

pub const THREADS: Workload = Workload {
    name: "threads",
    unit: "thread created and joined",
    cap: STORM,
    floor: 0,
    needs: &[],
    recipe: |side| storm(side, "threads", side.amount(300_000, 5000)),
};

pub const WALK: Workload = Workload {
    name: "walk",
    unit: "step in 256 MiB",
    cap: USUAL,
    floor: 20_000,
    needs: &[],
    recipe: |side| storm(side, "walk", side.amount(40_000_000, 1_000_000)),
};

/// The last line that `storms` prints, as JSON.
#[derive(Deserialize)]
struct Done {
    units: u64,
    seconds: f64,
    folded_pages: u64,
}

/// Runs one kind of storm; returns the seconds for a unit of work.
fn storm(side: &Side, kind: &str, units: u64) -> anyhow::Result<f64> {
    let path = beside(STORMS, "build it with cargo build --release -p trials")?;
    let path = path.to_str().context("a path that is not UTF-8")?;
    let (units, folded) = (units.to_string(), side.floor().to_string());
    let (said, _) =
        side.run(kind, &[path, kind, "--units", &units, "--await-folded", &folded, "--rest", DISCARD_REST])?;
    let done: Done = serde_json::from_str(&said).with_context(|| format!("the storm says {said:?}"))?;
    side.note_folded(done.folded_pages);
    Ok(done.seconds / done.units as f64)
}
