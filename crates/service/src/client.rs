//! A process that asks the supervisor, and the answers that wait for it.

use api::ask::{self, Answer};
use api::change::Change;
use cli::journal::By;
use host::{PeerProcess, Seqpacket};
use rustix::event::PollFlags;
use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

/// Time between two questions of one who connected at everybody's socket: 100 ms.
const BETWEEN: Duration = Duration::from_millis(100);

/// A process that asks, and its connection.
pub struct Client {
    /// Its connection.
    pub socket: Seqpacket,
    /// The process, and its user.
    pub peer: PeerProcess,
    /// The user to whose own socket it connected; `None`: to everybody's.
    pub entrance: Option<u32>,
    /// When it was last heard.
    pub since: Instant,
    /// It is not heard before.
    pub next: Instant,
    waiting: VecDeque<Vec<u8>>,
    /// The report that it waits for.
    pub wants: Option<Waits>,
    /// Whether its connection is over.
    pub done: bool,
}

/// The group's worker's report, or answer, that a client waits for, by its number.
pub struct Waits {
    /// The group.
    pub group: String,
    /// The number.
    pub report: u64,
    /// Its purpose.
    pub wants: Wants,
}

/// The purpose for which a client waits for a report.
pub enum Wants {
    /// To show it.
    Show,
    /// To check that there is memory to unfold into, for whoever wants it.
    Unfold(Change, By),
    /// None: it waits for the answer to the question of that number.
    Why,
}

impl Client {
    /// The client at the other end of `socket`.
    ///
    /// # Errors
    /// It has ended already.
    pub fn new(socket: Seqpacket, entrance: Option<u32>) -> io::Result<Self> {
        let peer = PeerProcess::of(&socket)?;
        let now = Instant::now();
        Ok(Self { socket, peer, entrance, since: now, next: now, waiting: VecDeque::new(), wants: None, done: false })
    }

    /// Notes that it has asked.
    pub fn heard(&mut self) {
        self.since = Instant::now();
        if self.entrance.is_none() {
            self.next = self.since + BETWEEN;
        }
    }

    /// Answers, as soon as it reads.
    pub fn answer(&mut self, answer: &Answer) {
        self.waiting.push_back(ask::encode(answer));
        self.flush();
    }

    /// The event of its socket that comes next, if any does. It asks nothing while it has answers to read: so what waits for it is the
    /// answer to one question.
    pub fn awaited(&self, now: Instant) -> Option<PollFlags> {
        match (&self.wants, self.waiting.is_empty()) {
            (Some(_), true) => None,
            (None, true) if self.next > now => None,
            (None, true) => Some(PollFlags::IN),
            (_, false) => Some(PollFlags::OUT),
        }
    }

    /// Sends waiting answers, as far as they are read.
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
