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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
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

/// All children that are followed.
static ALL: Mutex<Vec<Weak<Kept>>> = Mutex::new(Vec::new());

/// A child that is followed. The holder of the lock reads the kernel's messages about it. That is its nursery, but for the time in
/// which its userfaultfd is lent.
pub struct Kept {
    watch: Arc<Userfault>,
    follower: Mutex<Follower>,
}

impl Kept {
    /// The follower, if nobody else has it at the moment.
    pub fn try_hold(&self) -> Option<MutexGuard<'_, Follower>> {
        match self.follower.try_lock() {
            Ok(follower) => Some(follower),
            // A thread that panicked has read a message more, or less.
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// All children that are followed at the moment.
pub fn all() -> Vec<Arc<Kept>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner).iter().filter_map(Weak::upgrade).collect()
}

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
    children: Vec<Arc<Kept>>,
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
            let kept = Arc::new(Kept { watch: child.shared_watch(), follower: Mutex::new(child) });
            let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
            all.retain(|one| one.strong_count() > 0);
            all.push(Arc::downgrade(&kept));
            drop(all);
            self.children.push(kept);
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
        let (mut watched, mut is_settled) = (Vec::with_capacity(self.children.len()), true);
        for child in &self.children {
            match child.try_hold() {
                Some(follower) => {
                    is_settled &= follower.discarded().is_empty();
                    watched.push(&child.watch);
                }
                // It is lent, and may be back at any moment.
                None => is_settled = false,
            }
        }
        let mut fds: Vec<PollFd<'_>> = watched.iter().map(|watch| PollFd::new(&***watch, PollFlags::IN)).collect();
        fds.extend(socket.map(|socket| PollFd::new(socket, PollFlags::IN)));
        let time = if is_settled { LOOK_EVERY } else { SETTLE_AFTER };
        match poll(&mut fds, Timespec::try_from(time).ok().as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Handles the events of all children, and forgets children that have ended.
    fn look(&mut self) {
        let is_due = Instant::now() >= self.next_look;
        if is_due {
            self.next_look = Instant::now() + LOOK_EVERY;
        }
        let (before, mut born) = (self.children.len(), Vec::new());
        self.children.retain(|child| {
            let Some(mut child) = child.try_hold() else { return true };
            loop {
                match child.read() {
                    Ok(Told::Touch | Told::Discard | Told::Move(..)) => {}
                    Ok(Told::Birth(next)) => born.push(*next),
                    Ok(Told::Nothing) | Err(_) => break,
                }
            }
            child.settle().is_ok() && (!is_due || child.is_alive())
        });
        CHILDREN.fetch_sub(before - self.children.len(), Ordering::SeqCst);
        born.into_iter().for_each(|child| self.push(child));
    }
}

impl Drop for Nursery {
    fn drop(&mut self) {
        CHILDREN.fetch_sub(self.children.len(), Ordering::SeqCst);
    }
}
