//! The agent's connection to the keeper: the service's process that follows children of members ([`wire::prove`]), also
//! when their parents are gone.
//!
//! The agent holds on to each userfaultfd that it has handed over, and hands it to the next keeper should this one be
//! killed. A child waits as long as nobody reads the kernel's messages about it, so nothing is lost meanwhile.

use act::{Follower, Userfault};
use host::{Received, Seqpacket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use wire::prove::{FOLLOW_FORKS, FOLLOWS_FORKS, KEEP};

/// Time until the next attempt at a keeper that is absent or takes nothing, and between two looks for children that
/// have ended.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Longest time that the keeper may take to answer.
const ANSWER_TIME: Duration = Duration::from_secs(2);

/// The keeper's address, a connection to it, and the children that it follows.
pub struct Keeper {
    path: PathBuf,
    socket: Option<Seqpacket>,
    kept: Vec<Follower>,
    next: Instant,
    next_look: Instant,
}

impl Keeper {
    /// Makes no connection yet.
    pub fn new(path: PathBuf) -> Self {
        let now = Instant::now();
        Self { path, socket: None, kept: Vec::new(), next: now, next_look: now + RETRY_INTERVAL }
    }

    /// Whether it follows no child of this process.
    pub const fn is_idle(&self) -> bool {
        self.kept.is_empty()
    }

    /// Hands over a child of which no discards are pending. Returns the child if the keeper did not take it.
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
        self.next = now + RETRY_INTERVAL;
        Some(child)
    }

    /// Forgets children that have ended. Returns all others if the keeper is gone.
    pub fn look(&mut self) -> Vec<Follower> {
        let now = Instant::now();
        if now < self.next_look {
            return Vec::new();
        }
        self.next_look = now + RETRY_INTERVAL;
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

/// Opens a userfaultfd that follows memory and forks. The keeper has the right to begin one that reports forks; without
/// a keeper, there is none.
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
