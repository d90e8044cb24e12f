//! The protocol between the supervisor and a group's worker.
//!
//! The worker listens on a `SOCK_SEQPACKET` socket under the group's name, so that a new supervisor finds the workers
//! of its predecessor. Only a supervisor may connect: the worker checks the peer's credentials.
//!
//! Each message is one datagram of JSON, with file descriptors where it says so. Supervisor and worker are of one
//! installation, and messages are few, so the protocol is simple rather than compact.
//!
//! ```text
//!   supervisor                                      worker
//!     | Take {settings} + segments of a predecessor    |
//!     | ---------------------------------------------> |   once, after a start or an adoption
//!     | <----- Adopted {members, segments} + segments  |   what there is already, for a new supervisor
//!     | Admit {member} + the member's socket --------> |
//!     | Load {template} + its file ------------------> |   members may map it: its pages are slots
//!     | Unload {number} -----------------------------> |   it may go when nobody maps it any more
//!     | Set {settings} ------------------------------> |
//!     | Report --------------------------------------> |
//!     | <-------------------------------------- Report |
//!     | <------------------------------ Needs {bytes}  |   memory for pages that are to become private
//!     | Room {bytes, time} or {why not} -------------> |   nothing becomes private before that
//!     | Why {pages} ---------------------------------> |   a question of an operator's that names pages
//!     | <------------------------- Because {reasons}   |
//!     | <----------------- Segment {number} + its file |   keep this for my successor
//!     | <------------------------- Dropped {number}    |   nobody needs that segment any more
//!     | <------------------------------- Event {text}  |
//! ```

use crate::enrol::Via;
use page::Savings;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use wire::{Failures, MemberState, Outcome};

/// Longest control message, in bytes.
pub const CONTROL_BYTES: usize = 128 << 10;

/// Whether a group folds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Fold {
    /// Fold.
    #[default]
    On,
    /// Leave folded pages as they are, and fold nothing more.
    Off,
    /// Make folded pages private again, and fold nothing more.
    Unfold,
}

/// Treatment of pages of zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ZeroPolicy {
    /// Fold them like any other.
    #[default]
    Share,
    /// Leave them as they are.
    Ignore,
    /// Fold them while the member is nearly idle.
    WhenIdle,
}

/// What folding may take from programs that want the same processors. The kernel divides processors between threads as
/// usual in either case, so that no thread waits for long that keeps pages out of reach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Latency {
    /// Threads that scan and fold preempt no other thread when they wake (`SCHED_BATCH`).
    #[default]
    Quiet,
    /// They do, as threads usually may.
    Eager,
}

impl Latency {
    /// The word for it in the configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Quiet => "quiet",
            Self::Eager => "eager",
        }
    }

    /// Whether it is the default, which a group has whose configuration does not name this setting.
    pub fn is_usual(&self) -> bool {
        *self == Self::default()
    }
}

/// The settings of a group. All of them can be changed while the group runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Settings {
    /// Most pages to fingerprint a second in the whole group; `None` is `auto`.
    pub scan_rate: Option<u32>,
    /// Most processor time for folding, in percent of one processor, while the scan rate follows its yield. `None`: it does not.
    /// Workers of an earlier version do not know it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scan_budget_percent: Option<u8>,
    /// Treatment of pages of zeros.
    pub zero_pages: ZeroPolicy,
    /// Least percentage of a huge page that must fold for it to be split; `None`: none is split.
    pub split_huge_at_percent: Option<u8>,
    /// Whether to fold.
    pub fold: Fold,
    /// Whether pages of different members are never folded into one.
    pub intra_member_only: bool,
    /// Most slots that the pool may have in use.
    pub pool_slots: u32,
    /// Most pages without a duplicate that the index may remember.
    pub index_pages: u32,
    /// What folding may take from programs that want the same processors. Workers of an earlier version do not know it.
    #[serde(skip_serializing_if = "Latency::is_usual")]
    pub latency: Latency,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            scan_rate: None,
            scan_budget_percent: None,
            zero_pages: ZeroPolicy::Share,
            split_huge_at_percent: Some(50),
            fold: Fold::On,
            intra_member_only: false,
            pool_slots: page::PoolSlot::PER_SEGMENT,
            index_pages: 64 << 20,
            latency: Latency::Quiet,
        }
    }
}

/// A member's process, by facts that it did not choose, and the name that it was given.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Identity {
    /// Its name, unique among the group's living members.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// Start of that process in clock ticks since boot. No two processes have the same pid and start.
    pub started: u64,
}

/// A segment of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentInfo {
    /// Its number.
    pub number: u8,
    /// Number of slots that it may hold.
    pub slots: u32,
}

/// Memory for pages of one member that become private.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberRoom {
    /// The member's process.
    pub pid: u32,
    /// Bytes.
    pub bytes: u64,
}

/// A worker's request for memory for pages that are to become private.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Needs {
    /// By member. Empty if nothing is to become private any more.
    pub members: Vec<MemberRoom>,
    /// Whether only all of this memory helps. Otherwise, a part of it lets some pages become private.
    pub whole: bool,
}

/// The answer to [`Needs`]: promised memory, or the reason against it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Room {
    /// So much is promised.
    Promised {
        /// By member.
        members: Vec<MemberRoom>,
        /// Time for which the promise stands, in seconds.
        seconds: u64,
    },
    /// Nothing is promised, for this reason.
    Refused(String),
}

/// From the supervisor to a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Begin. A read-only file for each of `segments` comes with it, in this order.
    Take {
        /// The group's settings.
        settings: Settings,
        /// Segments that a predecessor left.
        segments: Vec<SegmentInfo>,
    },
    /// Serve a new member. Its agent's socket comes with it, from which nothing has been read.
    Admit(Identity),
    /// Close the connection to a process that is no longer a member. The process runs on.
    Dismiss(Identity),
    /// Have a member's agent make all of its pages private, and leave the process, which runs on.
    Leave(Identity),
    /// Use a template. Its read-only file comes with it.
    Load(SegmentInfo),
    /// Drop the template of this number when none of its slots may be mapped any more, as any other segment.
    Unload(u8),
    /// Use these settings of the group from now on.
    Set(Settings),
    /// Report on the group.
    Report,
    /// The answer to [`News::Needs`]. It replaces all earlier answers.
    Room(Room),
    /// Why are these pages of a member not folded? The number comes back with the answer.
    Why {
        /// Number of the question.
        question: u64,
        /// The member's process.
        pid: u32,
        /// Addresses, and numbers of pages.
        pages: Vec<(u64, u16)>,
    },
}

/// From a worker to the supervisor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum News {
    /// The first message on a connection: all members and segments; with it, a read-only file for each segment, in this
    /// order. Where there are more than 64 members, more of these follow, with the next members and no segments.
    Adopted {
        /// Members that are connected.
        members: Vec<Identity>,
        /// Segments of the pool.
        segments: Vec<SegmentInfo>,
        /// Whether it has received [`Order::Take`].
        begun: bool,
    },
    /// A new segment; with it, a read-only file, to be kept for a successor.
    Segment(SegmentInfo),
    /// A segment that nobody needs any more.
    Dropped(u8),
    /// Request for memory for pages that are to become private. Until it is answered, the worker leaves these pages
    /// folded.
    Needs(Needs),
    /// The answer to `Report`.
    Report(Box<GroupReport>),
    /// The answer to the [`Order::Why`] of this number: the number of a [`wire::Why`] for each page. It is empty if
    /// nobody can tell the reasons, for example because the member does not answer.
    Because(u64, Vec<u8>),
    /// Something worth a line in a log.
    Event(String),
}

/// A group's counters. They never decrease: the supervisor adds the counters of workers that have ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Bill {
    /// Pages folded.
    pub folds: u64,
    /// Of those, pages that had been folded before and broken since.
    pub refolds: u64,
    /// Of those, pages that were written again within a minute or so: they need not have been folded.
    pub short_folds: u64,
    /// Pages checked for writes.
    pub pages_scanned: u64,
    /// Pages fingerprinted.
    pub pages_hashed: u64,
    /// Pages that were to be folded and were not, by reason.
    pub fold_failures: BTreeMap<String, u64>,
    /// Processor time of the worker.
    pub worker_cpu_s: f64,
    /// Processor time of the agents of all members, former ones too.
    pub agent_cpu_s: f64,
}

/// Reason in [`Bill::fold_failures`] of pages that got no slot: the pool or the host's memory was full. Each time that
/// such a page was considered counts.
pub const NO_ROOM: &str = "no_room";

/// State of a member whose control group has too little left below its memory limit for more to be folded.
pub const NO_HEADROOM: &str = "no_headroom";

/// Frames by the worker's account, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Frames {
    /// Net savings: those of [`Savings`].
    pub saved: i64,
    /// Slots in use: their content is needed, or somebody may still map them.
    pub pool_in_use: u64,
    /// Slots that take memory and are not in use.
    pub pool_idle: u64,
    /// Slots in use, by the number of members' pages that map them: 0, 1, 2, 3 to 7, 8 and more.
    pub slots_by_sharers: [u64; 5],
    /// Slots in use that no member's page maps, because some process may still map them unseen, in bytes.
    pub deferred_bytes: u64,
    /// Tables of the worker and of the agents.
    pub tables: u64,
    /// The kernel's account of the members' mappings.
    pub mappings: u64,
}

/// A scan rate that follows its yield.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AdaptiveRate {
    /// Most pages fingerprinted a second, now.
    pub pages_per_s: u32,
    /// The reason of its last change; empty before the first.
    pub reason: String,
}

/// A worker's report on its group. Figures are those of the moment, except for the counters in the bill.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GroupReport {
    /// Its members, now.
    pub members: Vec<MemberReport>,
    /// Slots of the pool in use, now.
    pub slots: u64,
    /// Pages of members that map a slot, now.
    pub sharing_pages: u64,
    /// Pages of zeros given back, now.
    pub zero_pages: u64,
    /// Savings and costs of folding, by this account, now. `audit` counts frames instead.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = crate::shown::SavingsSchema))]
    pub savings: Savings,
    /// The same in frames, with the state of the pool's, now.
    #[serde(default)]
    pub frames: Frames,
    /// Slots that take memory and are not in use, now.
    #[serde(default)]
    pub idle_slots: u64,
    /// Why no page gets a slot of its own, now.
    #[serde(default)]
    pub no_room: Option<String>,
    /// Why pages that are to become private stay folded for the moment.
    #[serde(default)]
    pub waits_for_room: Option<String>,
    /// Whether the worker does not reach the prover that its service has, so that slots that were freed are not used again.
    #[serde(default)]
    pub no_prover: bool,
    /// Pages in mappings of the pool that were written since they were folded, now.
    pub broken_pages: u64,
    /// Its counters.
    #[serde(flatten)]
    pub bill: Bill,
    /// Pages that members reported a second, lately.
    pub scan_rate: u64,
    /// The scan rate, where that follows its yield.
    #[serde(default)]
    pub adaptive_rate: Option<AdaptiveRate>,
    /// Mappings of all members, now.
    pub vmas: u64,
    /// Memory of the index and of all tables of the worker, now.
    pub index_bytes: u64,
    /// Memory of the agents' tables, now.
    pub agent_bytes: u64,
    /// Part of the hash space that the passes have done, in thousandths; `None` if the index covers all of it.
    pub pass_permille: Option<u32>,
    /// Slots that are held only because some process that was a member, or its child, may still map them, now.
    #[serde(rename = "limbo_slots")]
    pub deferred_slots: u64,
    /// Members that are counted above and not listed, because the list would not fit into a message.
    #[serde(default)]
    pub members_left_out: u64,
}

/// The numbers of pages that were not folded, by the name of the reason.
pub fn by_reason(failures: &Failures, no_room: u64) -> BTreeMap<String, u64> {
    let reasons = Outcome::ALL.into_iter().filter(|outcome| *outcome != Outcome::Folded);
    let reasons = reasons.map(|outcome| (outcome.name().to_owned(), failures.of(outcome)));
    reasons.chain([(NO_ROOM.to_owned(), no_room)]).collect()
}

fn is_reason(name: &str) -> bool {
    name == NO_ROOM || Outcome::ALL.iter().any(|outcome| *outcome != Outcome::Folded && outcome.name() == name)
}

impl Bill {
    /// Sets each counter of this bill to a function of its values in both bills: `count` for counts, `time` for
    /// processor times.
    fn zip(&mut self, other: &Self, count: fn(u64, u64) -> u64, time: fn(f64, f64) -> f64) {
        for (own, others) in [
            (&mut self.folds, other.folds),
            (&mut self.refolds, other.refolds),
            (&mut self.short_folds, other.short_folds),
            (&mut self.pages_scanned, other.pages_scanned),
            (&mut self.pages_hashed, other.pages_hashed),
        ] {
            *own = count(*own, others);
        }
        // Only a compromised worker names an unknown reason. It is left out, because it would be kept for ever.
        for (reason, others) in other.fold_failures.iter().filter(|(reason, _)| is_reason(reason)) {
            let own = self.fold_failures.entry(reason.clone()).or_default();
            *own = count(*own, *others);
        }
        self.worker_cpu_s = time(self.worker_cpu_s, other.worker_cpu_s);
        self.agent_cpu_s = time(self.agent_cpu_s, other.agent_cpu_s);
    }

    /// Adds another worker's counters. Members choose some of the numbers, so sums saturate.
    pub fn add(&mut self, other: &Self) {
        self.zip(other, u64::saturating_add, |own, others| own + others);
    }

    /// Takes over a later bill of the same worker. A counter that has become smaller stays as it was.
    pub fn grow_to(&mut self, later: &Self) {
        self.zip(later, u64::max, f64::max);
    }
}

impl GroupReport {
    /// The report of a group without a worker.
    pub fn none() -> Self {
        let fold_failures = by_reason(&Failures::default(), 0);
        Self { bill: Bill { fold_failures, ..Bill::default() }, ..Self::default() }
    }
}

/// The report on one member.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MemberReport {
    /// Its name.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// Name of the first member of its family, which forked the others: its own, if nobody forked it. The worker leaves
    /// this and the next to the command line.
    #[serde(default)]
    pub family: String,
    /// Its process. Of the first member of a family, also the processes of the others.
    #[serde(default)]
    pub pids: Vec<u32>,
    /// Whether its agent is connected; if not, its slots are kept until its process and its children have ended.
    pub connected: bool,
    /// Whether it folds, and if not, why (`wire::MemberState`).
    pub state: String,
    /// Details of the state, for people.
    pub detail: String,
    /// The merger.
    #[serde(default)]
    pub via: Via,
    /// Of a member that ksmd merges: its pages that are merged, those of zeros among them, now; `None` where the kernel
    /// does not tell.
    #[serde(default)]
    pub ksm_pages: Option<u64>,
    /// The remedy for the state. The worker leaves it to the command line, which has the words.
    #[serde(default)]
    pub fix: Option<String>,
    /// Its part of the group's savings ([`Savings::of_member`]). The worker leaves it to the command line.
    #[serde(default)]
    pub saved_bytes: i64,
    /// Pages that may be folded, now.
    pub enrolled_pages: u64,
    /// Pages that map a slot, now, by the agent's account.
    pub folded_pages: u64,
    /// Pages of zeros given back, now.
    pub zero_pages: u64,
    /// Pages broken inside mappings of the pool, now.
    pub broken_pages: u64,
    /// Pages folded that had been broken, counted since its agent connected.
    #[serde(default)]
    pub refolds: u64,
    /// Anonymous memory of its process in page frames, by the kernel's counters, now. The worker leaves this and the next two
    /// to the supervisor; `None` where these cannot be read.
    #[serde(default)]
    pub anonymous_bytes: Option<u64>,
    /// Of a VM whose memory is balanced: its RAM without a balloon, at the balancer's last look.
    #[serde(default)]
    pub ram_bytes: Option<u64>,
    /// Of a VM whose memory is balanced: its size by its balloon driver, at the balancer's last look.
    #[serde(default)]
    pub actual_bytes: Option<u64>,
    /// Processor time of its agent.
    pub agent_cpu_s: f64,
    /// Its mappings, as last counted.
    pub vmas: u64,
    /// Median time for which pages were out of its reach, rounded up to a power of two.
    pub stall_p50_us: u64,
    /// 99th percentile of these times, rounded up to a power of two.
    pub stall_p99_us: u64,
    /// Longest of these times.
    pub stall_max_us: u64,
}

impl MemberReport {
    /// Whether the member's agent may still fold pages: it is connected, and its last state was one in which it folds.
    pub fn may_fold(&self) -> bool {
        self.connected && [MemberState::Folding.name(), NO_ROOM].contains(&self.state.as_str())
    }
}
