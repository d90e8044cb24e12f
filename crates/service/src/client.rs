//! A process that asks the supervisor questions, and the answers that it has not read yet.

use api::ask::{self, Answer};
use api::change::Change;
use cli::journal::By;
use host::{PeerProcess, Seqpacket};
use rustix::event::PollFlags;
use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

/// Least time between two questions of a client at the socket for everybody: 100 ms.
const BETWEEN: Duration = Duration::from_millis(100);

/// A process that asks, and its connection.
pub struct Client {
    /// The connection.
    pub socket: Seqpacket,
    /// The process, and its user.
    pub peer: PeerProcess,
    /// The user to whose own socket the client connected; `None`: to the socket for everybody.
    pub entrance: Option<u32>,
    /// Time of the client's last question.
    pub since: Instant,
    /// Time before which no further question of the client is read.
    pub next: Instant,
    waiting: VecDeque<Vec<u8>>,
    /// The worker's report or answer for which the client waits; `None`: it waits for none.
    pub wants: Option<Waits>,
    /// Whether the client's connection is over.
    pub done: bool,
}

/// What a client waits for: a report of a group's worker, or the worker's answer to a question about pages.
pub struct Waits {
    /// The group.
    pub group: String,
    /// Number of the report, or of the question ([`Wants::Why`]).
    pub report: u64,
    /// The purpose of the report.
    pub wants: Wants,
}

/// The purpose for which a client waits for a report.
pub enum Wants {
    /// To show the report to the client.
    Show,
    /// To check that there is memory for the pages that this change makes private, before the change is made for this
    /// user.
    Unfold(Change, By),
    /// The client waits for no report, but for the answer to a question why pages are not folded.
    Why,
}

impl Client {
    /// The client at the other end of `socket`.
    ///
    /// # Errors
    /// The client has ended already.
    pub fn new(socket: Seqpacket, entrance: Option<u32>) -> io::Result<Self> {
        let peer = PeerProcess::of(&socket)?;
        let now = Instant::now();
        Ok(Self { socket, peer, entrance, since: now, next: now, waiting: VecDeque::new(), wants: None, done: false })
    }

    /// Notes that the client has asked.
    pub fn heard(&mut self) {
        self.since = Instant::now();
        if self.entrance.is_none() {
            self.next = self.since + BETWEEN;
        }
    }

    /// Queues an answer, which is sent as soon as the client reads.
    pub fn answer(&mut self, answer: &Answer) {
        self.waiting.push_back(ask::encode(answer));
        self.flush();
    }

    /// The event for which the client's socket is polled now; `None`: it is not polled, because the client waits for a
    /// worker, or may not ask again yet. No question is read while answers wait to be read, so at most the answer to
    /// one question waits.
    pub fn awaited(&self, now: Instant) -> Option<PollFlags> {
        match (&self.wants, self.waiting.is_empty()) {
            (Some(_), true) => None,
            (None, true) if self.next > now => None,
            (None, true) => Some(PollFlags::IN),
            (_, false) => Some(PollFlags::OUT),
        }
    }

    /// Sends waiting answers, as far as the client reads them.
    pub fn flush(&mut self) {
        while let Some(frame) = self.waiting.front() {
            match self.socket.send(frame, &[]) {
                Ok(true) => _ = self.waiting.pop_front(),
                Ok(false) => return,
                Err(_) => {
                    self.done = true;
                    return;
                }
            }
        }
    }
}
