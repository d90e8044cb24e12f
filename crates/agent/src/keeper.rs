//! The keeper: the service's process that follows children of members ([`wire::prove`]), also when their parents are gone.
//!
//! What was handed over is held here, too, and handed to the next keeper should this one be killed. As long as nobody reads what
//! the kernel tells of a child, the child waits; so nothing is lost meanwhile.

use host::{Follower, Received, Seqpacket, Userfault};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use wire::prove::{FOLLOW_FORKS, FOLLOWS_FORKS, KEEP};

/// A keeper that is not there, or takes nothing, is tried again after so long; and as often it is looked which children have ended.
const AGAIN: Duration = Duration::from_millis(500);
/// It has so long to answer.
const ANSWER_TIME: Duration = Duration::from_secs(2);

/// Where it is to be found, a connection to it, and what it keeps.
pub struct Keeper {
    path: PathBuf,
    socket: Option<Seqpacket>,
    kept: Vec<Follower>,
    next: Instant,
    next_look: Instant,
}

impl Keeper {
    /// Nothing is sent yet.
    pub fn new(path: PathBuf) -> Self {
        let now = Instant::now();
        Self { path, socket: None, kept: Vec::new(), next: now, next_look: now + AGAIN }
    }

    /// Whether it keeps nothing.
    pub const fn is_idle(&self) -> bool {
        self.kept.is_empty()
    }

    /// Hands a child over, of which nothing is known here. Gives it back if it was not taken.
    pub fn take(&mut self, child: Follower) -> Option<Follower> {
        let now = Instant::now();
        if now < self.next {
            return Some(child);
        }
        if self.socket.is_none() {
            self.socket = Seqpacket::connect(&self.path).ok();
        }
        let sent = self.socket.as_ref().map(|socket| socket.send(&KEEP, &[child.watch().as_fd()]));
        if matches!(sent, Some(Err(_))) {
            self.socket = None;
        }
        if matches!(sent, Some(Ok(true))) {
            self.kept.push(child);
            return None;
        }
        self.next = now + AGAIN;
        Some(child)
    }

    /// Forgets children that have ended, and gives back all others if the keeper is gone.
    pub fn look(&mut self) -> Vec<Follower> {
        let now = Instant::now();
        if now < self.next_look {
            return Vec::new();
        }
        self.next_look = now + AGAIN;
        self.kept.retain(Follower::is_alive);
        let mut nothing = ([0; 8], Vec::new());
        let receive = |socket: &Seqpacket| socket.receive(&mut nothing.0, &mut nothing.1);
        if matches!(self.socket.as_ref().map(receive), Some(Ok(Received::Nothing))) {
            return Vec::new();
        }
        self.socket = None;
        std::mem::take(&mut self.kept)
    }
}

/// Opens a userfaultfd that follows memory and forks, if there is a keeper that begins it.
pub fn open_followed(keeper: &Path) -> Option<Userfault> {
    let socket = Seqpacket::connect(keeper).ok()?;
    let watch = Userfault::open_idle().ok()?;
    socket.send(&FOLLOW_FORKS, &[watch.as_fd()]).ok().filter(|sent| *sent)?;
    let (mut answer, mut files, until) = ([0; 8], Vec::new(), Instant::now() + ANSWER_TIME);
    loop {
        match socket.receive(&mut answer, &mut files).ok()? {
            Received::Frame(bytes) => return (answer[..bytes] == FOLLOWS_FORKS).then_some(watch),
            Received::Closed => return None,
            Received::Nothing => {}
        }
        let left = Timespec::try_from(until.checked_duration_since(Instant::now())?).ok()?;
        let _ = poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&left));
    }
}
