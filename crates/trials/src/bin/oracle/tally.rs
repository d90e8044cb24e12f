//! Counts operations, by the way in which they were made.

use crate::ops::OPERATIONS;
use crate::sys::Way;
use serde_json::{Map, Value, json};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Greatest number of operations.
const MOST: usize = 64;

/// Counts of one operation.
#[derive(Default)]
struct Row {
    done: [AtomicU64; Way::ALL.len()],
    /// Calls that the kernel refused, for want of resources or of the feature.
    refused: AtomicU64,
}

static ROWS: [Row; MOST] =
    [const { Row { done: [const { AtomicU64::new(0) }; Way::ALL.len()], refused: AtomicU64::new(0) } }; MOST];

/// Number of pages of a file's private mapping (such as folded pages) that were written and so became private.
pub static BREAKS: AtomicU64 = AtomicU64::new(0);
/// Number of pages whose whole contents were compared with the model.
pub static CHECKED: AtomicU64 = AtomicU64::new(0);
/// Pages whose protection was tried.
pub static PROBED: AtomicU64 = AtomicU64::new(0);
/// Number of plots that were given up, because another thread got their place or the kernel allowed no more mappings.
pub static GIVEN_UP: AtomicU64 = AtomicU64::new(0);
/// Number of writes through `/proc/self/mem` that the kernel refused, because it cannot wait for a page there, and that
/// were repeated.
pub static LATE_POKES: AtomicU64 = AtomicU64::new(0);
/// Number of children that ended without a fault.
pub static CHILDREN: AtomicU64 = AtomicU64::new(0);

pub fn count_done(operation: usize, way: Way) {
    ROWS[operation].done[way as usize].fetch_add(1, Relaxed);
}

pub fn count_refused(operation: usize) {
    ROWS[operation].refused.fetch_add(1, Relaxed);
}

/// The number of times that each operation was made in each way.
fn operations() -> Map<String, Value> {
    let row = |n: usize| {
        let by_way = Way::ALL.map(|way| (way.name().to_owned(), json!(ROWS[n].done[way as usize].load(Relaxed))));
        let mut row: Map<String, Value> = by_way.into_iter().collect();
        row.insert("refused".to_owned(), json!(ROWS[n].refused.load(Relaxed)));
        Value::Object(row)
    };
    OPERATIONS.iter().enumerate().map(|(n, operation)| (operation.name.to_owned(), row(n))).collect()
}

/// The line of JSON that a run without faults prints.
pub fn line(seed: u64, threads: usize, steps: u64, seconds: f64) -> Value {
    json!({
        "seed": seed,
        "threads": threads,
        "steps": steps,
        "seconds": seconds,
        "breaks_seen": BREAKS.load(Relaxed),
        "pages_checked": CHECKED.load(Relaxed),
        "pages_probed": PROBED.load(Relaxed),
        "plots_given_up": GIVEN_UP.load(Relaxed),
        "late_pokes": LATE_POKES.load(Relaxed),
        "children": CHILDREN.load(Relaxed),
        "operations": operations(),
    })
}
