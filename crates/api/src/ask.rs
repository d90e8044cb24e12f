//! The questions of the command line, and the supervisor's answers. Each message is a datagram of JSON on the control
//! socket.
//!
//! A question may have several [`Answer`]s: any number of [`Answer::Group`], [`Answer::Member`] or [`Answer::Trouble`],
//! and one other at the end.

use crate::change::Change;
use crate::control::{CONTROL_BYTES, GroupReport, Identity, Settings};
use crate::enrol::{NotAttached, Rule, Via};
use crate::promise::{Answered, Asked, Fit};
use cli::journal::By;
use host::{Received, Seqpacket};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io;

/// State of a group that the configuration does not name any more, in words.
pub const NOT_CONFIGURED: &str = "not configured any more: runs with its last limits, takes no new members";

/// Longest time for which a group has another pace than its settings have, in seconds: 1 hour.
pub const MOST_PACED_S: u32 = 3600;

/// A question. The socket tells the asker's process and user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ask {
    /// Make the asking process a member, before it executes the member's program.
    Join {
        /// Its group.
        group: String,
        /// Its name; `None`: one made from the program's.
        name: Option<String>,
        /// The file name of its program.
        program: String,
        /// The merger.
        #[serde(default)]
        via: Via,
    },
    /// Make a running process a member, into which the asking process is about to put an agent.
    Attach {
        /// The process's pid.
        pid: u32,
        /// Its start, in clock ticks since boot.
        started: u64,
        /// Its group.
        group: String,
        /// Its name; `None`: one made from the program's.
        name: Option<String>,
        /// Whether a rule wants it. A process that somebody has detached is not attached by a rule again.
        #[serde(default)]
        by_rule: bool,
        /// The merger. With ksmd, the asking process puts no agent there.
        #[serde(default)]
        via: Via,
        /// Whether it is only asked if that may be.
        #[serde(default)]
        dry_run: bool,
    },
    /// Have memory promised for a process, all of whose pages are to become private. One that was not attached is told to leave by itself.
    MayLeave {
        /// The process's pid.
        pid: u32,
        /// Its start, in clock ticks since boot.
        started: u64,
        /// Whether somebody wants it to leave, so that no rule attaches it again.
        #[serde(default)]
        for_good: bool,
    },
    /// End the membership of a process: its agent is gone, and nothing of the pool is mapped there.
    Leave {
        /// The process's pid.
        pid: u32,
        /// Its start, in clock ticks since boot.
        started: u64,
    },
    /// List the rules that enrol running processes, and tell which processes these fit in vain.
    Rules {
        /// Processes that are not attached; `None` leaves it at those that were told before.
        not_attached: Option<Vec<NotAttached>>,
    },
    /// Tell which forked children of an attached process are no members.
    Children {
        /// The process's pid.
        pid: u32,
        /// Its start, in clock ticks since boot.
        started: u64,
        /// These children.
        not_attached: Vec<NotAttached>,
    },
    /// Add a rule, until it is dropped.
    AddRule(Rule),
    /// Drop the rules that were added for this control group, or this container.
    DropRules {
        /// The control group.
        cgroup: Option<String>,
        /// The container.
        container: Option<String>,
    },
    /// List the groups.
    Groups,
    /// Show a group's state.
    Show {
        /// The group.
        group: String,
    },
    /// Change a group's settings.
    Set {
        /// The group.
        group: String,
        /// The settings to change.
        change: Change,
        /// Where the web side sends this: the client who asked the web side.
        #[serde(default)]
        by: Option<By>,
    },
    /// Drop what was changed on the fly: have a group run as it is configured.
    Reset {
        /// The group.
        group: String,
    },
    /// Have a group fingerprint so many pages a second for a while, whatever its settings have. It is not written down: it ends with
    /// the supervisor, and by itself.
    Pace {
        /// The group.
        group: String,
        /// Pages a second; `None` ends it.
        pages_per_s: Option<u32>,
        /// Time after which it ends, in seconds: [`MOST_PACED_S`] at most.
        for_s: u32,
    },
    /// Do further guests fit? Memory is promised to them.
    Admit {
        /// The guests.
        asked: Asked,
        /// Where the web side sends this: the client who asked the web side.
        #[serde(default)]
        by: Option<By>,
    },
    /// List the members of all groups.
    Members,
    /// List what is wrong with the service itself.
    Troubles,
    /// Lines of the journal behind a place.
    Journal {
        /// The place.
        after: u64,
    },
    /// The web side tells: clients have sent tokens that are not in the configuration.
    LoginFailed {
        /// How often, by address.
        addresses: BTreeMap<String, u32>,
        /// How often in all.
        times: u32,
    },
    /// Why are these pages of a member not folded?
    Why {
        /// Its group.
        group: String,
        /// Its process.
        pid: u32,
        /// Addresses, and numbers of pages: at most [`wire::RUNS`], and [`wire::WHY_PAGES`] pages.
        pages: Vec<(u64, u16)>,
    },
}

impl Ask {
    /// The group that it names.
    pub fn group(&self) -> Option<&str> {
        match self {
            Self::Join { group, .. }
            | Self::Attach { group, .. }
            | Self::Show { group }
            | Self::Set { group, .. }
            | Self::Reset { group }
            | Self::Pace { group, .. }
            | Self::Why { group, .. } => Some(group),
            Self::AddRule(rule) => Some(&rule.group),
            _ => None,
        }
    }
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The asker is a member, with this name.
    Joined(String),
    /// One of the groups.
    Group(GroupLine),
    /// One of the members.
    Member(MemberLine),
    /// One of the service's troubles.
    Trouble(Trouble),
    /// One of the rules.
    Rule(Rule),
    /// The list has ended.
    Done,
    /// The change is made, and these are the settings.
    Set(Box<Settings>),
    /// A group's state.
    Report(Box<GroupState>),
    /// Whether further guests fit.
    Admission(Box<Answered>),
    /// Lines of the journal, each with the place behind it; the last one is where to go on.
    Journal(Vec<(u64, Value)>, u64),
    /// For each page of [`Ask::Why`], the number of the [`wire::Why`].
    Because(Vec<u8>),
    /// The question is refused for this reason.
    Refused(String),
    /// The question names a group that there is not. Only those are told who may deal with any group.
    NoGroup(String),
}

/// Something that is wrong with a service.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Trouble {
    /// A fixed name for this kind of trouble, such as `no_prover`.
    pub trouble: String,
    /// The trouble in words, and the consequence.
    pub detail: String,
}

/// A group in a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupLine {
    /// Its name.
    pub name: String,
    /// Number of living members.
    pub members: usize,
    /// State of its worker.
    pub worker: WorkerState,
    /// Its settings.
    pub settings: Settings,
    /// Whether the configuration still names it, or any group is allowed.
    #[serde(default = "yes")]
    pub configured: bool,
}

const fn yes() -> bool {
    true
}

/// State of a group's worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum WorkerState {
    /// There is none: the group has no members.
    None,
    /// It is being started, or waits to be started again after it died.
    Starting,
    /// It runs.
    Running,
}

/// A member in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MemberLine {
    /// Its group.
    pub group: String,
    /// Its name and process.
    #[serde(flatten)]
    pub identity: Identity,
    /// Its user when it joined.
    pub uid: u32,
    /// Whether its agent has ever connected.
    pub connected: bool,
    /// Of a member that another member has forked: the name of the first of them, which was not forked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub family: Option<String>,
    /// The process that put the agent into it while it ran, if it was attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attached_by: Option<u32>,
    /// The merger.
    #[serde(default)]
    pub via: Via,
    /// The domain of libvirt that it runs, by the name of its control group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
}

impl MemberLine {
    /// Whether the program beside it is gone, if it was attached.
    pub fn is_left_alone(&self) -> bool {
        // Of one whose program cannot be seen, nobody takes the place.
        let is_beside = |pid| host::runs_program(pid, "pagefold-attach").unwrap_or(true);
        self.via == Via::Agent && self.attached_by.is_some_and(|pid| !is_beside(pid))
    }

    /// Whether it became a member while it ran.
    pub fn was_attached(&self) -> bool {
        self.attached_by.is_some() || self.via == Via::Ksm
    }
}

/// The most memory that a pool may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PoolLimit {
    /// Bytes.
    pub bytes: u64,
    /// The limit that binds.
    pub by: PoolLimitBy,
}

/// A limit of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum PoolLimitBy {
    /// The group's setting `pool`.
    Settings,
    /// Half of the memory that the members may have together, by the limits of their control groups.
    MembersMemory,
}

impl PoolLimit {
    /// The limit that binds, of the two.
    pub fn of(settings: &Settings, members: Option<u64>) -> Self {
        let bytes = page::pages_to_bytes(settings.pool_slots.into());
        match members.filter(|members| *members < bytes) {
            Some(bytes) => Self { bytes, by: PoolLimitBy::MembersMemory },
            None => Self { bytes, by: PoolLimitBy::Settings },
        }
    }
}

/// The state of a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupState {
    /// Its name.
    pub name: String,
    /// Its settings.
    pub settings: Settings,
    /// Whether the configuration still names it, or any group is allowed.
    #[serde(default = "yes")]
    pub configured: bool,
    /// State of its worker.
    pub worker: WorkerState,
    /// The worker's process.
    pub worker_pid: Option<u32>,
    /// The most that its pool may take.
    pub pool_limit: PoolLimit,
    /// Most pages that it fingerprints a second for a while, in place of its settings' scan rate ([`Ask::Pace`]).
    #[serde(default)]
    pub pressure_scan_rate: Option<u32>,
    /// How many more like most of its VMs fit; `None` where it has none, or nobody balances memory.
    #[serde(default)]
    pub fit: Option<Fit>,
    /// Number of the pool's segments kept for the worker's successor.
    pub segments: usize,
    /// Processes that a rule fits, or that a member has forked, and that are no members.
    #[serde(default)]
    pub not_attached: Vec<NotAttached>,
    /// The worker's report, with the bill of all workers of the group; an empty one without a worker.
    pub report: GroupReport,
}

/// A message as a datagram.
pub fn encode(message: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(message).expect("these types have no maps with keys other than text")
}

/// The next message, if one has come; `buffer` is its text. Texts within it are made printable.
///
/// # Errors
/// The other side hung up, or sent something that is no message.
pub fn receive<T: DeserializeOwned>(socket: &Seqpacket, buffer: &mut Vec<u8>) -> io::Result<Option<T>> {
    buffer.resize(CONTROL_BYTES, 0);
    match socket.receive_bare(buffer)? {
        Received::Nothing => Ok(None),
        Received::Closed => Err(io::ErrorKind::UnexpectedEof.into()),
        Received::Frame(bytes) => {
            buffer.truncate(bytes);
            decode(buffer).map(Some)
        }
    }
}

fn decode<T: DeserializeOwned>(text: &[u8]) -> io::Result<T> {
    let value = serde_json::from_slice(text).map_err(io::Error::other)?;
    serde_json::from_value(with_printable_texts(value)).map_err(io::Error::other)
}

/// serde bounds how deep a value can be.
fn with_printable_texts(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(cli::printable(&text)),
        Value::Array(items) => items.into_iter().map(with_printable_texts).collect(),
        Value::Object(map) => {
            map.into_iter().map(|(key, value)| (cli::printable(&key), with_printable_texts(value))).collect()
        }
        plain => plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_in_messages_are_printable() {
        let answer = decode::<Answer>(br#"{"refused": "\u001b[2Jno\u202e"}"#).unwrap();
        assert_eq!(answer, Answer::Refused("?[2Jno?".into()));
        let deep = format!("{}1{}", "[".repeat(1000), "]".repeat(1000));
        assert!(decode::<Answer>(deep.as_bytes()).is_err());
    }
}
