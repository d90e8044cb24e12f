//! The savings of folding: one sum, for all programs that count its terms.
//!
//! ```text
//!   gross = folded + zero pages       memory that members would take without folding
//!   costs = pool + tables + mappings  memory that folding takes
//!   saved = gross - costs             negative while folding costs more than it saves
//! ```

use crate::pages_to_bytes;
use serde::{Deserialize, Serialize};
use std::ops::AddAssign;

/// Kernel memory of one mapping, in bytes. That is its `vm_area_struct` (192), its part of a tree's node (25) and, for
/// half of them, the link to an `anon_vma` (64). Measured by `/proc/slabinfo` of Linux 6.18 with 40,000 mappings, of
/// which every other was one of a memory file.
const MAPPING_BYTES: u64 = 256;

/// The terms of the sum, in bytes, all of them whole pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Savings {
    /// Pages of members that map a slot of the pool: without it, each would be a frame.
    pub folded_bytes: u64,
    /// Pages of zeros that were given back and not written since.
    pub zero_bytes: u64,
    /// All memory of the pool, whether its slots are in use or idle.
    pub pool_bytes: u64,
    /// Tables of the worker and of the agents, and the worker's page tables.
    pub tables_bytes: u64,
    /// The kernel's account of the members' mappings, all of them.
    pub mappings_bytes: u64,
}

/// Bytes, rounded up to whole pages.
const fn whole_pages(bytes: u64) -> u64 {
    pages_to_bytes(bytes.div_ceil(pages_to_bytes(1)))
}

impl Savings {
    /// The terms of page counts, of the bytes of all tables, and of a number of mappings. Numbers beyond all real hosts
    /// are cut off, so that no sum overflows.
    pub fn of(folded_pages: u64, zero_pages: u64, pool_pages: u64, tables_bytes: u64, mappings: u64) -> Self {
        let pages = |n: u64| pages_to_bytes(n.min(u64::MAX >> 16));
        Self {
            folded_bytes: pages(folded_pages),
            zero_bytes: pages(zero_pages),
            pool_bytes: pages(pool_pages),
            tables_bytes: whole_pages(tables_bytes.min(u64::MAX >> 4)),
            mappings_bytes: whole_pages(mappings.saturating_mul(MAPPING_BYTES).min(u64::MAX >> 4)),
        }
    }

    /// Memory that members would take without folding.
    pub const fn gross_bytes(&self) -> u64 {
        self.folded_bytes.saturating_add(self.zero_bytes)
    }

    /// Memory that folding takes.
    pub const fn cost_bytes(&self) -> u64 {
        self.pool_bytes.saturating_add(self.tables_bytes).saturating_add(self.mappings_bytes)
    }

    /// Savings: gross less costs.
    pub fn saved_bytes(&self) -> i64 {
        let (gross, costs) = (self.gross_bytes(), self.cost_bytes());
        let most = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        most(gross).saturating_sub(most(costs))
    }

    /// The part of a group's savings that is one member's, by its pages and mappings.
    ///
    /// A member bears the costs of pool and tables by its part of the folded pages. While nothing is folded, they are
    /// nobody's but the group's.
    pub fn of_member(&self, folded_pages: u64, zero_pages: u64, mappings: u64) -> i64 {
        let own = Self::of(folded_pages, zero_pages, 0, 0, mappings);
        let common = u128::from(self.pool_bytes.saturating_add(self.tables_bytes));
        // A member that reports more folded pages than the whole group has bears all of the costs, and no more.
        let part = common.saturating_mul(own.folded_bytes.min(self.folded_bytes).into());
        let part = part.checked_div(u128::from(self.folded_bytes)).unwrap_or(0);
        own.saved_bytes().saturating_sub(i64::try_from(part).unwrap_or(i64::MAX))
    }
}

impl AddAssign for Savings {
    fn add_assign(&mut self, other: Self) {
        self.folded_bytes = self.folded_bytes.saturating_add(other.folded_bytes);
        self.zero_bytes = self.zero_bytes.saturating_add(other.zero_bytes);
        self.pool_bytes = self.pool_bytes.saturating_add(other.pool_bytes);
        self.tables_bytes = self.tables_bytes.saturating_add(other.tables_bytes);
        self.mappings_bytes = self.mappings_bytes.saturating_add(other.mappings_bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::Savings;

    #[test]
    fn saved_is_gross_less_costs() {
        let one = Savings::of(600, 100, 300, 4097, 17);
        assert_eq!(one.gross_bytes(), 700 << 12);
        assert_eq!(one.cost_bytes(), (300 + 2 + 2) << 12);
        assert_eq!(one.saved_bytes(), 396 << 12);
        let mut all = Savings::of(0, 0, 300, 0, 0);
        assert_eq!(all.saved_bytes(), -(300 << 12));
        all += one;
        assert_eq!(all.saved_bytes(), 96 << 12);
    }

    #[test]
    fn members_share_costs_by_their_folded_pages() {
        let group = Savings::of(400, 10, 100, 20 << 12, 32);
        let members = [(300, 0, 16), (100, 10, 16)].map(|(folded, zero, vmas)| group.of_member(folded, zero, vmas));
        assert_eq!(members, [(300 - 90 - 1) << 12, (100 + 10 - 30 - 1) << 12]);
        // The kernel's account is in whole pages for each: the sum may differ by a page a member.
        assert_eq!(members.iter().sum::<i64>(), group.saved_bytes());
        assert_eq!(Savings::of(0, 0, 100, 0, 0).of_member(0, 5, 0), 5 << 12);
        assert_eq!(group.of_member(u64::MAX, 0, 0), Savings::of(u64::MAX, 0, 0, 0, 0).saved_bytes() - (120 << 12));
    }

    #[test]
    fn numbers_that_no_host_has_do_not_overflow() {
        let bytes = [(1 << 52) - 1, 1 << 52, (1 << 52) + 1, u64::MAX].map(crate::pages_to_bytes);
        assert_eq!(bytes, [u64::MAX - 4095, u64::MAX, u64::MAX, u64::MAX]);
        let most = Savings::of(u64::MAX, u64::MAX, 0, 0, 0);
        assert!(most.saved_bytes() > 1 << 60);
        let mut costs = Savings::of(0, 0, u64::MAX, u64::MAX, u64::MAX);
        costs += costs;
        assert!(costs.saved_bytes() < 0 && costs.of_member(1, 0, 0) == 4096);
        assert!(Savings { folded_bytes: 1, ..costs }.of_member(1, 0, 0) < 0);
    }
}
