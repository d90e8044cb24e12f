//! The agent's connection to the keeper: the service's process that follows children of members ([`wire::prove`]), also
//! when their parents are gone.
//!
//! The agent holds on to each userfaultfd that it has handed over, and hands it to the next keeper should this one be
//! killed. A child waits as long as nobody reads the kernel's messages about it, so nothing is lost meanwhile.

use crate::world;
use act::{Follower, Userfault};
use host::{Received, Seqpacket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use wire::attach::Server;
use wire::prove::{FOLLOW_FORKS, FOLLOWS_FORKS, KEEP};
#[cfg(not(target_env = "gnu"))]
use {
    act::Claim,
    page::HostVirt,
    rustix::fd::OwnedFd,
    wire::prove::{CLAIMED, LENT, NOT_KEPT, YOURS, encode_lend},
};

/// Time until the next attempt at a keeper that is absent or takes nothing, and between two looks for children that
/// have ended.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Longest time that the keeper may take to answer.
const ANSWER_TIME: Duration = Duration::from_secs(2);
/// Longest time that the keeper may take to lend a userfaultfd: 20 s. It may have to try thousands.
#[cfg(not(target_env = "gnu"))]
const LEND_TIME: Duration = Duration::from_secs(20);
/// Time between two looks whether the keeper has given a new connection a place: 1 ms.
const PLACE_TIME: Duration = Duration::from_millis(1);

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
            self.socket = world::connect(Server::Prover, &self.path).ok();
        }
        match self.socket.as_ref().map(|socket| send_file(socket, &KEEP, child.watch().as_fd())) {
            Some(Ok(Sent::Yes)) => {
                self.kept.push(child);
                return None;
            }
            // It has a place at once, or is hung up on.
            Some(Ok(Sent::NoPlace)) => return Some(child),
            Some(Ok(Sent::Full)) => {}
            Some(Err(_)) | None => self.socket = None,
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
        let receive = |socket: &Seqpacket| socket.receive_bare(&mut [0; 8]);
        if matches!(self.socket.as_ref().map(receive), Some(Ok(Received::Nothing))) {
            return Vec::new();
        }
        self.socket = None;
        self.kept.iter_mut().for_each(Follower::succeed);
        std::mem::take(&mut self.kept)
    }
}

/// Outcome of an attempt to send a file.
#[derive(PartialEq, Eq)]
enum Sent {
    Yes,
    /// The keeper has not given the connection a place yet, and takes no files before.
    NoPlace,
    /// The keeper has too much to read.
    Full,
}

fn send_file(socket: &Seqpacket, frame: &[u8], file: BorrowedFd<'_>) -> io::Result<Sent> {
    match socket.send(frame, &[file]) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Ok(Sent::NoPlace),
        sent => Ok(if sent? { Sent::Yes } else { Sent::Full }),
    }
}

/// Borrows the userfaultfd that looks after a page which this process has inherited. Nobody else reads the kernel's messages there
/// as long as the claim lasts.
///
/// # Errors
/// There is no keeper, it does not answer, or it does not follow that page.
#[cfg(not(target_env = "gnu"))]
pub fn borrow(page: HostVirt) -> io::Result<(Userfault, Claim)> {
    let socket = world::connect(Server::Prover, Path::new(""))?;
    let (mut files, until) = (Vec::new(), Instant::now() + LEND_TIME);
    if !socket.send(&encode_lend(page), &[])? {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    let watch = match answer(&socket, &mut files, until)? {
        LENT => Userfault::from_fd(files.pop().ok_or(io::ErrorKind::InvalidData)?)?,
        NOT_KEPT => return Err(io::ErrorKind::NotFound.into()),
        _ => return Err(io::ErrorKind::InvalidData.into()),
    };
    let claim = watch.claim()?;
    // If the keeper is gone by now, the parent's agent may be reading.
    socket.send(&CLAIMED, &[])?;
    match answer(&socket, &mut files, until)? {
        YOURS => Ok((watch, claim)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// The keeper's next answer, of one byte.
#[cfg(not(target_env = "gnu"))]
fn answer(socket: &Seqpacket, files: &mut Vec<OwnedFd>, until: Instant) -> io::Result<[u8; 1]> {
    let mut frame = [0; 2];
    loop {
        match socket.receive(&mut frame, files)? {
            Received::Frame(1) => return Ok([frame[0]]),
            Received::Frame(_) => return Err(io::ErrorKind::InvalidData.into()),
            Received::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
            Received::Nothing => {}
        }
        let left = until.checked_duration_since(Instant::now()).ok_or(io::ErrorKind::TimedOut)?;
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&left));
    }
}

/// Has an idle userfaultfd follow memory and forks. The keeper has the right to begin one that reports forks; without a
/// keeper, there is none.
///
/// # Errors
/// `TimedOut`: the keeper does not answer. Others: there is none, or it refuses.
pub fn begin_followed(keeper: &Path, watch: &Userfault) -> io::Result<()> {
    let socket = world::connect(Server::Prover, keeper)?;
    let (mut answer, until) = ([0; 8], Instant::now() + ANSWER_TIME);
    let left = || until.checked_duration_since(Instant::now()).ok_or(io::ErrorKind::TimedOut);
    while send_file(&socket, &FOLLOW_FORKS, watch.as_fd())? != Sent::Yes {
        left()?;
        std::thread::sleep(PLACE_TIME);
    }
    loop {
        match socket.receive_bare(&mut answer)? {
            Received::Frame(bytes) if answer[..bytes] == FOLLOWS_FORKS => return Ok(()),
            Received::Frame(_) => return Err(io::ErrorKind::InvalidData.into()),
            Received::Closed => return Err(io::ErrorKind::UnexpectedEof.into()),
            Received::Nothing => {}
        }
        let left = Timespec::try_from(left()?).map_err(io::Error::other)?;
        let _ = poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&left));
    }
}

#[cfg(test)]
#[path = "keeper_tests.rs"]
mod tests;
