//! How the group does, for the supervisor.

use crate::control::{CONTROL_BYTES, GroupReport, MemberReport, by_reason};
use crate::group::Group;
use wire::{Failures, MemberStats, Outcome, Stalls};

/// Members' reports may take this much of a message.
const MEMBERS_BYTES: usize = CONTROL_BYTES - (16 << 10);

/// What members counted that are not connected any more.
#[derive(Clone, Debug, Default)]
pub struct Former {
    folds: u64,
    refolds: u64,
    short_folds: u64,
    scanned: u64,
    hashed: u64,
    agent_cpu_us: u64,
    failures: Failures,
    /// Pages reported.
    pub reported: u64,
}

impl Former {
    /// Adds what a member counted.
    pub fn add(&mut self, stats: &MemberStats, reported: u64) {
        self.reported += reported;
        self.folds = self.folds.saturating_add(stats.folds);
        self.refolds = self.refolds.saturating_add(stats.refolds);
        self.short_folds = self.short_folds.saturating_add(stats.short_folds);
        self.scanned = self.scanned.saturating_add(stats.pages_scanned);
        self.hashed = self.hashed.saturating_add(stats.pages_hashed);
        self.agent_cpu_us = self.agent_cpu_us.saturating_add(stats.agent_cpu_us);
        Outcome::ALL.into_iter().for_each(|outcome| self.failures.add(outcome, stats.failures.of(outcome)));
    }
}

/// The time that this many of a hundred stalls were not longer than.
pub fn percentile(stalls: &Stalls, percent: u64) -> u64 {
    let all: u128 = stalls.buckets.iter().map(|n| u128::from(*n)).sum();
    let wanted = (all * u128::from(percent)).div_ceil(100).max(1);
    let mut seen = 0;
    for (bucket, count) in stalls.buckets.iter().enumerate() {
        seen += u128::from(*count);
        if all > 0 && seen >= wanted {
            return ((1_u64 << bucket) - 1).min(stalls.longest_us);
        }
    }
    0
}

fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

impl Group {
    /// How the group does.
    pub fn report(&mut self) -> GroupReport {
        let mut sum = self.former.clone();
        let stats: Vec<&MemberStats> = self.members.values().map(|member| &member.stats).collect();
        stats.iter().for_each(|stats| sum.add(stats, 0));
        // Members choose these numbers: no sum of them may overflow.
        let total = |of: fn(&MemberStats) -> u64| stats.iter().fold(0, |sum: u64, stats| sum.saturating_add(of(stats)));
        let (zero_pages, broken_pages) = (total(|s| s.zero_pages), total(|s| s.broken_pages));
        let (vmas, agent_bytes) = (total(|s| s.vmas), total(|s| s.agent_bytes));
        let ids: Vec<_> = self.members.keys().copied().collect();
        let sharing_pages = ids.iter().map(|id| self.planner.place(*id).mapped).sum::<u64>();
        let resident = self.planner.pool.resident();
        let interval = self.planner.interval();
        let mut report = GroupReport {
            members: Vec::new(),
            slots: self.planner.pool.slots(),
            sharing_pages,
            zero_pages,
            saved_bytes: page::pages_to_bytes(
                sharing_pages.saturating_add(zero_pages).saturating_sub(resident) & (u64::MAX >> 12),
            ),
            broken_pages,
            folds: sum.folds,
            refolds: sum.refolds,
            short_folds: sum.short_folds,
            pages_scanned: sum.scanned,
            pages_hashed: sum.hashed,
            fold_failures: by_reason(&sum.failures),
            scan_rate: self.clock.rate.2,
            worker_cpu_s: host::own_cpu_time().as_secs_f64(),
            agent_cpu_s: seconds(sum.agent_cpu_us),
            vmas,
            index_bytes: self.planner.bytes(),
            agent_bytes,
            pass_permille: (interval != (0, u64::MAX)).then(|| ((u128::from(interval.0) * 1000) >> 64) as u32),
            limbo_slots: self.planner.pool.limbo(),
            members_left_out: 0,
        };
        self.report_members(&mut report);
        report
    }

    fn report_members(&self, report: &mut GroupReport) {
        let connected = self.members.values().map(|member| {
            let stats = &member.stats;
            MemberReport {
                name: member.identity.name.clone(),
                pid: member.identity.pid,
                connected: true,
                state: stats.state.name().to_owned(),
                detail: stats.detail.clone(),
                enrolled_pages: stats.enrolled_pages,
                folded_pages: stats.folded_pages,
                zero_pages: stats.zero_pages,
                broken_pages: stats.broken_pages,
                agent_cpu_s: seconds(stats.agent_cpu_us),
                vmas: stats.vmas,
                stall_p50_us: percentile(&stats.stalls, 50),
                stall_p99_us: percentile(&stats.stalls, 99),
                stall_max_us: stats.stalls.longest_us,
            }
        });
        let is_back = |pid: u32, started: u64| {
            self.members.values().any(|member| (member.identity.pid, member.identity.started) == (pid, started))
        };
        let ghosts =
            self.ghosts.iter().filter(|g| !is_back(g.identity.pid, g.identity.started)).map(|ghost| MemberReport {
                name: ghost.identity.name.clone(),
                pid: ghost.identity.pid,
                detail: format!(
                    "not connected; {} slots are kept until its process and its children are gone",
                    ghost.limbo()
                ),
                ..MemberReport::default()
            });
        let mut bytes = 0;
        for member in connected.chain(ghosts) {
            bytes += serde_json::to_vec(&member).map_or(0, |json| json.len() + 1);
            if bytes <= MEMBERS_BYTES {
                report.members.push(member);
            } else {
                report.members_left_out += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::percentile;
    use wire::Stalls;

    #[test]
    fn percentiles_are_bounds_of_buckets() {
        let mut stalls = Stalls::default();
        assert_eq!(percentile(&stalls, 99), 0);
        (0..98).for_each(|_| stalls.add(3));
        stalls.add(100);
        stalls.add(1000);
        assert_eq!((percentile(&stalls, 50), percentile(&stalls, 99), percentile(&stalls, 100)), (3, 127, 1000));
        stalls.buckets = [u64::MAX; wire::STALL_BUCKETS];
        assert!(percentile(&stalls, 50) > 0);
    }
}
