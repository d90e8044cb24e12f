//! The questions of the command line, and the supervisor's answers. Each message is a datagram of JSON on the control
//! socket.
//!
//! The answer to a question is one or several [`Answer`]s: any number that list something (such as [`Answer::Group`],
//! [`Answer::Member`] or [`Answer::Rule`]), and one of another kind at the end.

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

/// Longest time for which [`Ask::Pace`] may replace a group's scan rate, in seconds: 1 hour.
pub const MOST_PACED_S: u32 = 3600;

/// A question to the supervisor. The asker's process and user are known by the socket (`SO_PEERCRED`).
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
        /// The merger. With ksmd, the asking process puts no agent into the process, but turns on merging there.
        #[serde(default)]
        via: Via,
        /// Whether the process is not to become a member: the asker only wants to know whether it might.
        #[serde(default)]
        dry_run: bool,
    },
    /// Have memory promised for a member's process, all of whose pages are to become private. If the member was not
    /// attached, its agent is also told to leave the process.
    MayLeave {
        /// The process's pid.
        pid: u32,
        /// Its start, in clock ticks since boot.
        started: u64,
        /// Whether a user has asked for the process to leave, so that no rule attaches it again.
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
    /// List the rules that enrol running processes, and report which processes a rule fits that could not be attached.
    Rules {
        /// Processes that a rule fits and that are not attached, with the reasons; `None`: they are the same as
        /// reported before.
        not_attached: Option<Vec<NotAttached>>,
    },
    /// Report which forked children of an attached process are no members, and why.
    Children {
        /// The process's pid.
        pid: u32,
        /// Its start, in clock ticks since boot.
        started: u64,
        /// These children.
        not_attached: Vec<NotAttached>,
    },
    /// Add a rule that enrols running processes. It holds until [`Ask::DropRules`].
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
    /// Undo all changes of a group's settings on the fly, so that it runs as it is configured.
    Reset {
        /// The group.
        group: String,
    },
    /// Replace a group's scan rate for a while, because the host is short of memory for example. This is not kept in
    /// the state file: it ends after `for_s`, or with the supervisor.
    Pace {
        /// The group.
        group: String,
        /// Most pages fingerprinted a second; `None` ends the replacement.
        pages_per_s: Option<u32>,
        /// Time after which it ends, in seconds: [`MOST_PACED_S`] at most.
        for_s: u32,
    },
    /// Ask whether further guests fit, and have memory promised to them if the request wants that.
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
    /// Read lines of the journal after a place in it.
    Journal {
        /// The place.
        after: u64,
    },
    /// The web side reports that clients have sent tokens which are not in the configuration.
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
    /// The group that the question names; `None` if it names none.
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
    /// Lines of the journal, each with the place at which it ends, and the place from which to read on.
    Journal(Vec<(u64, Value)>, u64),
    /// For each page of [`Ask::Why`], the number of the reason ([`wire::Why`]).
    Because(Vec<u8>),
    /// The question is refused for this reason.
    Refused(String),
    /// The question names a group that does not exist. Only askers who may deal with any group get this answer; others
    /// get [`Answer::Refused`].
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
    /// Of a member that was forked by a member: the name of the first member of its family, which no member has forked.
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
    /// Whether the member was attached, and the `pagefold-attach` that serves it has ended. Another one may take its
    /// place.
    pub fn is_left_alone(&self) -> bool {
        // If it cannot be seen whether that process runs `pagefold-attach`, it counts as running: nobody takes its
        // place.
        let is_beside = |pid| host::runs_program(pid, "pagefold-attach").unwrap_or(true);
        self.via == Via::Agent && self.attached_by.is_some_and(|pid| !is_beside(pid))
    }

    /// Whether the process became a member while it ran, and was not started by `pagefold run`.
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
    /// The lower of two limits: the group's setting, and the bound by the members' memory limits, if there is one.
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

/// Encodes a message for one datagram.
pub fn encode(message: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(message).expect("these types have no maps with keys other than text")
}

/// The next message; `None` if none has come. Its JSON is left in `buffer`. In all of its strings, characters that
/// could steer a terminal are replaced.
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

/// Makes all strings of a value printable. The recursion is bounded, because `serde_json` refuses values that are
/// nested too deeply.
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
