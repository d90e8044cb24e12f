//! A guest that contributed to the savings gets what it saved: sharing entitlement, as in Satori and Kim's NOGRP-SE.

use super::{Policy, Wish, weighted, wishes};
use crate::facts::Facts;
use crate::share_out::share_out;

/// Each guest gets its own savings. Memory that nobody saved is dealt out equally.
pub struct Entitlement;

impl Policy for Entitlement {
    fn name(&self) -> &'static str {
        "entitlement"
    }

    fn sizes(&self, facts: &Facts, lendable_bytes: u64) -> Vec<Wish> {
        let saved = |n: usize| u64::try_from(facts.guests[n].saved_bytes).unwrap_or(0);
        let loans = own_and_equal(lendable_bytes, &weighted(facts, |_| 1), saved);
        wishes(facts, &loans, |n| format!("its savings, {} MiB, and an equal part of the rest", saved(n) >> 20))
    }
}

/// Loans: to each guest its `own` bytes first, scaled down if that is too much, then equal parts of what is left.
pub(super) fn own_and_equal(lendable: u64, weighted: &[(u64, u64)], own: impl Fn(usize) -> u64) -> Vec<u64> {
    let owns: Vec<(u64, u64)> = weighted
        .iter()
        .enumerate()
        .map(|(n, (weight, cap))| (if *weight > 0 { own(n) } else { 0 }, own(n).min(*cap)))
        .collect();
    let mut loans = share_out(lendable, &owns);
    let left = lendable.saturating_sub(loans.iter().fold(0, |sum: u64, loan| sum.saturating_add(*loan)));
    let rest: Vec<_> =
        weighted.iter().zip(&loans).map(|((weight, cap), loan)| (*weight, cap.saturating_sub(*loan))).collect();
    for (loan, more) in loans.iter_mut().zip(share_out(left, &rest)) {
        *loan = loan.saturating_add(more);
    }
    loans
}
