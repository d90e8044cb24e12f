//! Connections that are handed on to this service for agents in other namespaces, and the agent's object: `api::hand`.

use act::Role;
use api::hand::{self, Server};
use cli::note;
use host::{Seqpacket, SeqpacketListener};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Time for one that connects to hand something on: 2 s.
const PATIENCE: Duration = Duration::from_secs(2);
/// Most that have connected, and have handed on nothing.
const MOST: usize = 64;

/// See the module.
#[derive(Debug, Default)]
pub struct Handed {
    /// Those that have connected, and have handed on nothing.
    silent: Vec<(Seqpacket, Instant)>,
    /// The agent's object.
    object: Option<OwnedFd>,
}

impl Handed {
    /// The sockets that are to be waited for.
    pub fn sockets(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.silent.iter().map(|(socket, _)| PollFd::new(socket, PollFlags::IN))
    }

    /// Accepts those who connect, and takes what they hand on.
    pub fn take(&mut self, listener: &SeqpacketListener) -> Vec<(Server, Seqpacket)> {
        while self.silent.len() < MOST
            && let Ok(Some(socket)) = listener.accept()
        {
            self.silent.push((socket, Instant::now()));
        }
        let (mut all, object) = (Vec::new(), &mut self.object);
        self.silent.retain(|(socket, since)| match hand::take(socket) {
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
