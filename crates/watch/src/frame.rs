//! Facts of groups, members and processes at one moment, in one shape. `pagefold top --json` prints it.

use crate::figures::{Counted, Figures};
use crate::look::{Answers, Look};
use crate::plain::{MOST_TEXT, harmless};
use api::ask::{GroupLine, GroupState, MemberLine, NOT_CONFIGURED, WorkerState};
use api::change::Printed;
use api::control::{Fold, GroupReport, MemberReport};
use api::enrol::Via;
use api::member_words::FOLDING;
use api::promise::Fit;
use api::shown::NO_AGENT;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// State of a process whose figures are not known, because its group's report has no room for it.
const NOT_LISTED: &str = "not_listed";

/// All facts.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Frame {
    /// The date, in seconds since 1970.
    pub unix_s: u64,
    /// Seconds since the look with which rates are made; `None` for the first one.
    pub interval_s: Option<f64>,
    /// Directories of the services that answered.
    pub services: Vec<String>,
    /// Troubles of services, in words.
    pub troubles: Vec<String>,
    /// Groups.
    pub groups: Vec<Group>,
    /// Members that nobody forked, each with its forked children.
    pub members: Vec<Member>,
    /// Processes.
    pub processes: Vec<Process>,
}

/// A group.
#[derive(Clone, Debug, Serialize)]
pub struct Group {
    /// Directory of its service.
    pub service: String,
    /// Its name.
    pub group: String,
    /// How it does, in a word.
    pub state: &'static str,
    /// More about the state; may be empty.
    pub reason: String,
    /// Its settings.
    pub settings: Printed,
    /// Its members that nobody forked.
    pub members: usize,
    /// Its members, forked children included.
    pub processes: usize,
    /// Processes that a rule fits, and that are no members.
    pub not_attached: usize,
    /// How many more like most of its VMs fit, where memory is balanced.
    pub fit: Option<Fit>,
    /// Memory that its pool takes.
    pub pool_bytes: Option<u64>,
    /// The most that its pool may take.
    pub pool_limit_bytes: Option<u64>,
    /// Slots in use, by the number of pages that map them: 0, 1, 2, 3 to 7, 8 and more.
    pub slots_by_sharers: Option<[u64; 5]>,
    /// Pages fingerprinted a second, lately.
    pub scanned_pages_per_s: Option<u64>,
    /// Its figures.
    #[serde(flatten)]
    pub figures: Figures,
}

/// A member that nobody forked, with its forked children.
#[derive(Clone, Debug, Serialize)]
pub struct Member {
    /// Directory of its service.
    pub service: String,
    /// Its group.
    pub group: String,
    /// Its name.
    pub member: String,
    /// How it does, in a word.
    pub state: String,
    /// More about the state; may be empty.
    pub reason: String,
    /// The remedy for the state.
    pub fix: Option<String>,
    /// Its domain of libvirt.
    pub domain: Option<String>,
    /// Its processes.
    pub pids: Vec<u32>,
    /// Number of other members of the group that have pages in the same pool.
    pub shares_with: usize,
    /// RAM without a balloon, of a VM whose memory is balanced.
    pub ram_bytes: Option<u64>,
    /// Memory that its balloon has taken.
    pub balloon_bytes: Option<u64>,
    /// Its figures.
    #[serde(flatten)]
    pub figures: Figures,
}

/// A process.
#[derive(Clone, Debug, Serialize)]
pub struct Process {
    /// Directory of its service.
    pub service: String,
    /// Its group.
    pub group: String,
    /// The member that it is, or whose program forked it.
    pub member: String,
    /// Its name.
    pub name: String,
    /// Its pid.
    pub pid: u32,
    /// How it does, in a word.
    pub state: String,
    /// More about the state; may be empty.
    pub reason: String,
    /// The remedy for the state.
    pub fix: Option<String>,
    /// The merger: an agent, or ksmd.
    pub via: Via,
    /// Its mappings.
    pub vmas: Option<u64>,
    /// 99th percentile of the times for which pages were out of its reach, in microseconds.
    pub stall_p99_us: Option<u64>,
    /// Longest of these times, in microseconds.
    pub stall_max_us: Option<u64>,
    /// Its figures.
    #[serde(flatten)]
    pub figures: Figures,
}

/// Counters in the services' last answers before, by service, group and pid (0: the group itself).
type Before<'a> = HashMap<(&'a str, &'a str, u32), Counted>;

fn counters(look: &Look) -> Before<'_> {
    let mut counters = Before::new();
    for service in &look.services {
        for state in &service.states {
            let key = |pid| (service.dir.as_str(), state.name.as_str(), pid);
            counters.insert(key(0), Counted::of_group(&state.report));
            let of = |report: &MemberReport| (key(report.pid), Counted::of_process(report));
            counters.extend(state.report.members.iter().filter(|report| report.connected).map(of));
        }
    }
    counters
}

/// Counters in the services' last answers before, and the time since then.
struct Times<'a> {
    before: Before<'a>,
    seconds: f64,
}

impl Frame {
    /// Makes a frame of the services' answers, with rates since earlier answers.
    pub fn of(look: &Look, before: Option<&Look>) -> Self {
        let seconds = before.map_or(0.0, |before| look.at_ms.saturating_sub(before.at_ms) as f64 / 1000.0);
        let times = Times { before: before.map(counters).unwrap_or_default(), seconds };
        let mut frame = Self { unix_s: look.unix_s, interval_s: before.map(|_| seconds), ..Self::default() };
        for service in &look.services {
            frame.services.push(service.dir.clone());
            frame.troubles.extend(service.troubles.iter().map(|trouble| harmless(&trouble.detail, MOST_TEXT)));
            for line in &service.groups {
                match service.states.iter().find(|state| state.name == line.name) {
                    Some(state) => frame.add(service, state, &times),
                    None => frame.groups.push(silent(service, line)),
                }
            }
        }
        frame
    }

    fn add(&mut self, service: &Answers, state: &GroupState, times: &Times<'_>) {
        let lines = service.members.iter().filter(|line| line.group == state.name);
        let lines: HashMap<u32, &MemberLine> = lines.map(|line| (line.identity.pid, line)).collect();
        let of = |report: &MemberReport| process(&service.dir, state, report, lines.get(&report.pid).copied(), times);
        let processes: Vec<Process> = state.report.members.iter().map(of).collect();
        let members = members(&processes, &state.report, &lines, state.settings.intra_member_only);
        self.groups.push(group(&service.dir, state, &processes, members.len(), times));
        self.members.extend(members);
        self.processes.extend(processes);
    }

    /// The group of this name, of the service in this directory.
    pub fn group(&self, service: &str, name: &str) -> Option<&Group> {
        self.groups.iter().find(|group| group.service == service && group.group == name)
    }
}

/// A group whose state the service did not tell, with the reason.
fn silent(service: &Answers, line: &GroupLine) -> Group {
    let why = service.silent.iter().find(|(name, _)| *name == line.name);
    Group {
        service: service.dir.clone(),
        group: line.name.clone(),
        state: "unknown",
        reason: why.map(|(_, why)| harmless(why, MOST_TEXT)).unwrap_or_default(),
        settings: (&line.settings).into(),
        members: line.members,
        processes: line.members,
        not_attached: 0,
        fit: None,
        pool_bytes: None,
        pool_limit_bytes: None,
        slots_by_sharers: None,
        scanned_pages_per_s: None,
        figures: Figures::default(),
    }
}

fn group(dir: &str, state: &GroupState, processes: &[Process], members: usize, times: &Times<'_>) -> Group {
    let report = &state.report;
    let figures: Vec<Figures> = processes.iter().map(|process| process.figures.clone()).collect();
    let before = times.before.get(&(dir, state.name.as_str(), 0));
    let (word, reason) = state_of(state);
    Group {
        service: dir.to_owned(),
        group: state.name.clone(),
        state: word,
        reason: harmless(&reason, MOST_TEXT),
        settings: (&state.settings).into(),
        members,
        processes: processes.len(),
        not_attached: state.not_attached.len(),
        fit: state.fit.clone(),
        pool_bytes: Some(report.savings.pool_bytes),
        pool_limit_bytes: Some(state.pool_limit.bytes),
        slots_by_sharers: Some(report.frames.slots_by_sharers),
        scanned_pages_per_s: Some(report.scan_rate),
        figures: Figures::of_group(report, &figures).with_rates(&Counted::of_group(report), before, times.seconds),
    }
}

/// A group's state in one word, and the reason. If several states hold, it is the worst.
fn state_of(state: &GroupState) -> (&'static str, String) {
    let report = &state.report;
    if let Some(why) = &report.waits_for_room {
        return ("waits_for_room", why.clone());
    }
    if let Some(why) = &report.no_room {
        return ("no_room", why.clone());
    }
    if report.no_prover {
        return (
            "no_prover",
            "the worker does not reach the prover: slots that were freed are not used again".to_owned(),
        );
    }
    match (state.worker, state.settings.fold) {
        (WorkerState::Starting, _) => ("starting", "its worker is being started".to_owned()),
        _ if !state.configured => ("not_configured", NOT_CONFIGURED.to_owned()),
        (WorkerState::None, _) => ("no_worker", "it has no members, and needs no worker".to_owned()),
        (_, Fold::On) => (FOLDING, String::new()),
        (_, Fold::Off) => ("off", "it leaves what is folded, and folds nothing more".to_owned()),
        (_, Fold::Unfold) => ("unfold", "all its pages are private again, or will be soon".to_owned()),
    }
}

fn process(
    dir: &str,
    state: &GroupState,
    report: &MemberReport,
    line: Option<&MemberLine>,
    times: &Times<'_>,
) -> Process {
    let told = |figure: u64| report.connected.then_some(figure);
    // A member for which the report has no room seems to have no agent. But its agent has connected before, and the
    // report says that members were left out.
    let is_left_out =
        state.report.members_left_out > 0 && report.state == NO_AGENT && line.is_some_and(|l| l.connected);
    let (state_word, reason) = match (is_left_out, report.state.as_str()) {
        (true, _) => (NOT_LISTED, "its group has more members than a report has room for"),
        (false, "") => ("gone", report.detail.as_str()),
        (false, word) => (word, report.detail.as_str()),
    };
    let before = times.before.get(&(dir, state.name.as_str(), report.pid));
    let figures = Figures::of_process(report, &state.report);
    Process {
        service: dir.to_owned(),
        group: state.name.clone(),
        member: if report.family.is_empty() { report.name.clone() } else { report.family.clone() },
        name: report.name.clone(),
        pid: report.pid,
        state: harmless(state_word, MOST_TEXT),
        reason: harmless(reason, MOST_TEXT),
        fix: report.fix.as_ref().filter(|_| !is_left_out).map(|fix| harmless(fix, MOST_TEXT)),
        via: report.via,
        vmas: told(report.vmas),
        stall_p99_us: told(report.stall_p99_us),
        stall_max_us: told(report.stall_max_us),
        figures: figures.with_rates(&Counted::of_process(report), before, times.seconds),
    }
}

/// The members that no member has forked, each with its forked children, in the order of their names.
fn members(
    processes: &[Process],
    report: &GroupReport,
    lines: &HashMap<u32, &MemberLine>,
    is_alone: bool,
) -> Vec<Member> {
    let mut families: BTreeMap<&str, Vec<&Process>> = BTreeMap::new();
    processes.iter().for_each(|one| families.entry(&one.member).or_default().push(one));
    let shares = |family: &[&Process]| family.iter().any(|one| one.figures.folded_bytes.unwrap_or(0) > 0);
    let sharers = families.values().filter(|family| shares(family)).count();
    let others = |family: &[&Process]| if !is_alone && shares(family) { sharers.saturating_sub(1) } else { 0 };
    let reports: HashMap<u32, &MemberReport> = report.members.iter().map(|one| (one.pid, one)).collect();
    families.iter().map(|(name, family)| member(name, family, others(family), &reports, lines)).collect()
}

fn member(
    name: &str,
    family: &[&Process],
    shares_with: usize,
    reports: &HashMap<u32, &MemberReport>,
    lines: &HashMap<u32, &MemberLine>,
) -> Member {
    let first = family.iter().find(|one| one.name == name).unwrap_or(&family[0]);
    // A member folds as long as one of its processes does.
    let state = family.iter().find(|one| one.state == FOLDING).unwrap_or(first);
    let (own, line) = (reports.get(&first.pid), lines.get(&first.pid));
    let ram_bytes = own.and_then(|own| own.ram_bytes);
    let actual_bytes = own.and_then(|own| own.actual_bytes);
    Member {
        service: first.service.clone(),
        group: first.group.clone(),
        member: name.to_owned(),
        state: state.state.clone(),
        reason: state.reason.clone(),
        fix: state.fix.clone(),
        domain: line.and_then(|line| line.domain.as_deref()).map(|domain| harmless(domain, MOST_TEXT)),
        pids: family.iter().map(|one| one.pid).collect(),
        shares_with,
        ram_bytes,
        balloon_bytes: ram_bytes.zip(actual_bytes).map(|(ram, size)| ram.saturating_sub(size)),
        figures: Figures::of_member(family.iter().map(|one| &one.figures)),
    }
}
