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
//! **A keeper that is killed** has a successor, its standby ([`act::Standby`]). That has the same descriptors at every instant, and
//! the journal of what was read ([`act::Journal`]). Members' connections stay open, so that members do not notice. It follows these
//! children until it can hand them on. It has a standby, too.
//!
//! When its supervisor has ended, nobody can connect to it any more. It goes on, and hands its children on to the next supervisor's
//! keeper ([`hand_on`]): those of members that live by way of these. A member does not know of children that its child has forked.
//!
//! A member holds on to what it has handed over, and follows its children by itself when the connection is closed. So the keeper
//! has stopped to read by then, and a child that an agent has claimed (`lend`) is left alone by either.

use act::{About, Follower, Inheritance, Inherited, Journal, Purpose, Told, Userfault};
use host::{Received, Seqpacket};
use page::PageSet;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
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

/// The journal that a successor reads.
static JOURNAL: OnceLock<Arc<Journal>> = OnceLock::new();

/// All children that are followed.
static ALL: Mutex<Vec<Weak<Kept>>> = Mutex::new(Vec::new());

/// A child that is followed. The holder of the lock may read the kernel's messages about it.
pub struct Kept {
    watch: Arc<Userfault>,
    follower: Mutex<Follower>,
    /// Whether a child of the member's has forked it, so that the member does not know of it.
    is_born: bool,
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

/// Begins a journal of all children.
///
/// # Errors
/// Memory is short.
pub fn begin_journal() -> io::Result<Arc<Journal>> {
    let journal = Journal::new()?;
    Ok(Arc::clone(JOURNAL.get_or_init(|| journal)))
}

/// Follows the children of a keeper that was killed.
pub fn succeed(inheritance: Inheritance) {
    let Inheritance { mut children, sockets } = inheritance;
    let mut nurseries: Vec<(Option<i32>, Option<Seqpacket>)> = vec![(None, None)];
    nurseries.extend(sockets.into_iter().map(|(number, socket)| (Some(number), Some(socket.into()))));
    for (number, socket) in nurseries {
        let mut nursery = Nursery::new(number, None);
        for Inherited { follower, about } in children.extract_if(.., |child| child.about.socket == number) {
            nursery.layout = Some(about.layout).filter(|layout| *layout != (0, 0));
            nursery.push(follower, about.is_born);
        }
        std::thread::spawn(move || nursery.serve(socket));
    }
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
    let mut nursery = Nursery::new(Some(socket.as_fd().as_raw_fd()), host::peer_layout(&socket));
    nursery.add(Userfault::from_fd(first)?);
    nursery.serve(Some(socket))
}

struct Nursery {
    children: Vec<Arc<Kept>>,
    next_look: Instant,
    /// The member's layout in memory. Children of its children have it, too.
    layout: Option<(u64, u64)>,
    /// The number of the member's socket, for a successor.
    number: Option<i32>,
}

impl Nursery {
    fn new(number: Option<i32>, layout: Option<(u64, u64)>) -> Self {
        Self { children: Vec::new(), next_look: Instant::now() + LOOK_EVERY, layout, number }
    }

    /// Ends when no child is left and the member has hung up.
    fn serve(mut self, mut socket: Option<Seqpacket>) -> io::Result<()> {
        let served = self.serve_until_the_end(&mut socket);
        // Before the socket is closed: the member reads then.
        drop(self);
        served
    }

    fn serve_until_the_end(&mut self, socket: &mut Option<Seqpacket>) -> io::Result<()> {
        while socket.is_some() || !self.children.is_empty() {
            self.wait(socket.as_ref())?;
            if let Some(open) = &*socket
                && !self.take_from(open)?
            {
                // From here on its number may be another file's.
                if let (Some(journal), Some(number)) = (JOURNAL.get(), self.number.take()) {
                    journal.forget_socket(number);
                }
                *socket = None;
            }
            self.look();
            if self.hand_on(socket.is_some()) {
                break;
            }
        }
        Ok(())
    }

    fn add(&mut self, child: Userfault) {
        self.push(Follower::of_child(child, PageSet::new()), false);
    }

    /// Follows a child, unless there are too many: a member that forks more harms only its own children.
    fn push(&mut self, mut child: Follower, is_born: bool) {
        if self.children.len() < MOST_CHILDREN.0 && CHILDREN.load(Ordering::SeqCst) < MOST_CHILDREN.1 {
            CHILDREN.fetch_add(1, Ordering::SeqCst);
            let about = About { socket: self.number, layout: self.layout.unwrap_or_default(), is_born };
            if let Some(journal) = JOURNAL.get() {
                child.keep_journal(journal, about);
            }
            let (watch, is_given_back) = (child.shared_watch(), AtomicBool::new(false));
            let kept =
                Arc::new(Kept { watch, follower: Mutex::new(child), is_born, is_given_back, layout: self.layout });
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
            let held = child.try_hold().map(|mut follower| (follower.is_claimed(), !follower.has_work()));
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
        let all_at_rest =
            self.children.iter().all(|child| child.try_hold().is_some_and(|follower| follower.is_at_rest()));
        if has_member && !all_at_rest {
            return false;
        }
        let before = self.children.len();
        self.children.retain(|child| {
            let Some(mut follower) = child.try_hold() else { return true };
            let may = follower.is_at_rest() && !follower.is_claimed() && (child.is_born || !has_member);
            let is_taken = may && socket.send(&KEEP, &[child.watch.as_fd()]).is_ok_and(|sent| sent);
            child.is_given_back.fetch_or(is_taken, Ordering::SeqCst);
            !is_taken
        });
        CHILDREN.fetch_sub(before - self.children.len(), Ordering::SeqCst);
        has_member && self.children.iter().all(|child| !child.is_born)
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
        born.into_iter().for_each(|child| self.push(child, true));
    }
}

impl Drop for Nursery {
    fn drop(&mut self) {
        self.children.iter().for_each(|child| child.is_given_back.store(true, Ordering::SeqCst));
        CHILDREN.fetch_sub(self.children.len(), Ordering::SeqCst);
    }
}
