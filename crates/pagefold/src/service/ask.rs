//! What the command line asks a supervisor: each message a datagram of JSON on the control socket.
//!
//! A question is answered by any number of [`Answer`]s, of which the last is neither a [`Answer::Group`] nor a
//! [`Answer::Member`].

use super::change::Change;
use fold::control::{CONTROL_BYTES, GroupReport, Identity, Settings};
use host::{Received, Seqpacket};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io;

/// A question. Who asks is known from the socket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ask {
    /// Make the process that asks a member; it will execute the member's program.
    Join {
        /// Of this group.
        group: String,
        /// By this name, or one made of the program's.
        name: Option<String>,
        /// The file name of its program.
        program: String,
    },
    /// Which groups are there?
    Groups,
    /// How does a group do?
    Show {
        /// Which.
        group: String,
    },
    /// Run a group differently from now on.
    Set {
        /// Which.
        group: String,
        /// What is to change.
        change: Change,
    },
    /// Who are the members of all groups?
    Members,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It is a member, by this name.
    Joined(String),
    /// One of the groups.
    Group(GroupLine),
    /// One of the members.
    Member(MemberLine),
    /// That was all; it is done.
    Done,
    /// How a group does.
    Report(Box<GroupState>),
    /// No, and why.
    Refused(String),
}

/// A group in a list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupLine {
    /// Its name.
    pub name: String,
    /// Living members.
    pub members: usize,
    /// What its worker is doing.
    pub worker: WorkerState,
    /// How it is run.
    pub settings: Settings,
}

/// What a group's worker is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerState {
    /// There is none: the group has no members.
    None,
    /// It is being started, or will be in a moment, after it died.
    Starting,
    /// It runs.
    Running,
}

/// A member in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberLine {
    /// Its group.
    pub group: String,
    /// Who it is.
    #[serde(flatten)]
    pub identity: Identity,
    /// Its user when it joined.
    pub uid: u32,
    /// Whether its agent has connected at some time; not before it was loaded.
    pub connected: bool,
}

/// How a group does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupState {
    /// Its name.
    pub name: String,
    /// How it is run.
    pub settings: Settings,
    /// What its worker is doing.
    pub worker: WorkerState,
    /// The worker's process.
    pub worker_pid: Option<u32>,
    /// Segments of the pool kept for the worker's successor.
    pub segments: usize,
    /// What the worker says; nothing of all that where there is none.
    pub report: GroupReport,
}

/// A message as a datagram.
pub fn encode(message: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(message).expect("these types have no maps with keys other than text")
}

/// The next message, if one has come; `Err` also when the other side has hung up.
///
/// # Errors
/// The connection ended, or what came is no message.
pub fn receive<T: DeserializeOwned>(socket: &Seqpacket, buffer: &mut Vec<u8>) -> io::Result<Option<T>> {
    buffer.resize(CONTROL_BYTES, 0);
    // Nobody sends files here; those that come are closed.
    match socket.receive(buffer, &mut Vec::new())? {
        Received::Nothing => Ok(None),
        Received::Closed => Err(io::ErrorKind::UnexpectedEof.into()),
        Received::Frame(bytes) => serde_json::from_slice(&buffer[..bytes]).map(Some).map_err(io::Error::other),
    }
}
