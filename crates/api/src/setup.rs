//! The supervisor's messages to its web side, `pagefold-web`: one at its start, and one for each change.
//!
//! Standard input of `pagefold-web` is a `SOCK_SEQPACKET` socket. The first message has the listening sockets with it, in
//! the order of [`Setup::sockets`]; later ones have none. When the socket closes, the supervisor has ended, and
//! `pagefold-web` ends too.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

/// Longest message, in bytes.
pub const SETUP_BYTES: usize = 128 << 10;
/// Fewest characters of a token.
pub const LEAST_TOKEN_CHARS: usize = 32;

/// A listening socket.
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
    /// Whether changes of settings are taken at all. The supervisor refuses them otherwise, whatever the web side does.
    pub control: bool,
    /// Tokens and their rights.
    pub tokens: Vec<Token>,
    /// The sockets that come with this message.
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
    /// The groups that it sees; `None`: all.
    pub groups: Option<BTreeSet<String>>,
}

impl fmt::Debug for Token {
    /// The token's secret is left out, because it must not be logged.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, control, groups, .. } = self;
        f.debug_struct("Token").field("name", name).field("control", control).field("groups", groups).finish()
    }
}
