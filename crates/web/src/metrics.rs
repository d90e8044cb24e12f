//! Metrics of all groups that a caller sees, in the forms that Prometheus reads.
//!
//! Most metrics are listed in the tables [`GROUP`] and [`MEMBER`]. Units are base units (bytes, seconds). There are few
//! labels: `group`, `member`, `reason`, `state`, and `domain` for a member that runs a domain of libvirt.

#![cfg_attr(not(test), deny(clippy::arithmetic_side_effects))]

use crate::asker::Group;
use api::ask::GroupState;
use api::control::{Bill, GroupReport, MemberReport};
use api::member_words;
use api::promise::Fit;
use api::shown::KSM;
use page::pages_to_bytes;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabelSet, MetricEncoder, NoLabelSet, prometheus_text, text,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use std::fmt;

/// The form of metrics that a caller asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Form {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// The text form of Prometheus.
    Plain,
}

impl Form {
    /// The form that a header `Accept` asks for.
    pub fn of(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") { Self::OpenMetrics } else { Self::Plain }
    }

    /// The value of a header `Content-Type`.
    pub const fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Plain => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// The report on a member, with its group and its libvirt domain.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its group.
    pub group: String,
    /// The worker's report.
    pub report: MemberReport,
    /// Name of the libvirt domain whose VM the member runs.
    pub domain: Option<String>,
}

/// All figures of one scrape.
#[derive(Clone, Debug, Default)]
pub struct Scrape {
    /// The groups.
    pub groups: Vec<Group>,
    /// Members of the groups that have a state, which came in time.
    pub members: Vec<Member>,
    /// Whether the caller sees all groups, and so may see figures of the whole host.
    pub sees_all: bool,
    /// Start of the supervisor, in seconds since 1970.
    pub service_start_s: Option<f64>,
    /// Starts of workers by group, in seconds since 1970.
    pub worker_starts_s: Vec<(String, f64)>,
}

/// A metric that has one figure for each group, or for each member (`T`).
struct Family<T> {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    figure: fn(&T) -> Figure,
}

/// A figure, and its kind.
enum Figure {
    Gauge(f64),
    Counter(f64),
}

use Figure::{Counter, Gauge};

const fn bytes<T>(name: &'static str, help: &'static str, figure: fn(&T) -> Figure) -> Family<T> {
    Family { name, help, unit: Some(Unit::Bytes), figure }
}

const fn seconds<T>(name: &'static str, help: &'static str, figure: fn(&T) -> Figure) -> Family<T> {
    Family { name, help, unit: Some(Unit::Seconds), figure }
}

const fn plain<T>(name: &'static str, help: &'static str, figure: fn(&T) -> Figure) -> Family<T> {
    Family { name, help, unit: None, figure }
}

fn pages(pages: u64) -> Figure {
    Gauge(pages_to_bytes(pages.min(u64::MAX >> 16)) as f64)
}

/// Metrics of a group whose state is known: its worker answers, or it has no worker.
const GROUP: [Family<GroupState>; 16] = [
    bytes("group_saved", "Memory that folding saves, net of all that it takes; negative while it costs more", |g| {
        Gauge(g.report.savings.saved_bytes() as f64)
    }),
    bytes("group_folded", "Pages of members that map a page of the pool", |g| {
        Gauge(g.report.savings.folded_bytes as f64)
    }),
    bytes("group_zero", "Pages of zeros that were given back", |g| Gauge(g.report.savings.zero_bytes as f64)),
    bytes("group_pool", "Memory of the pool, in use or idle", |g| Gauge(g.report.savings.pool_bytes as f64)),
    bytes("group_pool_limit", "The most memory that the pool may have in use", |g| Gauge(g.pool_limit.bytes as f64)),
    bytes("group_tables", "Tables of the worker and of the agents, and the worker's page tables", |g| {
        Gauge(g.report.savings.tables_bytes as f64)
    }),
    bytes("group_mappings", "The kernel's account of the members' mappings", |g| {
        Gauge(g.report.savings.mappings_bytes as f64)
    }),
    bytes("group_broken", "Pages that were written since they were folded, and are private", |g| {
        pages(g.report.broken_pages)
    }),
    plain("group_no_room", "Whether no page gets a place in the pool: 1 or 0", |g| {
        Gauge(f64::from(u8::from(g.report.no_room.is_some())))
    }),
    plain("group_folded_pages", "Pages folded", |g| Counter(bill(&g.report).folds as f64)),
    plain("group_refolded_pages", "Of the pages folded, those that had been folded and broken before", |g| {
        Counter(bill(&g.report).refolds as f64)
    }),
    plain("group_short_lived_pages", "Of the pages folded, those that were written again within a minute or so", |g| {
        Counter(bill(&g.report).short_folds as f64)
    }),
    plain("group_scanned_pages", "Pages checked for writes", |g| Counter(bill(&g.report).pages_scanned as f64)),
    plain("group_fingerprinted_pages", "Pages fingerprinted", |g| Counter(bill(&g.report).pages_hashed as f64)),
    seconds("group_worker_cpu", "Processor time of all workers of the group", |g| {
        Counter(bill(&g.report).worker_cpu_s)
    }),
    seconds("group_agents_cpu", "Processor time of the agents of all members, former ones too", |g| {
        Counter(bill(&g.report).agent_cpu_s)
    }),
];

/// Metrics of a member.
const MEMBER: [Family<Member>; 9] = [
    bytes("member_saved", "Its part of the group's savings; costs of the pool by its part of the folded pages", |m| {
        Gauge(m.report.saved_bytes as f64)
    }),
    bytes("member_enrolled", "Memory that may be folded", |m| pages(m.report.enrolled_pages)),
    bytes("member_folded", "Pages that map a page of the pool", |m| pages(m.report.folded_pages)),
    bytes("member_zero", "Pages of zeros that were given back", |m| pages(m.report.zero_pages)),
    bytes("member_broken", "Pages that were written since they were folded, and are private", |m| {
        pages(m.report.broken_pages)
    }),
    plain("member_mappings", "Its mappings, as last counted", |m| Gauge(m.report.vmas as f64)),
    seconds("member_agent_cpu", "Processor time of its agent since it connected", |m| Counter(m.report.agent_cpu_s)),
    seconds("member_stall_max", "The longest time for which pages were out of its reach, since its agent began", |m| {
        Gauge(m.report.stall_max_us as f64 / 1e6)
    }),
    seconds("member_stall_p99", "Time for which pages were out of its reach: the 99th percentile", |m| {
        Gauge(m.report.stall_p99_us as f64 / 1e6)
    }),
];

const fn bill(report: &GroupReport) -> &Bill {
    &report.bill
}

/// The metrics as text.
pub fn text(scrape: Scrape, form: Form) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("pagefold");
    registry.register_collector(Box::new(scrape));
    let mut out = String::new();
    match form {
        Form::OpenMetrics => text::encode(&mut out, &registry)?,
        Form::Plain => prometheus_text::encode(&mut out, &registry)?,
    }
    Ok(out)
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        self.encode_service(encoder)?;
        let states: Vec<&GroupState> = self.groups.iter().filter_map(|group| group.state.as_deref()).collect();
        for family in &GROUP {
            encode(encoder, family, &states, |group| [("group", group.name.clone())])?;
        }
        self.encode_reasons(encoder, &states)?;
        self.encode_fits(encoder, &states)?;
        let members: Vec<&Member> = self.members.iter().collect();
        for family in &MEMBER {
            encode(encoder, family, &members, |m| [("group", m.group.clone()), ("member", m.report.name.clone())])?;
        }
        let mut infos = encoder.encode_descriptor(
            "member",
            "Its state, and the libvirt domain that it is",
            None,
            MetricType::Info,
        )?;
        for member in &self.members {
            infos.encode_info(&member.info())?;
        }
        Ok(())
    }
}

impl Member {
    fn info(&self) -> Vec<(&'static str, String)> {
        let Self { group, report, domain } = self;
        let mut labels =
            vec![("group", group.clone()), ("member", report.name.clone()), ("state", report.state.clone())];
        labels.extend(domain.clone().map(|domain| ("domain", domain)));
        labels
    }
}

impl Scrape {
    fn encode_service(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "The version of pagefold-web";
        let mut info = encoder.encode_descriptor("build", help, None, MetricType::Info)?;
        info.encode_info(&[("version", env!("CARGO_PKG_VERSION"))])?;
        if let Some(start) = self.service_start_s {
            let help = "Start of the supervisor, in seconds since 1970";
            let mut gauge =
                encoder.encode_descriptor("service_start_time", help, Some(&Unit::Seconds), MetricType::Gauge)?;
            gauge.encode_gauge(&start)?;
        }
        let help = "Start of the group's worker, in seconds since 1970: it changes when the worker is started again";
        let mut starts =
            encoder.encode_descriptor("worker_start_time", help, Some(&Unit::Seconds), MetricType::Gauge)?;
        for (group, start) in &self.worker_starts_s {
            starts.encode_family(&[("group", group.as_str())])?.encode_gauge(start)?;
        }
        let help = "Whether the group's figures could be had: 1 or 0";
        let mut up = encoder.encode_descriptor("group_up", help, None, MetricType::Gauge)?;
        for group in &self.groups {
            let figure = f64::from(u8::from(group.state.is_some()));
            up.encode_family(&[("group", group.line.name.as_str())])?.encode_gauge(&figure)?;
        }
        let mut members = encoder.encode_descriptor("group_members", "Living members", None, MetricType::Gauge)?;
        for group in &self.groups {
            members
                .encode_family(&[("group", group.line.name.as_str())])?
                .encode_gauge(&(group.line.members as f64))?;
        }
        Ok(())
    }

    /// How many further guests fit, if a process balances memory. The figures `storm` and `storm_reserve` are those of
    /// the host, which every group's state has.
    fn encode_fits(&self, encoder: &mut DescriptorEncoder<'_>, states: &[&GroupState]) -> fmt::Result {
        let fits: Vec<(&str, &Fit)> =
            states.iter().filter_map(|state| Some((state.name.as_str(), state.fit.as_ref()?))).collect();
        let Some((_, host)) = fits.first().filter(|_| self.sees_all) else { return Ok(()) };
        let help = "Further guests like most of the group's VMs that fit, by the policy of admission";
        let mut more = encoder.encode_descriptor("group_more_guests", help, None, MetricType::Gauge)?;
        for (group, fit) in &fits {
            more.encode_family(&[("group", *group)])?.encode_gauge(&(fit.more as f64))?;
        }
        let help = "Memory that a full break storm of all groups takes, promises included";
        let mut storm = encoder.encode_descriptor("storm", help, Some(&Unit::Bytes), MetricType::Gauge)?;
        storm.encode_gauge(&(host.storm_bytes as f64))?;
        let help = "Memory that stands against a full break storm";
        let mut reserve = encoder.encode_descriptor("storm_reserve", help, Some(&Unit::Bytes), MetricType::Gauge)?;
        reserve.encode_gauge(&(host.reserve_bytes as f64))
    }

    /// Metrics with a label `reason`. Every known reason has a figure, even if it is 0, so that a series does not
    /// appear only when its reason first occurs.
    fn encode_reasons(&self, encoder: &mut DescriptorEncoder<'_>, states: &[&GroupState]) -> fmt::Result {
        let help = "Members that fold nothing more, by reason: the state in pagefold group show";
        let mut not = encoder.encode_descriptor("group_members_not_folding", help, None, MetricType::Gauge)?;
        for group in states {
            // A member that ksmd merges is in its intended state.
            let is_trouble = |state: &str| ![member_words::FOLDING, KSM].contains(&state);
            for (reason, _) in member_words::STATES.iter().filter(|(state, _)| is_trouble(state)) {
                let count = group.report.members.iter().filter(|member| member.state == *reason).count();
                let labels = [("group", group.name.as_str()), ("reason", reason)];
                not.encode_family(&labels)?.encode_gauge(&(count as f64))?;
            }
        }
        let help = "Pages that were to be folded and were not, by reason; a page counts as often as it was tried";
        let mut failures = encoder.encode_descriptor("group_fold_failures", help, None, MetricType::Counter)?;
        for group in states {
            for (reason, count) in &bill(&group.report).fold_failures {
                let labels = [("group", group.name.as_str()), ("reason", reason.as_str())];
                counter(failures.encode_family(&labels)?, *count as f64)?;
            }
        }
        Ok(())
    }
}

fn counter(mut encoder: MetricEncoder<'_>, figure: f64) -> fmt::Result {
    encoder.encode_counter::<NoLabelSet, f64, f64>(&figure, None)
}

/// Encodes a metric with the figures of all `things`. All of these are gauges, or all are counters.
fn encode<T, L: EncodeLabelSet>(
    encoder: &mut DescriptorEncoder<'_>,
    family: &Family<T>,
    things: &[&T],
    labels: impl Fn(&T) -> L,
) -> fmt::Result {
    let Some(first) = things.first() else { return Ok(()) };
    let kind = match (family.figure)(first) {
        Gauge(_) => MetricType::Gauge,
        Counter(_) => MetricType::Counter,
    };
    let mut metric = encoder.encode_descriptor(family.name, family.help, family.unit.as_ref(), kind)?;
    for thing in things {
        let labels = labels(thing);
        let mut one = metric.encode_family(&labels)?;
        match (family.figure)(thing) {
            Gauge(figure) => one.encode_gauge(&figure)?,
            Counter(figure) => counter(one, figure)?,
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "metrics_extreme_tests.rs"]
mod extreme_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use api::ask::{GroupLine, PoolLimit, WorkerState};
    use api::control::Settings;
    use page::Savings;
    use std::sync::Arc;

    pub(super) fn scrape() -> Scrape {
        let settings = Settings::default();
        let report = MemberReport {
            name: "a\"b\\c\nd".into(),
            state: "no_vma".into(),
            saved_bytes: -5,
            ..MemberReport::default()
        };
        let savings = Savings::of(0, 0, 10, 0, 0);
        let report_of_group = GroupReport { members: vec![report.clone()], savings, ..GroupReport::none() };
        let line =
            GroupLine { name: "acme".into(), members: 1, worker: WorkerState::Running, settings, configured: true };
        let state = GroupState {
            name: "acme".into(),
            settings,
            configured: true,
            worker: WorkerState::Running,
            worker_pid: Some(1),
            pool_limit: PoolLimit::of(&settings, None),
            pressure_scan_rate: None,
            fit: Some(Fit { more: 3, storm_bytes: 7, reserve_bytes: 9, ..Fit::default() }),
            segments: 1,
            not_attached: Vec::new(),
            report: report_of_group,
        };
        let silent = Group { line: GroupLine { name: "beta".into(), ..line.clone() }, state: None };
        Scrape {
            groups: vec![Group { line, state: Some(Arc::new(state)) }, silent],
            members: vec![Member { group: "acme".into(), report, domain: Some("web1".into()) }],
            sees_all: true,
            service_start_s: Some(1.5),
            worker_starts_s: vec![("acme".into(), 2.5)],
        }
    }

    #[test]
    fn caller_that_sees_some_groups_learns_nothing_of_the_memory_of_all() {
        let out = text(Scrape { sees_all: false, ..scrape() }, Form::Plain).unwrap();
        assert!(!out.contains("more_guests") && !out.contains("pagefold_storm"), "{out}");
    }

    #[test]
    fn figures_have_units_and_hostile_labels_are_escaped() {
        let out = text(scrape(), Form::Plain).unwrap();
        for line in [
            "# TYPE pagefold_group_saved_bytes gauge",
            "pagefold_group_saved_bytes{group=\"acme\"} -40960",
            "pagefold_group_folded_pages_total{group=\"acme\"} 0",
            "pagefold_group_more_guests{group=\"acme\"} 3",
            "pagefold_storm_bytes 7",
            "pagefold_storm_reserve_bytes 9",
            "pagefold_group_worker_cpu_seconds_total{group=\"acme\"} 0",
            "pagefold_group_up{group=\"beta\"} 0",
            "pagefold_group_members_not_folding{group=\"acme\",reason=\"no_vma\"} 1",
            "pagefold_group_members_not_folding{group=\"acme\",reason=\"off\"} 0",
            "pagefold_group_fold_failures_total{group=\"acme\",reason=\"no_room\"} 0",
            "pagefold_member_saved_bytes{group=\"acme\",member=\"a\\\"b\\\\c\\nd\"} -5",
            "pagefold_member_info{group=\"acme\",member=\"a\\\"b\\\\c\\nd\",state=\"no_vma\",domain=\"web1\"} 1",
            "pagefold_service_start_time_seconds 1.5",
            "pagefold_worker_start_time_seconds{group=\"acme\"} 2.5",
        ] {
            assert!(out.lines().any(|found| found == line || found == format!("{line}.0")), "{line}\n{out}");
        }
        assert!(!out.contains("ksm") && !out.contains("pagefold_group_saved_bytes{group=\"beta\""), "{out}");
        let open = text(scrape(), Form::OpenMetrics).unwrap();
        assert!(open.ends_with("# EOF\n") && open.contains("# TYPE pagefold_group_folded_pages counter\n"), "{open}");
        let (open, plain) = (Form::of("application/openmetrics-text;version=1.0.0,*/*;q=0.1"), Form::of("*/*"));
        assert_eq!((open, plain), (Form::OpenMetrics, Form::Plain));
    }
}
