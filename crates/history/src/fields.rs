//! The figures that are kept, of groups and of members.
//!
//! A figure's index in its list is its number in files. So figures are only ever appended to the lists.

use api::ask::GroupState;
use api::control::MemberReport;
use page::pages_to_bytes;

/// How several samples of a series are combined into one of a longer step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A figure of a moment: the mean of the samples.
    Gauge,
    /// A counter: the last sample.
    Counter,
}

/// A figure of a group or of a member.
pub struct Figure<T> {
    /// Its name, with its unit.
    pub name: &'static str,
    /// Whether it says something about the whole host, so that only callers who see all groups may see it.
    pub is_of_host: bool,
    /// Its value in a report; `None` where the report does not have it.
    pub of: fn(&T) -> Option<i64>,
}

impl<T> Figure<T> {
    /// What a reader of files has to know of the figure.
    const fn about(&self) -> About {
        About { name: self.name, is_of_host: self.is_of_host }
    }
}

/// What a reader of files has to know of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct About {
    /// Its name, with its unit.
    pub name: &'static str,
    /// Whether the figure says something about the whole host.
    pub is_of_host: bool,
}

impl About {
    /// How the figure's samples are combined. Counters have names that end with `_total`.
    pub fn kind(self) -> Kind {
        if self.name.ends_with("_total") { Kind::Counter } else { Kind::Gauge }
    }
}

const fn figure<T>(name: &'static str, of: fn(&T) -> Option<i64>) -> Figure<T> {
    Figure { name, is_of_host: false, of }
}

const fn of_host<T>(name: &'static str, of: fn(&T) -> Option<i64>) -> Figure<T> {
    Figure { name, is_of_host: true, of }
}

fn whole(value: u64) -> Option<i64> {
    value.try_into().ok()
}

fn microseconds(seconds: f64) -> Option<i64> {
    Some((seconds * 1e6) as i64)
}

/// Figures of a group.
pub static OF_GROUP: [Figure<GroupState>; 17] = [
    figure("saved_bytes", |g| Some(g.report.savings.saved_bytes())),
    figure("folded_bytes", |g| whole(g.report.savings.folded_bytes)),
    figure("zero_bytes", |g| whole(g.report.savings.zero_bytes)),
    figure("pool_bytes", |g| whole(g.report.savings.pool_bytes)),
    figure("tables_bytes", |g| whole(g.report.savings.tables_bytes)),
    figure("mappings_bytes", |g| whole(g.report.savings.mappings_bytes)),
    figure("broken_bytes", |g| whole(pages_to_bytes(g.report.broken_pages))),
    figure("anonymous_bytes", anonymous),
    figure("members", |g| whole(g.report.members.iter().filter(|m| m.connected).count() as u64)),
    of_host("more_guests", |g| whole(g.fit.as_ref()?.more)),
    of_host("storm_bytes", |g| whole(g.fit.as_ref()?.storm_bytes)),
    of_host("reserve_bytes", |g| whole(g.fit.as_ref()?.reserve_bytes)),
    figure("folded_pages_total", |g| whole(g.report.bill.folds)),
    figure("refolded_pages_total", |g| whole(g.report.bill.refolds)),
    figure("fingerprinted_pages_total", |g| whole(g.report.bill.pages_hashed)),
    figure("worker_cpu_us_total", |g| microseconds(g.report.bill.worker_cpu_s)),
    figure("agents_cpu_us_total", |g| microseconds(g.report.bill.agent_cpu_s)),
];

/// Figures of a member.
pub static OF_MEMBER: [Figure<MemberReport>; 11] = [
    figure("saved_bytes", |m| Some(m.saved_bytes)),
    figure("anonymous_bytes", |m| whole(m.anonymous_bytes?)),
    figure("folded_bytes", |m| whole(pages_to_bytes(m.folded_pages))),
    figure("zero_bytes", |m| whole(pages_to_bytes(m.zero_pages))),
    figure("broken_bytes", |m| whole(pages_to_bytes(m.broken_pages))),
    figure("enrolled_bytes", |m| whole(pages_to_bytes(m.enrolled_pages))),
    figure("balloon_bytes", |m| whole(m.ram_bytes?.saturating_sub(m.actual_bytes?))),
    figure("mappings", |m| whole(m.vmas)),
    figure("stall_p99_us", |m| whole(m.stall_p99_us)),
    figure("refolded_pages_total", |m| whole(m.refolds)),
    figure("agent_cpu_us_total", |m| microseconds(m.agent_cpu_s)),
];

/// Anonymous memory of all members; `None` if it is known of none, or if the report leaves some out.
fn anonymous(group: &GroupState) -> Option<i64> {
    let known = group.report.members.iter().filter_map(|member| member.anonymous_bytes);
    known.reduce(u64::saturating_add).filter(|_| group.report.members_left_out == 0).and_then(whole)
}

/// The figures of a group, or of a member, in the order of their numbers.
pub fn about(is_group: bool) -> Vec<About> {
    if is_group { OF_GROUP.iter().map(Figure::about).collect() } else { OF_MEMBER.iter().map(Figure::about).collect() }
}
