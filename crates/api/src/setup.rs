//! The messages by which the supervisor tells `pagefold-web` its sockets, tokens and rights: one at its start, and one
//! for each change.
//!
//! Standard input of `pagefold-web` is a `SOCK_SEQPACKET` socket. The first message has the listening sockets with it, in
//! the order of [`Setup::sockets`]; later ones have none. When the socket closes, the supervisor has ended, and
//! `pagefold-web` ends too.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

/// Longest message: 128 KiB.
pub const SETUP_BYTES: usize = 128 << 10;
/// Fewest characters that a token must have.
pub const LEAST_TOKEN_CHARS: usize = 32;

/// The kind of a listening socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Socket {
    /// A Unix socket: the kernel tells the peer's user.
    Unix,
    /// A TCP socket: a peer is known by its token alone.
    Tcp,
}

/// The sockets of the web side, and the rights of its callers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// The service's directory.
    pub dir: PathBuf,
    /// Whether settings may be changed over HTTP. If not, the supervisor refuses changes by the web side, too.
    pub control: bool,
    /// Tokens and their rights.
    pub tokens: Vec<Token>,
    /// The listening sockets that come with this message, in this order.
    pub sockets: Vec<Socket>,
}

/// A bearer token, and the rights that it gives.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token {
    /// Its name, for people.
    pub name: String,
    /// The secret.
    pub token: String,
    /// Whether it may change settings.
    pub control: bool,
    /// The groups that its bearer may see and change; `None`: all.
    pub groups: Option<BTreeSet<String>>,
}

impl fmt::Debug for Token {
    /// The token's secret is left out, because it must not be logged.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, control, groups, .. } = self;
        f.debug_struct("Token").field("name", name).field("control", control).field("groups", groups).finish()
    }
}
