//! The savings of a group stay in it: Kim, Kim and Lee, "Group-Based Memory Deduplication for Virtualized Clouds"
//! (2011).

use super::{Policy, Wish, weighted, wishes};
use crate::facts::Facts;
use crate::share_out::share_out;
use std::collections::BTreeMap;

/// Each group gets its own net savings, which its guests share equally. Memory that nobody saved is dealt out equally
/// among all guests.
pub struct Group;

impl Policy for Group {
    fn name(&self) -> &'static str {
        "group"
    }

    fn sizes(&self, facts: &Facts, lendable_bytes: u64) -> Vec<Wish> {
        let all = weighted(facts, |_| 1);
        let saved = |group: &str| facts.saved_bytes(group);
        let mut groups: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (n, guest) in facts.guests.iter().enumerate() {
            groups.entry(&guest.group).or_default().push(n);
        }
        let caps = groups.iter().map(|(group, guests)| {
            let most = guests.iter().filter(|n| all[**n].0 > 0).map(|n| all[*n].1).fold(0, u64::saturating_add);
            (saved(group), saved(group).min(most))
        });
        let of_groups = share_out(lendable_bytes, &caps.collect::<Vec<_>>());
        let mut loans = vec![0; all.len()];
        for (guests, bytes) in groups.values().zip(of_groups) {
            let shares = share_out(bytes, &guests.iter().map(|n| all[*n]).collect::<Vec<_>>());
            guests.iter().zip(shares).for_each(|(n, share)| loans[*n] = share);
        }
        let left = lendable_bytes.saturating_sub(loans.iter().fold(0, |sum: u64, loan| sum.saturating_add(*loan)));
        let rest: Vec<_> =
            all.iter().zip(&loans).map(|((weight, cap), loan)| (*weight, cap.saturating_sub(*loan))).collect();
        for (loan, more) in loans.iter_mut().zip(share_out(left, &rest)) {
            *loan = loan.saturating_add(more);
        }
        wishes(facts, &loans, |n| {
            let group = &facts.guests[n].group;
            format!("its part of what group {group} saved, {} MiB, and of the rest", saved(group) >> 20)
        })
    }
}
