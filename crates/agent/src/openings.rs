//! The generation of `references`: the number of times that the program has opened something through which memory might
//! be written without pinning.
//!
//! `references` counts. A section compares the number with what it was at the last survey, and knows nothing about
//! files.

use std::sync::atomic::{AtomicU64, Ordering};

/// The generation.
static NUMBER: AtomicU64 = AtomicU64::new(0);

/// The generation. It changes before the program can use the file that it has opened.
pub fn number() -> u64 {
    NUMBER.load(Ordering::SeqCst)
}

/// Changes the generation.
pub fn count() {
    NUMBER.fetch_add(1, Ordering::SeqCst);
}
