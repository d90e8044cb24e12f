//! Groups in the form in which programs read them as JSON: `group show --json`, `group list --json`, and
//! `pagefold-web`.
//!
//! The worker's report lacks what only the asker's side knows: members without an agent, remedies, and savings by member.
//! [`complete`] adds them.

use crate::ask::{GroupLine, GroupState, MemberLine, PoolLimit, WorkerState};
use crate::change::Printed;
use crate::control::{GroupReport, MemberReport};
use crate::enrol::{NotAttached, Via};
use crate::member_words;
use crate::promise::Fit;
use host::{Ksm, KsmStat};
use page::Savings;
use serde::Serialize;
use std::collections::BTreeMap;

/// State of a member whose agent is not connected.
pub const NO_AGENT: &str = "no_agent";
/// State of a member that ksmd merges.
pub const KSM: &str = "ksm";

/// What a member's process shows of the reason why its agent does nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Whether the process is stopped, and its agent with it.
    pub is_stopped: bool,
    /// The reason.
    pub why: String,
    /// The remedy.
    pub fix: String,
}

impl Look {
    const fn state(&self) -> &'static str {
        if self.is_stopped { member_words::STOPPED } else { NO_AGENT }
    }

    /// Writes this into the report on the member.
    fn tell(self, row: &mut MemberReport) {
        (row.state, row.detail, row.fix) = (self.state().to_owned(), self.why, Some(self.fix));
    }
}

/// The schema of [`Savings`]: the room `page`, which is a part of the agent, knows nothing of schemas.
#[cfg(feature = "openapi")]
#[derive(utoipa::ToSchema)]
#[schema(as = Savings)]
#[expect(dead_code, reason = "its fields are read by the macro alone")]
pub(crate) struct SavingsSchema {
    /// Pages of members that map a slot of the pool: without it, each would be a frame.
    folded_bytes: u64,
    /// Pages of zeros that were given back and not written since.
    zero_bytes: u64,
    /// All memory of the pool, whether its slots are in use or idle.
    pool_bytes: u64,
    /// Tables of the worker and of the agents.
    tables_bytes: u64,
    /// The kernel's account of the members' mappings, all of them.
    mappings_bytes: u64,
}

/// A group's state.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ShownGroup {
    /// Its name.
    name: String,
    /// Whether the configuration still names it, or any group is allowed.
    configured: bool,
    /// Its settings.
    settings: Printed,
    /// State of its worker.
    worker: WorkerState,
    /// The worker's process.
    worker_pid: Option<u32>,
    /// Memory that the pool may take, and by which rule.
    pool_limit: PoolLimit,
    /// Most pages fingerprinted a second while the host is short of memory, in place of the settings' scan rate.
    pressure_scan_rate: Option<u32>,
    /// How many more like most of its VMs fit. It is `null` where it has none, where nobody balances memory, and for callers that do not
    /// see all groups.
    fit: Option<Fit>,
    /// Number of the pool's files that are kept for the worker's successor.
    segments: usize,
    /// Memory that folding saves, net of its costs; may be negative.
    saved_bytes: i64,
    /// Processes that a rule fits, and that are no members.
    not_attached: Vec<NotAttached>,
    #[serde(flatten)]
    report: GroupReport,
}

impl From<GroupState> for ShownGroup {
    fn from(state: GroupState) -> Self {
        Self {
            name: state.name,
            configured: state.configured,
            settings: (&state.settings).into(),
            worker: state.worker,
            worker_pid: state.worker_pid,
            pool_limit: state.pool_limit,
            pressure_scan_rate: state.pressure_scan_rate,
            fit: state.fit,
            segments: state.segments,
            saved_bytes: state.report.savings.saved_bytes(),
            not_attached: state.not_attached,
            report: state.report,
        }
    }
}

/// A group in a list. Figures that its worker did not tell are `null`.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ListedGroup {
    /// Its name.
    pub name: String,
    /// Number of living members.
    pub members: usize,
    /// State of its worker.
    pub worker: WorkerState,
    /// Whether the configuration still names it, or any group is allowed.
    pub configured: bool,
    /// Its settings.
    pub settings: Printed,
    /// Memory that folding saves, net of its costs; may be negative.
    pub saved_bytes: Option<i64>,
    /// The terms of that sum.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<SavingsSchema>))]
    pub savings: Option<Savings>,
    /// Processor time of all its workers and agents.
    pub cpu_s: Option<f64>,
    /// Why no page gets a slot of its own; `null` where pages do.
    pub no_room: Option<String>,
    /// Why pages that are to become private wait for memory; `null` where none do.
    pub waits_for_room: Option<String>,
}

impl ListedGroup {
    /// A group in a list, with figures of the worker's report if there is one.
    pub fn new(line: GroupLine, report: Option<&GroupReport>) -> Self {
        let GroupLine { name, members, worker, settings, configured } = line;
        Self {
            name,
            members,
            worker,
            configured,
            settings: (&settings).into(),
            saved_bytes: report.map(|r| r.savings.saved_bytes()),
            savings: report.map(|r| r.savings),
            cpu_s: report.map(|r| r.bill.worker_cpu_s + r.bill.agent_cpu_s),
            no_room: report.and_then(|r| r.no_room.clone()),
            waits_for_room: report.and_then(|r| r.waits_for_room.clone()),
        }
    }
}

/// Adds to a worker's report what the asker knows. `look` gets a process, and whether its agent is connected. It
/// returns why the agent does nothing; if the agent is connected, this can only be that the process is stopped.
pub fn complete(state: &mut GroupState, members: &[MemberLine], look: impl Fn(u32, bool) -> Option<Look>) {
    let of_group = members.iter().filter(|member| member.group == state.name);
    add_absent(&mut state.report, of_group.clone(), look);
    name_families(&mut state.report.members, of_group);
    let (savings, limit) = (state.report.savings, (&state.pool_limit, state.report.slots));
    for member in &mut state.report.members {
        member.saved_bytes = savings.of_member(member.folded_pages, member.zero_pages, member.vmas);
        if !member.state.is_empty() && member.fix.is_none() {
            member.fix = member_words::remedy(&member.state, &state.name, &state.settings, limit);
        }
    }
}

/// Writes the family into the report on each member, and the pids of the whole family into the report on its first
/// member.
fn name_families<'a>(reports: &mut [MemberReport], members: impl Iterator<Item = &'a MemberLine>) {
    let families: BTreeMap<u32, &str> = members.filter_map(|m| Some((m.identity.pid, m.family.as_deref()?))).collect();
    for report in reports.iter_mut() {
        let family = families.get(&report.pid).copied().unwrap_or(&report.name);
        (report.family, report.pids) = (family.to_owned(), vec![report.pid]);
    }
    let forked: Vec<(String, u32)> =
        reports.iter().filter(|r| r.family != r.name).map(|r| (r.family.clone(), r.pid)).collect();
    for report in reports.iter_mut().filter(|report| report.family == report.name) {
        report.pids.extend(forked.iter().filter(|(family, _)| *family == report.name).map(|(_, pid)| *pid));
    }
}

/// The report on a member that ksmd merges, from the kernel's counters.
fn ksm_row(name: &str, pid: u32) -> MemberReport {
    let stat = KsmStat::of(pid).unwrap_or_default();
    let ksm_pages = stat.ksm_merging_pages.map(|pages| pages.saturating_add(stat.ksm_zero_pages.unwrap_or(0)));
    let runs = Ksm::read().is_some_and(|ksm| ksm.run == 1);
    let detail = ksm_detail(ksm_pages, stat.ksm_merge_any, runs);
    let state = KSM.to_owned();
    MemberReport { name: name.to_owned(), pid, state, detail, via: Via::Ksm, ksm_pages, ..MemberReport::default() }
}

fn ksm_detail(pages: Option<u64>, is_asked: Option<bool>, runs: bool) -> String {
    let merged = pages.map_or("the kernel does not tell how much is merged".to_owned(), |pages| {
        format!("{} of it are merged", cli::bytes(page::pages_to_bytes(pages)))
    });
    let lost = if is_asked == Some(false) { "; it does not ask for merging any more: attach it again" } else { "" };
    let idle = if runs { "" } else { "; ksmd does not run: write 1 to /sys/kernel/mm/ksm/run" };
    format!("{merged}{lost}{idle}")
}

/// Adds or completes the reports on members whose agent is not connected, or whose process is stopped, with the reason.
fn add_absent<'a>(
    report: &mut GroupReport,
    members: impl Iterator<Item = &'a MemberLine>,
    look: impl Fn(u32, bool) -> Option<Look>,
) {
    for member in members {
        let pid = member.identity.pid;
        if member.via == Via::Ksm {
            report.members.retain(|m| m.pid != pid);
            report.members.push(ksm_row(&member.identity.name, pid));
            continue;
        }
        if let Some(connected) = report.members.iter_mut().find(|m| m.pid == pid && m.connected) {
            if let Some(look) = look(pid, true) {
                look.tell(connected);
            }
            continue;
        }
        let look = look(pid, false).unwrap_or_default();
        if let Some(known) = report.members.iter_mut().find(|m| m.pid == pid) {
            look.tell(known);
            continue;
        }
        let mut row = MemberReport { name: member.identity.name.clone(), pid, ..MemberReport::default() };
        look.tell(&mut row);
        report.members.push(row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{Identity, Settings};

    #[test]
    fn member_that_ksmd_merges_says_so_and_why_nothing_is_merged() {
        assert_eq!(ksm_detail(Some(256), Some(true), true), "1.0 MiB of it are merged");
        assert_eq!(ksm_detail(None, None, true), "the kernel does not tell how much is merged");
        let idle = ksm_detail(Some(0), Some(false), false);
        assert!(idle.contains("attach it again; ksmd does not run: write 1 to"), "{idle}");
        let mut report = GroupReport::none();
        let identity = Identity { name: "k".into(), pid: std::process::id(), started: 1 };
        let (group, via) = ("acme".to_owned(), Via::Ksm);
        let line = MemberLine {
            group,
            identity,
            uid: 0,
            connected: false,
            family: None,
            attached_by: None,
            via,
            domain: None,
        };
        add_absent(&mut report, [&line].into_iter(), |_, _| Some(Look::default()));
        let row = &report.members[0];
        assert_eq!((row.state.as_str(), row.via, row.connected), (KSM, Via::Ksm, false), "{row:?}");
    }

    #[test]
    fn members_without_agent_have_rows_and_savings_are_shared_out() {
        let member = |name: &str, pid, folded_pages| MemberReport {
            name: name.into(),
            pid,
            connected: true,
            state: "folding".into(),
            folded_pages,
            ..MemberReport::default()
        };
        let report = GroupReport {
            members: vec![member("a", 1, 300), member("b", 2, 100)],
            savings: Savings::of(400, 0, 100, 0, 0),
            ..GroupReport::none()
        };
        let mut state = GroupState {
            name: "acme".into(),
            settings: Settings::default(),
            configured: true,
            worker: WorkerState::Running,
            worker_pid: Some(9),
            pool_limit: PoolLimit::of(&Settings::default(), None),
            pressure_scan_rate: None,
            fit: None,
            segments: 1,
            not_attached: Vec::new(),
            report,
        };
        let line = |name: &str, pid, group: &str| MemberLine {
            group: group.into(),
            identity: Identity { name: name.into(), pid, started: 1 },
            uid: 0,
            connected: false,
            family: None,
            attached_by: None,
            via: Via::Agent,
            domain: None,
        };
        let lines = [line("a", 1, "acme"), line("c", 3, "acme"), line("d", 4, "beta")];
        let look = |pid, connected: bool| Look { why: format!("why {pid}"), is_stopped: connected, ..Look::default() };
        complete(&mut state, &lines, |pid, connected| (!connected).then(|| look(pid, connected)));
        let found: Vec<_> = state.report.members.iter().map(|m| (&*m.name, &*m.state, m.saved_bytes)).collect();
        assert_eq!(found, [("a", "folding", 225 << 12), ("b", "folding", 75 << 12), ("c", "no_agent", 0)]);
        assert_eq!(state.report.members[2].detail, "why 3");
        assert!(state.report.members[2].fix.is_some());
        let shown = serde_json::to_value(ShownGroup::from(state)).unwrap();
        assert_eq!((&shown["saved_bytes"], &shown["slots"]), (&(300 << 12).into(), &0.into()));
    }
}
