//! What the supervisor and a group's worker say to each other.
//!
//! One `SOCK_SEQPACKET` socket, which the worker listens on under the group's name, so that a new supervisor finds the
//! workers of the one before it. Each message is one datagram of JSON; file descriptors travel with it. The two belong
//! to the same installation and trust each other, so this is kept simple rather than tight; only a supervisor may
//! connect (the worker looks at the peer's credentials).
//!
//! ```text
//!   supervisor                                      worker
//!     | Take {settings} + segments of a predecessor    |
//!     | ---------------------------------------------> |   once, after a start or an adoption
//!     | <----- Adopted {members, segments} + segments  |   what there is already, for a new supervisor
//!     | Admit {member} + the member's socket --------> |
//!     | Set {settings} ------------------------------> |
//!     | Report --------------------------------------> |
//!     | <-------------------------------------- Report |
//!     | <----------------- Segment {number} + its file |   keep this for my successor
//!     | <------------------------- Dropped {number}    |   nobody needs that segment any more
//!     | <------------------------------- Event {text}  |
//! ```

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use wire::{Failures, Outcome};

/// No control message is longer.
pub const CONTROL_BYTES: usize = 128 << 10;

/// Whether a group folds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fold {
    /// Fold.
    #[default]
    On,
    /// Leave what is folded, fold nothing more.
    Off,
    /// Make everything private again, fold nothing more.
    Unfold,
}

/// What to do with pages of zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ZeroPolicy {
    /// Fold them like any other.
    #[default]
    Share,
    /// Leave them.
    Ignore,
    /// Fold them while the member does next to nothing.
    WhenIdle,
}

/// How a group is to be run; all of it can be changed at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Settings {
    /// Pages a second that may be fingerprinted in the whole group; `None` is `auto`.
    pub scan_rate: Option<u32>,
    /// What to do with pages of zeros.
    pub zero_pages: ZeroPolicy,
    /// Split a huge page when at least this many percent of it would fold; `None`: never.
    pub split_huge_at_percent: Option<u8>,
    /// Whether to fold.
    pub fold: Fold,
    /// Pages of different members are never folded into one.
    pub intra_member_only: bool,
    /// The pool may hold so many slots.
    pub pool_slots: u32,
    /// The index may remember so many pages that have no twin yet.
    pub index_pages: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            scan_rate: None,
            zero_pages: ZeroPolicy::Share,
            split_huge_at_percent: Some(50),
            fold: Fold::On,
            intra_member_only: false,
            pool_slots: page::PoolSlot::PER_SEGMENT,
            index_pages: 64 << 20,
        }
    }
}

/// Who a member is, by facts it did not choose, and the name it was given.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// Its name, unique in the group among the living.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// When that process started, in clock ticks since boot: with the pid, no other process ever.
    pub started: u64,
}

/// A segment of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentInfo {
    /// Its number.
    pub number: u8,
    /// How many slots it may hold.
    pub slots: u32,
}

/// From the supervisor to a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Begin; with it, a read-only file for each segment that a predecessor left, in this order.
    Take {
        /// How to run the group.
        settings: Settings,
        /// What a predecessor left.
        segments: Vec<SegmentInfo>,
    },
    /// A member; with it, its socket, on which it has said `Hello`.
    Admit(Identity),
    /// From now on, run the group like this.
    Set(Settings),
    /// Say how the group does.
    Report,
}

/// From a worker to the supervisor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum News {
    /// The first message on a connection: what there is; with it, a read-only file for each segment, in this order.
    /// Where there are more than 64 members, more of these follow, with the next members and no segments.
    Adopted {
        /// Members that are connected.
        members: Vec<Identity>,
        /// Segments of the pool.
        segments: Vec<SegmentInfo>,
        /// Whether it has been told to begin already.
        begun: bool,
    },
    /// A new segment; with it, a read-only file, to be kept for a successor.
    Segment(SegmentInfo),
    /// A segment that nobody needs any more.
    Dropped(u8),
    /// The answer to `Report`.
    Report(Box<GroupReport>),
    /// Something worth a line in a log.
    Event(String),
}

/// How a group does. Counters only grow unless they say "now".
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GroupReport {
    /// Its members, now.
    pub members: Vec<MemberReport>,
    /// Slots of the pool in use, now.
    pub slots: u64,
    /// Pages of members that map a slot, now.
    pub sharing_pages: u64,
    /// Pages of zeros given back, now.
    pub zero_pages: u64,
    /// What members' pages would take if they were private, less what they take, by this account: `audit` counts frames.
    pub saved_bytes: u64,
    /// Pages in mappings of the pool that were written since, now.
    pub broken_pages: u64,
    /// Pages folded.
    pub folds: u64,
    /// Of those, pages that had been folded before and broken since.
    pub refolds: u64,
    /// Of those, pages that were written again within a minute or so: they need not have been folded.
    pub short_folds: u64,
    /// Pages looked at for writes.
    pub pages_scanned: u64,
    /// Pages fingerprinted.
    pub pages_hashed: u64,
    /// Pages that were to be folded and were not, by reason.
    pub fold_failures: BTreeMap<String, u64>,
    /// Pages fingerprinted a second, lately.
    pub scan_rate: u64,
    /// Processor time of the worker.
    pub worker_cpu_s: f64,
    /// Processor time of the agents of all members there were.
    pub agent_cpu_s: f64,
    /// Mappings of all members, now.
    pub vmas: u64,
    /// Memory of the index and of all tables of the worker, now.
    pub index_bytes: u64,
    /// Memory of the agents' tables, now.
    pub agent_bytes: u64,
    /// Which pass over the hash space this is, if the index does not hold all of it: done parts of a thousand.
    pub pass_permille: Option<u32>,
    /// Slots that are held only because some process that was a member, or its child, may still map them, now.
    pub limbo_slots: u64,
    /// Members that are counted above and not listed, because the list would not fit into a message.
    #[serde(default)]
    pub members_left_out: u64,
}

/// All reasons there are.
pub(crate) fn by_reason(failures: &Failures) -> BTreeMap<String, u64> {
    let reasons = Outcome::ALL.into_iter().filter(|outcome| *outcome != Outcome::Folded);
    reasons.map(|outcome| (outcome.name().to_owned(), failures.of(outcome))).collect()
}

impl GroupReport {
    /// Of a group that nobody has reported on yet.
    pub fn none() -> Self {
        Self { fold_failures: by_reason(&Failures::default()), ..Self::default() }
    }
}

/// How one member does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemberReport {
    /// Its name.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// Whether its agent is connected; if not, what it holds is held until its process is gone.
    pub connected: bool,
    /// Whether it folds, and if not, why (`wire::MemberState`).
    pub state: String,
    /// More of that, for people.
    pub detail: String,
    /// Pages that may be folded, now.
    pub enrolled_pages: u64,
    /// Pages that map a slot, now, by the agent's account.
    pub folded_pages: u64,
    /// Pages of zeros given back, now.
    pub zero_pages: u64,
    /// Pages broken inside mappings of the pool, now.
    pub broken_pages: u64,
    /// Processor time of its agent.
    pub agent_cpu_s: f64,
    /// Its mappings, as last counted.
    pub vmas: u64,
    /// How long pages were out of its reach: median, 99th percentile and longest, in microseconds, by powers of two.
    pub stall_p50_us: u64,
    /// As above.
    pub stall_p99_us: u64,
    /// As above.
    pub stall_max_us: u64,
}
