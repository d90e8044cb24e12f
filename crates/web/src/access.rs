//! Callers and their rights.
//!
//! | connection | token | may |
//! |---|---|---|
//! | Unix socket | none | see all groups; root and the service's own user may change settings, too |
//! | any | a valid one | what the token gives |
//! | any | another one | nothing |
//! | TCP | none | nothing |
//!
//! The file mode of the Unix socket says who can connect there. Where the service takes no changes over HTTP
//! ([`Setup::control`]), nobody may make any.

use api::setup::{Setup, Token};
use axum::http::{HeaderMap, header};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::sync::Arc;
use subtle::{Choice, ConstantTimeEq};

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A process of this user, by the kernel's word.
    User(u32),
    /// Somebody at the other end of a TCP connection.
    Unknown,
}

/// The identity of a caller, for shares of what is scarce.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CallerId {
    /// A user.
    User(u32),
    /// The bearer of the token of this name.
    Token(Arc<str>),
}

/// A caller that may see something.
#[derive(Clone, Debug)]
pub struct Caller {
    /// Its identity.
    pub id: CallerId,
    /// The groups that it sees; `None`: all.
    groups: Option<Arc<BTreeSet<String>>>,
    /// Whether it may change settings of groups that it sees.
    pub may_change: bool,
}

impl Caller {
    /// Whether it may see a group, and know that there is one.
    pub fn sees(&self, group: &str) -> bool {
        self.groups.as_ref().is_none_or(|groups| groups.contains(group))
    }

    /// Whether it sees all groups.
    pub const fn sees_all(&self) -> bool {
        self.groups.is_none()
    }
}

/// A token by its digest: digests have one length, and tell nothing of the token.
struct Known {
    digest: [u8; 32],
    caller: Caller,
}

/// Rights of all callers.
pub struct Access {
    control: bool,
    /// The service's own user.
    owner: u32,
    tokens: Vec<Known>,
}

impl Access {
    /// The rights that a setup gives, at the service of user `owner`.
    pub fn new(setup: &Setup, owner: u32) -> Self {
        let known = |token: &Token| Known {
            digest: Sha256::digest(&token.token).into(),
            caller: Caller {
                id: CallerId::Token(token.name.as_str().into()),
                groups: token.groups.clone().map(Arc::new),
                may_change: token.control && setup.control,
            },
        };
        Self { control: setup.control, owner, tokens: setup.tokens.iter().map(known).collect() }
    }

    /// The caller of a request; `None` if it has no rights.
    pub fn caller(&self, peer: Peer, headers: &HeaderMap) -> Option<Caller> {
        let mut authorizations = headers.get_all(header::AUTHORIZATION).iter();
        match (authorizations.next(), authorizations.next(), peer) {
            (None, _, Peer::User(uid)) => {
                let may_change = self.control && (uid == 0 || uid == self.owner);
                Some(Caller { id: CallerId::User(uid), groups: None, may_change })
            }
            (Some(given), None, _) => self.bearer(given.as_bytes()),
            _ => None,
        }
    }

    /// The bearer of a token. However it ends, all tokens are looked at, and whole.
    fn bearer(&self, authorization: &[u8]) -> Option<Caller> {
        let (scheme, token) = authorization.split_at_checked("Bearer ".len())?;
        if !scheme.eq_ignore_ascii_case(b"Bearer ") {
            return None;
        }
        let digest: [u8; 32] = Sha256::digest(token).into();
        let mut found = None;
        for known in &self.tokens {
            let same: Choice = known.digest.ct_eq(&digest);
            if bool::from(same) {
                found = Some(&known.caller);
            }
        }
        found.cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(control: bool) -> Access {
        let token = |name: &str, secret: &str, control, groups: Option<&[&str]>| Token {
            name: name.into(),
            token: secret.into(),
            control,
            groups: groups.map(|all| all.iter().map(|g| (*g).to_owned()).collect()),
        };
        let tokens = vec![token("all", "aaaa", false, None), token("acme", "bbbb", true, Some(&["acme"]))];
        Access::new(&Setup { dir: "/d".into(), control, tokens, sockets: vec![] }, 7)
    }

    fn headers(values: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(header::AUTHORIZATION, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn rights_are_those_of_the_token_or_else_of_the_user() {
        let access = access(true);
        let caller = |peer, values: &[&str]| access.caller(peer, &headers(values));
        for (uid, may_change) in [(0, true), (7, true), (8, false)] {
            let user = caller(Peer::User(uid), &[]).unwrap();
            assert!(user.sees("acme") && user.sees_all() && user.may_change == may_change, "{uid}");
        }
        assert!(caller(Peer::Unknown, &[]).is_none());
        for peer in [Peer::Unknown, Peer::User(0)] {
            let acme = caller(peer, &["Bearer bbbb"]).unwrap();
            assert!(acme.sees("acme") && !acme.sees("acm") && !acme.sees("beta") && acme.may_change);
            let all = caller(peer, &["bearer aaaa"]).unwrap();
            assert!(all.sees("beta") && !all.may_change);
            for wrong in ["Bearer cccc", "Bearer bbbbb", "Bearer bbb", "Bearer ", "Bearer", "Basic bbbb", "bbbb", ""] {
                assert!(caller(peer, &[wrong]).is_none(), "{wrong}");
            }
            assert!(caller(peer, &["Bearer bbbb", "Bearer bbbb"]).is_none());
        }
    }

    #[test]
    fn nobody_changes_anything_where_no_changes_are_taken() {
        let access = access(false);
        for (peer, values) in [(Peer::User(0), &[][..]), (Peer::Unknown, &["Bearer bbbb"])] {
            assert!(!access.caller(peer, &headers(values)).unwrap().may_change);
        }
    }
}
