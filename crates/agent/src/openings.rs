//! The number of times that something was opened through which memory might be written without pinning.
//!
//! `references` counts. A section compares the number with the one at the survey before it, and knows nothing of files.

use std::sync::atomic::{AtomicU64, Ordering};

/// The number.
static NUMBER: AtomicU64 = AtomicU64::new(0);

/// The number, which changes before the program can use the opened file.
pub fn number() -> u64 {
    NUMBER.load(Ordering::SeqCst)
}

/// Counts one more.
pub fn count() {
    NUMBER.fetch_add(1, Ordering::SeqCst);
}
