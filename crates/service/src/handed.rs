//! Connections that are handed on to this service for agents in other namespaces: `api::hand`.

use api::hand::{self, Server};
use cli::note;
use host::{Seqpacket, SeqpacketListener};
use rustix::event::{PollFd, PollFlags};
use std::time::{Duration, Instant};

/// Time for one that connects to hand something on: 2 s.
const PATIENCE: Duration = Duration::from_secs(2);
/// Most that have connected, and have handed on nothing.
const MOST: usize = 64;

/// See the module.
#[derive(Debug, Default)]
pub struct Handed(Vec<(Seqpacket, Instant)>);

impl Handed {
    /// The sockets that are to be waited for.
    pub fn sockets(&self) -> impl Iterator<Item = PollFd<'_>> {
        self.0.iter().map(|(socket, _)| PollFd::new(socket, PollFlags::IN))
    }

    /// Accepts those who connect, and takes what they hand on.
    pub fn take(&mut self, listener: &SeqpacketListener) -> Vec<(Server, Seqpacket)> {
        while self.0.len() < MOST
            && let Ok(Some(socket)) = listener.accept()
        {
            self.0.push((socket, Instant::now()));
        }
        let mut all = Vec::new();
        self.0.retain(|(socket, since)| match hand::take(socket) {
            Ok(None) => since.elapsed() < PATIENCE,
            Ok(taken) => {
                all.extend(taken);
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
