//! The keeper: follows children of members ([`host::Follower`]), also when their parents are gone.
//!
//! What a child discards of memory that maps its group's pool has to read as zeros, and nobody in a child that was forked by a bare
//! system call sees to that. The kernel tells of it through a userfaultfd, which the parent's agent gets at the fork and hands
//! on. Here it is read as long as the child lives, whatever becomes of its parent and of the supervisor.
//!
//! Nothing has to be known of a child: what is discarded is made zeros at once, and all else is the file's.
//!
//! What is handed over is believed to be a userfaultfd only if the kernel calls it one. It lets us map zeros and pages of the file
//! that is mapped anyway, in the address space of whoever opened it, when that asks for it: who hands over another's could do the
//! same. A peer that clears the flag which keeps reading from waiting holds up this one connection's thread.

use host::{Follower, Purpose, Received, Seqpacket, Told, Userfault};
use page::PageSet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use wire::prove::KEEP;

/// Children of one member, and of all, that are followed at a time.
const MOST_CHILDREN: (usize, usize) = (1024, 8192);
/// How often it is looked which have ended, and how soon discards are seen to that had not happened yet.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const SETTLE_AFTER: Duration = Duration::from_millis(1);

/// All children that are followed.
static CHILDREN: AtomicUsize = AtomicUsize::new(0);

/// Whether any child is followed.
pub fn has_children() -> bool {
    CHILDREN.load(Ordering::SeqCst) > 0
}

/// Has a member's userfaultfd tell of forks, too.
///
/// # Errors
/// It is none, was begun before, or the kernel lacks what that takes.
pub fn follow_forks(file: OwnedFd) -> io::Result<()> {
    Userfault::from_fd(file)?.begin(Purpose::FollowForks)
}

/// Follows a child of a member, and all that the member hands over later, until none is left and the member has hung up.
///
/// # Errors
/// What was handed over is no userfaultfd.
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

    /// More than there is room for are not followed: a member that forks so many has itself to thank for it.
    fn push(&mut self, child: Follower) {
        if self.children.len() < MOST_CHILDREN.0 && CHILDREN.load(Ordering::SeqCst) < MOST_CHILDREN.1 {
            CHILDREN.fetch_add(1, Ordering::SeqCst);
            self.children.push(child);
        }
    }

    /// Takes what the member hands over. Says whether more may come.
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

    /// Answers what children wait for, and forgets those that have ended.
    fn look(&mut self) {
        let mut born = Vec::new();
        for child in &mut self.children {
            loop {
                match child.read() {
                    Ok(Told::Touch | Told::Discard | Told::Move(..)) => {}
                    Ok(Told::Birth(next)) => born.push(next),
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
