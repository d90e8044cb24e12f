//! The group's report to the supervisor.

use crate::group::Group;
use crate::member::Member;
use crate::table::MemberId;
use api::control::{
    AdaptiveRate, Bill, CONTROL_BYTES, Frames, GroupReport, MemberReport, NO_HEADROOM, NO_ROOM, by_reason,
};
use page::Savings;
use std::time::Instant;
use wire::{Counters, MemberState, MemberStats, Outcome, Stalls};

/// Most bytes that reports of single members take in a message to the supervisor; 16 KiB are left for the rest of the
/// group's report. Members whose reports do not fit are only counted.
const MEMBERS_BYTES: usize = CONTROL_BYTES - (16 << 10);

/// Sums over all earlier connections of members.
#[derive(Clone, Debug, Default)]
pub struct Former {
    /// Sum of the counters that these members had reported.
    pub done: Counters,
    /// Pages that they reported.
    pub reported: u64,
}

/// A percentile of stall times in microseconds, rounded up to the end of its bucket.
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

/// A member's state and its details. A member that folds has the state `no_headroom` near its control group's memory
/// limit. Else it has `no_room` if the group's pool gives out no slots.
fn state_of(member: &Member, folds: bool, no_room: Option<&str>) -> (&'static str, String) {
    let stats = &member.stats;
    let is_open = folds && matches!(stats.state, MemberState::Folding | MemberState::Off);
    if let Some(why) = member.headroom.refusal.as_ref().filter(|_| is_open) {
        return (NO_HEADROOM, why.clone());
    }
    match (stats.state, no_room) {
        (MemberState::Folding, Some(full)) => (NO_ROOM, full.to_owned()),
        (MemberState::Folding, None) if stats.detail.is_empty() => (stats.state.name(), why_nothing(stats)),
        (state, _) => (state.name(), stats.detail.clone()),
    }
}

/// Why a member in the state "folding" has no folded page; empty if it has one.
fn why_nothing(stats: &MemberStats) -> String {
    if stats.enrolled_pages == 0 || [stats.folded_pages, stats.zero_pages, stats.broken_pages] != [0; 3] {
        return String::new();
    }
    let reasons = Outcome::ALL.into_iter().filter(|outcome| *outcome != Outcome::Folded);
    match reasons.max_by_key(|outcome| stats.done.failures.of(*outcome)) {
        Some(most) if stats.done.failures.of(most) > 0 => {
            format!("pages were to be folded and could not be, most of them for {}", most.name())
        }
        _ if stats.done.pages_hashed == 0 => {
            "none of its pages has rested for a whole round so far: what is written all the time is not folded".into()
        }
        _ => "none of its pages that rest has a lasting duplicate in its group so far".into(),
    }
}

impl Group {
    /// The group's report at this moment.
    pub fn report(&mut self, now: Instant) -> GroupReport {
        self.planner.pool.look_at_templates();
        let mut done = self.former.done;
        let stats: Vec<&MemberStats> = self.members.values().map(|member| &member.stats).collect();
        stats.iter().for_each(|stats| done.add(&stats.done));
        // A hostile member can send any number, so no sum may overflow.
        let total = |of: fn(&MemberStats) -> u64| stats.iter().fold(0, |sum: u64, stats| sum.saturating_add(of(stats)));
        let (zero_pages, broken_pages) = (total(|s| s.zero_pages), total(|s| s.broken_pages));
        let (vmas, agent_bytes) = (total(|s| s.vmas), total(|s| s.agent_bytes));
        let ids: Vec<_> = self.members.keys().copied().collect();
        let mut mapped = |id: &MemberId| {
            let place = self.planner.place(*id);
            [place.mapped, place.sent]
        };
        let mapped: Vec<[u64; 2]> = ids.iter().map(&mut mapped).collect();
        let sharing_pages = mapped.iter().map(|[mapped, _]| mapped).sum::<u64>();
        let (slots, resident) = (self.planner.pool.slots(), self.planner.pool.resident());
        let interval = self.planner.interval();
        let index_bytes = self.planner.bytes();
        // Page tables of this process count as a cost of folding: without it, the process would map no pool.
        let page_tables = host::page_table_bytes(std::process::id()).unwrap_or_default();
        let tables = index_bytes.saturating_add(agent_bytes).saturating_add(page_tables);
        let savings = Savings::of(sharing_pages, zero_pages, resident, tables, vmas);
        let mut report = GroupReport {
            members: Vec::new(),
            slots,
            sharing_pages,
            zero_pages,
            savings,
            frames: self.frames(&savings),
            idle_slots: resident.saturating_sub(slots),
            no_room: self.clock.no_room(now),
            no_prover: self.proofs.is_lost(now),
            waits_for_room: self.asking.refusal().map(str::to_owned),
            broken_pages,
            bill: self.bill(&done),
            scan_rate: self.clock.rate.2,
            adaptive_rate: self.adaptive_rate(),
            vmas,
            index_bytes,
            agent_bytes,
            pass_permille: (interval != (0, u64::MAX)).then(|| ((u128::from(interval.0) * 1000) >> 64) as u32),
            deferred_slots: self.planner.pool.deferred(),
            members_left_out: 0,
        };
        self.report_members(&mut report, &mapped);
        report
    }

    fn adaptive_rate(&self) -> Option<AdaptiveRate> {
        let adaptive = self.adaptive.as_ref()?;
        Some(AdaptiveRate { pages_per_s: adaptive.rate, reason: adaptive.reason.clone() })
    }

    fn frames(&self, savings: &Savings) -> Frames {
        let pool = &self.planner.pool;
        let pages = |bytes: u64| bytes >> page::PAGE_SHIFT;
        Frames {
            saved: savings.saved_bytes() >> page::PAGE_SHIFT,
            pool_in_use: pool.slots(),
            pool_idle: pool.resident().saturating_sub(pool.slots()),
            slots_by_sharers: pool.by_sharers(),
            deferred_bytes: page::pages_to_bytes(pool.deferred()),
            tables: pages(savings.tables_bytes),
            mappings: pages(savings.mappings_bytes),
        }
    }

    fn bill(&self, done: &Counters) -> Bill {
        Bill {
            folds: done.folds,
            refolds: done.refolds,
            short_folds: done.short_folds,
            pages_scanned: done.pages_scanned,
            pages_hashed: done.pages_hashed,
            fold_failures: by_reason(&done.failures, self.planner.no_room),
            worker_cpu_s: host::own_cpu_time().as_secs_f64(),
            agent_cpu_s: seconds(done.agent_cpu_us),
        }
    }

    /// `mapped` are the pages of each member that map a slot, and the pages of unanswered requests. A member has no
    /// more folded pages than these two together, so a greater number that it reports is cut to their sum.
    fn report_members(&self, report: &mut GroupReport, mapped: &[[u64; 2]]) {
        let connected = self.members.values().zip(mapped).map(|(member, [mapped, sent])| {
            let stats = &member.stats;
            let (state, detail) = state_of(member, self.planner.policy.folds, report.no_room.as_deref());
            MemberReport {
                name: member.identity.name.clone(),
                pid: member.identity.pid,
                connected: true,
                state: state.to_owned(),
                detail,
                enrolled_pages: stats.enrolled_pages,
                folded_pages: stats.folded_pages.min(mapped + sent),
                zero_pages: stats.zero_pages,
                broken_pages: stats.broken_pages,
                refolds: stats.done.refolds,
                agent_cpu_s: seconds(stats.done.agent_cpu_us),
                vmas: stats.vmas,
                stall_p50_us: percentile(&stats.stalls, 50),
                stall_p99_us: percentile(&stats.stalls, 99),
                stall_max_us: stats.stalls.longest_us,
                ..MemberReport::default()
            }
        });
        let is_back = |pid: u32, started: u64| {
            self.members.values().any(|member| (member.identity.pid, member.identity.started) == (pid, started))
        };
        let departed = self.departed.iter().filter(|g| !is_back(g.identity.pid, g.identity.started)).map(|departed| {
            MemberReport {
                name: departed.identity.name.clone(),
                pid: departed.identity.pid,
                detail: format!(
                    "not connected; {} slots are kept until its process and its children are gone",
                    departed.deferred()
                ),
                ..MemberReport::default()
            }
        });
        let members: Vec<MemberReport> = connected.chain(departed).collect();
        let mut bytes = 0;
        for member in members {
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
