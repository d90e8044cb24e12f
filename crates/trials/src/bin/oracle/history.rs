//! The latest operations on a plot. The history has a fixed size and holds plain bytes, because a forked child writes
//! it down for its parent.

use std::fmt;

/// Number of operations that are kept.
const KEPT: usize = 24;

#[derive(Clone, Copy, Debug, Default)]
pub struct Event {
    pub step: u64,
    pub name: &'static str,
    pub way: &'static str,
    pub from: usize,
    pub pages: usize,
    /// A detail of the operation: a class of content, an index, or a kind of access.
    pub detail: usize,
    /// The error number, or 0.
    pub error: i32,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct History {
    events: [Event; KEPT],
    count: usize,
}

impl History {
    pub const fn add(&mut self, event: Event) {
        self.events[self.count % KEPT] = event;
        self.count += 1;
    }

    /// Records the error with which the latest operation ended, or 0.
    pub const fn ended(&mut self, error: i32) {
        if self.count > 0 {
            self.events[(self.count - 1) % KEPT].error = error;
        }
    }
}

impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = self.count.saturating_sub(KEPT);
        for Event { step, name, way, from, pages, detail, error } in (first..self.count).map(|n| self.events[n % KEPT])
        {
            write!(f, "  step {step}: {name} ({way}) pages {from}..{}", from + pages)?;
            if detail != 0 {
                write!(f, " {detail:#x}")?;
            }
            if error != 0 {
                write!(f, " -> error {error}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}
