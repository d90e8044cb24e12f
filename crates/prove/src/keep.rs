//! The keeper: follows children of members ([`act::Follower`]), also after their parents have ended.
//!
//! A child may discard memory that maps its group's pool, and has to read zeros there afterwards. In a child that was
//! forked by a bare system call, no agent sees to that. The kernel reports discards through a userfaultfd of the child,
//! which the parent's agent gets at the fork and hands to the keeper. The keeper reads it as long as the child lives,
//! whatever happens to the parent and the supervisor.
//!
//! The keeper needs to know nothing of the child: it makes discarded pages zeros at once, and all others are the
//! file's.
//!
//! The keeper is safe from what it is handed:
//!
//! - It takes a file for a userfaultfd only if the kernel calls it one.
//! - Through a userfaultfd it maps only zeros, and pages of the file that is mapped anyway. It does so in the address
//!   space of the process that opened the userfaultfd, when that process asks for it. A peer that hands over another
//!   process's userfaultfd could do the same itself.
//! - A peer may clear the flag by which reading does not wait. That holds up the thread of this one connection.

use act::{Follower, Purpose, Told, Userfault};
use host::{Received, Seqpacket};
use page::PageSet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use wire::prove::KEEP;

/// Most children that are followed at a time: of one member, and of all.
const MOST_CHILDREN: (usize, usize) = (1024, 8192);
/// Time between two checks for children that have ended: 1 s.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Wait before the next attempt at discards that the kernel has reported and not carried out yet: 1 ms.
const SETTLE_AFTER: Duration = Duration::from_millis(1);

/// Number of all children that are followed.
static CHILDREN: AtomicUsize = AtomicUsize::new(0);

/// Whether any child is followed.
pub fn has_children() -> bool {
    CHILDREN.load(Ordering::SeqCst) > 0
}

/// Begins a member's userfaultfd with events of forks.
///
/// # Errors
/// The file is no userfaultfd, was begun before, or the kernel lacks events of forks.
pub fn follow_forks(file: OwnedFd) -> io::Result<()> {
    Userfault::from_fd(file)?.begin(Purpose::FollowForks)
}

/// Follows a child of a member, and the children that the member hands over later. Returns when no child is left and
/// the member has hung up.
///
/// # Errors
/// The file is no userfaultfd.
pub fn serve(socket: Seqpacket, first: OwnedFd) -> io::Result<()> {
    let mut nursery = Nursery { children: Vec::new(), next_look: Instant::now() + LOOK_EVERY };
    nursery.add(Userfault::from_fd(first)?);
    let mut socket = Some(socket);
    while socket.is_some() || !nursery.children.is_empty() {
        nursery.wait(socket.as_ref())?;
        socket = socket.filter(|socket| nursery.take_from(socket));
        nursery.look();
    }
    Ok(())
}

struct Nursery {
    children: Vec<Follower>,
    next_look: Instant,
}

impl Nursery {
    fn add(&mut self, child: Userfault) {
        self.push(Follower::of_child(child, PageSet::new()));
    }

    /// Follows a child, unless there are too many: a member that forks more harms only its own children.
    fn push(&mut self, child: Follower) {
        if self.children.len() < MOST_CHILDREN.0 && CHILDREN.load(Ordering::SeqCst) < MOST_CHILDREN.1 {
            CHILDREN.fetch_add(1, Ordering::SeqCst);
            self.children.push(child);
        }
    }

    /// Takes the children that the member hands over. Returns whether more may come.
    fn take_from(&mut self, socket: &Seqpacket) -> bool {
        let (mut frame, mut files) = ([0; 8], Vec::new());
        loop {
            match socket.receive(&mut frame, &mut files) {
                Ok(Received::Nothing) => return true,
                Ok(Received::Frame(bytes)) if frame[..bytes] == KEEP && files.len() == 1 => {
                    let Some(Ok(child)) = files.pop().map(Userfault::from_fd) else { return false };
                    self.add(child);
                }
                Ok(Received::Frame(_) | Received::Closed) | Err(_) => return false,
            }
        }
    }

    fn wait(&self, socket: Option<&Seqpacket>) -> io::Result<()> {
        let mut fds: Vec<PollFd<'_>> =
            self.children.iter().map(|child| PollFd::new(child.watch(), PollFlags::IN)).collect();
        fds.extend(socket.map(|socket| PollFd::new(socket, PollFlags::IN)));
        let is_settled = self.children.iter().all(|child| child.discarded().is_empty());
        let time = if is_settled { LOOK_EVERY } else { SETTLE_AFTER };
        match poll(&mut fds, Timespec::try_from(time).ok().as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Handles the events of all children, and forgets children that have ended.
    fn look(&mut self) {
        let mut born = Vec::new();
        for child in &mut self.children {
            loop {
                match child.read() {
                    Ok(Told::Touch | Told::Discard | Told::Move(..)) => {}
                    Ok(Told::Birth(next)) => born.push(*next),
                    Ok(Told::Nothing) | Err(_) => break,
                }
            }
        }
        let is_due = Instant::now() >= self.next_look;
        if is_due {
            self.next_look = Instant::now() + LOOK_EVERY;
        }
        let before = self.children.len();
        self.children.retain_mut(|child| child.settle().is_ok() && (!is_due || child.is_alive()));
        CHILDREN.fetch_sub(before - self.children.len(), Ordering::SeqCst);
        born.into_iter().for_each(|child| self.push(child));
    }
}

impl Drop for Nursery {
    fn drop(&mut self) {
        CHILDREN.fetch_sub(self.children.len(), Ordering::SeqCst);
    }
}
