//! `libpagefold.so`: the agent that is preloaded into a process. Its hooks stand before functions of the C library, and
//! the core (`agent`) folds the pages of the process. ARCHITECTURE.md, section "Folding", shows how they work together.

mod child;
mod debugged;
mod files;
mod hooks;
mod resign;
#[cfg(test)]
#[path = "../../agent/src/scarce.rs"]
#[expect(dead_code, reason = "tests of the core use the rest")]
mod scarce;
mod start;
#[cfg(test)]
#[path = "../../agent/src/testing.rs"]
#[expect(dead_code, reason = "tests of the core use the rest")]
mod testing;

#[cfg(test)]
use agent::{follow, maps, raw, references, section, table, witness};
