//! The callers of the web side, and their rights.
//!
//! | connection | token | may |
//! |---|---|---|
//! | Unix socket | none | see all groups; root and the service's own user may change settings, too |
//! | any | a valid one | what the token gives |
//! | any | an unknown one | nothing |
//! | TCP | none | nothing |
//!
//! The file mode of the Unix socket says who can connect there. Where the service takes no changes over HTTP
//! ([`Setup::control`]), nobody may make any.

use api::setup::{Setup, Token};
use axum::http::{HeaderMap, header};
use cli::journal::By;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use subtle::{Choice, ConstantTimeEq};

/// The peer of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A process of this user, by `SO_PEERCRED` of a Unix socket.
    User(u32),
    /// A TCP client at this address.
    Address(IpAddr),
}

impl Peer {
    /// The peer, as the journal names it, without a token.
    fn by(self) -> By {
        match self {
            Self::User(uid) => By { user: Some(uid), ..By::default() },
            Self::Address(address) => By { address: Some(address.to_string()), ..By::default() },
        }
    }
}

/// The identity of a caller. Connections, processor time and listeners to events are bounded for each identity.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CallerId {
    /// A user.
    User(u32),
    /// The bearer of the token of this name.
    Token(Arc<str>),
}

/// The groups that a caller sees; `None`: all.
pub type Scope = Option<Arc<BTreeSet<String>>>;

/// A caller with rights: it may see some groups at least.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The caller's identity.
    pub id: CallerId,
    /// The groups that the caller sees.
    pub groups: Scope,
    /// Whether the caller may change settings of the groups that it sees.
    pub may_change: bool,
    /// The caller, as the journal names it.
    pub by: By,
    /// The digest of the caller's token, if it has one.
    digest: Option<[u8; 32]>,
}

impl Caller {
    /// Whether the caller may see a group, and know that it exists.
    pub fn sees(&self, group: &str) -> bool {
        self.groups.as_ref().is_none_or(|groups| groups.contains(group))
    }

    /// Whether the caller sees all groups.
    pub const fn sees_all(&self) -> bool {
        self.groups.is_none()
    }
}

/// Rights of all callers.
pub struct Access {
    control: bool,
    /// The service's own user.
    owner: u32,
    /// Callers by the digest of their token. Comparing digests reveals nothing of a token, as all of them have the same
    /// length.
    tokens: Vec<([u8; 32], Caller)>,
}

impl Access {
    /// The rights that the supervisor's setup gives in a service that runs as user `owner`.
    pub fn new(setup: &Setup, owner: u32) -> Self {
        let known = |token: &Token| {
            let digest = Sha256::digest(&token.token).into();
            let caller = Caller {
                id: CallerId::Token(token.name.as_str().into()),
                groups: token.groups.clone().map(Arc::new),
                may_change: token.control && setup.control,
                by: By { token: Some(token.name.clone()), ..By::default() },
                digest: Some(digest),
            };
            (digest, caller)
        };
        Self { control: setup.control, owner, tokens: setup.tokens.iter().map(known).collect() }
    }

    /// The caller of a request; `None` if it has no rights.
    pub fn caller(&self, peer: Peer, headers: &HeaderMap) -> Option<Caller> {
        let mut authorizations = headers.get_all(header::AUTHORIZATION).iter();
        match (authorizations.next(), authorizations.next(), peer) {
            (None, _, Peer::User(uid)) => {
                let may_change = self.control && (uid == 0 || uid == self.owner);
                Some(Caller { id: CallerId::User(uid), groups: None, may_change, by: peer.by(), digest: None })
            }
            (Some(given), None, _) => {
                let caller = self.bearer(given.as_bytes())?;
                Some(Caller { by: By { token: caller.by.token, ..peer.by() }, ..caller })
            }
            _ => None,
        }
    }

    /// The caller that an `Authorization` header with a known token identifies. The token's digest is compared with all
    /// known digests, each in full, so that the time taken reveals nothing.
    fn bearer(&self, authorization: &[u8]) -> Option<Caller> {
        let (scheme, token) = authorization.split_at_checked("Bearer ".len())?;
        if !scheme.eq_ignore_ascii_case(b"Bearer ") {
            return None;
        }
        let digest: [u8; 32] = Sha256::digest(token).into();
        let mut found = None;
        for (known, caller) in &self.tokens {
            let same: Choice = known.ct_eq(&digest);
            if bool::from(same) {
                found = Some(caller);
            }
        }
        found.cloned()
    }

    /// Whether a caller that was admitted under earlier rights still has its token, and the token still shows the same
    /// groups.
    pub fn still_shows(&self, caller: &Caller) -> bool {
        let Some(digest) = caller.digest else { return true };
        let found = self.tokens.iter().find(|(known, _)| *known == digest);
        found.is_some_and(|(_, known)| (&known.id, &known.groups) == (&caller.id, &caller.groups))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAR: Peer = Peer::Address(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST));

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
        assert!(caller(FAR, &[]).is_none());
        for peer in [FAR, Peer::User(0)] {
            let acme = caller(peer, &["Bearer bbbb"]).unwrap();
            assert_eq!((acme.by.token.as_deref(), acme.by.user.is_some()), (Some("acme"), peer != FAR));
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
        for (peer, values) in [(Peer::User(0), &[][..]), (FAR, &["Bearer bbbb"])] {
            assert!(!access.caller(peer, &headers(values)).unwrap().may_change);
        }
    }

    #[test]
    fn caller_sees_the_same_until_its_own_token_changes() {
        let setup = |tokens: &[(&str, &str, &str)]| {
            let token = |(name, secret, group): &(&str, &str, &str)| Token {
                name: (*name).into(),
                token: (*secret).into(),
                control: false,
                groups: Some([(*group).to_owned()].into()),
            };
            Setup { dir: "/d".into(), control: false, tokens: tokens.iter().map(token).collect(), sockets: vec![] }
        };
        let before = Access::new(&setup(&[("acme", "aaaa", "acme")]), 7);
        let acme = before.caller(FAR, &headers(&["Bearer aaaa"])).unwrap();
        let still = |tokens: &[(&str, &str, &str)]| Access::new(&setup(tokens), 7).still_shows(&acme);
        assert!(still(&[("beta", "bbbb", "beta"), ("acme", "aaaa", "acme")]));
        assert!(!still(&[("acme", "cccc", "acme")]) && !still(&[("acme", "aaaa", "beta")]) && !still(&[]));
        assert!(before.still_shows(&before.caller(Peer::User(8), &headers(&[])).unwrap()));
    }
}
