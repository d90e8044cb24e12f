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
//!
//! When its supervisor has ended, nobody can connect to it any more. It goes on, and hands its children on to the next supervisor's
//! keeper ([`hand_on`]): those of members that live by way of these.
//!
//! A member holds on to what it has handed over, and follows its children by itself when the connection is closed. So the keeper
//! has stopped to read by then, and a child that an agent has claimed (`lend`) is left alone by either.

use act::{Follower, Purpose, Told, Userfault};
use host::{Received, Seqpacket};
use page::PageSet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};
use wire::prove::KEEP;

/// Most children that are followed at a time: of one member, and of all.
const MOST_CHILDREN: (usize, usize) = (1024, 8192);
/// Time between two checks for children that have ended: 1 s.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Wait before the next attempt at discards that the kernel has reported and not carried out yet: 1 ms.
const SETTLE_AFTER: Duration = Duration::from_millis(1);
/// Time between two checks whether the agent in a child has given up its claim: 20 ms.
const CLAIMED_EVERY: Duration = Duration::from_millis(20);

/// Number of all children that are followed.
static CHILDREN: AtomicUsize = AtomicUsize::new(0);

/// A connection to the next supervisor's keeper.
static SUCCESSOR: Mutex<Option<Seqpacket>> = Mutex::new(None);

/// All children that are followed.
static ALL: Mutex<Vec<Weak<Kept>>> = Mutex::new(Vec::new());

/// A child that is followed. The holder of the lock may read the kernel's messages about it.
pub struct Kept {
    watch: Arc<Userfault>,
    follower: Mutex<Follower>,
    /// Whether its nursery has ended, so that the member follows it.
    is_given_back: AtomicBool,
    /// The layout in memory of the member that handed it over, and so its own.
    layout: Option<(u64, u64)>,
}

impl Kept {
    /// Whether it has this layout, and so is of the same family as the process that has it, in all likelihood.
    pub fn has_layout(&self, layout: Option<(u64, u64)>) -> bool {
        layout.is_some() && self.layout == layout
    }

    /// Whether nobody but this process reads the kernel's messages about it, and nobody will that does not look for a claim which
    /// there is already.
    pub fn is_ours(&self) -> bool {
        !self.is_given_back.load(Ordering::SeqCst)
    }

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

/// Has all children be handed on as soon as the next supervisor's keeper listens at `path`. To be called again and again, by a
/// keeper that nobody can connect to any more.
pub fn hand_on(path: &Path) {
    let mut successor = SUCCESSOR.lock().unwrap_or_else(PoisonError::into_inner);
    let is_there = |socket: &Seqpacket| matches!(socket.receive_bare(&mut [0; 8]), Ok(Received::Nothing));
    if !successor.as_ref().is_some_and(is_there) {
        *successor = Seqpacket::connect(path).ok();
    }
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
    let (layout, mut socket) = (host::peer_layout(&socket), Some(socket));
    // Declared behind the socket, and so dropped before it: the member reads when the socket is closed.
    let mut nursery = Nursery { children: Vec::new(), next_look: Instant::now() + LOOK_EVERY, layout };
    nursery.add(Userfault::from_fd(first)?);
    while socket.is_some() || !nursery.children.is_empty() {
        nursery.wait(socket.as_ref())?;
        if let Some(open) = &socket
            && !nursery.take_from(open)?
        {
            socket = None;
        }
        nursery.look();
        if nursery.hand_on(socket.is_some()) {
            break;
        }
    }
    Ok(())
}

struct Nursery {
    children: Vec<Arc<Kept>>,
    next_look: Instant,
    /// The member's layout in memory. Children of its children have it, too.
    layout: Option<(u64, u64)>,
}

impl Nursery {
    fn add(&mut self, child: Userfault) {
        self.push(Follower::of_child(child, PageSet::new()));
    }

    /// Follows a child, unless there are too many: a member that forks more harms only its own children.
    fn push(&mut self, child: Follower) {
        if self.children.len() < MOST_CHILDREN.0 && CHILDREN.load(Ordering::SeqCst) < MOST_CHILDREN.1 {
            CHILDREN.fetch_add(1, Ordering::SeqCst);
            let (watch, is_given_back) = (child.shared_watch(), AtomicBool::new(false));
            let kept = Arc::new(Kept { watch, follower: Mutex::new(child), is_given_back, layout: self.layout });
            let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
            all.retain(|one| one.strong_count() > 0);
            all.push(Arc::downgrade(&kept));
            drop(all);
            self.children.push(kept);
        }
    }

    /// Takes the children that the member hands over. Returns whether more may come.
    ///
    /// # Errors
    /// The member sends something else. It is hung up on, and follows its children by itself.
    fn take_from(&mut self, socket: &Seqpacket) -> io::Result<bool> {
        let (mut frame, mut files) = ([0; 8], Vec::new());
        loop {
            match socket.receive(&mut frame, &mut files)? {
                Received::Nothing => return Ok(true),
                Received::Closed => return Ok(false),
                Received::Frame(bytes) if frame[..bytes] == KEEP && files.len() == 1 => {
                    files
                        .pop()
                        .into_iter()
                        .try_for_each(|file| Userfault::from_fd(file).map(|child| self.add(child)))?;
                }
                Received::Frame(_) => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
    }

    fn wait(&self, socket: Option<&Seqpacket>) -> io::Result<()> {
        let (mut watched, mut time) = (Vec::with_capacity(self.children.len()), LOOK_EVERY);
        for child in &self.children {
            // If somebody else has it, it is about to be claimed.
            let held = child.try_hold().map(|mut follower| (follower.is_claimed(), follower.discarded().is_empty()));
            if let Some((false, _)) = held {
                watched.push(&child.watch);
            }
            time = time.min(match held {
                Some((true, _)) => CLAIMED_EVERY,
                Some((false, true)) => LOOK_EVERY,
                Some((false, false)) | None => SETTLE_AFTER,
            });
        }
        let mut fds: Vec<PollFd<'_>> = watched.iter().map(|watch| PollFd::new(&***watch, PollFlags::IN)).collect();
        fds.extend(socket.map(|socket| PollFd::new(socket, PollFlags::IN)));
        match poll(&mut fds, Timespec::try_from(time).ok().as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Hands children on to the next keeper, if there is one, once no discard is pending. Returns whether the member is to do that,
    /// which takes them back when this connection is closed.
    fn hand_on(&mut self, has_member: bool) -> bool {
        let successor = SUCCESSOR.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(socket) = successor.as_ref() else { return false };
        if has_member {
            let at_rest = |child: &Arc<Kept>| child.try_hold().is_some_and(|follower| follower.is_at_rest());
            return self.children.iter().all(at_rest);
        }
        let before = self.children.len();
        self.children.retain(|child| {
            let Some(mut follower) = child.try_hold() else { return true };
            let may = follower.is_at_rest() && !follower.is_claimed();
            let is_taken = may && socket.send(&KEEP, &[child.watch.as_fd()]).is_ok_and(|sent| sent);
            child.is_given_back.fetch_or(is_taken, Ordering::SeqCst);
            !is_taken
        });
        CHILDREN.fetch_sub(before - self.children.len(), Ordering::SeqCst);
        false
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
        self.children.iter().for_each(|child| child.is_given_back.store(true, Ordering::SeqCst));
        CHILDREN.fetch_sub(self.children.len(), Ordering::SeqCst);
    }
}
