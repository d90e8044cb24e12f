//! What clients hand on to this service at `hand.sock` (`api::hand`): connections of agents that cannot connect from
//! their namespaces, the agent's program file (its object), and questions about templates.

use act::Role;
use api::hand::{self, Server};
use api::template::Question;
use cli::note;
use host::{ForeignFile, Peer, Seqpacket, Shares};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Time within which a client that has connected must hand something on, or is disconnected: 2 s.
const PATIENCE: Duration = Duration::from_secs(2);
/// Most clients at a user's own socket that have connected, and have handed on nothing yet.
const OWN_PLACES: usize = 128;
/// Most clients at the socket for everybody that have connected, and have handed on nothing yet: 64, and 8 of one user.
const PLACES: Shares = Shares { most: 64, roots: 0, others: (64, 8) };

/// A client that has connected, and has handed on nothing yet.
#[derive(Debug)]
struct Silent {
    socket: Seqpacket,
    uid: u32,
    /// The user to whose own socket the client connected; `None`: to the socket for everybody.
    entrance: Option<u32>,
    since: Instant,
}

/// A question about templates.
#[derive(Debug)]
pub struct AboutTemplates {
    /// The question.
    pub question: Question,
    /// The file that goes with it.
    pub file: Option<ForeignFile>,
    /// The connection for the answer.
    pub asker: Seqpacket,
    /// The user who asks.
    pub uid: u32,
}

/// Clients that have connected and have handed on nothing yet, and the agent's object.
#[derive(Debug, Default)]
pub struct Handed {
    /// Clients that have connected, and have handed on nothing yet.
    silent: Vec<Silent>,
    /// The memory file of the agent's object that `pagefold-attach` has handed over to be kept; `None`: none was.
    object: Option<OwnedFd>,
}

impl Handed {
    /// The sockets of clients that have handed on nothing yet, to be polled.
    pub fn sockets(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.silent.iter().map(|silent| PollFd::new(&silent.socket, PollFlags::IN))
    }

    /// Whether another connection to this user's own socket would have a place. At the socket for everybody (`None`),
    /// connections are always accepted, and closed if they get no place.
    pub fn has_room(&self, entrance: Option<u32>) -> bool {
        entrance.is_none() || self.at(entrance).count() < OWN_PLACES
    }

    fn at(&self, entrance: Option<u32>) -> impl Iterator<Item = &Silent> + Clone {
        self.silent.iter().filter(move |silent| silent.entrance == entrance)
    }

    /// Gives a new connection a place, at this user's own socket or at the socket for everybody, where each user has
    /// few places. If there is no place, the connection is closed, and the client tries again.
    pub fn add(&mut self, socket: Seqpacket, entrance: Option<u32>) {
        let Ok(uid) = Peer::user_of(&socket) else { return };
        let fits = || PLACES.have_room(uid, &BTreeSet::new(), self.at(None).map(|silent| silent.uid));
        if entrance.is_some() || fits() {
            self.silent.push(Silent { socket, uid, entrance, since: Instant::now() });
        }
    }

    /// Receives what clients have handed on since the last call, and returns connections, and questions about
    /// templates. Questions about the agent's object are answered here. Clients that hand on nothing in time are
    /// disconnected.
    pub fn take(&mut self) -> (Vec<(Server, Seqpacket)>, Vec<AboutTemplates>) {
        let (mut connections, mut questions) = (Vec::new(), Vec::new());
        for silent in std::mem::take(&mut self.silent) {
            match hand::take(&silent.socket) {
                Ok(None) if silent.since.elapsed() < PATIENCE => self.silent.push(silent),
                Ok(None) => {}
                Ok(Some(hand::Handed::Connection(server, socket))) => connections.push((server, socket)),
                Ok(Some(hand::Handed::WhichObject)) => {
                    // An asker that is gone needs no answer.
                    let _ = hand::answer_object(&silent.socket, self.object.as_ref().map(AsFd::as_fd));
                }
                Ok(Some(hand::Handed::Object(file))) => match act::check(&file, Role::Object) {
                    Ok(()) => self.object = Some(file.into_inner()),
                    Err(e) => note!("a file was not kept as the agent's object, because it is not sealed: {e}"),
                },
                Ok(Some(hand::Handed::Template(question, file))) => {
                    questions.push(AboutTemplates { question, file, asker: silent.socket, uid: silent.uid });
                }
                Err(e) => note!("a connection was not taken over: {e}"),
            }
        }
        (connections, questions)
    }
}
