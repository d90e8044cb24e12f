//! Computes figures of memory and of folding's work from services' answers.
//!
//! ```text
//!   unique = anonymous page frames, by the kernel's counters
//!   PSS    = unique + folded pages * (slots in use / pages that map one, of the whole group)
//! ```
//!
//! A group's PSS is the sum of `unique` over its processes, and the slots in use of its pool. No figure counts files
//! that processes map.

use api::control::{GroupReport, MemberReport};
use page::pages_to_bytes;
use serde::Serialize;

/// Figures that groups, members and processes have; `None` where no service tells.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Anonymous memory in page frames: nobody else holds these, but for forked children and ksmd's merged pages.
    pub anonymous_bytes: Option<u64>,
    /// Pages that map a slot of the group's pool.
    pub folded_bytes: Option<u64>,
    /// Pages of zeros that were given back.
    pub zero_bytes: Option<u64>,
    /// Pages that were folded and written since.
    pub broken_bytes: Option<u64>,
    /// Anonymous memory, and its part of the group's pool.
    pub proportional_bytes: Option<u64>,
    /// Savings, net of all costs; may be negative.
    pub saved_bytes: Option<i64>,
    /// Pages that were broken in a second, since the look before: at least so many.
    pub broken_bytes_per_s: Option<u64>,
    /// Processor time of folding since the look before, in percent of one processor.
    pub cpu_percent: Option<f64>,
}

/// Counters of a group or process at one moment. Rates are computed from two of them.
#[derive(Clone, Copy, Debug)]
pub struct Counted {
    /// Pages that are broken now, and pages that were broken and folded again since. This number grows by each page
    /// that breaks, unless the page is released.
    pub broken_pages: u64,
    /// Of these, pages that were folded again.
    pub refolds: u64,
    /// Processor time of folding, in seconds.
    pub cpu_s: f64,
}

impl Counted {
    /// Counters of a process.
    pub const fn of_process(report: &MemberReport) -> Self {
        let (broken_pages, refolds) = (report.broken_pages.saturating_add(report.refolds), report.refolds);
        Self { broken_pages, refolds, cpu_s: report.agent_cpu_s }
    }

    /// Counters of a group.
    pub fn of_group(report: &GroupReport) -> Self {
        let (bill, refolds) = (&report.bill, report.bill.refolds);
        let broken_pages = report.broken_pages.saturating_add(refolds);
        Self { broken_pages, refolds, cpu_s: bill.worker_cpu_s + bill.agent_cpu_s }
    }

    /// Bytes that broke a second, and percent of a processor that folding took, since `before`. `None` if the counters
    /// were reset (an agent has connected anew), or no time has passed.
    fn rates(&self, before: &Self, seconds: f64) -> Option<(u64, f64)> {
        let is_anew =
            self.refolds < before.refolds || self.cpu_s < before.cpu_s || !seconds.is_normal() || seconds < 0.0;
        let broken = pages_to_bytes(self.broken_pages.saturating_sub(before.broken_pages)) as f64;
        let cpu_percent = (self.cpu_s - before.cpu_s) / seconds * 100.0;
        (!is_anew).then(|| ((broken / seconds).round() as u64, (cpu_percent * 100.0).round() / 100.0))
    }
}

/// The sum of those figures that are known; `None` if none is.
fn sum(figures: impl Iterator<Item = Option<u64>>) -> Option<u64> {
    figures.flatten().reduce(u64::saturating_add)
}

impl Figures {
    /// The figures of a process. Those that its agent reports are `None` while no agent is connected.
    pub fn of_process(report: &MemberReport, group: &GroupReport) -> Self {
        let bytes = |pages: u64| report.connected.then(|| pages_to_bytes(pages));
        let part = u128::from(report.folded_pages).saturating_mul(group.slots.into());
        let part = part.checked_div(group.sharing_pages.into()).unwrap_or(0).min(report.folded_pages.into());
        let part = pages_to_bytes(u64::try_from(part).unwrap_or(u64::MAX));
        Self {
            anonymous_bytes: report.anonymous_bytes,
            folded_bytes: bytes(report.folded_pages),
            zero_bytes: bytes(report.zero_pages),
            broken_bytes: bytes(report.broken_pages),
            proportional_bytes: report.anonymous_bytes.map(|own| own.saturating_add(part)),
            saved_bytes: report.connected.then_some(report.saved_bytes),
            ..Self::default()
        }
    }

    /// The figures of a group. `processes` has the figures of its members' processes.
    pub fn of_group(report: &GroupReport, processes: &[Self]) -> Self {
        // A sum without the members that the report leaves out would be too small.
        let is_whole = report.members_left_out == 0;
        let anonymous_bytes = sum(processes.iter().map(|one| one.anonymous_bytes)).filter(|_| is_whole);
        let pool = pages_to_bytes(report.slots);
        Self {
            anonymous_bytes,
            folded_bytes: Some(pages_to_bytes(report.sharing_pages)),
            zero_bytes: Some(pages_to_bytes(report.zero_pages)),
            broken_bytes: Some(pages_to_bytes(report.broken_pages)),
            proportional_bytes: anonymous_bytes.map(|own| own.saturating_add(pool)),
            saved_bytes: Some(report.savings.saved_bytes()),
            ..Self::default()
        }
    }

    /// The figures of a member: sums over its processes.
    pub fn of_member<'a>(processes: impl Iterator<Item = &'a Self> + Clone) -> Self {
        let all = |of: fn(&Self) -> Option<u64>| sum(processes.clone().map(of));
        Self {
            anonymous_bytes: all(|one| one.anonymous_bytes),
            folded_bytes: all(|one| one.folded_bytes),
            zero_bytes: all(|one| one.zero_bytes),
            broken_bytes: all(|one| one.broken_bytes),
            proportional_bytes: all(|one| one.proportional_bytes),
            saved_bytes: processes.clone().filter_map(|one| one.saved_bytes).reduce(i64::saturating_add),
            broken_bytes_per_s: all(|one| one.broken_bytes_per_s),
            cpu_percent: processes.clone().filter_map(|one| one.cpu_percent).reduce(|sum, one| sum + one),
        }
    }

    /// Adds the rates between two sets of counters, with `seconds` between them.
    pub fn with_rates(mut self, now: &Counted, before: Option<&Counted>, seconds: f64) -> Self {
        let rates = before.and_then(|before| now.rates(before, seconds));
        self.broken_bytes_per_s = rates.map(|(broken, _)| broken);
        self.cpu_percent = rates.map(|(_, cpu)| cpu);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_count_broken_pages_that_were_folded_again_and_none_across_a_new_start() {
        let counted = |broken: u64, refolds: u64, cpu_s| Counted { broken_pages: broken + refolds, refolds, cpu_s };
        let before = counted(10, 100, 1.0);
        assert_eq!(counted(5, 110, 1.5).rates(&before, 2.0), Some((5 * 4096 / 2, 25.0)));
        assert_eq!(counted(3, 100, 1.0).rates(&before, 2.0), Some((0, 0.0)));
        assert_eq!(counted(50, 0, 0.1).rates(&before, 2.0), None);
        assert_eq!(counted(10, 100, 1.0).rates(&before, 0.0), None);
    }

    #[test]
    fn parts_of_the_pool_add_up_to_the_pool() {
        let group = GroupReport { slots: 100, sharing_pages: 400, ..GroupReport::default() };
        let member = |folded_pages| MemberReport {
            connected: true,
            folded_pages,
            anonymous_bytes: Some(4096),
            ..MemberReport::default()
        };
        let processes = [300, 100].map(|folded| Figures::of_process(&member(folded), &group));
        assert_eq!(processes.clone().map(|one| one.proportional_bytes), [Some(76 << 12), Some(26 << 12)]);
        assert_eq!(Figures::of_member(processes.iter()).proportional_bytes, Some(102 << 12));
        assert_eq!(Figures::of_group(&group, &processes).proportional_bytes, Some(102 << 12));
        let part = GroupReport { members_left_out: 1, ..group };
        assert_eq!(Figures::of_group(&part, &processes).anonymous_bytes, None);
        let liar = Figures::of_process(&member(u64::MAX), &GroupReport { slots: u64::MAX, ..part });
        assert!(liar.proportional_bytes.is_some());
    }
}
