//! The agent's connection to the keeper: the service's process that follows children of members ([`wire::prove`]), also
//! when their parents are gone.
//!
//! The agent keeps each userfaultfd that it has handed over, and hands it to the next keeper if this one is killed. A
//! thread of a child that needs an answer waits as long as nobody reads the kernel's messages about the child, so
//! nothing is lost meanwhile. For each child, the keeper answers whether it follows that child.
//!
//! The userfaultfd of each child takes a descriptor in the agent's table of files. The program's limit of descriptors
//! (`RLIMIT_NOFILE`) is shared out like this:
//!
//! ```text
//!   | a half, 512 at most | a quarter | the rest |
//!                         |           +-- children are left to the keeper and its standby alone (wire::prove::ALONE)
//!                         +-- the program's memory becomes private, so that no process has to follow later children
//!                             (Keeper::is_to_give_way)
//! ```

use crate::world;
use act::{Follower, Userfault};
use host::{Received, Seqpacket};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::process::{Resource, getrlimit};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use wire::attach::Server;
use wire::prove::{ALONE, ALONE_TOO, FOLLOW_FORKS, FOLLOWS_FORKS, KEEP_BYTES, Kept, decode_kept, encode_keep};

/// Time until the next attempt to reach a keeper that is absent or takes no child, and between two checks whether
/// children have ended: 500 ms.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Longest time that the keeper may take to answer a request to follow forks: 2 s.
const ANSWER_TIME: Duration = Duration::from_secs(2);
/// Number of followed children at which the program's memory is made private.
const MOST_FOLLOWED: usize = 512;
/// Time for which the keeper may take no child before the program's memory is made private: 10 s. The keeper may be
/// restarting meanwhile.
const REFUSED_FOR: Duration = Duration::from_secs(10);
/// Time between two checks whether the keeper has accepted a new connection: 1 ms.
const PLACE_TIME: Duration = Duration::from_millis(1);

/// The keeper's address, a connection to it, and the children that it follows.
pub struct Keeper {
    path: PathBuf,
    socket: Option<Seqpacket>,
    /// Descriptor reserved for the next connection: children may have taken all others by then.
    spare: Option<OwnedFd>,
    kept: Vec<Follower>,
    /// Children that were handed over, by number, as long as the keeper has not answered.
    asked: Vec<(u32, Follower)>,
    /// Children that the keeper refused or gave back, until the follower takes them over.
    back: Vec<Follower>,
    number: u32,
    /// Whether the keeper was asked to follow its children without this process ([`Keeper::leave`]), and has not
    /// answered yet.
    leaves: bool,
    /// Whether the keeper has said that it can take few more children.
    is_full: bool,
    /// Time since which the keeper has taken no child; `None` if it takes children.
    refused: Option<Instant>,
    next: Instant,
    next_look: Instant,
}

/// Number of descriptors that the agent may have, by the program's limit (`RLIMIT_NOFILE`).
pub fn descriptors() -> usize {
    getrlimit(Resource::Nofile).current.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

/// A descriptor that is only there to be closed when another one is needed; `None` if none is left.
fn spare() -> Option<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC).ok()
}

impl Keeper {
    /// A keeper to which no connection has been made yet.
    pub fn new(path: PathBuf) -> Self {
        let (now, kept, asked, back) = (Instant::now(), Vec::new(), Vec::new(), Vec::new());
        let (socket, number, leaves, is_full, refused, next_look) = (None, 0, false, false, None, now + RETRY_INTERVAL);
        let spare = spare();
        Self { path, socket, spare, kept, asked, back, number, leaves, is_full, refused, next: now, next_look }
    }

    /// Whether the keeper follows no child of this process.
    pub const fn is_idle(&self) -> bool {
        self.kept.is_empty() && self.asked.is_empty()
    }

    /// Whether the keeper has answered for all children that were handed over.
    pub const fn has_answered(&self) -> bool {
        self.asked.is_empty()
    }

    /// The socket to the keeper, if an answer is expected on it.
    pub fn answers(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().filter(|_| self.leaves || !self.asked.is_empty()).map(AsFd::as_fd)
    }

    /// Hands over a child without unsettled discards. Returns the child if the keeper did not take it.
    pub fn take(&mut self, child: Follower) -> Option<Follower> {
        let now = Instant::now();
        if now < self.next {
            return Some(child);
        }
        if self.socket.is_none() {
            self.spare = None;
            self.socket = world::connect(Server::Prover, &self.path).ok();
            self.spare = if self.socket.is_none() { spare() } else { None };
        }
        let frame = encode_keep(self.number);
        match self.socket.as_ref().map(|socket| send_file(socket, &frame, child.watch().as_fd())) {
            Some(Ok(Sent::Yes)) => {
                self.asked.push((self.number, child));
                self.number = self.number.wrapping_add(1);
                if self.kept.len() + self.asked.len() >= descriptors() / 4 * 3 {
                    self.leave();
                }
                return None;
            }
            // The keeper accepts a new connection at once, or closes it.
            Some(Ok(Sent::NoPlace)) => return Some(child),
            // The keeper closes a connection by itself only when it follows none of its children any more.
            Some(Err(_)) => self.next_look = now,
            Some(Ok(Sent::Full)) | None => {}
        }
        self.next = now + RETRY_INTERVAL;
        self.refused.get_or_insert(now);
        Some(child)
    }

    /// Gives up a closed connection. The next connection begins without children: those of this one are followed here
    /// again.
    fn hang_up(&mut self) {
        (self.socket, self.leaves) = (None, false);
        self.spare = spare();
        if !self.asked.is_empty() {
            // The keeper may not know the request, or refuse children of a process like this one.
            self.refused.get_or_insert_with(Instant::now);
        }
        let mut all = std::mem::take(&mut self.kept);
        all.extend(self.asked.drain(..).map(|(_, child)| child));
        all.iter_mut().for_each(Follower::succeed);
        self.back.append(&mut all);
    }

    /// Asks the keeper to be the only one that follows its children, because descriptors are short. This process closes
    /// the children's userfaultfds once the keeper agrees.
    pub fn leave(&mut self) {
        if !self.leaves && !self.is_idle() {
            let sent = self.socket.as_ref().map(|socket| socket.send(&ALONE, &[]));
            self.leaves = matches!(sent, Some(Ok(true)));
        }
    }

    /// Whether the program's memory must become private, because too many children have to be followed. `here` is the
    /// number of children that this process follows; `are_new`: some were forked since the last call.
    pub fn is_to_give_way(&mut self, here: usize, are_new: bool) -> bool {
        let is_refused = here > 0 && self.refused.take_if(|since| since.elapsed() > REFUSED_FOR).is_some();
        let all = self.kept.len() + self.asked.len() + here;
        let are_many = are_new && all >= (descriptors() / 2).min(MOST_FOLLOWED);
        std::mem::take(&mut self.is_full) || is_refused || are_many
    }

    /// Reads the keeper's answers. Returns the children that the keeper does not follow.
    pub fn hear(&mut self) -> Vec<Follower> {
        let mut frame = [0; KEEP_BYTES + 1];
        while self.answers().is_some() {
            match self.socket.as_ref().map(|socket| socket.receive_bare(&mut frame)) {
                Some(Ok(Received::Nothing)) => break,
                // The keeper has answered for all of these children before.
                Some(Ok(Received::Frame(bytes))) if frame[..bytes] == ALONE_TOO && self.leaves => {
                    self.leaves = false;
                    self.kept.clear();
                }
                Some(Ok(Received::Frame(bytes))) if let Some((number, kept)) = decode_kept(&frame[..bytes]) => {
                    let at = self.asked.iter().position(|(asked, _)| *asked == number);
                    let child = at.map(|at| self.asked.remove(at).1);
                    let to = if kept == Kept::No { &mut self.back } else { &mut self.kept };
                    to.extend(child);
                    self.is_full |= kept != Kept::Yes;
                    self.refused = None;
                    if kept == Kept::No {
                        self.next = Instant::now() + RETRY_INTERVAL;
                    }
                }
                _ => {
                    self.hang_up();
                    break;
                }
            }
        }
        std::mem::take(&mut self.back)
    }

    /// Forgets children that have ended. If the keeper is gone, returns all others, which this process has to follow
    /// then.
    pub fn look(&mut self) -> Vec<Follower> {
        let now = Instant::now();
        if now < self.next_look {
            return Vec::new();
        }
        self.next_look = now + RETRY_INTERVAL;
        self.kept.retain(Follower::is_alive);
        let receive = |socket: &Seqpacket| socket.receive_bare(&mut [0; 8]);
        if self.answers().is_some() || matches!(self.socket.as_ref().map(receive), Some(Ok(Received::Nothing))) {
            return Vec::new();
        }
        self.hang_up();
        std::mem::take(&mut self.back)
    }
}

/// Outcome of an attempt to send a file.
#[derive(PartialEq, Eq)]
enum Sent {
    Yes,
    /// The keeper has not accepted the connection yet, and takes no files before.
    NoPlace,
    /// The socket's buffer is full.
    Full,
}

fn send_file(socket: &Seqpacket, frame: &[u8], file: BorrowedFd<'_>) -> io::Result<Sent> {
    match socket.send(frame, &[file]) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Ok(Sent::NoPlace),
        sent => Ok(if sent? { Sent::Yes } else { Sent::Full }),
    }
}

/// Asks the keeper to initialise an idle userfaultfd (`UFFDIO_API`) so that it follows memory and reports forks. The
/// keeper has the right to do so; without a keeper, no userfaultfd reports forks.
///
/// # Errors
/// `TimedOut`: the keeper does not answer. Others: there is no keeper, or it refuses.
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
