//! All guests get the same.

use super::{Policy, Wish, weighted, wishes};
use crate::facts::Facts;
use crate::share_out::share_out;

/// Each guest gets an equal part of what can be lent, up to its RAM.
pub struct Equal;

impl Policy for Equal {
    fn name(&self) -> &'static str {
        "equal"
    }

    fn sizes(&self, facts: &Facts, lendable_bytes: u64) -> Vec<Wish> {
        let loans = share_out(lendable_bytes, &weighted(facts, |_| 1));
        wishes(facts, &loans, |_| "an equal part of what can be lent".into())
    }
}
