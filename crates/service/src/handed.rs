//! Connections that are handed on to this service for agents in other namespaces, and the agent's object: `api::hand`.

use act::Role;
use api::hand::{self, Server};
use cli::note;
use host::{Peer, Seqpacket, Shares};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Time for one that connects to hand something on: 2 s.
const PATIENCE: Duration = Duration::from_secs(2);
/// Places at a user's own socket for those that have connected, and have handed on nothing.
const OWN_PLACES: usize = 128;
/// Places for those at everybody's socket: each user has 8.
const PLACES: Shares = Shares { most: 64, roots: 0, others: (64, 8) };

/// One that has connected, and has handed on nothing.
#[derive(Debug)]
struct Silent {
    socket: Seqpacket,
    uid: u32,
    /// The user to whose own socket it connected; `None`: to everybody's.
    entrance: Option<u32>,
    since: Instant,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Handed {
    /// Those that have connected, and have handed on nothing.
    silent: Vec<Silent>,
    /// The agent's object.
    object: Option<OwnedFd>,
}

impl Handed {
    /// The sockets that are to be waited for.
    pub fn sockets(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.silent.iter().map(|silent| PollFd::new(&silent.socket, PollFlags::IN))
    }

    /// Whether another connection to this user's own socket would have a place. At everybody's, those without a place are hung up on.
    pub fn has_room(&self, entrance: Option<u32>) -> bool {
        entrance.is_none() || self.at(entrance).count() < OWN_PLACES
    }

    fn at(&self, entrance: Option<u32>) -> impl Iterator<Item = &Silent> + Clone {
        self.silent.iter().filter(move |silent| silent.entrance == entrance)
    }

    /// Gives one that has connected to this user's own socket a place, or to everybody's: there, each user has few. Others are hung up on,
    /// and try again.
    pub fn add(&mut self, socket: Seqpacket, entrance: Option<u32>) {
        let Ok(uid) = Peer::user_of(&socket) else { return };
        let fits = || PLACES.have_room(uid, &BTreeSet::new(), self.at(None).map(|silent| silent.uid));
        if entrance.is_some() || fits() {
            self.silent.push(Silent { socket, uid, entrance, since: Instant::now() });
        }
    }

    /// Takes what was handed on.
    pub fn take(&mut self) -> Vec<(Server, Seqpacket)> {
        let (mut all, object) = (Vec::new(), &mut self.object);
        self.silent.retain(|Silent { socket, since, .. }| match hand::take(socket) {
            Ok(None) => since.elapsed() < PATIENCE,
            Ok(Some(hand::Handed::Connection(server, socket))) => {
                all.push((server, socket));
                false
            }
            Ok(Some(hand::Handed::WhichObject)) => {
                // An asker that is gone needs no answer.
                let _ = hand::answer_object(socket, object.as_ref().map(AsFd::as_fd));
                false
            }
            Ok(Some(hand::Handed::Object(file))) => {
                match act::check(&file, Role::Object) {
                    Ok(()) => *object = Some(file.into_inner()),
                    Err(e) => note!("a file was not kept as the agent's object, because it is not sealed: {e}"),
                }
                false
            }
            Err(e) => {
                note!("a connection was not taken over: {e}");
                false
            }
        });
        all
    }
}
